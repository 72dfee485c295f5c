"""How far apart two checkpoints are as numbers: an FP8 export and its source, two precisions, two runs."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.name_map import FP8_BLOCK, SCALE_SUFFIX
from glm5_next.bridge.values import STAGING_BYTES, read_values


@dataclass(frozen=True)
class TensorError:
    """One tensor of b against a. NaN in one of them, or values where a has only zeros, make `relative` infinite."""

    name: str
    relative: float  # root mean square of the difference, over that of a
    worst: float  # largest |a - b|


@dataclass(frozen=True)
class Closeness:
    """`errors` of all tensors that both have in the same shape, worst first."""

    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    errors: tuple[TensorError, ...]

    def within(self, tolerance: float) -> bool:
        """Same names and shapes, and no tensor further off than `tolerance`, relatively."""
        same = not (self.only_in_a or self.only_in_b or self.shapes)
        return same and all(error.relative <= tolerance for error in self.errors)


def closeness(
    a: Checkpoint, b: Checkpoint, *, workers: int = 1, on_bytes: Callable[[int], None] = lambda count: None
) -> Closeness:
    """Compares the numbers of two checkpoints, whatever they are stored as; scales count as part of their tensors."""
    names = [[name for name in checkpoint.tensors if not _is_scale(checkpoint, name)] for checkpoint in (a, b)]
    both = [name for name in names[0] if name in set(names[1])]
    pairs = [(name, a.tensors[name].shape, b.tensors[name].shape) for name in both]

    def one(name: str) -> TensorError:
        error = _error(a, b, name)
        on_bytes(a.tensors[name].end - a.tensors[name].begin)
        return error

    with ThreadPoolExecutor(workers) as pool:
        errors = list(pool.map(one, [name for name, x, y in pairs if x == y]))
    return Closeness(
        only_in_a=tuple(sorted(set(names[0]) - set(both))),
        only_in_b=tuple(sorted(set(names[1]) - set(both))),
        shapes=tuple((name, x, y) for name, x, y in pairs if x != y),
        errors=tuple(sorted(errors, key=lambda error: -error.relative)),
    )


def _is_scale(checkpoint: Checkpoint, name: str) -> bool:
    return name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in checkpoint.tensors


def _error(a: Checkpoint, b: Checkpoint, name: str) -> TensorError:
    shape = a.tensors[name].shape or (1,)
    step = max(FP8_BLOCK, STAGING_BYTES // (4 * math.prod(shape[1:]) or 1) // FP8_BLOCK * FP8_BLOCK)
    difference = size = worst = 0.0
    for row in range(0, shape[0], step):
        first, second = (torch.empty((min(step, shape[0] - row), *shape[1:])) for _ in "ab")
        read_values(a, name, first, row=row)
        read_values(b, name, second, row=row)
        size += first.norm(dtype=torch.float64).item() ** 2
        second -= first
        difference += second.norm(dtype=torch.float64).item() ** 2
        worst = max(worst, second.abs().max().item())
    if difference == 0:
        return TensorError(name, 0.0, 0.0)
    relative = math.sqrt(difference / size) if size > 0 else math.inf
    return TensorError(name, relative if math.isfinite(relative) else math.inf, worst)
