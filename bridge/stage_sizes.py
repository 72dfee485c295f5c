"""Parameters that a rank holds, counted from the name table alone. `audit` counts the same from built modules."""

import math
from dataclasses import dataclass

from glm5_next.bridge.name_map import GLOBALS, Row, layer_rows, sizes
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.topology import Topology


@dataclass(frozen=True)
class StageSize:
    """One rank of a pipeline position, all its virtual stages together. `fp32` and `frozen` are parts of `dense`."""

    layers: tuple[int, ...]
    dense: int
    expert: int
    fp32: int
    frozen: int

    @property
    def parameters(self) -> int:
        return self.dense + self.expert


def stage_sizes(config: Glm5NextConfig, topology: Topology) -> list[StageSize]:
    """One entry per pipeline rank. Selection biases count as parameters, the vocabulary is padded to a multiple of TP."""
    symbols = sizes(config)
    embedding, head, norm = (_size(config, topology, symbols, (row,)) for row in GLOBALS)
    kinds = list(zip(config.attention_kinds, config.mlp_kinds))
    layer_sizes = {
        kind: _size(config, topology, symbols, layer_rows(config, kinds.index(kind))) for kind in sorted(set(kinds))
    }
    stages = topology.layers_per_stage(config.num_layers)
    result = []
    for rank in range(topology.pp):
        layers = tuple(layer for chunk in stages[rank :: topology.pp] for layer in chunk)
        parts = [layer_sizes[kinds[layer]] for layer in layers]
        parts += [embedding] if rank == 0 else []
        parts += [head, norm] if rank == topology.pp - 1 else []
        result.append(StageSize(layers, *(sum(column) for column in zip(*parts))))
    return result


def _size(
    config: Glm5NextConfig, topology: Topology, symbols: dict[str, int], rows: tuple[Row, ...]
) -> tuple[int, int, int, int]:
    """(dense, expert, fp32, frozen) parameters of some rows on one rank."""
    dense = expert = fp32 = frozen = 0
    for row in rows:
        shape = [symbols[symbol] for symbol in row.shape]
        if row.split is not None:
            size = topology.etp if row.is_expert else topology.tp
            shape[row.split] = -(-shape[row.split] // size)  # only the vocabulary may not divide
        count = math.prod(shape) * len(row.hf)
        if row.is_expert:
            expert += count * (config.num_experts // topology.ep)
        else:
            dense += count
            fp32 += count * row.fp32_in_model
            frozen += count * row.is_frozen
    return dense, expert, fp32, frozen
