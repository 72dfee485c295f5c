"""Run as a module: every Triton kernel of ours built for Hopper at the released model's sizes; prints what it takes as JSON."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5_next.launchers.presets import RELEASED_CONFIG
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.documents import Documents
from glm5_next.plugins.kernels import (
    indexer_triton,
    kda_triton,
    logprobs_triton,
    mhc_triton,
    norm_triton,
    swiglu_triton,
)
from tests.support.compiled import compiling

TOKENS = 8192
MODEL = Glm5NextConfig.from_hf(RELEASED_CONFIG)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta").requires_grad_(dtype.is_floating_point)


def backward(outputs: Tensor | tuple[Tensor, ...]) -> None:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [torch.empty_like(out) for out in outputs])


def norms_and_activations() -> None:
    hidden, experts = MODEL.hidden_size, MODEL.moe_ffn_hidden_size
    backward(norm_triton.rms_norm(empty(TOKENS, hidden), empty(hidden), 1e-5))
    backward(swiglu_triton.clamped_swiglu(empty(TOKENS, 2 * MODEL.ffn_hidden_size), 10.0))
    backward(swiglu_triton.clamped_swiglu(empty(TOKENS, 2 * experts), 10.0, empty(TOKENS, dtype=torch.float32)))
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    logprobs, _ = logprobs_triton.token_logprobs(
        empty(TOKENS, MODEL.vocab_size),
        empty(TOKENS, dtype=torch.int64),
        vocab_size=MODEL.vocab_size,
        tp_group=group,  # type: ignore[arg-type]
    )
    backward(logprobs)


def attention() -> None:
    heads, width = MODEL.kda_num_heads, MODEL.kda_head_dim
    q, k, gate = (empty(TOKENS, heads, width) for _ in range(3))
    parameters = empty(heads, dtype=torch.float32), empty(heads * width, dtype=torch.float32)
    backward(kda_triton.activate(q, k, gate, empty(TOKENS, heads), *parameters, -5.0))

    documents = Documents(torch.empty(2, dtype=torch.int32, device="meta"), (TOKENS,))
    kpool, width, selected = MODEL.index_kpool, MODEL.index_head_dim, MODEL.num_pools_selected
    with torch.no_grad():
        keys, gate = (empty(TOKENS, width, dtype=torch.float32) for _ in range(2))
        pooled = indexer_triton.pool_keys(keys, gate, empty(kpool, width), documents)
        q, weights = empty(TOKENS, MODEL.index_num_heads, width), empty(TOKENS, MODEL.index_num_heads)
        indexer_triton.select_pools(q, weights, pooled.bfloat16(), 0, documents, kpool=kpool, num_selected=selected)
        pools = empty(TOKENS, selected, dtype=torch.int32)
        indexer_triton.used_slots(indexer_triton.expand_pools(pools, documents, kpool))


def hyper_connections(tokens: int) -> None:
    n, hidden = MODEL.num_streams, MODEL.hidden_size
    outputs = n * (n + 2)
    scales = tuple(empty(1, dtype=torch.float32) for _ in range(3))
    site = mhc_triton.mhc_site(
        empty(tokens, n * hidden),
        empty(outputs, n * hidden, dtype=torch.float32),
        empty(outputs, dtype=torch.float32),
        scales,  # type: ignore[arg-type]
        num_streams=n,
        norm_eps=MODEL.norm_eps,
        hc_eps=MODEL.hc_eps,
        iterations=MODEL.sinkhorn_iterations,
    )
    backward(site)
    post, mix = (empty(tokens, *size, dtype=torch.float32) for size in ((n,), (n, n)))
    backward(mhc_triton.mhc_merge(empty(tokens, n * hidden), empty(tokens, hidden), post, mix))


@triton.jit
def squares_beside_a_product(x, w, out, BLOCK: tl.constexpr):
    """What `mhc_site_kernels.site_products` must not be: rows from shared memory both multiplied and squared."""
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    squares, total = tl.zeros((BLOCK, BLOCK), tl.float32), tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, 1024, BLOCK):
        a = tl.load(x + row * 1024 + start + column)
        total = tl.dot(a, tl.trans(tl.load(w + row * 1024 + start + column)), total)
        squares += a.to(tl.float32) * a.to(tl.float32)
    tl.store(out + row * BLOCK + column, total + squares)


def main() -> None:
    with compiling() as found:
        norms_and_activations()
        attention()
        hyper_connections(TOKENS)
    with compiling():  # of one token, which Triton takes for a constant
        hyper_connections(1)
    with compiling() as wrong:
        x, w = empty(64, 1024), empty(64, 1024)
        squares_beside_a_product[(1,)](x, w, empty(64, 64, dtype=torch.float32), 64, num_warps=4, num_stages=3)
    print(json.dumps({"kernels": [asdict(kernel) for kernel in found], "wrong": [asdict(kernel) for kernel in wrong]}))


if __name__ == "__main__":
    main()
