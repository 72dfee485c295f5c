"""Tensors of a checkpoint as numbers, whatever they are stored as: what load, convert, verify and export's copies read."""

import math

from torch import Tensor

from glm5_next.bridge.checkpoint import TORCH_DTYPES, Checkpoint
from glm5_next.bridge.fp8 import dequantize
from glm5_next.bridge.name_map import FP8_BLOCK, SCALE_SUFFIX

STAGING_BYTES = 16 * 2**20  # read at a time where the numbers cannot go straight to their place


def read_values(
    checkpoint: Checkpoint, name: str, out: Tensor, *, row: int = 0, columns: tuple[int, int] | None = None
) -> None:
    """Fills `out` (any float dtype and device) with rows of a tensor from `row` on, of a matrix if asked some columns.

    FP8 values are multiplied by their scales. Bytes that need no change are read straight into `out`; everything else
    passes through STAGING_BYTES.
    """
    stored = checkpoint.stored(name)
    dtype = TORCH_DTYPES[stored.dtype]
    if dtype == out.dtype and out.device.type == "cpu" and out.is_contiguous():
        checkpoint.read_rows(name, row, row + len(out), columns, out=out)
        return
    scales = None
    if stored.dtype == "F8_E4M3":
        scales = checkpoint.read(name + SCALE_SUFFIX).to(out.device)
    line = math.prod(out.shape[1:]) * dtype.itemsize
    step = max(FP8_BLOCK, STAGING_BYTES // max(line, 1) // FP8_BLOCK * FP8_BLOCK)
    for start in range(0, len(out), step):
        target = out[start : start + step]
        block = checkpoint.read_rows(name, row + start, row + start + len(target), columns).to(out.device)
        if scales is None:
            target.copy_(block)
        else:
            dequantize(block, scales, target, row=row + start, column=columns[0] if columns else 0, name=name)
