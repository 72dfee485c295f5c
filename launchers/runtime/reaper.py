"""Ends what is left of a run's processes when the driver is gone, however it went: at a clean end, or by kill -9.

Ray's daemons end with the driver and its workers with the daemons, but Ray's agents notice only after a minute, and a
start that is interrupted leaves what it has started. So the driver starts this file as a process that keeps in mind all
processes below the driver, and waits for the end of its input: the driver closes that, or the system does when the
driver dies.
"""

import os
import select
import subprocess
import sys
import time

import psutil

SECONDS = 10.0  # so long a killed process may take to vanish
SECONDS_BETWEEN_LOOKS = 0.5


class Reaper:
    """From its construction to `close`: what this process starts does not outlive it."""

    def __init__(self) -> None:
        others = [str(process.pid) for process in psutil.Process().children(recursive=True)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(os.getpid()), *others],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"{__file__} did not start (exit status {self._process.wait()})")

    def all_started(self) -> None:
        """Lets it look once more, and then no more until the next call, or the end."""
        assert self._process.stdin is not None
        self._process.stdin.write("all started\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Ends every process below this one that was started since, and waits for that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(2 * SECONDS)


def main(driver_id: int, others: set[int]) -> None:
    driver = psutil.Process(driver_id)
    if os.getppid() != driver_id:
        return  # it is gone already, and its number may be somebody else's
    print("watching", flush=True)
    known: set[psutil.Process] = set()
    all_started = False
    while True:
        input_there, _, _ = select.select([sys.stdin], [], [], None if all_started else SECONDS_BETWEEN_LOOKS)
        known |= {process for process in below(driver) if process.pid not in others}
        if input_there and not sys.stdin.readline():
            break
        all_started = all_started or bool(input_there)
    end(known)


def below(driver: psutil.Process) -> set[psutil.Process]:
    """All processes below the driver but this one; none if the driver is gone (psutil knows it by its time of birth)."""
    try:
        return {process for process in driver.children(recursive=True) if process.pid != os.getpid()}
    except psutil.NoSuchProcess:
        return set()


def end(processes: set[psutil.Process]) -> None:
    """Kills them until they are gone; psutil tells a process from a later one with its number."""
    limit = time.monotonic() + SECONDS
    while (left := {process for process in processes if is_alive(process)}) and time.monotonic() < limit:
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(left, timeout=0.2)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


if __name__ == "__main__":
    main(int(sys.argv[1]), {int(number) for number in sys.argv[2:]})
