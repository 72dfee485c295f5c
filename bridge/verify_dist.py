"""Compares a Megatron distributed checkpoint with the Hugging Face folder that it was converted from, bit by bit."""

from collections.abc import Callable

import torch

from glm5_next.bridge.checkpoint import Checkpoint, as_bytes
from glm5_next.bridge.dist_names import regions
from glm5_next.bridge.dist_read import DistCheckpoint
from glm5_next.bridge.dist_write import cut
from glm5_next.bridge.name_map import model_tensors
from glm5_next.bridge.values import read_values


def differing_tensors(
    dist: DistCheckpoint, source: Checkpoint, on_bytes: Callable[[int], None] = lambda count: None
) -> list[str]:
    """HF names of the tensors whose values are not those of the source in the checkpoint's dtype; holds two blocks.

    Raises ValueError for a tensor that is missing, incomplete or of another shape.
    """
    different: list[str] = []
    for entry in model_tensors(source.config, mtp=True):
        for region in regions(entry, source.config):
            dist.check(region)
            dtype = dist.dtypes[region.key]
            for part in cut(region, dtype.itemsize):
                held, wanted = (torch.empty((part.num_rows, *part.inner_shape), dtype=dtype) for _ in range(2))
                dist.read(part, held)
                read_values(source, part.hf, wanted, row=part.row)
                on_bytes(held.nbytes)
                if as_bytes(held) != as_bytes(wanted) and part.hf not in different[-1:]:
                    different.append(part.hf)
    return different
