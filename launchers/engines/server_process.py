"""One engine's server as a child of a Ray process on the node where it runs: it ends with it, and its log holds no key."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import ray

from glm5_next.launchers.engines import with_parent
from glm5_next.launchers.runtime.actors import Process

POLL_SECONDS = 0.1
LAST_LINES = 15


class EngineServer(Process):
    """Starts, watches and ends one server."""

    def start_server(
        self,
        words: Sequence[str],
        values: Mapping[str, str],
        key: str,
        log: Path,
        local: bool,
        environment: Mapping[str, str],
    ) -> str:
        """Starts the command with its placeholders filled in; returns the server's address. It is not ready yet."""
        self.end_server()
        self.key, self.log = key, log
        host = "127.0.0.1" if local else ray.util.get_node_ip_address()
        port = _free_port(host)
        self.folder = tempfile.TemporaryDirectory(prefix="glm5-next-")  # mode 700
        files = {
            "key_file": self._private("key", key),
            "key_config": self._private("engine.yaml", f"api-key: {key}\n"),
        }
        filled = dict(values) | {"host": host, "port": str(port)} | files
        self.process = subprocess.Popen(
            [sys.executable, "-I", with_parent.__file__, *(_filled(word, filled) for word in words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "VLLM_API_KEY": key, "VLLM_SERVER_DEV_MODE": "1", **environment},
        )
        threading.Thread(target=self._copy_log, daemon=True).start()
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def wait_until(self, listening: str, deadline: float) -> None:
        """Until the server answers /health; raises RuntimeError with the end of its log if it ends or takes too long."""
        import httpx2

        limit = time.monotonic() + deadline
        while time.monotonic() < limit:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self.process.returncode}; {self._end_of_log()}")
            try:
                if httpx2.get(f"{listening}/health", timeout=5.0, trust_env=False).status_code == 200:
                    return
            except httpx2.TransportError:
                pass  # not listening yet
            time.sleep(POLL_SECONDS)
        raise RuntimeError(f"the server did not answer within {deadline:g} seconds; {self._end_of_log()}")

    def server_id(self) -> int:
        return self.process.pid

    def end_server(self) -> None:
        process = getattr(self, "process", None)
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _private(self, name: str, text: str) -> str:
        path = Path(self.folder.name) / name
        path.touch(mode=0o600)
        path.write_text(text)
        return str(path)

    def _copy_log(self) -> None:
        """Servers print their settings; the key is one of them."""
        process = self.process
        assert process.stdout is not None
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            for line in process.stdout:
                log.write(line.replace(self.key.encode(), b"<key>"))
                log.flush()

    def _end_of_log(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return f"the end of {self.log}:\n" + "\n".join(lines[-LAST_LINES:])


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
