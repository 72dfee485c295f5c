"""Triton kernels of the backward pass of a hyper-connection's mapping and collapse; see `mhc_site_kernels`."""
# Tuples grow in unrolled loops, which Triton's compiler knows as concatenation only.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl

from glm5_next.plugins.kernels.mhc_site_kernels import _in_three, _normalised, _softmax


@triton.jit
def site_pre_backward(streams, grad, grad_pre, N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """One token: the gradient of what collapses its streams."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    totals = ()
    for _ in tl.static_range(N):
        totals = totals + (tl.zeros((BLOCK_D,), tl.float32),)
    for start in range(0, D, BLOCK_D):
        g = tl.load(grad + token * D + start + channel).to(tl.float32)
        new = ()
        for stream in tl.static_range(N):
            x = tl.load(streams + token * (N * D) + stream * D + start + channel).to(tl.float32)
            new = new + (totals[stream] + g * x,)
        totals = new
    for stream in tl.static_range(N):
        tl.store(grad_pre + token * N + stream, tl.sum(totals[stream]))


@triton.jit
def _denormalised(grad, result, total, axis: tl.constexpr):
    """The gradient before a normalisation from the one after it, its result and what it divided by."""
    return (grad - tl.sum(grad * result, axis, keep_dims=True)) / total


@triton.jit
def _store_parts(to, value, mask):
    high, middle, low = _in_three(value, to.dtype.element_ty)
    tl.store(to, high, mask=mask)
    tl.store(to + 32, middle, mask=mask)
    tl.store(to + 64, low, mask=mask)
    tl.store(to + 96, high, mask=mask)


@triton.jit
def site_coefficients_backward(
    bias,
    alpha_pre,
    alpha_post,
    alpha_res,
    rstd,
    products,
    grad_pre,
    grad_post,
    grad_mix,
    grad_logits,
    grad_products,
    grad_norm,
    tokens,
    hc_eps,
    N: tl.constexpr,
    D: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """grad_products is what multiplies the weight in the streams' gradient, grad_norm what multiplies the streams.

    grad_products: of each token 4 x 32 narrow numbers, the high, middle and low parts and the high ones again; zeros stay.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = token < tokens
    column = tl.arange(0, 8)[None, :]
    r = tl.load(rstd + token, mask=real, other=0.0)
    row = token[:, None] * (N * (N + 2))
    is_pre, is_vector = column < N, column < 2 * N
    inside = real[:, None] & is_vector
    alpha = tl.where(is_pre, tl.load(alpha_pre), tl.load(alpha_post))
    z = tl.load(products + row + column, mask=inside, other=0.0) * r[:, None]
    gates = tl.sigmoid(alpha * z + tl.load(bias + column, mask=is_vector, other=0.0))
    g = tl.load(grad_pre + token[:, None] * N + column, mask=inside & is_pre, other=0.0)
    g += 2.0 * tl.load(grad_post + token[:, None] * N + column - N, mask=inside & (column >= N), other=0.0)
    g = tl.where(is_vector, g * gates * (1.0 - gates), 0.0)
    tl.store(grad_logits + row + column, g, mask=inside)
    _store_parts(grad_products + token[:, None] * 128 + column, alpha * g * r[:, None], inside)
    of_norm = tl.sum(alpha * g * z, 1)

    old, new = tl.arange(0, 4)[None, :, None], tl.arange(0, 4)[None, None, :]
    valid = (old < N) & (new < N)
    inside = real[:, None, None] & valid
    at = 2 * N + old * N + new
    row3 = token[:, None, None] * (N * (N + 2)) + at
    z3 = tl.load(products + row3, mask=inside, other=0.0) * r[:, None, None]
    a = tl.load(alpha_res)
    logits = tl.where(valid, a * z3 + tl.load(bias + at, mask=valid, other=0.0), float("-inf"))
    start3 = _softmax(logits, valid, hc_eps)
    matrix, total = _normalised(start3, valid, hc_eps, 1)
    totals = (total,)
    for _ in tl.static_range(ITERATIONS - 1):
        matrix, total = _normalised(matrix, valid, hc_eps, 2)
        totals = totals + (total,)
        matrix, total = _normalised(matrix, valid, hc_eps, 1)
        totals = totals + (total,)
    g3 = tl.load(grad_mix + token[:, None, None] * (N * N) + old * N + new, mask=inside, other=0.0)
    for i in tl.static_range(ITERATIONS - 1):
        g3 = tl.where(valid, _denormalised(g3, matrix, totals[2 * (ITERATIONS - 1 - i)], 1), 0.0)
        matrix *= totals[2 * (ITERATIONS - 1 - i)]
        g3 = tl.where(valid, _denormalised(g3, matrix, totals[2 * (ITERATIONS - 1 - i) - 1], 2), 0.0)
        matrix *= totals[2 * (ITERATIONS - 1 - i) - 1]
    g3 = tl.where(valid, _denormalised(g3, matrix, totals[0], 1), 0.0)
    softmax = tl.where(valid, start3 - hc_eps, 0.0)
    g3 = softmax * (g3 - tl.sum(g3 * softmax, 2, keep_dims=True))
    tl.store(grad_logits + row3, g3, mask=inside)
    _store_parts(grad_products + token[:, None, None] * 128 + at, a * g3 * r[:, None, None], inside)
    of_norm += tl.sum(tl.sum(a * g3 * z3, 2), 1)
    # The norm's factor is (mean square + eps)^-1/2 and every product is proportional to it.
    tl.store(grad_norm + token, -of_norm * r * r / (N * D), mask=real)


@triton.jit
def site_streams_backward(
    streams,
    weight,
    pre,
    grad,
    grad_products,
    grad_norm,
    grad_streams,
    shares,
    tokens,
    steps,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One block of channels of one stream for one share of the tokens: their gradient, and their part of the weight's.

    Products with the weight's high part, and with its middle one where the fourth repeats the high one.
    """
    C: tl.constexpr = N * (N + 2)
    at = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    stream = tl.program_id(0) * BLOCK_D // D
    row = tl.arange(0, 128)[:, None]
    wide = tl.load(weight + row % 32 * (N * D) + at[None, :], mask=row % 32 < C, other=0.0)
    high, middle, _ = _in_three(wide, streams.dtype.element_ty)
    w = tl.where(row < 96, high, middle)
    grad_weight = tl.zeros((128, BLOCK_D), tl.float32)
    for step in range(steps):
        token = (tl.program_id(1).to(tl.int64) * steps + step) * BLOCK_T + tl.arange(0, BLOCK_T)
        real = token < tokens
        x_at = token[:, None] * (N * D) + at[None, :]
        x = tl.load(streams + x_at, mask=real[:, None], other=0.0)
        p = tl.load(grad_products + token[:, None] * 128 + tl.arange(0, 128)[None, :], mask=real[:, None], other=0.0)
        grad_weight = tl.dot(tl.trans(p), x, grad_weight, input_precision="ieee")
        out = tl.dot(p, w, input_precision="ieee")
        g = tl.load(grad + token[:, None] * D + (at - stream * D)[None, :], mask=real[:, None], other=0.0)
        out += tl.load(pre + token * N + stream, mask=real, other=0.0)[:, None] * g.to(tl.float32)
        out += tl.load(grad_norm + token, mask=real, other=0.0)[:, None] * x.to(tl.float32)
        tl.store(grad_streams + x_at, out.to(grad_streams.dtype.element_ty), mask=real[:, None])
    total = tl.sum(tl.reshape(tl.where(row < 96, grad_weight, 0.0), (4, 32, BLOCK_D)), 0)
    output = tl.arange(0, 32)[:, None]
    tl.store(shares + tl.program_id(1) * (C * N * D) + output * (N * D) + at[None, :], total, mask=output < C)
