"""Compares two Hugging Face checkpoint folders: names, dtypes, shapes, bits, and the files beside the tensors."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from glm5_next.bridge.checkpoint import TORCH_DTYPES, Checkpoint
from glm5_next.bridge.hf_folder import carried_files
from glm5_next.bridge.shards import resolve_inside

FILE_PIECE = 2**20  # bytes


@dataclass(frozen=True)
class ValueDifference:
    """A tensor whose values differ."""

    name: str
    num_different: int  # elements whose bits differ (of unequal dtypes: whose values differ)
    num_elements: int
    worst: float  # largest |a - b|; NaN if one side is NaN somewhere the other side is not the same NaN


@dataclass(frozen=True)
class Comparison:
    """What differs between folders a and b; every tuple is empty if they are equal."""

    a: Path
    b: Path
    num_tensors: int  # in both
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    dtypes: tuple[tuple[str, str, str], ...]  # name, in a, in b
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    values: tuple[ValueDifference, ...]
    files: tuple[tuple[str, str], ...]  # name, what is different

    @property
    def tensors_equal(self) -> bool:
        """Same names, dtypes, shapes and bits."""
        return not (self.only_in_a or self.only_in_b or self.dtypes or self.shapes or self.values)

    @property
    def equal(self) -> bool:
        """The tensors are equal, and so are the other files."""
        return self.tensors_equal and not self.files

    def lines(self) -> list[tuple[str, str, str]]:
        """One row per difference: kind, name, detail. Values come worst first."""
        by_worst = sorted(self.values, key=lambda value: -math.inf if math.isnan(value.worst) else -value.worst)
        return [
            *(("only in a", name, "") for name in self.only_in_a),
            *(("only in b", name, "") for name in self.only_in_b),
            *(("dtype", name, f"{a} -> {b}") for name, a, b in self.dtypes),
            *(("shape", name, f"{list(a)} -> {list(b)}") for name, a, b in self.shapes),
            *(("values", v.name, f"{v.num_different}/{v.num_elements} differ, worst {v.worst:.3g}") for v in by_worst),
            *(("file", name, what) for name, what in self.files),
        ]


def compare(
    a: str | Path | Checkpoint,
    b: str | Path | Checkpoint,
    *,
    workers: int = 1,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Comparison:
    """Compares two checkpoint folders, reading both in pieces in `workers` threads; `on_bytes` hears of progress in a.

    How tensors are spread over shards does not count. Raises ValueError if one of the folders cannot be opened.
    """
    first, second = (x if isinstance(x, Checkpoint) else Checkpoint(x) for x in (a, b))
    both = [name for name in first.tensors if name in second.tensors]
    pairs = [(name, first.tensors[name], second.tensors[name]) for name in both]

    def one(name: str) -> ValueDifference:
        difference = _compare_values(first, second, name)
        on_bytes(first.tensors[name].end - first.tensors[name].begin)
        return difference

    with ThreadPoolExecutor(workers) as pool:
        differences = list(pool.map(one, [name for name, x, y in pairs if x.shape == y.shape]))
    return Comparison(
        a=first.folder,
        b=second.folder,
        num_tensors=len(both),
        only_in_a=tuple(sorted(first.tensors.keys() - second.tensors.keys())),
        only_in_b=tuple(sorted(second.tensors.keys() - first.tensors.keys())),
        dtypes=tuple((name, x.dtype, y.dtype) for name, x, y in pairs if x.dtype != y.dtype),
        shapes=tuple((name, x.shape, y.shape) for name, x, y in pairs if x.shape != y.shape),
        values=tuple(difference for difference in differences if difference.num_different),
        files=tuple(_compare_files(first, second)),
    )


def _compare_values(first: Checkpoint, second: Checkpoint, name: str) -> ValueDifference:
    dtypes = [TORCH_DTYPES[checkpoint.stored(name).dtype] for checkpoint in (first, second)]
    different, worst = 0, torch.zeros((), dtype=torch.float64)
    for pieces in zip(first.raw_bytes(name), second.raw_bytes(name), strict=True):
        if dtypes[0] == dtypes[1] and np.array_equal(np.asarray(pieces[0]), np.asarray(pieces[1])):
            continue
        a, b = (torch.frombuffer(piece, dtype=dtype) for piece, dtype in zip(pieces, dtypes, strict=True))
        unequal = _unequal(a, b)
        if unequal.any():
            different += int(unequal.sum())
            worst = torch.maximum(worst, (a[unequal].double() - b[unequal].double()).abs().max())  # keeps NaN
    return ValueDifference(name, different, math.prod(first.stored(name).shape), worst.item())


def _unequal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Which elements differ: in their bits, or between dtypes in their values (there NaN equals NaN)."""
    if a.dtype == b.dtype:
        bits_a, bits_b = (x.view(torch.uint8).view(len(x), x.element_size()) for x in (a, b))
        return (bits_a != bits_b).any(1)
    return (a.double() != b.double()) & ~(a.isnan() & b.isnan())


def _compare_files(first: Checkpoint, second: Checkpoint) -> list[tuple[str, str]]:
    names = [set(carried_files(checkpoint.folder)) for checkpoint in (first, second)]
    found = [(name, "only in a") for name in names[0] - names[1]] + [
        (name, "only in b") for name in names[1] - names[0]
    ]
    for name in names[0] & names[1]:
        if name == "config.json":
            found += [(name, f"keys differ: {key}") for key in _different_keys(first.raw_config, second.raw_config)]
        elif not _same_bytes(*(resolve_inside(checkpoint.folder, name) for checkpoint in (first, second))):
            found.append((name, "bytes differ"))
    return sorted(found)


def _different_keys(a: object, b: object, path: str = "") -> list[str]:
    """Dotted names of the JSON values that differ; values count as equal only if their types are, too."""
    if isinstance(a, dict) and isinstance(b, dict):
        parts = [_different_keys(a.get(key, ...), b.get(key, ...), f"{path}.{key}") for key in sorted({*a, *b})]
        return [key for part in parts for key in part]
    return [] if type(a) is type(b) and a == b else [path.lstrip(".")]


def _same_bytes(a: Path, b: Path) -> bool:
    if a.stat().st_size != b.stat().st_size:
        return False
    with a.open("rb") as first, b.open("rb") as second:
        return all(piece == second.read(FILE_PIECE) for piece in iter(lambda: first.read(FILE_PIECE), b""))
