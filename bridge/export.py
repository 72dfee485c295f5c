"""This rank's parameters -> a stream of whole HF tensors, the same on every rank, or a folder of them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.hf_folder import HfFolderWriter
from glm5_next.bridge.local_tensors import LocalTensor, local_tensors, tensor_split, unwrapped
from glm5_next.bridge.name_map import Row, Tensors, inventory, sizes, text_tensors, trained_names
from glm5_next.bridge.transforms import unshard
from glm5_next.plugins.config import Glm5NextConfig

ExportDtype = Literal["source", "float32"]
TORCH_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


@torch.no_grad()
def export_weights(
    chunks: Sequence[torch.nn.Module], config: Glm5NextConfig, dtype: ExportDtype = "source"
) -> Iterator[tuple[str, Tensor]]:
    """Yields (HF name, tensor) for every trained tensor, in model order, contiguous, gathered over TP, EP and PP.

    Collective: every rank has to iterate to the end and sees all tensors. `dtype` is 'source' for the checkpoint's
    own dtypes (fp32 masters of bf16 tensors are rounded) or 'float32'.
    """
    params_dtype = unwrapped(chunks[0]).config.params_dtype

    def dtype_of(row: Row) -> torch.dtype:
        return torch.float32 if row.fp32_in_model else params_dtype

    stored = inventory(config)
    for entry, parts in whole_tensors(chunks, config, lambda local: local.tensor, dtype_of):
        for name, part in zip(entry.hf, parts, strict=True):
            wanted = torch.float32 if dtype == "float32" else TORCH_DTYPES[stored[name].dtype]
            yield name, part.view(stored[name].shape).to(wanted).contiguous()


@torch.no_grad()
def whole_tensors(
    chunks: Sequence[torch.nn.Module],
    config: Glm5NextConfig,
    value: Callable[[LocalTensor], Tensor],
    dtype_of: Callable[[Row], torch.dtype],
) -> Iterator[tuple[Tensors, list[Tensor]]]:
    """Every entry of the name table with its whole HF parts, in model order and on every rank.

    `value` says what of a rank's tensor is gathered (the weight, its gradient: same shape), `dtype_of` its dtype, which
    ranks that do not hold the tensor have to know. Collective: every rank has to iterate to the end.
    """
    tensors = local_tensors(chunks, config)
    stage_of = _stages(tensors)
    for entry in text_tensors(config):
        held = None
        if entry.megatron[0] in tensors:
            held = torch.cat([value(tensors[name]) for name in entry.megatron])
        yield entry, _whole_parts(entry, held, stage_of, config, dtype_of(entry.row))


def save_hf_folder(
    weights: Iterator[tuple[str, Tensor]], source: Checkpoint, out: Path, dtype: ExportDtype = "source"
) -> None:
    """Drains a stream of exported tensors on every rank; global rank 0 writes them, and what the model does not hold.

    Tensors outside the trained model (vision tower, multi-token-prediction layers) and the folder's other files come
    from `source`.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        for _ in weights:
            pass
        return
    with HfFolderWriter(out, source=source, dtype=dtype) as writer:
        for name, tensor in weights:
            writer.add(name, tensor.cpu())
        writer.copy_from_source(sorted(set(inventory(source.config)) - trained_names(source.config)))


def _stages(tensors: dict[str, LocalTensor]) -> dict[str, int]:
    """Megatron name -> the pipeline rank that holds it; experts under the name of any rank's share."""
    group = mpu.get_pipeline_model_parallel_group()
    names: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(names, list(tensors), group=group)
    return {name: stage for stage, held in enumerate(names) for name in held}


def _whole_parts(
    entry: Tensors,
    held: Tensor | None,
    stage_of: dict[str, int],
    config: Glm5NextConfig,
    dtype: torch.dtype,
) -> list[Tensor]:
    """The entry's HF tensors on every rank, wherever the shards are."""
    size, stage = sizes(config), _stage(entry, stage_of, config)
    shape = [size[symbol] for symbol in entry.row.shape]
    if held is not None:
        parts = [part[: shape[0]] for part in unshard(_gather(held, entry), entry.row)]
    else:
        parts = [torch.empty(shape, dtype=dtype, device=_device()) for _ in entry.hf]
    if entry.expert is not None and stage == mpu.get_pipeline_model_parallel_rank():
        owner = entry.expert // _experts_per_rank(config)
        parts = _broadcast(parts, mpu.get_expert_model_parallel_group(), owner)
    return _broadcast(parts, mpu.get_pipeline_model_parallel_group(), stage)


def _gather(value: Tensor, entry: Tensors) -> list[Tensor]:
    _, size, group = tensor_split(entry)
    if entry.row.split is None or size == 1:
        return [value]
    shards = [torch.empty_like(value) for _ in range(size)]
    dist.all_gather(shards, value.contiguous(), group=group)
    return shards


def _stage(entry: Tensors, stage_of: dict[str, int], config: Glm5NextConfig) -> int:
    name = entry.megatron[0]
    if entry.expert is not None:  # this rank's EP peers hold the other experts of the same layer
        local = mpu.get_expert_model_parallel_rank() * _experts_per_rank(config)
        name = name.replace(f".experts.{entry.expert}.", f".experts.{local}.")
    return stage_of[name]


def _experts_per_rank(config: Glm5NextConfig) -> int:
    return config.num_experts // mpu.get_expert_model_parallel_world_size()


def _device() -> torch.device:
    gloo = dist.get_backend(mpu.get_pipeline_model_parallel_group()) == "gloo"
    return torch.device("cpu") if gloo else torch.device("cuda", torch.cuda.current_device())


def _broadcast(parts: list[Tensor], group: dist.ProcessGroup, source: int) -> list[Tensor]:
    if group.size() > 1:
        parts = [part.contiguous() for part in parts]
        for part in parts:
            dist.broadcast(part, src=dist.get_global_rank(group, source), group=group)
    return parts
