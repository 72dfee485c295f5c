"""A small HTTP server that speaks an engine's protocol with transformers' model behind it, on a CPU.

For trying a run with servers where no GPU is (`--preset tiny-http`) and for tests. Started by a run like any server:
`python -m glm5_next.launchers.engines.tiny_server --protocol sglang --checkpoint DIR --host 127.0.0.1 --port 0 --key-file F`.
It answers only to the key, and reads nothing but JSON.
"""

import argparse
import json
import os
import secrets
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from glm5_next.launchers.engines.keys import read_key

MAX_BODY_BYTES = 1 << 30


class Server(ThreadingHTTPServer):
    """Threads for all requests at once, as many as come."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], protocol: Any, key: str):
        super().__init__(address, Handler)
        self.protocol, self.key = protocol, key


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line per request would be all that a log holds."""

    def _serve(self, method: str) -> None:
        url = urlsplit(self.path)
        raw = self.rfile.read(min(int(self.headers.get("Content-Length") or 0), MAX_BODY_BYTES))
        if not self._allowed(url.path):
            return self._answer(401, {"error": "Unauthorized"})
        try:
            body = json.loads(raw) if raw else {}
        except (ValueError, RecursionError):
            return self._answer(422, {"detail": "the body is not JSON"})
        self._answer(*self.server.protocol.handle(method, url.path, dict(parse_qsl(url.query)), body))

    def _allowed(self, path: str) -> bool:
        if path.startswith(self.server.protocol.open_paths):
            return True
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return secrets.compare_digest(given.encode(), self.server.key.encode())

    def _answer(self, status: int, content: Any) -> None:
        is_text = isinstance(content, str)
        raw = content.encode() if is_text else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if is_text else "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def main(words: Sequence[str], wrap: Any = lambda protocol: protocol) -> None:
    """Serves until it is ended. `wrap` may change the protocol: that is how tests make it fail."""
    parser = argparse.ArgumentParser(prog="tiny_server")
    parser.add_argument("--protocol", choices=("sglang", "vllm"), required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key-file", type=Path, required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--picks", choices=("stock", "recorded", "unwritten", "zeros"), default="stock")
    options = parser.parse_args(words)
    key = read_key(options.key_file)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from glm5_next.launchers.engines.tiny_host import ModelHost
    from glm5_next.launchers.engines.tiny_sglang import SGLangProtocol
    from glm5_next.launchers.engines.tiny_vllm import VllmProtocol

    protocols: dict[str, Any] = {"sglang": SGLangProtocol, "vllm": VllmProtocol}
    protocol = protocols[options.protocol](
        ModelHost(options.checkpoint, precision=options.precision), picks=options.picks
    )
    with Server((options.host, options.port), wrap(protocol), key) as server:
        print(f"listening on http://{options.host}:{server.server_address[1]}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
