"""The k-pool indexer's scores and selection with the cuDNN frontend (1.32.0) on Hopper."""

from cudnn import DSA
from torch import Tensor

from glm5_next.plugins.documents import Documents

COLUMNS = 128  # the widths of score rows are multiples of this, so that few kernels are compiled


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
    """`kernels.select_pools`; selected pools come in ascending order, and of equal scores the earlier pool."""
    end = first_query + q.shape[0]
    first_pool, last_pool = documents.pool_range(first_query, end, kpool)
    if first_pool == last_pool:
        return q.new_full((q.shape[0], num_selected), -1).int()
    segments = documents.query_segments(first_query, end, kpool)
    scores = DSA.indexer_forward_wrapper(
        q.contiguous(),
        pooled[first_pool:last_pool].unsqueeze(1),
        (head_weights.float() * q.shape[1] ** -0.5).contiguous(),
        ratio=kpool,
        sm_scale=q.shape[2] ** -0.5,
        cu_seqlens_q=segments.cu_queries,
        cu_seqlens_k=segments.cu_pools,
        max_seqlen_q=q.shape[0],
        max_seqlen_k=-(-max(segments.longest, num_selected) // COLUMNS) * COLUMNS,
        q_causal_offsets=segments.offsets,
    )["scores"]
    chosen = DSA.indexer_top_k_wrapper(
        scores, segments.visible, num_selected, next_n=1, return_val=False, deterministic=True
    )
    return chosen["indices"]
