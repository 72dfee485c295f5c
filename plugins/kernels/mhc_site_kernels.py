"""Triton kernels of a hyper-connection's mapping and collapse. N streams of D channels; coefficients in the order pre, post, mix.

The products of a token's streams with the mapping's weight are rows of 32: N (N + 2) coefficients, and the sum of squares in
the last. The N x N mixing matrix of each token is held as 4 x 4, whatever N.
"""

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
def split_weight(weight, parts, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The weight as three narrow ones, each of 32 rows, zeros below the last output."""
    at = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    row = tl.arange(0, 32)[:, None]
    w = tl.load(weight + row * INPUTS + at, mask=row < OUTPUTS, other=0.0)
    high, middle, low = _in_three(w, parts.dtype.element_ty)
    tl.store(parts + row * INPUTS + at, high)
    tl.store(parts + (32 + row) * INPUTS + at, middle)
    tl.store(parts + (64 + row) * INPUTS + at, low)


@triton.jit
def site_products(
    streams,
    weights,
    out,
    tokens,
    INPUTS: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Products of one share of the channels; `weights` of `split_weight`. One product of matrices does all three parts."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = token < tokens
    row = tl.arange(0, 128)
    channel = tl.arange(0, BLOCK_D)
    squares = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_T, 128), tl.float32)
    for step in range(0, SHARE, BLOCK_D):
        at = tl.program_id(1) * SHARE + step + channel
        x = tl.load(streams + tl.minimum(token, tokens - 1)[:, None] * INPUTS + at[None, :])
        # Takes the rows through registers. Were they multiplied from shared memory while their squares are taken, Triton
        # 3.6 would give them a buffer too few and overwrite them under the product (tests/cpu/test_triton_compile.py).
        x = tl.where(real[:, None], x, 0.0)
        w = tl.load(weights + row[:, None] * INPUTS + at[None, :], mask=(row < 96)[:, None], other=0.0)
        wide = x.to(tl.float32)
        squares += wide * wide
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    products = tl.sum(tl.reshape(total, (BLOCK_T, 4, 32)), 1)
    column = tl.arange(0, 32)[None, :]
    products = tl.where(column == 31, tl.sum(squares, 1)[:, None], products)
    row_of_share = tl.program_id(1).to(tl.int64) * tokens + token
    tl.store(out + row_of_share[:, None] * 32 + column, products, mask=real[:, None])


@triton.jit
def _summed(shares, at, mask, tokens, SHARES: tl.constexpr):
    """What `site_products` found for all shares, in their order."""
    total = tl.load(shares + at, mask=mask, other=0.0)
    for share in tl.static_range(1, SHARES):
        total += tl.load(shares + share * 32 * tl.cast(tokens, tl.int64) + at, mask=mask, other=0.0)
    return total


@triton.jit
def _normalised(matrix, valid, eps, axis: tl.constexpr):
    """The matrix with its sums along an axis brought to (nearly) one, and what it was divided by."""
    total = tl.sum(matrix, axis, keep_dims=True) + eps
    return tl.where(valid, matrix / total, 0.0), total


@triton.jit
def _softmax(logits, valid, eps):
    """Row softmax plus eps; rows outside the matrix are zeros."""
    peak = tl.max(logits, 2, keep_dims=True)
    e = tl.where(valid, tl.exp(logits - tl.where(peak > float("-inf"), peak, 0.0)), 0.0)
    total = tl.sum(e, 2, keep_dims=True)
    return tl.where(valid, e / tl.where(total > 0, total, 1.0) + eps, 0.0)


@triton.jit
def site_coefficients(
    shares,
    bias,
    alpha_pre,
    alpha_post,
    alpha_res,
    pre,
    post,
    mix,
    rstd,
    products,
    tokens,
    norm_eps,
    hc_eps,
    SHARES: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """From the products to the coefficients; also the norm's factor and the products for the backward pass."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = token < tokens
    squares = _summed(shares, token * 32 + 31, real, tokens, SHARES)
    r = 1.0 / tl.sqrt_rn(squares / (N * D) + norm_eps)
    tl.store(rstd + token, r, mask=real)

    column = tl.arange(0, 8)[None, :]
    inside = real[:, None] & (column < 2 * N)
    vectors = _summed(shares, token[:, None] * 32 + column, inside, tokens, SHARES)
    tl.store(products + token[:, None] * (N * (N + 2)) + column, vectors, mask=inside)
    is_pre = column < N
    alpha = tl.where(is_pre, tl.load(alpha_pre), tl.load(alpha_post))
    gates = tl.sigmoid(alpha * (vectors * r[:, None]) + tl.load(bias + column, mask=column < 2 * N, other=0.0))
    tl.store(pre + token[:, None] * N + column, gates + hc_eps, mask=inside & is_pre)
    tl.store(post + token[:, None] * N + column - N, 2.0 * gates, mask=inside & (column >= N))

    old, new = tl.arange(0, 4)[None, :, None], tl.arange(0, 4)[None, None, :]
    valid = (old < N) & (new < N)
    inside = real[:, None, None] & valid
    at = 2 * N + old * N + new
    matrix = _summed(shares, token[:, None, None] * 32 + at, inside, tokens, SHARES)
    tl.store(products + token[:, None, None] * (N * (N + 2)) + at, matrix, mask=inside)
    logits = tl.load(alpha_res) * (matrix * r[:, None, None]) + tl.load(bias + at, mask=valid, other=0.0)
    sinkhorn = _softmax(tl.where(valid, logits, float("-inf")), valid, hc_eps)
    sinkhorn, _ = _normalised(sinkhorn, valid, hc_eps, 1)
    for _ in range(ITERATIONS - 1):
        sinkhorn, _ = _normalised(sinkhorn, valid, hc_eps, 2)
        sinkhorn, _ = _normalised(sinkhorn, valid, hc_eps, 1)
    tl.store(mix + token[:, None, None] * (N * N) + old * N + new, sinkhorn, mask=inside)


@triton.jit
def site_collapse(
    streams,
    pre,
    collapsed,
    tokens,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = token < tokens
    at = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for stream in tl.static_range(N):
        x = tl.load(streams + token[:, None] * (N * D) + stream * D + at, mask=real[:, None], other=0.0)
        total += tl.load(pre + token * N + stream, mask=real, other=0.0)[:, None] * x.to(tl.float32)
    tl.store(collapsed + token[:, None] * D + at, total.to(collapsed.dtype.element_ty), mask=real[:, None])
