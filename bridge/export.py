"""This rank's parameters -> a stream of whole HF tensors, the same on every rank, or a folder of them."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from glm5_next.bridge.checkpoint import TORCH_DTYPES, Checkpoint
from glm5_next.bridge.fp8 import quantize
from glm5_next.bridge.hf_folder import ExportDtype, HfFolderWriter, stored_as
from glm5_next.bridge.local_tensors import LocalTensor, holds_mtp, local_tensors, tensor_split
from glm5_next.bridge.name_map import (
    TensorInfo,
    Tensors,
    inventory,
    model_tensors,
    on_disk,
)
from glm5_next.bridge.shards import shorten
from glm5_next.bridge.transforms import unshard
from glm5_next.plugins.config import Glm5NextConfig

logger = logging.getLogger(__name__)


@torch.no_grad()
def export_weights(
    chunks: Sequence[torch.nn.Module], config: Glm5NextConfig, dtype: ExportDtype = "source"
) -> Iterator[tuple[str, Tensor]]:
    """Yields (HF name, tensor) for every tensor of the model, in model order, contiguous, gathered over TP, EP and PP.

    Collective: every rank has to iterate to the end and sees all tensors. `dtype` is 'source' for the checkpoint's
    own dtypes (fp32 masters of bf16 tensors are rounded, FP8 tensors are quantised and followed by their scales),
    'bfloat16' or 'float32'. Tensors that a server fuses follow each other (`name_map.together`). A multi-token-prediction
    layer is exported if the model was built with it. Holds the group that is exported and its shards, nothing else.
    """
    tensors, target = local_tensors(chunks, config), stored_as(config, dtype)
    stage_of = _stages(tensors)
    for entry in model_tensors(config, mtp=holds_mtp(chunks)):
        wanted = on_disk(entry, target)
        held = [tensors[name].tensor for name in entry.megatron if name in tensors]
        parts = _stored_parts(entry, held, wanted) if held else _empty_parts(wanted)
        parts = _from_holder(parts, entry, stage_of, config)
        yield from zip(wanted, parts, strict=True)


def save_hf_folder(
    weights: Iterator[tuple[str, Tensor]], source: Checkpoint, out: Path, dtype: ExportDtype = "source"
) -> None:
    """Drains a stream of exported tensors on every rank; global rank 0 writes them, and what the model does not hold.

    Tensors outside the trained model (vision tower, multi-token-prediction layers) and the folder's other files come
    from `source`; the log says which.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        for _ in weights:
            pass
        return
    with HfFolderWriter(out, source=source, dtype=dtype) as writer:
        for name, tensor in weights:
            writer.add(name, tensor.cpu())
        rest = sorted(inventory(stored_as(source.config, dtype)).keys() - writer.shards.written)
        what = "%s: %d tensors that the model does not hold are copied from %s: %s"
        logger.info(what, out, len(rest), source.folder, shorten(rest))
        writer.copy_from_source(rest)


def _stages(tensors: dict[str, LocalTensor]) -> dict[str, int]:
    """Megatron name -> the first pipeline rank that holds it; experts under the name of any rank's share."""
    group = mpu.get_pipeline_model_parallel_group()
    names: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(names, list(tensors), group=group)
    return {name: stage for stage in reversed(range(len(names))) for name in names[stage]}


def _stored_parts(entry: Tensors, held: Sequence[Tensor], wanted: Mapping[str, TensorInfo]) -> list[Tensor]:
    """The entry's tensors as they are stored, from this rank's and its TP peers' parts."""
    first = wanted[entry.hf[0]]
    is_fp8 = first.dtype == "F8_E4M3"
    # Rounding before gathering halves what is sent and held; FP8 blocks have to be whole first.
    value = torch.cat(list(held)).to(held[0].dtype if is_fp8 else TORCH_DTYPES[first.dtype])
    stored: list[Tensor] = []
    for name, part in zip(entry.hf, _gathered(value, entry), strict=True):
        part = part[: first.shape[0]].view(first.shape)  # the vocabulary may be padded
        stored += quantize(part, name) if is_fp8 else [part.contiguous()]
    return stored


def _gathered(value: Tensor, entry: Tensors) -> Sequence[Tensor]:
    """Whole HF parts from the TP ranks' shards; padding of the last rank is kept."""
    row = entry.row
    _, size, group = tensor_split(entry)
    if row.split is None or size == 1:
        return value.chunk(len(entry.hf))
    if row.split == 0 and len(entry.hf) == 1:
        whole = value.new_empty(size * len(value), *value.shape[1:])
        dist.all_gather(list(whole.chunk(size)), value, group=group)
        return [whole]
    shards = [torch.empty_like(value) for _ in range(size)]
    dist.all_gather(shards, value, group=group)
    return unshard(shards, row)


def _empty_parts(wanted: Mapping[str, TensorInfo]) -> list[Tensor]:
    return [torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype], device=_device()) for info in wanted.values()]


def _from_holder(parts: list[Tensor], entry: Tensors, stage_of: dict[str, int], config: Glm5NextConfig) -> list[Tensor]:
    """The tensors of the rank that holds them, on every rank of its expert and pipeline groups."""
    stage = _stage(entry, stage_of, config)
    if entry.expert is not None and stage == mpu.get_pipeline_model_parallel_rank():
        owner = entry.expert // _experts_per_rank(config)
        _broadcast(parts, mpu.get_expert_model_parallel_group(), owner)
    _broadcast(parts, mpu.get_pipeline_model_parallel_group(), stage)
    return parts


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


def _broadcast(parts: Sequence[Tensor], group: dist.ProcessGroup, source: int) -> None:
    """As bytes: not every backend knows FP8."""
    if group.size() > 1:
        for part in parts:
            dist.broadcast(part.view(-1).view(torch.uint8), src=dist.get_global_rank(group, source), group=group)
