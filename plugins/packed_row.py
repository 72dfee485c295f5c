"""A packed row as it travels through Megatron: `PackedSeqParams` with what our layers need beside it."""

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from glm5_next.plugins.documents import Documents
from glm5_next.plugins.replay import Choices


@dataclass
class PackedRow(PackedSeqParams):
    """Megatron hands this object to every layer, in the forward pass and in recomputation, so whatever must stay with
    its micro-batch travels on it."""

    routes: Choices | None = None
    picks: Choices | None = None


def packed_row(cu_seqlens: Tensor, routes: Choices | None = None, picks: Choices | None = None) -> PackedRow:
    """The `thd` description of one row: cu_seqlens int32 `[D + 1]` from 0 to the number of tokens."""
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        routes=routes,
        picks=picks,
    )


def documents_of(row: PackedSeqParams | None, length: int, batch: int, device: torch.device) -> Documents:
    """The documents of a `[length, batch, ...]` activation (full sequence, before any TP split).

    Without a row every batch entry is one document. Computed once per row and kept on it, so that all layers use the
    same tensors.
    """
    if row is None:
        return Documents.of_equal_length(batch, length, device)
    if batch != 1:
        raise ValueError(f"a packed row has batch size 1, got {batch}")
    documents = row.__dict__.get("documents")
    if documents is None:
        # Padding between documents belongs to the document before it: nothing later in a document reaches back.
        padded = row.cu_seqlens_q_padded
        documents = Documents.from_cu_seqlens(row.cu_seqlens_q if padded is None else padded, length)
        row.__dict__["documents"] = documents
    return documents


def to_tokens(x: Tensor) -> Tensor:
    """`[s, b, ...]` -> `[b * s, ...]`: documents of an unpacked batch one after another."""
    return x.transpose(0, 1).flatten(0, 1)


def from_tokens(x: Tensor, batch: int) -> Tensor:
    """The inverse of `to_tokens`."""
    return x.unflatten(0, (batch, -1)).transpose(0, 1)
