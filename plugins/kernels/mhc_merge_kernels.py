"""Triton kernels of a hyper-connection's write-back. N streams of D channels."""
# Tuples grow in unrolled loops, which Triton's compiler knows as concatenation only.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl


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
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token. Sums over its channels are kept apart for every thread until the end."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    sums, posts, mixes = (), (), ()  # sums: gradients of mix, old streams by new streams, then of post
    for k in tl.static_range(N):
        posts = posts + (tl.load(post + token * N + k),)
        for j in tl.static_range(N):
            mixes = mixes + (tl.load(mix + token * (N * N) + k * N + j),)
    for _ in tl.static_range(N * N + N):
        sums = sums + (tl.zeros((BLOCK_D,), tl.float32),)
    for start in range(0, D, BLOCK_D):
        row = token * (N * D) + start + channel
        of_output = tl.zeros((BLOCK_D,), tl.float32)
        gs, new, of_post = (), (), ()
        y = tl.load(output + token * D + start + channel).to(tl.float32)
        for k in tl.static_range(N):
            gs = gs + (tl.load(grad + row + k * D).to(tl.float32),)
            of_output += posts[k] * gs[k]
            of_post = of_post + (sums[N * N + k] + y * gs[k],)
        tl.store(grad_output + token * D + start + channel, of_output.to(grad_output.dtype.element_ty))
        for j in tl.static_range(N):
            x = tl.load(streams + row + j * D).to(tl.float32)
            total = tl.zeros((BLOCK_D,), tl.float32)
            for k in tl.static_range(N):
                total += mixes[j * N + k] * gs[k]
                new = new + (sums[j * N + k] + x * gs[k],)
            tl.store(grad_streams + row + j * D, total.to(grad_streams.dtype.element_ty))
        sums = new + of_post
    for i in tl.static_range(N * N):
        tl.store(grad_mix + token * (N * N) + i, tl.sum(sums[i]))
    for k in tl.static_range(N):
        tl.store(grad_post + token * N + k, tl.sum(sums[N * N + k]))
