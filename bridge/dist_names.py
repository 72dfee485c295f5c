"""Where HF tensors lie in a Megatron distributed checkpoint (`torch_dist`): keys, offsets, shapes. Needs no torch.

This is what `sharded_state_dict()` of the model says (megatron-core 0.19.2), written down, so that a conversion needs
neither Megatron nor a model. tests/cpu/test_dist_names.py compares the two for every kind of layer.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from glm5_next.bridge.name_map import Tensors, sizes
from glm5_next.plugins.config import Glm5NextConfig

EXPERT = re.compile(r"\.experts\.\d+\.")
EXPERTS_INFIX = ".experts.experts."
# Parameters whose parts Megatron saves under names of their own; parts of all others are rows of one tensor.
SEPARATE_PARTS = {
    "self_attention.in_proj.weight": ("query", "key", "value"),
    "self_attention.conv1d.weight": ("query", "key", "value"),
}
COMMON_STATE = "common_state/shard_0_1"  # a dictionary of everything that is no tensor


@dataclass(frozen=True)
class Region:
    """Rows of an HF tensor and the block that holds them in the tensor `key` of a distributed checkpoint.

    `shape` and `offset` are the block's, in the dimensions of `key`, whose whole shape is `whole`.
    """

    hf: str
    row: int
    num_rows: int
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]

    @property
    def row_dim(self) -> int:
        """The dimension of `key` that HF rows run along."""
        return 1 if EXPERTS_INFIX in self.key else 0

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return self.shape[self.row_dim + 1 :]

    def rows(self, start: int, stop: int) -> "Region":
        """Rows `start` up to `stop` of the region."""
        dim = self.row_dim
        offset, shape = list(self.offset), list(self.shape)
        offset[dim] += start
        shape[dim] = stop - start
        return replace(self, row=self.row + start, num_rows=stop - start, offset=tuple(offset), shape=tuple(shape))


def regions(entry: Tensors, config: Glm5NextConfig) -> Iterator[Region]:
    """Every HF tensor of an entry, in order; one that Megatron cuts in several (the scales) gives several regions."""
    symbols = sizes(config)
    shape = tuple(symbols[symbol] for symbol in entry.row.shape)
    if len(entry.megatron) > 1:
        num_rows = shape[0] // len(entry.megatron)
        for index, name in enumerate(entry.megatron):
            cut = (num_rows, *shape[1:])
            yield Region(entry.hf[0], index * num_rows, num_rows, _key(name), (0,) * len(cut), cut, cut)
        return
    key, separate = _key(entry.megatron[0]), _separate_parts(entry)
    for part, name in enumerate(entry.hf):
        if separate:
            yield Region(name, 0, shape[0], f"{key}.{separate[part]}", (0,) * len(shape), shape, shape)
            continue
        offset, whole = (part * shape[0], *(0,) * (len(shape) - 1)), (len(entry.hf) * shape[0], *shape[1:])
        if entry.expert is None:
            yield Region(name, 0, shape[0], key, offset, shape, whole)
        else:
            prefix, count = (entry.expert,), (config.num_experts,)
            yield Region(name, 0, shape[0], key, prefix + offset, (1, *shape), count + whole)


def extra_state(entry: Tensors, config: Glm5NextConfig) -> str | None:
    """The key under which Megatron saves the (empty) extra state of the linear layer that holds an entry.

    Its column- and row-parallel layers have one; loading asks for it.
    """
    name = entry.megatron[0]
    if entry.layer is None or entry.row.split is None or not name.endswith(".weight") or ".conv1d." in name:
        return None
    shard = "shard_0_1" if entry.expert is None else f"shard_{entry.expert}_{config.num_experts}"
    return f"{_key(name).removesuffix('weight')}_extra_state/{shard}"


def _key(name: str) -> str:
    """Megatron stacks the experts of a layer, and keeps an older name of the multi-token-prediction block."""
    return EXPERT.sub(EXPERTS_INFIX, name).replace(".mtp_model_layer.", ".transformer_layer.")


def _separate_parts(entry: Tensors) -> tuple[str, ...]:
    return next((parts for end, parts in SEPARATE_PARTS.items() if entry.megatron[0].endswith(end)), ())
