"""What comes before the delta rule, in one pass each way: norms of q and k, the bounded decay, the sigmoid of beta."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_T = 32


def activate(
    q: Tensor, k: Tensor, gate: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments as in `kernels.kda`. Returns q and k of unit length in their dtype, log decay `[T, H, K]` and write
    strength `[T, H]` in fp32; all contiguous."""
    return _Activate.apply(q, k, gate, beta, A_log, dt_bias, lower_bound)


@triton.jit
def _unit(x, out, rstd, at, row, real, row_real):
    value = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt_rn(tl.sum(value * value, 1) + 1e-6)
    tl.store(out + at, (value * r[:, None]).to(out.dtype.element_ty), mask=real)
    tl.store(rstd + row, r, mask=row_real)


@triton.jit
def _forward(
    q,
    k,
    gate,
    beta,
    A_log,
    dt_bias,
    unit_q,
    unit_k,
    rstd_q,
    rstd_k,
    decay,
    strength,
    tokens,
    lower_bound,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    channel = tl.arange(0, K)
    row, row_real = token * H + head, token < tokens
    at, real = row[:, None] * K + channel[None, :], row_real[:, None]
    _unit(q, unit_q, rstd_q, at, row, real, row_real)
    _unit(k, unit_k, rstd_k, at, row, real, row_real)
    raw = tl.load(gate + at, mask=real, other=0.0).to(tl.float32) + tl.load(dt_bias + head * K + channel)[None, :]
    tl.store(decay + at, lower_bound * tl.sigmoid(tl.exp(tl.load(A_log + head)) * raw), mask=real)
    b = tl.load(beta + row, mask=row_real, other=0.0).to(tl.float32)
    tl.store(strength + row, tl.sigmoid(b), mask=row_real)


@triton.jit
def _unit_backward(unit, rstd, grad, out, at, row, real, row_real):
    y = tl.load(unit + at, mask=real, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=real, other=0.0).to(tl.float32)
    r = tl.load(rstd + row, mask=row_real, other=0.0)
    g = (g - y * tl.sum(g * y, 1)[:, None]) * r[:, None]
    tl.store(out + at, g.to(out.dtype.element_ty), mask=real)


@triton.jit
def _backward(
    unit_q,
    unit_k,
    rstd_q,
    rstd_k,
    gate,
    beta,
    A_log,
    dt_bias,
    grad_unit_q,
    grad_unit_k,
    grad_decay,
    grad_strength,
    grad_q,
    grad_k,
    grad_gate,
    grad_beta,
    part_A,
    part_bias,
    tokens,
    lower_bound,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    channel = tl.arange(0, K)
    row, row_real = token * H + head, token < tokens
    at, real = row[:, None] * K + channel[None, :], row_real[:, None]
    _unit_backward(unit_q, rstd_q, grad_unit_q, grad_q, at, row, real, row_real)
    _unit_backward(unit_k, rstd_k, grad_unit_k, grad_k, at, row, real, row_real)
    raw = tl.load(gate + at, mask=real, other=0.0).to(tl.float32) + tl.load(dt_bias + head * K + channel)[None, :]
    rate = tl.exp(tl.load(A_log + head))
    s = tl.sigmoid(rate * raw)
    inner = tl.load(grad_decay + at, mask=real, other=0.0) * lower_bound * s * (1.0 - s) * rate
    tl.store(grad_gate + at, inner.to(grad_gate.dtype.element_ty), mask=real)
    part = tl.program_id(0) * H + head
    tl.store(part_bias + part * K + channel, tl.sum(inner, 0))
    tl.store(part_A + part, tl.sum(tl.sum(inner * raw, 1), 0))
    b = tl.sigmoid(tl.load(beta + row, mask=row_real, other=0.0).to(tl.float32))
    g = tl.load(grad_strength + row, mask=row_real, other=0.0) * b * (1.0 - b)
    tl.store(grad_beta + row, g.to(grad_beta.dtype.element_ty), mask=row_real)


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        gate: Tensor,
        beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        lower_bound: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, gate, beta = (x.contiguous() for x in (q, k, gate, beta))
        tokens, heads, width = q.shape
        unit_q, unit_k = torch.empty_like(q), torch.empty_like(k)
        rstd_q, rstd_k, strength = (beta.new_empty(tokens, heads, dtype=torch.float32) for _ in range(3))
        decay = torch.empty_like(gate, dtype=torch.float32)
        if tokens:
            _forward[(triton.cdiv(tokens, BLOCK_T), heads)](
                q,
                k,
                gate,
                beta,
                A_log,
                dt_bias,
                unit_q,
                unit_k,
                rstd_q,
                rstd_k,
                decay,
                strength,
                tokens,
                lower_bound,
                heads,
                width,
                BLOCK_T,
                num_warps=4,
            )
        ctx.save_for_backward(unit_q, unit_k, rstd_q, rstd_k, gate, beta, A_log, dt_bias)
        ctx.lower_bound = lower_bound
        return unit_q, unit_k, decay, strength

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        unit_q, unit_k, rstd_q, rstd_k, gate, beta, A_log, dt_bias = ctx.saved_tensors
        tokens, heads, width = unit_q.shape
        blocks = triton.cdiv(tokens, BLOCK_T)
        out = tuple(torch.empty_like(x) for x in (unit_q, unit_k, gate, beta))
        part_A = A_log.new_empty(blocks, heads, dtype=torch.float32)
        part_bias = A_log.new_empty(blocks, heads * width, dtype=torch.float32)
        if tokens:
            _backward[(blocks, heads)](
                unit_q,
                unit_k,
                rstd_q,
                rstd_k,
                gate,
                beta,
                A_log,
                dt_bias,
                *(grad.contiguous() for grad in grads),
                *out,
                part_A,
                part_bias,
                tokens,
                ctx.lower_bound,
                heads,
                width,
                BLOCK_T,
                num_warps=4,
            )
        return *out, part_A.sum(0), part_bias.sum(0), None
