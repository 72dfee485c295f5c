"""A checkpoint saved in one layout is loaded in every other one, optimizer state included, and the next step is the same."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.run_state import RunState
from glm5_next.launchers.runtime.trainer import Trainer
from tests.support.training import batch, on_trainers, samples, settings, unequal_updates, weights_of

LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "ep2": {"ranks": 2, "ep": 2},
    "tp2_pp2": {"ranks": 4, "tp": 2, "pp": 2},
    "pp4": {"ranks": 4, "pp": 4},
    "pp2_ep2": {"ranks": 4, "pp": 2, "ep": 2},
}
SAMPLES = samples(2, seed=5)
ROWS = [[0], [1]]
STATE = RunState(
    next_step=2, weights_version=2, prompt_cursor=7, seed=3, prompts_digest="d", samples_drawn=5, samples_trained=5
)
DEADLINE = 240
Saved = tuple[float, dict[str, Tensor], dict[str, Tensor], int]
Loaded = dict[str, tuple[float, dict[str, Tensor], dict[str, Tensor]]]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("hf") / "tiny"
    return Checkpoint(write_tiny_checkpoint(folder, layers=5, experts=4, dtype="float32", mtp=False, vision=False))


def run_of(source: Checkpoint, layout: str, *, distributed: bool):
    parallel = {f"parallel__{key}": size for key, size in LAYOUTS[layout].items()}
    return settings(source.folder, parallel__distributed_optimizer=distributed, **parallel)


def update_of(run):
    replicas = run.parallel.topology().dp
    return batch(run, SAMPLES, [ROWS[replica::replicas] for replica in range(replicas)])


def save_and_go_on(trainer: Trainer, update: Any, folder: Path) -> Saved:
    """A step, a checkpoint, and the next step: its norm, the weights before and after, and how many optimizers."""
    trainer.train(update)
    trainer.save(folder, STATE)
    before = weights_of(trainer)
    norm = trainer.train(update).grad_norm
    parts = len(getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]))
    after = weights_of(trainer)
    return (norm, before, after, parts) if trainer.rank == 0 else (norm, {}, {}, parts)


def load_each(trainer: Trainer, update: Any, folders: dict[str, Path]) -> Loaded:
    """The same of the step after loading each folder in turn."""
    found: Loaded = {}
    for layout, folder in folders.items():
        assert trainer.load(folder) == STATE
        before = weights_of(trainer)
        norm = trainer.train(update).grad_norm
        after = weights_of(trainer)
        found[layout] = (norm, before, after) if trainer.rank == 0 else (norm, {}, {})
    return found


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, marks=pytest.mark.long), True],
    ids=["plain_optimizer", "distributed_optimizer"],
)
def saved(request, source, tmp_path_factory) -> tuple[bool, dict[str, Path], dict[str, Saved]]:
    root = tmp_path_factory.mktemp("checkpoints")
    folders = {layout: root / layout / "checkpoints" / "step-000002" for layout in LAYOUTS}
    went_on = {}
    for layout, folder in folders.items():
        run = run_of(source, layout, distributed=request.param)
        went_on[layout] = on_trainers(run, save_and_go_on, update_of(run), folder, timeout=DEADLINE)[0]
    return request.param, folders, went_on


def test_layouts_differ_in_the_number_of_their_optimizers(saved):
    parts = {layout: went_on[3] for layout, went_on in saved[2].items()}
    assert (parts["one"], parts["pp4"]) == (1, 1) and (parts["ep2"], parts["pp2_ep2"]) == (2, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_checkpoint_is_loaded_and_its_next_step_is_the_same(saved, source, layout):
    distributed, folders, went_on = saved
    run = run_of(source, layout, distributed=distributed)
    loaded = on_trainers(run, load_each, update_of(run), folders, timeout=DEADLINE)[0]
    for origin, (norm, before, after, _) in went_on.items():
        got_norm, got_before, got_after = loaded[origin]
        assert math.isclose(got_norm, norm, rel_tol=1e-5), f"{origin} -> {layout}"
        assert all(torch.equal(got_before[name], value) for name, value in before.items()), f"{origin} -> {layout}"
        unequal = unequal_updates(got_after, after, LastWeights(before))
        assert not unequal, f"{origin} -> {layout}: {unequal}"


class LastWeights:
    """Where an update starts, as `unequal_updates` reads it."""

    def __init__(self, weights: dict[str, Tensor]):
        self.read = weights.__getitem__


def without_optimizer(trainer: Trainer, update: Any, folder: Path) -> dict[str, Tensor]:
    """The step after loading, with Adam's moments lost on the way."""
    trainer.load(folder)
    for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        for state in part.optimizer.state.values():
            for value in state.values():
                value.zero_()
    trainer.train(update)
    return weights_of(trainer)


def test_the_comparison_sees_lost_moments(saved, source):
    distributed, folders, went_on = saved
    run = run_of(source, "one", distributed=distributed)
    after = on_trainers(run, without_optimizer, update_of(run), folders["one"], timeout=DEADLINE)[0]
    _, before, expected, _ = went_on["one"]
    assert len(unequal_updates(after, expected, LastWeights(before))) > len(expected) / 2
