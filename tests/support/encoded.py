"""A checkpoint whose every value says which tensor, row and column it is."""

from pathlib import Path

import torch
from torch import Tensor

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.hf_folder import HfFolderWriter
from glm5_next.bridge.name_map import Tensors, inventory, text_tensors, trained_names

# Digits of a value, from the last one up; together below 2**24, so that fp32 holds them exactly.
BASES = {"column": 128, "row": 256, "part": 4, "expert": 8, "layer": 16}
GLOBAL_LAYER = 15


def encode(entry: Tensors, part: int, shape: tuple[int, ...]) -> Tensor:
    """fp32 values of HF tensor number `part` of an entry. Columns count along the last dimension, modulo 128."""
    rows = torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)).expand(shape)
    columns = torch.arange(shape[-1]).expand(shape) % BASES["column"] if len(shape) > 1 else torch.zeros(shape)
    layer = GLOBAL_LAYER if entry.layer is None else entry.layer
    digits = {"layer": layer, "expert": entry.expert or 0, "part": part, "row": rows, "column": columns}
    value: Tensor | int = 0
    for name in reversed(BASES):
        value = value * BASES[name] + digits[name]
    assert isinstance(value, Tensor)
    return value.float()


def decode(tensor: Tensor) -> dict[str, Tensor]:
    """The digits of every value."""
    value, digits = tensor.detach().long(), {}
    for name, base in BASES.items():
        digits[name] = value % base
        value = value // base
    assert not value.any(), "not a value that encode() gives"
    return digits


def write_encoded_checkpoint(out: Path, source: Checkpoint) -> Path:
    """`source` (stored as float32) with encoded values in every trained tensor."""
    with HfFolderWriter(out, source=source) as writer:
        for entry in text_tensors(source.config):
            for part, name in enumerate(entry.hf):
                writer.add(name, encode(entry, part, source.tensors[name].shape))
        writer.copy_from_source(sorted(inventory(source.config).keys() - trained_names(source.config)))
    return out
