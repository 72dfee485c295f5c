"""Hugging Face folder <-> Megatron distributed checkpoint, in one CPU process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_model import GPTModel

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.export import export_weights, save_hf_folder
from glm5_next.bridge.load import load_weights
from glm5_next.bridge.local_tensors import unwrapped
from glm5_next.launchers.runtime.checkpoint_folder import Origin, check_finished
from glm5_next.launchers.runtime.checkpoints import METADATA, writing_checkpoint
from glm5_next.launchers.runtime.megatron import start_ranks
from glm5_next.plugins.chunks import build_chunks
from glm5_next.plugins.megatron_config import megatron_config
from glm5_next.plugins.topology import Topology


def hf_to_megatron(source: Path, out: Path) -> None:
    """Writes the trained tensors of a Hugging Face folder as a distributed checkpoint that any layout can load."""
    checkpoint = Checkpoint(source)
    checkpoint.check_inventory()
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out}: exists and is not empty")
    precision = {"bfloat16": "bf16", "float32": "fp32"}[checkpoint.config.dtype]
    with _one_process_model(checkpoint, precision) as model:
        load_weights([model], checkpoint)
        with writing_checkpoint(out, Origin(hf=str(source.resolve()), precision=precision)) as folder:
            dist_checkpointing.save({"model0": model.sharded_state_dict(metadata=METADATA)}, str(folder))


def megatron_to_hf(source: Path, out: Path, hf: Path | None) -> None:
    """Writes the weights of a distributed checkpoint (a converted one or a run's) as a Hugging Face folder.

    `hf` is the folder that config, tokenizer and untrained tensors come from; by default the one the checkpoint names.
    """
    check_finished(source)
    origin = Origin.load(source)
    checkpoint = Checkpoint(Path(origin.hf) if hf is None else hf)
    checkpoint.check_inventory()
    with _one_process_model(checkpoint, origin.precision) as model:
        state = dist_checkpointing.load({"model0": model.sharded_state_dict(metadata=METADATA)}, str(source))
        model.load_state_dict(state["model0"], strict=True)
        weights = export_weights([model], checkpoint.config, origin.export_dtype)
        save_hf_folder(weights, checkpoint, out, dtype=origin.export_dtype)


@contextmanager
def _one_process_model(checkpoint: Checkpoint, precision: str) -> Iterator[GPTModel]:
    start_ranks(Topology(), 0, dist.HashStore(), on_cpu=True, seed=0)
    try:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        config = megatron_config(
            checkpoint.config, Topology(), dtype=dtype, on_cpu=True, perform_initialization=False, bf16=False
        )
        (model,) = build_chunks(config)
        yield unwrapped(model)
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
