"""Megatron distributed checkpoints of a run: weights, optimizer, schedule and `RunState`, complete or not there."""

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from glm5_next.launchers.run_state import RunState
from glm5_next.launchers.runtime.checkpoint_folder import (
    STATE_FILE,
    Origin,
    begin,
    check_finished,
    finish,
    unfinished_folder,
)
from glm5_next.launchers.runtime.optimizer_state import METADATA, load_optimizer_state, sharded_optimizer_state


def save_checkpoint(
    folder: Path,
    state: RunState,
    origin: Origin,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> None:
    """Collective. The folder appears whole or not at all."""
    with writing_checkpoint(folder, origin) as unfinished:
        tree, _ = _sharded_state(chunks, optimizer, scheduler, is_loading=False)
        dist_checkpointing.save(tree, str(unfinished))
        if dist.get_rank() == 0:
            state.save(unfinished / STATE_FILE)


@contextmanager
def writing_checkpoint(folder: Path, origin: Origin) -> Iterator[Path]:
    """Collective: a temporary folder to save into, renamed to `folder` at the end; the marker is the last file."""
    _keep_results_in_process()
    unfinished = unfinished_folder(folder)
    if dist.get_rank() == 0:
        begin(folder)
    dist.barrier()
    yield unfinished
    dist.barrier()
    if dist.get_rank() == 0:
        finish(folder, origin)
    dist.barrier()


def load_checkpoint(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> RunState:
    """Collective. Restores what `save_checkpoint` wrote, from ranks in this layout or in another."""
    check_finished(folder)
    tree, skeletons = _sharded_state(chunks, optimizer, scheduler, is_loading=True)
    loaded = _loaded(folder, tree, chunks)
    load_optimizer_state(optimizer, loaded["optimizer"], skeletons)
    scheduler.load_state_dict(loaded["scheduler"])
    return RunState.load(folder / STATE_FILE)


def load_model(folder: Path, chunks: Sequence[torch.nn.Module]) -> None:
    """Collective. Weights alone, of a converted checkpoint or a run's, for ranks in any layout."""
    check_finished(folder)
    _loaded(folder, _model_state(chunks), chunks)


def _loaded(folder: Path, tree: dict[str, Any], chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    loaded = dist_checkpointing.load(tree, str(folder))
    for index, chunk in enumerate(chunks):
        unwrapped(chunk).load_state_dict(loaded[f"model{index}"], strict=True)
    return loaded


def _model_state(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    return {f"model{i}": unwrapped(chunk).sharded_state_dict(metadata=METADATA) for i, chunk in enumerate(chunks)}


def _sharded_state(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    *,
    is_loading: bool,
) -> tuple[dict[str, Any], list[Any]]:
    """(what to save or load, the optimizers' own dictionaries for `load_optimizer_state`)."""
    model = _model_state(chunks)
    model_state = model["model0"] if len(model) == 1 else model
    tensors, skeletons = sharded_optimizer_state(optimizer, model_state, is_loading=is_loading)
    return {**model, "optimizer": tensors, "scheduler": scheduler.state_dict()}, skeletons


def _keep_results_in_process() -> None:
    """megatron-core 0.19.2 starts a `multiprocessing.Manager` process per rank to pass write results through a queue,
    even when it writes synchronously in this very process.

    The helper imports the main module again (6-10 s) and outlives a rank that is killed. A plain queue does the same.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
