"""Megatron-Core around a training rank: process groups, optimizer, schedule, and the gradients between steps."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from glm5_next.launchers.config import RunConfig
from glm5_next.plugins.topology import Topology

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
# Parameters that a bf16 model keeps in fp32 get groups of their own: in a mixed group the distributed optimizer of
# megatron-core 0.19.2 mistakes one parameter's state for another's when it saves. The key itself means nothing to it.
FP32_APART: dict[ParamKey, Any] = {
    ParamKey(predicate=ParamPredicate("fp32", lambda parameter: parameter.dtype == torch.float32)): {"fp32": True}
}


def start_ranks(topology: Topology, rank: int, store: dist.Store, *, on_cpu: bool, seed: int) -> None:
    """Process groups and random states of one rank. `store` is shared by all ranks."""
    dist.init_process_group(
        "gloo" if on_cpu else "nccl",
        store=store,
        rank=rank,
        world_size=topology.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        virtual_pipeline_model_parallel_size=topology.vpp,
        expert_model_parallel_size=topology.ep,
        expert_tensor_parallel_size=topology.etp,
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def optimizer_config(run: RunConfig) -> OptimizerConfig:
    """The run's optimizer settings in Megatron's words."""
    settings = run.optimizer
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=run.model.precision == "bf16",
        params_dtype=torch.bfloat16 if run.model.precision == "bf16" else torch.float32,
        use_distributed_optimizer=run.parallel.distributed_optimizer,
        optimizer_cpu_offload=settings.offload,
        optimizer_offload_fraction=1.0 if settings.offload else 0.0,
        # The offloading optimizer is only reached through this path (Megatron's own arguments insist on it).
        use_precision_aware_optimizer=settings.offload,
    )


def build_optimizer(
    run: RunConfig, chunks: Sequence[DistributedDataParallel]
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Megatron's AdamW with gradient clipping, and its learning-rate schedule counted in optimizer steps.

    Raises ValueError for `optimizer.offload` without a GPU.
    """
    settings = run.optimizer
    if settings.offload and not torch.cuda.is_available():
        raise ValueError("optimizer.offload is true, but there is no GPU to relieve: set it to false on a CPU")
    config = optimizer_config(run)
    overrides = get_standard_config_overrides(config)
    if config.bf16:
        overrides |= FP32_APART
    # The offloading optimizer takes no view that has a gradient's history, which fp32 parameters would give it.
    with torch.no_grad():
        optimizer = get_megatron_optimizer(config, list(chunks), overrides)
    steps = run.train.steps * run.grpo.mini_batches
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(steps, settings.warmup_steps + 1),
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        # A resumed run follows its settings as they are now; Megatron's default is to keep the old ones, silently.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return optimizer, scheduler


def reset_gradients(chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Clears what the last step left: Megatron's buffers and the `.grad` that its fp32 optimizer points at them."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def check_gradients_are_reset(chunks: Sequence[DistributedDataParallel]) -> None:
    """Raises RuntimeError if a gradient of the last step is still there: the next step would silently add to it."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.grad is not None:
                raise RuntimeError(f"{name}.grad was not reset before the step; it would be counted twice")
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            if buffer.grad_data.any():
                raise RuntimeError("a gradient buffer was not reset before the step; gradients would add up")
