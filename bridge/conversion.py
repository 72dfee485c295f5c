"""What all conversions of whole checkpoints share: options, the memory plan, pieces in threads, and the report."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.hf_folder import check_space
from glm5_next.bridge.memory import GIB, MemoryPlan, peak_resident_bytes, plan_memory
from glm5_next.bridge.name_map import together
from glm5_next.bridge.pieces import Progress, Share, Work, identity

PIECE_BYTES = GIB  # what a kill costs at most, per thread
MAX_WORKERS = 16


@dataclass(frozen=True)
class Plan:
    """Told before the work: bytes to write in all and of those now, and the memory that this will take."""

    num_bytes: int
    todo_bytes: int
    memory: MemoryPlan


@dataclass(frozen=True)
class Options:
    """`budget`: bytes of memory (resident set) for this process; by default the largest tensor group and 2 GiB."""

    workers: int | None = None
    budget: int | None = None
    share: Share = field(default_factory=Share)
    on_plan: Callable[[Plan], None] = lambda plan: None
    on_bytes: Callable[[int], None] = lambda count: None


@dataclass(frozen=True)
class Report:
    """`is_finished` is False if other processes still have pieces to write. `passed_through`: kind -> tensor names."""

    out: Path
    is_finished: bool
    num_bytes: int
    written_bytes: int
    num_pieces: int
    written_pieces: int
    seconds: float
    workers: int
    budget: int
    predicted_peak: int
    measured_peak: int
    passed_through: dict[str, list[str]]

    @property
    def gb_per_second(self) -> float:
        return self.written_bytes / 1e9 / self.seconds if self.written_bytes else 0.0


class Buffers(threading.local):
    """Each thread's own memory, used again and again: fresh memory costs as much time as copying does."""

    def __init__(self) -> None:
        self.memory: dict[str, torch.Tensor] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype, purpose: str = "") -> torch.Tensor:
        """A tensor with a storage of exactly its size, valid until the next call for the same purpose."""
        size = dtype.itemsize
        for length in shape:
            size *= length
        held = self.memory.get(purpose)
        if held is None or held.nbytes < size:
            held = self.memory[purpose] = torch.empty(max(size, 1), dtype=torch.uint8)
        if size == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(held.numpy(), dtype=dtype, count=size // dtype.itemsize).view(tuple(shape))


def in_pieces[T](items: Iterable[T], num_bytes: Callable[[T], int]) -> list[list[T]]:
    """Items in order, in runs of at most PIECE_BYTES (or one item)."""
    pieces: list[list[T]] = [[]]
    size = 0
    for item in items:
        if size and size + num_bytes(item) > PIECE_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(item)
        size += num_bytes(item)
    return pieces


def largest_group(sizes: Iterable[tuple[str, int]]) -> int:
    """Bytes of the largest set of tensors that belong together, from (HF name, bytes)."""
    groups: dict[str, int] = {}
    for name, num_bytes in sizes:
        key = together(name)
        groups[key] = groups.get(key, 0) + num_bytes
    return max(groups.values())


def input_files(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a manifest says of the files of a checkpoint folder that a conversion reads."""
    names = ["config.json", *checkpoint.metadata]
    return {name: identity(checkpoint.folder / name) for name in names}


def convert(
    work: Work,
    prepare: Callable[[Path], None],
    piece_sizes: Sequence[int],
    do: Callable[[int, Progress], dict[str, Any]],
    complete: Callable[[Path], None],
    options: Options,
    *,
    per_worker: int,
    shared: int,
    group_bytes: int,
    passed_through: dict[str, list[str]],
) -> Report:
    """Writes the pieces of an output that are not there yet, `piece_sizes[number]` bytes each, and completes it.

    `prepare` is called with the unfinished folder before the first piece, also when the work is taken up again.
    """
    start, num_bytes = time.monotonic(), sum(piece_sizes)
    budget = options.budget or group_bytes + 2 * GIB
    workers = options.workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    memory = plan_memory(budget, per_worker, shared, workers)
    written: list[int] = []
    is_finished = not work.begin()
    if not is_finished:
        with work.locked(options.share):
            count, share = len(piece_sizes), options.share
            done = work.finished_pieces()
            written = [number for number in range(share.index, count, share.count) if number not in done]
            todo_bytes = sum(piece_sizes[number] for number in written)
            check_space(work.out, todo_bytes)
            prepare(work.folder)
            options.on_plan(Plan(num_bytes, todo_bytes, memory))
            progress = Progress(options.on_bytes)
            work.run(written, lambda number: do(number, progress), workers=memory.workers, progress=progress)
            is_finished = work.finish(count, complete)
    return Report(
        out=work.out,
        is_finished=is_finished,
        num_bytes=num_bytes,
        written_bytes=sum(piece_sizes[number] for number in written),
        num_pieces=len(piece_sizes),
        written_pieces=len(written),
        seconds=time.monotonic() - start,
        workers=memory.workers,
        budget=budget,
        predicted_peak=memory.predicted_peak,
        measured_peak=peak_resident_bytes(),
        passed_through=passed_through,
    )
