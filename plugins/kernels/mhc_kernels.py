"""The Triton kernels of the hyper-connections. N streams of D channels; coefficients in the order pre, post, mix.

The N x N mixing matrix of each token is held as 4 x 4, whatever N: column 4 j + k of a `[BLOCK_T, 16]` tile is old stream j,
new stream k.
"""
# Tuples grow in unrolled loops, which Triton's compiler knows as concatenation only.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl


@triton.jit
def _in_three(x, dtype: tl.constexpr):
    """fp32 as the sum of three numbers of a narrow type: for bf16, which has 8 of its 24 bits, exactly."""
    high = x.to(dtype)
    rest = x - high.to(tl.float32)
    middle = rest.to(dtype)
    return high, middle, (rest - middle.to(tl.float32)).to(dtype)


@triton.jit
def _dot_exact(x, w, total):
    """total + x w for narrow x and fp32 w."""
    high, middle, low = _in_three(w, x.dtype)
    total = tl.dot(x, low, total, input_precision="ieee")
    total = tl.dot(x, middle, total, input_precision="ieee")
    return tl.dot(x, high, total, input_precision="ieee")


@triton.jit
def _column(tile, index, columns):
    """One column of a `[BLOCK_T, C]` tile: `[BLOCK_T]`."""
    return tl.sum(tl.where(columns == index, tile, 0.0), 1)


@triton.jit
def _normalised(matrix, valid, eps, axis: tl.constexpr):
    """The matrix with its sums along an axis brought to (nearly) one, and what it was divided by."""
    total = tl.sum(matrix, axis, keep_dims=True) + eps
    return tl.where(valid, matrix / total, 0.0), total


@triton.jit
def site_forward(
    streams,
    weight,
    bias,
    alpha_pre,
    alpha_post,
    alpha_res,
    collapsed,
    post,
    mix,
    rstd,
    products,
    tokens,
    norm_eps,
    hc_eps,
    N: tl.constexpr,
    D: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = token < tokens
    column = tl.arange(0, 16)
    j, k = column // 4, column % 4
    mixes = (j < N) & (k < N)
    channel = tl.arange(0, BLOCK_D)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    vectors = tl.zeros((BLOCK_T, 16), tl.float32)  # pre, post
    matrix = tl.zeros((BLOCK_T, 16), tl.float32)
    for start in range(0, N * D, BLOCK_D):
        at = start + channel
        x = tl.load(streams + token[:, None] * (N * D) + at[None, :], mask=real[:, None], other=0.0)
        w = tl.load(weight + column[None, :] * (N * D) + at[:, None], mask=(column < 2 * N)[None, :], other=0.0)
        m = tl.load(weight + (2 * N + j * N + k)[None, :] * (N * D) + at[:, None], mask=mixes[None, :], other=0.0)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        vectors = _dot_exact(x, w, vectors)
        matrix = _dot_exact(x, m, matrix)
    r = 1.0 / tl.sqrt_rn(squares / (N * D) + norm_eps)
    tl.store(rstd + token, r, mask=real)
    out = products + token[:, None] * (N * (N + 2))
    tl.store(out + column[None, :], vectors, mask=real[:, None] & (column < 2 * N)[None, :])
    tl.store(out + (2 * N + j * N + k)[None, :], matrix, mask=real[:, None] & mixes[None, :])

    is_pre = column < N
    alpha = tl.where(is_pre, tl.load(alpha_pre), tl.load(alpha_post))
    b = tl.load(bias + column, mask=column < 2 * N, other=0.0)
    gates = tl.sigmoid(alpha[None, :] * (vectors * r[:, None]) + b[None, :])
    post_at = post + token[:, None] * N + (column - N)[None, :]
    tl.store(post_at, 2.0 * gates, mask=real[:, None] & ((column >= N) & (column < 2 * N))[None, :])
    pre = gates + hc_eps

    b = tl.load(bias + 2 * N + j * N + k, mask=mixes, other=0.0)
    logits = tl.load(alpha_res) * (matrix * r[:, None]) + b[None, :]
    logits = tl.reshape(tl.where(mixes[None, :], logits, float("-inf")), (BLOCK_T, 4, 4))
    old, new = tl.arange(0, 4)[None, :, None], tl.arange(0, 4)[None, None, :]
    valid = (old < N) & (new < N)
    sinkhorn = _softmax(logits, valid, hc_eps)
    sinkhorn, _ = _normalised(sinkhorn, valid, hc_eps, 1)
    for _ in range(ITERATIONS - 1):
        sinkhorn, _ = _normalised(sinkhorn, valid, hc_eps, 2)
        sinkhorn, _ = _normalised(sinkhorn, valid, hc_eps, 1)
    mix_at = mix + token[:, None, None] * (N * N) + old * N + new
    tl.store(mix_at, sinkhorn, mask=real[:, None, None] & valid)

    for step in range(0, D, BLOCK_D):
        here = D - BLOCK_D - step + channel  # from the end: what was read last is still in the cache
        total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        for stream in tl.static_range(N):
            x = tl.load(streams + token[:, None] * (N * D) + stream * D + here[None, :], mask=real[:, None], other=0.0)
            total += _column(pre, stream, column[None, :])[:, None] * x.to(tl.float32)
        tl.store(
            collapsed + token[:, None] * D + here[None, :], total.to(collapsed.dtype.element_ty), mask=real[:, None]
        )


@triton.jit
def _softmax(logits, valid, eps):
    """Row softmax plus eps; rows outside the matrix are zeros."""
    peak = tl.max(logits, 2, keep_dims=True)
    e = tl.where(valid, tl.exp(logits - tl.where(peak > float("-inf"), peak, 0.0)), 0.0)
    total = tl.sum(e, 2, keep_dims=True)
    return tl.where(valid, e / tl.where(total > 0, total, 1.0) + eps, 0.0)


@triton.jit
def _denormalised(grad, result, total, axis: tl.constexpr):
    """The gradient before a normalisation from the one after it, its result and what it divided by."""
    return (grad - tl.sum(grad * result, axis, keep_dims=True)) / total


@triton.jit
def site_coefficients_backward(
    streams,
    bias,
    alpha_pre,
    alpha_post,
    alpha_res,
    rstd,
    products,
    grad,
    grad_post,
    grad_mix,
    pre,
    grad_logits,
    grad_products,
    grad_norm,
    tokens,
    hc_eps,
    N: tl.constexpr,
    D: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """grad_products is what multiplies the weight in the streams' gradient, grad_norm what multiplies the streams."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = token < tokens
    channel = tl.arange(0, BLOCK_D)[None, :]
    column = tl.arange(0, 16)[None, :]
    grad_gates = tl.zeros((BLOCK_T, 16), tl.float32)
    for start in range(0, D, BLOCK_D):
        g = tl.load(grad + token[:, None] * D + start + channel, mask=real[:, None], other=0.0).to(tl.float32)
        for stream in tl.static_range(N):
            at = streams + token[:, None] * (N * D) + stream * D + start + channel
            x = tl.load(at, mask=real[:, None], other=0.0).to(tl.float32)
            grad_gates += tl.where(column == stream, tl.sum(g * x, 1)[:, None], 0.0)

    r = tl.load(rstd + token, mask=real, other=0.0)
    row = token[:, None] * (N * (N + 2))
    is_pre, is_vector = column < N, column < 2 * N
    is_post = is_vector & (column >= N)
    alpha = tl.where(is_pre, tl.load(alpha_pre), tl.load(alpha_post))
    z = tl.load(products + row + column, mask=real[:, None] & is_vector, other=0.0) * r[:, None]
    gates = tl.sigmoid(alpha * z + tl.load(bias + column, mask=is_vector, other=0.0))
    tl.store(pre + token[:, None] * N + column, gates + hc_eps, mask=real[:, None] & is_pre)
    of_post = tl.load(grad_post + token[:, None] * N + column - N, mask=real[:, None] & is_post, other=0.0)
    g = (grad_gates + 2.0 * of_post) * gates * (1.0 - gates)
    g = tl.where(is_vector, g, 0.0)
    tl.store(grad_logits + row + column, g, mask=real[:, None] & is_vector)
    tl.store(grad_products + row + column, alpha * g * r[:, None], mask=real[:, None] & is_vector)
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
    tl.store(grad_products + row3, a * g3 * r[:, None, None], mask=inside)
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
    parts,
    tokens,
    steps,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One block of channels of one stream for one share of the tokens: their gradient, and their part of the weight's."""
    C: tl.constexpr = N * (N + 2)
    at = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    stream = tl.program_id(0) * BLOCK_D // D
    output = tl.arange(0, 32)
    w_at = weight + output[:, None] * (N * D) + at[None, :]
    w_high, w_middle, _ = _in_three(tl.load(w_at, mask=(output < C)[:, None], other=0.0), streams.dtype.element_ty)
    grad_weight = tl.zeros((32, BLOCK_D), tl.float32)
    for step in range(steps):
        token = (tl.program_id(1).to(tl.int64) * steps + step) * BLOCK_T + tl.arange(0, BLOCK_T)
        real = token < tokens
        x_at = token[:, None] * (N * D) + at[None, :]
        x = tl.load(streams + x_at, mask=real[:, None], other=0.0)
        p = tl.load(
            grad_products + token[:, None] * C + output[None, :],
            mask=real[:, None] & (output < C)[None, :],
            other=0.0,
        )
        high, middle, low = _in_three(p, x.dtype)
        grad_weight = tl.dot(tl.trans(low), x, grad_weight, input_precision="ieee")
        grad_weight = tl.dot(tl.trans(middle), x, grad_weight, input_precision="ieee")
        grad_weight = tl.dot(tl.trans(high), x, grad_weight, input_precision="ieee")
        out = tl.dot(middle, w_high, input_precision="ieee")
        out = tl.dot(high, w_middle, out, input_precision="ieee")
        out = tl.dot(high, w_high, out, input_precision="ieee")
        g = tl.load(grad + token[:, None] * D + (at - stream * D)[None, :], mask=real[:, None], other=0.0)
        out += tl.load(pre + token * N + stream, mask=real, other=0.0)[:, None] * g.to(tl.float32)
        out += tl.load(grad_norm + token, mask=real, other=0.0)[:, None] * x.to(tl.float32)
        tl.store(grad_streams + x_at, out.to(grad_streams.dtype.element_ty), mask=real[:, None])
    part = parts + tl.program_id(1) * (C * N * D) + output[:, None] * (N * D) + at[None, :]
    tl.store(part, grad_weight, mask=(output < C)[:, None])


@triton.jit
def merge_forward(
    streams,
    output,
    post,
    mix,
    out,
    tokens,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = token < tokens
    at = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    row = token[:, None] * (N * D) + at
    y = tl.load(output + token[:, None] * D + at, mask=real[:, None], other=0.0).to(tl.float32)
    xs = ()
    for j in tl.static_range(N):
        xs = xs + (tl.load(streams + row + j * D, mask=real[:, None], other=0.0).to(tl.float32),)
    for k in tl.static_range(N):
        total = tl.load(post + token * N + k, mask=real, other=0.0)[:, None] * y
        for j in tl.static_range(N):
            total += tl.load(mix + token * (N * N) + j * N + k, mask=real, other=0.0)[:, None] * xs[j]
        tl.store(out + row + k * D, total.to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def merge_backward(
    streams,
    output,
    post,
    mix,
    grad,
    grad_streams,
    grad_output,
    grad_post,
    grad_mix,
    tokens,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = token < tokens
    channel = tl.arange(0, BLOCK_D)[None, :]
    column = tl.arange(0, 32)[None, :]
    coefficients = tl.zeros((BLOCK_T, 32), tl.float32)  # gradients: mix in the first N * N columns, post in the next N
    for start in range(0, D, BLOCK_D):
        row = token[:, None] * (N * D) + start + channel
        y = tl.load(output + token[:, None] * D + start + channel, mask=real[:, None], other=0.0).to(tl.float32)
        of_output = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        gs = ()
        for k in tl.static_range(N):
            g = tl.load(grad + row + k * D, mask=real[:, None], other=0.0).to(tl.float32)
            gs = gs + (g,)
            of_output += tl.load(post + token * N + k, mask=real, other=0.0)[:, None] * g
            coefficients += tl.where(column == N * N + k, tl.sum(y * g, 1)[:, None], 0.0)
        at = grad_output + token[:, None] * D + start + channel
        tl.store(at, of_output.to(grad_output.dtype.element_ty), mask=real[:, None])
        for j in tl.static_range(N):
            x = tl.load(streams + row + j * D, mask=real[:, None], other=0.0).to(tl.float32)
            total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
            for k in tl.static_range(N):
                total += tl.load(mix + token * (N * N) + j * N + k, mask=real, other=0.0)[:, None] * gs[k]
                coefficients += tl.where(column == j * N + k, tl.sum(x * gs[k], 1)[:, None], 0.0)
            tl.store(grad_streams + row + j * D, total.to(grad_streams.dtype.element_ty), mask=real[:, None])
    of_mix, of_post = column < N * N, (column >= N * N) & (column < N * N + N)
    tl.store(grad_mix + token[:, None] * (N * N) + column, coefficients, mask=real[:, None] & of_mix)
    tl.store(grad_post + token[:, None] * N + column - N * N, coefficients, mask=real[:, None] & of_post)
