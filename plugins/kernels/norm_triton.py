"""RMSNorm with the reference's two roundings, in one pass each way."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# At most this many programs share the rows in the backward pass; each sums its own rows' part of the weight's gradient.
BACKWARD_PROGRAMS = 528


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`naive.rms_norm`: rounds to x's dtype before the weight multiplies. x `[..., D]`, weight `[D]`."""
    return _RmsNorm.apply(x, weight, eps)


@triton.jit
def _forward(x, weight, out, rstd, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    value = tl.load(x + row * D + column, mask=inside, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / D + eps)
    normed = (value * r).to(out.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * D + column, scaled.to(out.dtype.element_ty), mask=inside)
    tl.store(rstd + row, r)


@triton.jit
def _backward(
    x, weight, rstd, grad, grad_x, partial, rows, D: tl.constexpr, BLOCK: tl.constexpr, ROWS_EACH: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    grad_w = tl.zeros((BLOCK,), tl.float32)
    for step in range(ROWS_EACH):
        row = tl.program_id(0).to(tl.int64) * ROWS_EACH + step
        at = row * D + column
        inside = (column < D) & (row < rows)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * r
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        grad_w += g * normed.to(x.dtype.element_ty).to(tl.float32)
        g *= w
        g = (g - normed * (tl.sum(g * normed, 0) / D)) * r
        tl.store(grad_x + at, g.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(partial + tl.program_id(0) * D + column, grad_w, mask=column < D)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        width = x.shape[-1]
        out, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        block = triton.next_power_of_2(width)
        if rstd.numel():
            _forward[(rstd.numel(),)](x, weight, out, rstd, eps, width, block, num_warps=_warps(block))
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, rstd = ctx.saved_tensors
        width, rows = x.shape[-1], rstd.numel()
        block = triton.next_power_of_2(width)
        each = triton.next_power_of_2(max(1, triton.cdiv(rows, BACKWARD_PROGRAMS)))
        grad_x, partial = torch.empty_like(x), weight.new_empty(triton.cdiv(rows, each), width, dtype=torch.float32)
        if rows:
            _backward[(partial.shape[0],)](
                x, weight, rstd, grad.contiguous(), grad_x, partial, rows, width, block, each, num_warps=_warps(block)
            )
        return grad_x, partial.sum(0).to(weight.dtype), None


def _warps(block: int) -> int:
    return max(1, min(8, block // 512))
