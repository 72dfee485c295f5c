"""Our model against transformers' on the same tokens and the same weights, stage by stage, in any CPU layout."""

from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.load import load_weights
from glm5_next.bridge.reference import load_reference
from glm5_next.launchers.parity import ParityReport, compare_records
from glm5_next.launchers.runtime.local_ranks import run_ranks
from glm5_next.launchers.runtime.probes import SET_STAGES, Record, gather_record, our_record, reference_record
from glm5_next.plugins.chunks import build_chunks
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.megatron_config import megatron_config
from glm5_next.plugins.packed_row import packed_row
from glm5_next.plugins.topology import Topology

Dtype = Literal["float32", "bfloat16"]
DEADLINE = 600.0  # seconds for all ranks


def run_parity(folder: Path, topology: Topology, *, dtype: Dtype, num_tokens: int, seed: int) -> ParityReport:
    """Random tokens through the fp32 reference and through our model in `dtype`, spread over local gloo ranks.

    Needs `cpu_runtime.install()`. Raises ValueError for a checkpoint or topology that does not fit.
    """
    checkpoint = Checkpoint(folder)
    checkpoint.check_inventory()
    config = checkpoint.config
    topology.check_model(config)
    if num_tokens % topology.tp:
        raise ValueError(f"--tokens ({num_tokens}) must be a multiple of --tp ({topology.tp}): sequence parallelism")
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (num_tokens,), generator=generator)
    reference = reference_side(folder, tokens, "float32")
    own = None if dtype == "float32" else reference_side(folder, tokens, dtype)
    ours = run_ranks(our_side, topology.world_size, folder, topology, dtype, tokens, timeout=DEADLINE)[0]
    return compare_records(ours, reference, own, layer_kinds(config), SET_STAGES)


@torch.no_grad()
def reference_side(folder: Path, tokens: torch.Tensor, dtype: Dtype) -> Record:
    """transformers on `[T]` tokens."""
    model = load_reference(folder, dtype)
    with reference_record(model) as record:
        model(input_ids=tokens.unsqueeze(0))
    return record


@torch.no_grad()
def our_side(folder: Path, topology: Topology, dtype: Dtype, tokens: torch.Tensor) -> Record:
    """Our model on this rank of an initialised gloo group; the whole record is on every rank."""
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        virtual_pipeline_model_parallel_size=topology.vpp,
        expert_model_parallel_size=topology.ep,
        expert_tensor_parallel_size=topology.etp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    checkpoint = Checkpoint(folder)
    settings = megatron_config(
        checkpoint.config, topology, dtype=getattr(torch, dtype), on_cpu=True, perform_initialization=False
    )
    chunks = build_chunks(settings)
    load_weights(chunks, checkpoint)
    return forward_record(chunks, checkpoint.config, tokens)


def forward_record(chunks: list[torch.nn.Module], config: Glm5NextConfig, tokens: torch.Tensor) -> Record:
    """One forward pass of `[T]` tokens through all pipeline stages, recorded."""

    def forward_step(rows: Any, chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        next(rows)
        ends = torch.tensor([0, len(tokens)], dtype=torch.int32)
        positions = torch.arange(len(tokens)).unsqueeze(0)
        out = chunk(tokens.unsqueeze(0), positions, None, packed_seq_params=packed_row(ends))
        return out, lambda output, non_loss_data=False: None

    count = mpu.get_pipeline_model_parallel_world_size() if len(chunks) > 1 else 1
    with our_record(chunks, config.num_layers) as record:
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(range(count)) for _ in chunks] if len(chunks) > 1 else iter(range(count)),
            model=chunks,
            num_microbatches=count,
            seq_length=len(tokens),
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    tp = mpu.get_tensor_model_parallel_world_size()
    return gather_record(record, sequence_parallel=tp > 1, vocab_size=config.vocab_size)


def layer_kinds(config: Glm5NextConfig) -> list[str]:
    return [f"{attention} + {mlp}" for attention, mlp in zip(config.attention_kinds, config.mlp_kinds)]
