"""The operators the model's modules call, one signature each, whatever computes them."""

import torch
from torch import Tensor

from glm5_next.plugins.documents import Documents
from glm5_next.plugins.kernels import naive
from glm5_next.plugins.kernels.naive import (
    expand_pools,
    gated_rms_norm,
    pool_keys,
    short_convolution,
    sparse_attention,
)

__all__ = [
    "expand_pools",
    "gated_rms_norm",
    "kda",
    "pool_keys",
    "select_pools",
    "short_convolution",
    "sparse_attention",
]


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
    queries: Tensor,
    documents: Documents,
    *,
    kpool: int,
    num_selected: int,
) -> Tensor:
    """Scores every complete pool for each query and keeps the best: int32 `[Tq, num_selected]`, -1 unused.

    q `[Tq, I, E]`, head_weights `[Tq, I]`, pooled `[pools, E]`, queries `[Tq]` row indices.
    """
    scores = naive.pool_scores(q, head_weights, pooled)
    return naive.select_pools(scores, queries, documents, kpool, num_selected)
