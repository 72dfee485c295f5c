"""A `glm5-next` command in a session of its own: watched, signalled, and in the end gone with everything it started."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

COMMAND = Path(sys.executable).parent / "glm5-next"
# prctl(PR_SET_PDEATHSIG, SIGKILL): the system kills a command when the tests are killed, and it takes its own along.
END_WITH_THE_TESTS = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
MARK = "GLM5_NEXT_TEST_RUN"  # an environment variable that every process of a run inherits


class CliRun:
    """A running command. Whoever starts it leaves the `running` block with no process of it alive."""

    def __init__(self, arguments: Sequence[str], folder: Path):
        self.mark = uuid.uuid4().hex
        self.log = folder / f"output-{self.mark}.txt"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", END_WITH_THE_TESTS, str(COMMAND), *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, MARK: self.mark},
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_until(self, condition: Callable[[], Any], what: str, deadline: float = 240.0) -> Any:
        """Polls until `condition` holds; fails with the command's output if it ends before, or takes too long."""
        limit = time.monotonic() + deadline
        while not (value := condition()):
            ended = self.process.poll()
            assert ended is None or condition(), f"ended with {ended} before {what}:\n{self.output}"
            assert time.monotonic() < limit, f"no {what} within {deadline} seconds:\n{self.output}"
            time.sleep(0.02)
        return value

    def wait(self, deadline: float) -> int:
        """The exit status."""
        self.wait_until(lambda: self.process.poll() is not None, "exit", deadline)
        return self.process.returncode

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        """What a terminal does on Ctrl-C: the signal goes to the whole process group."""
        os.killpg(self.process.pid, number)

    def process_of(self, name: str) -> psutil.Process:
        """The process of "trainer rank 1" or "engine 0", as the run announced it."""
        found = self.wait_until(lambda: re.search(rf"\b{name} is (\d+)", self.output), f"process of {name}")
        return psutil.Process(int(found[1]))

    def processes(self) -> list[psutil.Process]:
        """Everything alive that belongs to the run: by session, and by environment where it left the session."""
        return [process for process in psutil.process_iter() if self._owns(process)]

    def wait_until_gone(self, deadline: float = 60.0) -> None:
        """Fails, naming them, if processes of the run are alive after the deadline."""
        limit = time.monotonic() + deadline
        while left := self.processes():
            assert time.monotonic() < limit, f"alive after {deadline} s: {[_describe(process) for process in left]}"
            time.sleep(0.1)

    def _owns(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return os.getsid(process.pid) == self.process.pid or process.environ().get(MARK) == self.mark
        except (psutil.Error, ProcessLookupError, PermissionError):
            return False


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[CliRun]:
    """Starts the command in `folder`; at the end, also of a test that fails, all its processes are killed."""
    run = CliRun(arguments, folder)
    try:
        yield run
    finally:
        for process in run.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        run.process.wait()


def records(run_dir: Path) -> list[dict[str, Any]]:
    """The run's metrics so far."""
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return str(process.pid)
