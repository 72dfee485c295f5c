"""A selection of pools made up by layer and position, as both real engines write it down, and the model it belongs to."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from glm5_next.plugins.pick_coding import PickRecord, first_choice

KPOOL, SELECTED, LAYERS, SPARSE, EXPERTS = 4, 3, 8, (3, 7), 2
LONGEST = 96
FIRST = first_choice(KPOOL, SELECTED)
MODEL: Any = SimpleNamespace(
    num_layers=LAYERS, num_experts_per_token=EXPERTS, num_experts=288, mlp_kinds=("dense", *["moe"] * (LAYERS - 1)),
    attention_kinds=tuple("dsa" if layer in SPARSE else "kda" for layer in range(LAYERS)), index_kpool=KPOOL,
    num_pools_selected=SELECTED, index_topk=KPOOL * SELECTED,
)  # fmt: skip
SCORES = {
    layer: torch.randn(LONGEST, LONGEST // KPOOL, generator=torch.Generator().manual_seed(layer)) for layer in SPARSE
}


def pools_at(layer: int, position: int) -> list[int]:
    """What the stand-ins choose, best first: it depends on the position alone, as in sequences with the same beginning."""
    visible = (position + 1) // KPOOL
    return SCORES[layer][position, :visible].topk(min(visible, SELECTED)).indices.tolist()


def tokens_at(layer: int, position: int, *, tail_at_end: bool) -> list[int]:
    """The row that attention reads: chosen pools token by token, then the incomplete one; -1 unused.

    vLLM puts the tail into the last columns (`kpool_compress.py:886`), SGLang behind what was chosen (`topk_v2.cuh:191`).
    """
    history = [pool * KPOOL + member for pool in pools_at(layer, position) for member in range(KPOOL)]
    tail = list(range((position + 1) // KPOOL * KPOOL, position + 1))
    gap = [-1] * (KPOOL * SELECTED - len(history))
    row = [*history, *gap, *tail] if tail_at_end else [*history, *tail, *gap]
    return [*row, *[-1] * (KPOOL * SELECTED + KPOOL - 1 - len(row))]


def rows_of(layer: int, positions: Tensor, *, tail_at_end: bool) -> Tensor:
    return torch.tensor([tokens_at(layer, at, tail_at_end=tail_at_end) for at in positions.tolist()], dtype=torch.int32)


def assert_chosen(record: PickRecord, length: int) -> None:
    assert record.num_tokens == length and not record.holes.any()
    for layer in SPARSE:
        for position, row in enumerate(record.decode(layer).tolist()):
            assert {pool for pool in row if pool >= 0} == set(pools_at(layer, position)), (layer, position)
