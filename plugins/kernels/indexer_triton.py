"""The k-pool indexer's operators in Triton: pooled keys, scores, and the tokens of the selected pools."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5_next.plugins.documents import Documents

TOKEN_SLOTS = 128  # sparse-attention kernels take this many slots at a time


def pool_keys(keys: Tensor, gate: Tensor, ape: Tensor, documents: Documents) -> Tensor:
    """`naive.pool_keys`: fp32 `[pools, E]`. keys and gate may be halves of one tensor: only their rows are contiguous."""
    starts = documents.pool_starts(ape.shape[0])
    out = keys.new_empty(len(starts), keys.shape[1], dtype=torch.float32)
    assert keys.stride(1) == gate.stride(1) == 1 and ape.is_contiguous()
    if len(starts):
        block = 16
        _pool[(triton.cdiv(len(starts), block),)](
            keys,
            gate,
            ape,
            starts,
            out,
            len(starts),
            keys.stride(0),
            gate.stride(0),
            ape.shape[0],
            keys.shape[1],
            block,
        )
    return out


@triton.jit
def _pool(
    keys, gate, ape, starts, out, pools, keys_row, gate_row, P: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr
):
    pool = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, E)[None, :]
    real = (pool < pools)[:, None]
    start = tl.load(starts + pool, mask=pool < pools, other=0)[:, None]
    peak = tl.full((BLOCK, E), float("-inf"), tl.float32)
    for m in tl.static_range(P):
        logit = tl.load(gate + (start + m) * gate_row + channel, mask=real, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, logit + tl.load(ape + m * E + channel).to(tl.float32))
    total = tl.zeros((BLOCK, E), tl.float32)
    mean = tl.zeros((BLOCK, E), tl.float32)
    for m in tl.static_range(P):
        logit = tl.load(gate + (start + m) * gate_row + channel, mask=real, other=0.0).to(tl.float32)
        weight = tl.exp(logit + tl.load(ape + m * E + channel).to(tl.float32) - peak)
        total += weight
        mean += weight * tl.load(keys + (start + m) * keys_row + channel, mask=real, other=0.0).to(tl.float32)
    tl.store(out + pool[:, None].to(tl.int64) * E + channel, mean / total, mask=real)


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
    """`kernels.select_pools`: scores in one kernel without a per-head intermediate, then torch's top-k."""
    rows = slice(first_query, first_query + q.shape[0])
    begin, end = documents.pool_range(first_query, first_query + q.shape[0], kpool)
    if begin == end:
        return q.new_full((q.shape[0], num_selected), -1, dtype=torch.int32)
    scores = q.new_empty(q.shape[0], end - begin, dtype=torch.float32)
    q, head_weights, pooled = q.contiguous(), head_weights.float().contiguous(), pooled.contiguous()
    first, position = documents.first_pools(kpool)[rows] - begin, documents.positions[rows]
    block_q, block_p = 64, 128
    _score[(triton.cdiv(scores.shape[1], block_p), triton.cdiv(scores.shape[0], block_q))](
        q,
        head_weights,
        pooled[begin:end],
        first,
        position,
        scores,
        scores.shape[0],
        scores.shape[1],
        q.shape[2] ** -0.5,
        q.shape[1] ** -0.5,
        q.shape[1],
        q.shape[2],
        kpool,
        block_q,
        block_p,
        num_warps=8,
    )
    best = scores.topk(min(num_selected, scores.shape[1]), dim=-1)
    chosen = (best.indices - first.unsqueeze(1)).masked_fill(best.values == float("-inf"), -1)
    return torch.nn.functional.pad(chosen, (0, num_selected - chosen.shape[1]), value=-1).int()


@triton.jit
def _score(
    q,
    head_weights,
    pooled,
    first,
    position,
    scores,
    queries,
    pools,
    scale,
    head_scale,
    I: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    row = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    pool = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    channel = tl.arange(0, E)
    real = row < queries
    begin = tl.load(first + row, mask=real, other=pools)
    end = begin + (tl.load(position + row, mask=real, other=-1) + 1) // P
    visible = (pool[None, :] >= begin[:, None]) & (pool[None, :] < end[:, None])
    total = tl.zeros((BLOCK_Q, BLOCK_P), tl.float32)
    if tl.sum(visible.to(tl.int32)) > 0:
        key = tl.load(pooled + pool[None, :] * E + channel[:, None], mask=(pool < pools)[None, :], other=0.0)
        for head in range(I):
            at = (row.to(tl.int64) * I + head)[:, None] * E + channel[None, :]
            query = tl.load(q + at, mask=real[:, None], other=0.0)
            weight = tl.load(head_weights + row * I + head, mask=real, other=0.0) * head_scale
            product = tl.dot(query, key, input_precision="ieee") * scale
            total += weight[:, None] * tl.maximum(product, 0.0)
    out = scores + row.to(tl.int64)[:, None] * pools + pool[None, :]
    tl.store(out, tl.where(visible, total, float("-inf")), mask=real[:, None] & (pool < pools)[None, :])


def expand_pools(pools: Tensor, documents: Documents, kpool: int) -> Tensor:
    """`naive.expand_pools` with the used slots first: int32 `[T, W]`, W rounded up to `TOKEN_SLOTS`, -1 unused."""
    tokens, selected = pools.shape
    width = triton.cdiv(selected * kpool + kpool - 1, TOKEN_SLOTS) * TOKEN_SLOTS
    out = pools.new_empty(tokens, width)
    block = min(1024, triton.next_power_of_2(width))
    if tokens:
        _expand[(tokens, triton.cdiv(width, block))](
            pools.contiguous(), documents.starts, documents.positions, out, selected, kpool, width, block
        )
    return out


@triton.jit
def _expand(pools, starts, positions, out, S: tl.constexpr, P: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, position = tl.load(starts + row), tl.load(positions + row)
    complete = (position + 1) // P
    used = tl.minimum(complete, S).to(tl.int32) * P
    pool = tl.load(pools + row * S + slot // P, mask=slot < used, other=0).to(tl.int64)
    tail = complete * P + slot - used
    token = tl.where(slot < used, start + pool * P + slot % P, start + tail)
    token = tl.where((slot < used) | (tail <= position), token, -1)
    tl.store(out + row * W + slot, token.to(tl.int32), mask=slot < W)


def used_slots(indices: Tensor) -> Tensor:
    """Of each row of `[T, W]`, the number of slots up to the last used one: int32 `[T]`. The rest need not be read."""
    out = indices.new_empty(len(indices))
    width = indices.shape[1]
    if len(indices):
        _used_slots[(len(indices),)](indices, out, width, triton.next_power_of_2(width), num_warps=4)
    return out


@triton.jit
def _used_slots(indices, out, W: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK)
    index = tl.load(indices + row * W + slot, mask=slot < W, other=-1)
    tl.store(out + row, tl.max(tl.where(index >= 0, slot + 1, 0), 0))
