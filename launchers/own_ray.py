"""Stands in for the `ray` program inside a job: the same, but `ray stop` ends this job's processes and nobody else's.

`ray symmetric-run` of Ray 2.60.0 ends with `ray stop`, which kills every process on the machine whose name looks like
Ray's, of whatever job. A job's processes inherit MARK from the process that started them; only those are ended here.
"""

import contextlib
import os
import shlex
import shutil
import sys
import time
from pathlib import Path

import psutil

MARK = "GLM5_NEXT_JOB"
SECONDS = 10.0  # between asking and killing


def install(folder: Path) -> Path:
    """Writes a program called `ray` into a folder, to be put first on PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "ray"
    command = shlex.join([sys.executable, "-m", "glm5_next.launchers.own_ray"])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    program.chmod(0o755)
    return folder


def main() -> None:
    if sys.argv[1:2] == ["stop"]:
        end_all(os.environ[MARK])
        return
    here = Path(os.environ["PATH"].split(os.pathsep)[0])
    rest = os.environ["PATH"].removeprefix(f"{here}{os.pathsep}")
    ray = shutil.which("ray", path=rest)
    if ray is None:
        sys.exit("ray: not on PATH")
    os.execv(ray, [ray, *sys.argv[1:]])


def end_all(mark: str) -> None:
    """Ends the processes that carry the mark, except the caller and those above it."""
    spared = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    targets = [process for process in psutil.process_iter() if process.pid not in spared and _carries(process, mark)]
    for process in targets:
        _signal(process, "terminate")
    limit = time.monotonic() + SECONDS
    while targets and time.monotonic() < limit:
        _, targets = psutil.wait_procs(targets, timeout=0.2)
    for process in targets:
        _signal(process, "kill")


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False  # somebody else's, or gone


def _signal(process: psutil.Process, method: str) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        getattr(process, method)()


if __name__ == "__main__":
    main()
