"""Pure tensor functions between HF parts and one rank's Megatron tensor. Nothing here communicates or reads files."""

from collections.abc import Sequence

import torch
from torch import Tensor

from glm5_next.bridge.name_map import Row


def part_range(row: Row, length: int, rank: int, size: int) -> tuple[int, int]:
    """What rank `rank` of `size` takes of an HF part along `row.split`, whose length there is `length`.

    The last rank's range ends before `rank + 1` shares if the length (the vocabulary) is no multiple of `size`.
    """
    share = -(-length // size)
    return min(rank * share, length), min((rank + 1) * share, length)


def shard(parts: Sequence[Tensor], row: Row, rank: int, size: int) -> Tensor:
    """Whole HF parts -> one rank's Megatron tensor(s), concatenated. Split first, fuse second: [q_r; k_r; v_r]."""
    if row.split is not None:
        ranges = [part_range(row, part.shape[row.split], rank, size) for part in parts]
        parts = [part.narrow(row.split, start, stop - start) for part, (start, stop) in zip(parts, ranges)]
    return torch.cat(list(parts))


def unshard(shards: Sequence[Tensor], row: Row) -> list[Tensor]:
    """Every rank's Megatron tensor -> the whole HF parts; the inverse of `shard` (padding of the last rank kept)."""
    if row.split is None:
        return list(shards[0].chunk(len(row.hf)))
    parts_of_rank = [shard.chunk(len(row.hf)) for shard in shards]
    return [torch.cat(pieces, row.split) for pieces in zip(*parts_of_rank, strict=True)]
