"""Safetensors -> this rank's parameters, range by range."""

from collections.abc import Sequence

import torch
from torch import Tensor

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.local_tensors import LocalTensor, local_tensors, tensor_split
from glm5_next.bridge.transforms import part_range


@torch.no_grad()
def load_weights(chunks: Sequence[torch.nn.Module], checkpoint: Checkpoint) -> None:
    """Fills every parameter and persistent buffer of this rank's model chunks from a checkpoint.

    Each rank reads only its own byte ranges. The whole inventory is checked before any tensor is touched; a parameter
    without a row, a row without a parameter, a shape or dtype that does not fit is a ValueError that names it.
    """
    checkpoint.check_inventory()
    tensors = local_tensors(chunks, checkpoint.config)
    for local in tensors.values():
        _check_dtype(local)
    for local in tensors.values():
        _fill(local, _read(local, checkpoint))


def _read(local: LocalTensor, checkpoint: Checkpoint) -> Tensor:
    row, entry = local.entry.row, local.entry
    if row.split is None:
        return torch.cat([checkpoint.read(name) for name in entry.hf])
    rank, size, _ = tensor_split(entry)
    parts = []
    for name in entry.hf:
        start, stop = part_range(row, checkpoint.tensors[name].shape[row.split], rank, size)
        parts.append(checkpoint.read_slice(name, row.split, start, stop))
    return torch.cat(parts)


def _fill(local: LocalTensor, value: Tensor) -> None:
    value = value.chunk(len(local.entry.megatron))[local.index]
    target = local.tensor
    if value.shape[1:] != target.shape[1:] or value.shape[0] > target.shape[0]:
        raise ValueError(
            f"{local.name}: the model has shape {tuple(target.shape)}, the checkpoint {tuple(value.shape)}"
        )
    if value.shape[0] < target.shape[0] and local.entry.layer is not None:
        raise ValueError(f"{local.name}: only the vocabulary may be padded; {value.shape[0]} of {target.shape[0]} rows")
    target.data[: value.shape[0]].copy_(value)
    target.data[value.shape[0] :].zero_()


def _check_dtype(local: LocalTensor) -> None:
    if local.entry.row.fp32_in_model and local.tensor.dtype != torch.float32:
        raise ValueError(f"{local.name} has to be fp32 while training, but the model holds {local.tensor.dtype}")
