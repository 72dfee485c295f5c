"""Long work on an output folder, in pieces that are finished one by one: it can be killed at any moment and run again.

Everything goes into a hidden sibling of the output, with a manifest of inputs and settings and a record of every
finished piece in `.conversion/`. A piece is recorded after its bytes are on disk; records and manifest appear by rename.
At the end the sibling takes the output's name, with the manifest in it, so that a finished output is recognised.
Several processes, on one node or on several with a common file system, can share the pieces of one output.
"""

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5_next.bridge.shards import read_json, shorten

STATE = ".conversion"
MANIFEST = "manifest.json"
RECORDS = "pieces"


@dataclass(frozen=True)
class Share:
    """This process's part of the pieces: every `count`-th from `index` on."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Share":
        """Reads "0/4". Raises ValueError for anything else."""
        numbers = text.split("/")
        if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
            raise ValueError(
                f"--share is {text!r}; it must look like 0/4: this process's number and how many there are"
            )
        share = cls(int(numbers[0]), int(numbers[1]))
        if share.index >= share.count:
            raise ValueError(f"--share is {text!r}; processes are numbered from 0 to {share.count - 1}")
        return share


class Stopped(Exception):
    """Another thread failed, or the user interrupted the work."""


@dataclass
class Progress:
    """Counts bytes over threads; ends them when asked to stop."""

    on_bytes: Callable[[int], None] = lambda count: None
    stop: threading.Event = field(default_factory=threading.Event)

    def __call__(self, count: int) -> None:
        if self.stop.is_set():
            raise Stopped
        self.on_bytes(count)


class Work:
    """One output folder in the making. `inputs` maps files to what identifies them, `settings` names to values."""

    def __init__(self, out: Path, *, inputs: Mapping[str, Any], settings: Mapping[str, Any]):
        self.out = out
        self.folder = out.with_name(f".{out.name}.unfinished")
        self.state = self.folder / STATE
        self.manifest = json.loads(json.dumps({"settings": dict(settings), "inputs": dict(inputs)}))

    def begin(self) -> bool:
        """Prepares the unfinished folder, or takes up one that was left; False: the output is there already.

        Raises ValueError, and changes nothing, for an output that is something else or was begun with other inputs or
        settings, which it names.
        """
        if self.out.exists() and not (self.out.is_dir() and not any(self.out.iterdir())):
            finished = self.out / STATE / MANIFEST
            if not finished.is_file():
                raise ValueError(f"{self.out}: exists and is not empty; choose another output or remove it")
            self._check_same(read_json(finished), self.out)
            _clean(self.out / STATE)
            return False
        manifest = self.state / MANIFEST
        if manifest.is_file():
            self._check_same(read_json(manifest), self.folder)
        elif self.folder.exists() and any(path != self.state for path in self.folder.iterdir()):
            raise ValueError(f"{self.folder}: is in the way and is no unfinished conversion; remove it")
        (self.state / RECORDS).mkdir(parents=True, exist_ok=True)
        write_durably(manifest, json.dumps(self.manifest, indent=2).encode())
        return True

    @contextmanager
    def locked(self, share: Share) -> Iterator[None]:
        """Raises ValueError if a living process works on the same pieces of this output."""
        own = self.state / f"lock-{share.index}-of-{share.count}"
        others = [path for path in self.state.glob("lock-*-of-*") if not path.name.endswith(f"-of-{share.count}")]
        with ExitStack() as stack:
            for path in (own, *others):
                lock = stack.enter_context(path.open("a"))
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ValueError(f"{self.out}: another process is writing it ({path.name}); wait for it") from None
                if path != own:
                    fcntl.flock(lock, fcntl.LOCK_UN)
            yield

    def finished_pieces(self) -> set[int]:
        return {int(path.stem) for path in (self.state / RECORDS).glob("*.json")}

    def records(self, count: int) -> list[dict[str, Any]]:
        """What was recorded of pieces 0 to `count` - 1, read from disk: the same whoever wrote it, and when."""
        return [read_json(self._record(number)) for number in range(count)]

    def run(
        self, todo: Sequence[int], do: Callable[[int], dict[str, Any]], *, workers: int, progress: Progress
    ) -> None:
        """Calls `do(number)` for every piece in `workers` threads, and records what it returns.

        Threads and not processes: the time goes into reads, writes and tensor operations, which all run beside each
        other, and the process has one budget.
        """

        def one(number: int) -> None:
            if not progress.stop.is_set():
                content = do(number)
                write_durably(self._record(number), json.dumps(content).encode())

        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(one, number) for number in todo]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                progress.stop.set()
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
            raise error

    def finish(self, count: int, complete: Callable[[Path], None]) -> bool:
        """Completes the folder and gives it its name, if all `count` pieces are there; whoever is last does it."""
        try:
            lock = (self.state / "lock-finish").open("a")
        except FileNotFoundError:  # another process has finished
            return True
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.folder.exists():
                if len(self.finished_pieces()) < count:
                    return False
                complete(self.folder)
                for path in (*(path for path in self.folder.iterdir() if path.is_file()), self.folder):
                    flush(path)
                self.folder.rename(self.out)
                flush(self.out.parent)
        _clean(self.out / STATE)
        return True

    def _record(self, number: int) -> Path:
        return self.state / RECORDS / f"{number:06d}.json"

    def _check_same(self, begun: dict[str, Any], where: Path) -> None:
        """Raises ValueError that names every setting or input that is not as it was."""
        for kind, now in self.manifest.items():
            before = begun.get(kind, {})
            names = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
            if names:
                changes = [f"{name} was {before.get(name)!r} and is now {now.get(name)!r}" for name in names]
                raise ValueError(
                    f"{where}: was begun with other {kind}: {shorten(changes)}; repeat it as it was begun, or remove "
                    f"{where} to start over"
                )


def identity(path: Path) -> list[int]:
    """Size and modification time (ns) of an input file."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def write_durably(path: Path, content: bytes) -> None:
    """A file that is whole or not there, and is on disk when this returns."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Waits until a file's or folder's content is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clean(state: Path) -> None:
    """Removes from a finished output what only the work needed; the manifest stays."""
    for path in state.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != MANIFEST:
            path.unlink(missing_ok=True)
