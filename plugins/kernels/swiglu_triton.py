"""Clamped SwiGLU, optionally times one weight per row, with a single rounding."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


def clamped_swiglu(gate_up: Tensor, limit: float, weights: Tensor | None = None) -> Tensor:
    """`naive.clamped_swiglu`: `[..., 2F]` (gate first) -> `[..., F]`, each row times its fp32 weight if given."""
    return _ClampedSwiglu.apply(gate_up, limit, weights)


@triton.jit
def _forward(gate_up, weights, out, limit, F: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < F
        gate = tl.load(gate_up + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * F + F + column, mask=inside, other=0.0).to(tl.float32)
        gate = tl.minimum(gate, limit)
        value = gate * tl.sigmoid(gate) * tl.minimum(tl.maximum(up, -limit), limit)
        if WEIGHTED:
            value *= tl.load(weights + row)
        tl.store(out + row * F + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    gate_up,
    weights,
    grad,
    grad_gate_up,
    grad_weights,
    limit,
    F: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    grad_weight = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < F
        gate = tl.load(gate_up + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * F + F + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row * F + column, mask=inside, other=0.0).to(tl.float32)
        clipped_gate, clipped_up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        s = tl.sigmoid(clipped_gate)
        silu = clipped_gate * s
        if WEIGHTED:
            grad_weight += g * silu * clipped_up
            g *= tl.load(weights + row)
        grad_gate = tl.where(gate <= limit, g * clipped_up * (s + silu * (1.0 - s)), 0.0)
        grad_up = tl.where((up >= -limit) & (up <= limit), g * silu, 0.0)
        at = grad_gate_up + row * 2 * F + column
        tl.store(at, grad_gate.to(grad_gate_up.dtype.element_ty), mask=inside)
        tl.store(at + F, grad_up.to(grad_gate_up.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(grad_weights + row, tl.sum(grad_weight, 0))


class _ClampedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, limit: float, weights: Tensor | None) -> Tensor:
        gate_up = gate_up.contiguous()
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        rows = out.numel() // width
        if weights is not None:
            weights = weights.contiguous()
            assert weights.numel() == rows and weights.dtype == torch.float32
        if rows:
            _forward[(rows,)](
                gate_up, weights, out, limit, width, weights is not None, _block(width), num_warps=_warps(width)
            )
        ctx.save_for_backward(gate_up, weights)
        ctx.limit = limit
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None]:  # type: ignore[override]
        gate_up, weights = ctx.saved_tensors
        width = gate_up.shape[-1] // 2
        grad_gate_up = torch.empty_like(gate_up)
        grad_weights = None if weights is None else torch.empty_like(weights)
        rows = gate_up.numel() // (2 * width)
        if rows:
            _backward[(rows,)](
                gate_up,
                weights,
                grad.contiguous(),
                grad_gate_up,
                grad_weights,
                ctx.limit,
                width,
                weights is not None,
                _block(width),
                num_warps=_warps(width),
            )
        return grad_gate_up, None, grad_weights


def _block(width: int) -> int:
    return min(BLOCK, triton.next_power_of_2(width))


def _warps(width: int) -> int:
    return max(1, min(4, _block(width) // 256))
