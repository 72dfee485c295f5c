"""Megatron distributed checkpoints of a run: weights, optimizer, schedule and `RunState`, complete or not there."""

import queue
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any


import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from glm5_next.bridge.local_tensors import unwrapped
from glm5_next.launchers.atomic_write import write_atomic
from glm5_next.launchers.run_state import RunState

STATE_FILE = "run_state.json"
MARKER = "COMPLETE"
METADATA = {"chained_optim_avoid_prefix": True, "distrib_optim_sharding_type": "dp_reshardable"}


def save_checkpoint(
    folder: Path,
    state: RunState,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> None:
    """Collective. Writes beside `folder` and renames; the marker inside is the last file written."""
    _keep_results_in_process()
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    if dist.get_rank() == 0:
        for old in (unfinished, folder):
            if old.exists():
                shutil.rmtree(old)
        unfinished.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_sharded_state(chunks, optimizer, scheduler, is_loading=False), str(unfinished))
    dist.barrier()
    if dist.get_rank() == 0:
        state.save(unfinished / STATE_FILE)
        unfinished.rename(folder)
        write_atomic(folder / MARKER, b"")
    dist.barrier()


def load_checkpoint(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> RunState:
    """Collective. Restores what `save_checkpoint` wrote; raises ValueError for a folder without its marker."""
    if not (folder / MARKER).is_file():
        raise ValueError(f"{folder}: has no {MARKER} marker, so it is not a finished checkpoint")
    loaded = dist_checkpointing.load(_sharded_state(chunks, optimizer, scheduler, is_loading=True), str(folder))
    for index, chunk in enumerate(chunks):
        unwrapped(chunk).load_state_dict(loaded[f"model{index}"], strict=True)
    with torch.no_grad():  # the distributed optimizer writes into views of parameters
        optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    return RunState.load(folder / STATE_FILE)


def step_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint taken before step `step` lies."""
    return run_dir / "checkpoints" / f"step-{step:06d}"


def last_checkpoint(run_dir: Path) -> Path | None:
    """The newest finished checkpoint of a run."""
    finished = [path.parent for path in (run_dir / "checkpoints").glob(f"step-*/{MARKER}")]
    return max(finished, default=None)


def drop_old_checkpoints(run_dir: Path, keep: int) -> None:
    """Removes all but the newest `keep` finished checkpoints (0: keeps all), and what a killed run left unfinished."""
    folder = run_dir / "checkpoints"
    for unfinished in folder.glob(".step-*.unfinished"):
        shutil.rmtree(unfinished)
    finished = sorted(path.parent for path in folder.glob(f"step-*/{MARKER}"))
    for old in finished[: max(0, len(finished) - keep)] if keep else []:
        (old / MARKER).unlink()  # first: a removal that is interrupted must not leave a checkpoint that looks whole
        shutil.rmtree(old)


def _sharded_state(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    *,
    is_loading: bool,
) -> dict[str, Any]:
    model = {f"model{i}": unwrapped(chunk).sharded_state_dict(metadata=METADATA) for i, chunk in enumerate(chunks)}
    model_state = model["model0"] if len(model) == 1 else model
    return {
        **model,
        "optimizer": optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=METADATA),
        "scheduler": scheduler.state_dict(),
    }


def _keep_results_in_process() -> None:
    """megatron-core 0.19.2 starts a `multiprocessing.Manager` process per rank to pass write results through a queue,
    even when it writes synchronously in this very process.

    The helper imports the main module again (6-10 s) and outlives a rank that is killed. A plain queue does the same.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


