"""The tensors of this rank's model chunks under their global names, checked against the table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from glm5_next.bridge.name_map import Tensors, find, model_tensors, table_name
from glm5_next.plugins.config import Glm5NextConfig


@dataclass(frozen=True)
class LocalTensor:
    """A parameter or persistent buffer of this rank. `name` is global and spelt as in the table."""

    name: str
    tensor: Tensor
    entry: Tensors

    @property
    def index(self) -> int:
        """Which of the entry's Megatron tensors this is."""
        return self.entry.megatron.index(self.name)


def unwrapped(chunk: torch.nn.Module) -> GPTModel:
    """The GPT model inside DDP and Float16Module."""
    while not isinstance(chunk, GPTModel):
        inner = chunk.module
        assert isinstance(inner, torch.nn.Module)
        chunk = inner
    return chunk


def local_tensors(chunks: Sequence[torch.nn.Module], config: Glm5NextConfig) -> dict[str, LocalTensor]:
    """Every parameter and persistent buffer of the chunks, by global name.

    Raises ValueError for a tensor without a row in the table and for one that the table has and a chunk lacks.
    """
    found: dict[str, LocalTensor] = {}
    for chunk in map(unwrapped, chunks):
        chunk_names = set()
        for name, tensor in _state(chunk):
            name = _global_name(chunk, name, config)
            found[name] = LocalTensor(name, tensor, find(config, name))
            chunk_names.add(name)
        missing = sorted(_expected_names(chunk, config) - chunk_names)
        if missing:
            raise ValueError(f"the model lacks {len(missing)} tensors of the name table, first {missing[:5]}")
    return found


def _state(chunk: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, as the live tensors."""
    persistent = set(chunk.state_dict(keep_vars=True))
    yield from chunk.named_parameters()
    yield from ((name, buffer) for name, buffer in chunk.named_buffers() if name in persistent)


def _global_name(chunk: GPTModel, name: str, config: Glm5NextConfig) -> str:
    """A parameter's name in the table: its layer and expert numbers are this rank's own until here."""
    words = table_name(name).split(".")
    if words[:2] == ["decoder", "layers"]:
        words[2] = str(chunk.decoder.layers[int(words[2])].layer_number - 1)
    if "experts" in words:
        position = words.index("experts") + 1
        words[position] = str(int(words[position]) + expert_range(config).start)
    return ".".join(words)


def expert_range(config: Glm5NextConfig) -> range:
    """The global numbers of the experts that this rank owns."""
    count = config.num_experts // mpu.get_expert_model_parallel_world_size()
    first = mpu.get_expert_model_parallel_rank() * count
    return range(first, first + count)


def holds_mtp(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether the model was built with multi-token-prediction layers, on this rank or another."""
    return bool(unwrapped(chunks[0]).config.mtp_num_layers)


def _expected_names(chunk: GPTModel, config: Glm5NextConfig) -> set[str]:
    layers = {layer.layer_number - 1 for layer in chunk.decoder.layers}
    if chunk.mtp_process:
        layers |= {config.num_layers + depth for depth in range(config.num_mtp_layers)}
    experts = expert_range(config)
    owned = {
        "embedding.word_embeddings.weight": chunk.pre_process or chunk.mtp_process,
        "decoder.final_layernorm.weight": chunk.post_process,
        "output_layer.weight": chunk.post_process,
    }
    return {
        name
        for entry in model_tensors(config, mtp=chunk.mtp_process)
        for name in entry.megatron
        if (owned[name] if entry.layer is None else entry.layer in layers)
        and (entry.expert is None or entry.expert in experts)
    }


def tensor_split(entry: Tensors) -> tuple[int, int, torch.distributed.ProcessGroup]:
    """Rank, size and group over which an entry's tensors are split: expert-TP for experts, TP for the rest."""
    is_expert = entry.row.is_expert
    group = mpu.get_expert_tensor_parallel_group() if is_expert else mpu.get_tensor_model_parallel_group()
    return group.rank(), group.size(), group
