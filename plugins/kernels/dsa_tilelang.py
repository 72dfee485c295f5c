"""Sparse latent attention with Megatron-Core 0.19.2's TileLang kernels, for GPUs that FlashMLA and cuDNN leave out."""

import torch.nn.functional as F
from megatron.core.transformer.experimental_attention_variant.ops.sparse_mla import SparseMLA
from torch import Tensor

TAIL = 64  # the kernels are for 512 channels and a rotary tail; this model has none, so it is zeros


def sparse_attention(q: Tensor, latent: Tensor, indices: Tensor, scale: float) -> Tensor:
    """`naive.sparse_attention`; the forward pass runs once more in the backward pass.

    Sums over queries go through atomic additions, so the latent's gradient differs in its last bits from run to run.
    """
    out, _ = SparseMLA.apply(F.pad(q, (0, TAIL)), F.pad(latent, (0, TAIL)).unsqueeze(1), indices.unsqueeze(1), scale)
    return out
