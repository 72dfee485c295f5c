"""The operators the model's modules call, one signature each: here with their naive definitions.

`registry` lists the GPU backends behind the same signatures and chooses among them.
"""

import torch
from torch import Tensor

from glm5_next.plugins.documents import Documents
from glm5_next.plugins.kernels import naive
from glm5_next.plugins.kernels.logprobs import token_logprobs
from glm5_next.plugins.kernels.naive import (
    clamped_swiglu,
    expand_pools,
    gated_rms_norm,
    mhc_merge,
    pool_keys,
    rms_norm,
    short_convolution,
    sparse_attention,
)

__all__ = [
    "clamped_swiglu",
    "expand_pools",
    "gated_rms_norm",
    "kda",
    "mhc_merge",
    "mhc_site",
    "pool_keys",
    "rms_norm",
    "select_pools",
    "short_convolution",
    "sparse_attention",
    "token_logprobs",
]


def mhc_site(
    streams: Tensor,
    weight: Tensor,
    bias: Tensor,
    scales: tuple[Tensor, Tensor, Tensor],
    *,
    num_streams: int,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """A hyper-connection before its block: streams `[..., N * D]` -> the block's input `[..., D]` in their dtype, and
    fp32 post `[..., N]` and mix `[..., N, N]` for `mhc_merge`. Arguments as in `naive.mhc_mapping`."""
    pre, post, mix = naive.mhc_mapping(
        streams,
        weight,
        bias,
        scales,
        num_streams=num_streams,
        norm_eps=norm_eps,
        hc_eps=hc_eps,
        iterations=iterations,
    )
    return naive.mhc_collapse(streams, pre), post, mix


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    beta: Tensor,
    documents: Documents,
    *,
    lower_bound: float,
) -> Tensor:
    """Kimi delta attention from raw projections: q, k, gate `[T, H, K]`, v `[T, H, V]`, beta `[T, H]` logits.

    Returns `[T, H, V]` in v's dtype. Normalisation of q and k, the bounded decay and the sigmoid of beta are inside.
    """
    decay = naive.kda_gate(gate, A_log, dt_bias, lower_bound)
    q, k, beta = naive.l2_norm(q), naive.l2_norm(k), torch.sigmoid(beta.float())
    return naive.kda_chunked(q, k, v, decay, beta, documents).to(v.dtype)


def select_pools(
    q: Tensor,
    head_weights: Tensor,
    pooled: Tensor,
    first_query: int,
    documents: Documents,
    *,
    kpool: int,
    num_selected: int,
) -> Tensor:
    """Scores every complete pool for each query and keeps the best: int32 `[Tq, num_selected]`, -1 unused.

    q `[Tq, I, E]` of the row's tokens `first_query`, `first_query + 1`, ..., head_weights `[Tq, I]` fp32, pooled
    `[pools, E]`. Products and sums are fp32, whatever the dtype of q and pooled.
    """
    queries = torch.arange(first_query, first_query + q.shape[0], device=q.device)
    return naive.select_pools(naive.pool_scores(q, head_weights, pooled), queries, documents, kpool, num_selected)
