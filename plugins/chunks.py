"""This rank's part of the model, wrapped as Megatron's schedules expect it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.module import Float16Module

from glm5_next.plugins.megatron_config import Glm5NextTransformerConfig
from glm5_next.plugins.spec import build_gpt_model

# Called as provider(pre_process=..., post_process=..., vp_stage=...).
Provider = Callable[..., torch.nn.Module]


def build_chunks(config: Glm5NextTransformerConfig, provider: Provider | None = None) -> list[torch.nn.Module]:
    """One chunk per virtual stage, behind Megatron's cast module if the run is bf16. Process groups must exist.

    `provider` builds a chunk in place of `build_gpt_model`, for frameworks that add to it.
    """
    chunks: list[torch.nn.Module] = []
    virtual = config.virtual_pipeline_model_parallel_size
    for vp_stage in [None] if virtual is None else range(virtual):
        stage = {
            "pre_process": mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            "post_process": mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            "vp_stage": vp_stage,
        }
        chunk = build_gpt_model(config, **stage) if provider is None else provider(**stage)
        chunk.to(config.device)  # Megatron makes the router's weight on the CPU
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(Float16Module(config, chunk) if config.bf16 else chunk)
    return chunks


def wrap_ddp(
    chunks: Sequence[torch.nn.Module],
    config: Glm5NextTransformerConfig,
    *,
    distributed_optimizer: bool,
    **overrides: Any,
) -> list[DistributedDataParallel]:
    """Megatron's data parallelism: fp32 gradient buffers, summed (not averaged) over replicas.

    The sum is divided by the number of trained tokens of the whole step when gradients are finalised, so a step does
    not depend on how it is cut into micro-batches and ranks. A non-finite gradient stops the run. `overrides` are fields
    of Megatron's own settings, for frameworks that bring theirs.
    """
    settings = {
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": False,
        "use_distributed_optimizer": distributed_optimizer,
        "check_for_nan_in_grad": True,
        "average_in_collective": False,
    }
    ddp_config = DistributedDataParallelConfig(**(settings | overrides))
    config.finalize_model_grads_func = finalize_model_grads
    return [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
