"""FP8 weights with one fp32 scale per block of 128 x 128, as the FP8 release stores them.

    W[r, c] = W8[r, c] * scale_inv[r // 128, c // 128]

The scale multiplies, whatever its name says. Blocks at the lower and right edge are cut where the tensor ends.
"""

import torch
from torch import Tensor

from glm5_next.bridge.name_map import FP8_BLOCK

LARGEST = 448.0  # finite value of e4m3


def dequantize(codes: Tensor, scale_inv: Tensor, out: Tensor, *, row: int = 0, column: int = 0, name: str = "") -> None:
    """Writes a region of an FP8 matrix as numbers into `out` (any float dtype, same shape and device).

    codes: e4m3 `[rows, columns]`, whose first element is (`row`, `column`) of the whole matrix; scale_inv: all its
    scales. Raises ValueError naming the tensor for a NaN code or a scale that is negative or not finite.
    """
    if not (scale_inv.isfinite().all() and (scale_inv >= 0).all()):
        raise ValueError(f"{name}_scale_inv: has a scale that is negative or not finite; the file is damaged")
    scales = scale_inv.repeat_interleave(FP8_BLOCK, dim=1)[:, column : column + codes.shape[1]]
    start = 0
    while start < codes.shape[0]:
        block = (row + start) // FP8_BLOCK
        stop = min(codes.shape[0], (block + 1) * FP8_BLOCK - row)
        out[start:stop] = _values(codes[start:stop], name).mul_(scales[block])
        start = stop


def _values(codes: Tensor, name: str) -> Tensor:
    """e4m3 -> fp32, exactly. On a CPU by moving bits, seven times as fast as torch's cast."""
    if codes.device.type != "cpu":
        values = codes.float()
        is_damaged = bool(values.isnan().any())
    else:
        # Sign, exponent and mantissa at their places in a bf16, whose exponent is then too small by 127 - 7.
        bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(0x87F0 - 0x10000)
        is_damaged = int(bits.bitwise_and(0x07F0).amax()) == 0x07F0
        values = bits.view(torch.bfloat16).float().mul_(2.0**120)
    if is_damaged:
        raise ValueError(f"{name}: has an FP8 code that is no number; the file is damaged")
    return values


def quantize(values: Tensor, name: str = "") -> tuple[Tensor, Tensor]:
    """A whole matrix -> (e4m3 codes, fp32 scales); every block's largest value gets the largest code.

    The scale is amax / 448, and 1 for a block of zeros. So what was quantised by this rule from bf16 weights, and
    dequantised to bf16, comes back with the same bits. Raises ValueError naming the tensor for values that are not
    finite.
    """
    rows, columns = values.shape
    codes = torch.empty_like(values, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK), dtype=torch.float32, device=values.device)
    for block, scale in enumerate(scales):
        part = slice(block * FP8_BLOCK, (block + 1) * FP8_BLOCK)
        strip = values[part].float()
        largest = torch.maximum(strip.amax(0), -strip.amin(0))
        largest = torch.nn.functional.pad(largest, (0, len(scale) * FP8_BLOCK - columns))
        scale.copy_(largest.view(-1, FP8_BLOCK).amax(1) / LARGEST)
        scale[scale == 0] = 1.0
        codes[part] = (strip / scale.repeat_interleave(FP8_BLOCK)[:columns]).to(torch.float8_e4m3fn)
    if not scales.isfinite().all():
        raise ValueError(f"{name}: has values that are not finite, which FP8 cannot store")
    return codes, scales
