"""Ends what is left of a run's processes when the driver is gone, however it went: at a clean end, or by kill -9.

Ray's daemons and workers end with the driver, but its agents notice only after a minute. So the driver starts this file
as a process that is told of them and waits for the end of its input. The driver closes that input, or the system does
when the driver dies.
"""

import subprocess
import sys
import time

import psutil

SECONDS = 10.0  # so long a killed process may take to vanish


class Reaper:
    """From `watch` on, the processes that there are then do not outlive this one."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__], stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def watch(self) -> None:
        """Tells it of all processes below this one."""
        assert self._process.stdin is not None
        for child in psutil.Process().children(recursive=True):
            if child.pid != self._process.pid:
                self._process.stdin.write(f"{child.pid} {child.create_time()!r}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Ends them, and waits for that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(2 * SECONDS)


def end(processes: dict[int, float]) -> None:
    """Kills processes given by number and time of birth: a number alone may be somebody else's by now."""
    limit = time.monotonic() + SECONDS
    while (left := [process for process in psutil.process_iter() if _is_meant(process, processes)]) and (
        time.monotonic() < limit
    ):
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(left, timeout=0.2)


def _is_meant(process: psutil.Process, processes: dict[int, float]) -> bool:
    try:
        same = process.create_time() == processes.get(process.pid)
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


if __name__ == "__main__":
    end({int(number): float(born) for number, born in (line.split() for line in sys.stdin)})
