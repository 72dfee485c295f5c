"""Safetensors -> this rank's parameters, range by range."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.local_tensors import LocalTensor, local_tensors, tensor_split
from glm5_next.bridge.transforms import part_range
from glm5_next.bridge.values import read_values


@dataclass(frozen=True)
class Share:
    """What one Megatron tensor of this rank takes of one HF tensor: some rows, of a matrix maybe some columns only."""

    name: str
    row: int
    num_rows: int
    columns: tuple[int, int] | None = None


@torch.no_grad()
def load_weights(chunks: Sequence[torch.nn.Module], checkpoint: Checkpoint) -> None:
    """Fills every parameter and persistent buffer of this rank's model chunks from a checkpoint.

    Each rank reads only its own byte ranges, straight into its parameters; what needs a cast, an FP8 scale or another
    device passes through 16 MiB. Replicas on a node read the same bytes from the page cache: measured faster than one
    reader that broadcasts (0.63 against 0.41 GB/s for two ranks, scripts/bench_convert.py --load). Everything is checked before the first parameter changes: the whole inventory, a
    parameter without a row, a row without a parameter, every shape and dtype; a ValueError names what does not fit.
    """
    checkpoint.check_inventory()
    tensors = local_tensors(chunks, checkpoint.config)
    shares = {name: _shares(local, checkpoint) for name, local in tensors.items()}
    for name, local in tensors.items():
        _check_dtype(local)
        _check_shape(local, shares[name], checkpoint)
    for name, local in tensors.items():
        _fill(local, shares[name], checkpoint)


def _shares(local: LocalTensor, checkpoint: Checkpoint) -> list[Share]:
    """In the order of the rows of the Megatron tensor."""
    row, entry = local.entry.row, local.entry
    rank, size, _ = tensor_split(entry)
    shares = []
    for name in entry.hf:
        shape = checkpoint.tensors[name].shape
        if row.split is None:
            shares.append(Share(name, 0, shape[0]))
            continue
        start, stop = part_range(row, shape[row.split], rank, size)
        shares.append(Share(name, start, stop - start) if row.split == 0 else Share(name, 0, shape[0], (start, stop)))
    if len(entry.megatron) > 1:  # one HF tensor, cut into several Megatron tensors
        (share,) = shares
        num_rows = share.num_rows // len(entry.megatron)
        shares = [Share(share.name, local.index * num_rows, num_rows)]
    return shares


def _fill(local: LocalTensor, shares: Sequence[Share], checkpoint: Checkpoint) -> None:
    target, at = local.tensor.data, 0
    for share in shares:
        read_values(checkpoint, share.name, target[at : at + share.num_rows], row=share.row, columns=share.columns)
        at += share.num_rows
    target[at:].zero_()


def _check_shape(local: LocalTensor, shares: Sequence[Share], checkpoint: Checkpoint) -> None:
    first = shares[0]
    inner = checkpoint.tensors[first.name].shape[1:]
    if first.columns is not None:
        inner = (first.columns[1] - first.columns[0],)
    wanted, held = (sum(share.num_rows for share in shares), *inner), tuple(local.tensor.shape)
    if wanted[1:] != held[1:] or wanted[0] > held[0]:
        raise ValueError(f"{local.name}: the model has shape {held}, the checkpoint {wanted}")
    if wanted[0] < held[0] and local.entry.layer is not None:
        raise ValueError(f"{local.name}: only the vocabulary may be padded; {wanted[0]} of {held[0]} rows")


def _check_dtype(local: LocalTensor) -> None:
    if local.entry.row.fp32_in_model and local.tensor.dtype != torch.float32:
        raise ValueError(f"{local.name} has to be fp32 while training, but the model holds {local.tensor.dtype}")
