"""Sparse latent attention on Hopper: FlashMLA's forward (sgl-flash-mla 1.0.0), cuDNN's backward (frontend 1.32.0)."""

from typing import Any

import torch
import torch.nn.functional as F
from cudnn import DSA
from flash_mla import flash_mla_sparse_fwd
from torch import Tensor

from glm5_next.plugins.kernels.indexer_triton import TOKEN_SLOTS, used_slots

HEADS = 64  # what the kernels take at a time
MAX_QUERIES = 2**15  # in one call, so that no offset into `[queries, 64, 512]` reaches 2^31


def sparse_attention(q: Tensor, latent: Tensor, indices: Tensor, scale: float) -> Tensor:
    """`naive.sparse_attention`: any number of heads, -1 in any slot.

    Sums over queries go through atomic additions, so the latent's gradient differs in its last bits from run to run.
    """
    heads = q.shape[1]
    q = F.pad(q, (0, 0, 0, -heads % HEADS))
    indices = F.pad(indices, (0, -indices.shape[1] % TOKEN_SLOTS), value=-1).contiguous()
    parts = (
        _SparseAttention.apply(part, latent, chosen, scale)
        for part, chosen in zip(q.split(MAX_QUERIES), indices.split(MAX_QUERIES))
    )
    out = next(parts) if q.shape[0] <= MAX_QUERIES else torch.cat(list(parts))
    return out[:, :heads]


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, latent: Tensor, indices: Tensor, scale: float) -> Tensor:
        q, latent = q.contiguous(), latent.contiguous()
        lengths = used_slots(indices)
        # The kernels for Hopper are the ones that this package calls legacy.
        out, _, lse = flash_mla_sparse_fwd(
            q,
            latent.unsqueeze(1),
            indices.unsqueeze(1),
            scale,
            d_v=latent.shape[1],
            topk_length=lengths,
            use_legacy=True,
        )
        ctx.save_for_backward(q, latent, indices, lengths, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        q, latent, indices, lengths, out, lse = ctx.saved_tensors
        no_sink = torch.full((q.shape[1],), float("-inf"), dtype=torch.float32, device=q.device)
        grads = DSA.sparse_attention_backward_wrapper(
            q,
            latent,
            out,
            grad.contiguous(),
            lse,
            no_sink,
            indices,
            softmax_scale=ctx.scale,
            topk_length=lengths,
        )
        return grads["dq"], grads["dkv"], None, None
