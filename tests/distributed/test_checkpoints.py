"""A checkpoint is whole or not there, and a run that loads it goes on as if it had never stopped."""

import hashlib
from pathlib import Path

import psutil
import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch import Tensor

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.run_state import RunState
from glm5_next.launchers.runtime import checkpoint_folder, checkpoints
from glm5_next.launchers.runtime.checkpoint_folder import (
    MARKER,
    Origin,
    check_finished,
    drop_old_checkpoints,
    last_checkpoint,
    step_folder,
    unfinished_folder,
)
from glm5_next.launchers.runtime.convert import hf_to_megatron
from glm5_next.launchers.runtime.trainer import Trainer
from tests.support.ranks import run_ranks
from tests.support.training import batch, on_trainers, samples, settings, weights_of

LAYOUTS = {
    "one": {},
    "dp2_distributed_optimizer": {"parallel__ranks": 2, "parallel__distributed_optimizer": True},
    "ep2": {"parallel__ranks": 2, "parallel__ep": 2},
    "ep2_bf16_distributed_optimizer": {
        "model__precision": "bf16",
        "parallel__ranks": 2,
        "parallel__ep": 2,
        "parallel__distributed_optimizer": True,
    },
    "tp2": {"parallel__ranks": 2, "parallel__tp": 2},
    "pp2": {"parallel__ranks": 2, "parallel__pp": 2},
}
STATE = RunState(
    next_step=2, weights_version=2, prompt_cursor=7, seed=3, prompts_digest="d", samples_drawn=5, samples_trained=5
)
ORIGIN = Origin(hf="/somewhere", precision="fp32")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("hf") / "tiny"
    return Checkpoint(write_tiny_checkpoint(folder, layers=4, experts=4, mtp=False, vision=False))


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def snapshot(trainer: Trainer) -> dict:
    """Bits of all weights, of what this rank's optimizers hold, and the learning rate of the next step."""
    parts = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    held = [
        (number, place, key, digest(value))
        for number, part in enumerate(parts)
        for place, parameter in enumerate(p for group in part.optimizer.param_groups for p in group["params"])
        for key, value in sorted(
            {**part.optimizer.state.get(parameter, {}), "value": parameter}.items(), key=lambda item: item[0]
        )
        if isinstance(value, Tensor)
    ]
    return {
        "weights": {name: digest(tensor) for name, tensor in weights_of(trainer).items()},
        "optimizer": held,
        "lr": trainer.optimizer.param_groups[0]["lr"],
    }


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def train_save_train(trainer: Trainer, update, folder: Path) -> dict:
    trainer.train(update)
    saved, before = snapshot(trainer), children()
    trainer.save(folder, STATE)
    started = children() - before
    report = trainer.train(update)
    return {"saved": saved, "started": started, "next": (report.sums, report.grad_norm, report.lr, snapshot(trainer))}


def load_train(trainer: Trainer, update, folder: Path) -> dict:
    fresh = snapshot(trainer)
    state = trainer.load(folder)
    loaded = snapshot(trainer)
    report = trainer.train(update)
    after = (report.sums, report.grad_norm, report.lr, snapshot(trainer))
    return {"fresh": fresh, "state": state, "loaded": loaded, "next": after}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request, source, tmp_path_factory):
    """What every rank saw of a run that went on, and of one that was loaded in new processes."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints" / "step-000002"
    run = settings(source.folder, optimizer__schedule="cosine", **LAYOUTS[request.param])
    update = batch(run, samples(2))
    went_on = on_trainers(run, train_save_train, update, folder)
    return went_on, on_trainers(run, load_train, update, folder), folder


def test_what_is_loaded_is_what_was_saved(layout):
    for saved, loaded in zip(*layout[:2], strict=True):
        assert loaded["state"] == STATE
        assert loaded["loaded"]["lr"] == saved["saved"]["lr"] != loaded["fresh"]["lr"]
        for part in ("weights", "optimizer"):
            assert loaded["loaded"][part] == saved["saved"][part], part
            assert loaded["fresh"][part] != saved["saved"][part], f"{part}: a fresh run has them, nothing is tested"


def test_the_moments_of_every_trained_parameter_are_compared(layout):
    for result in layout[1]:
        kept = {}
        for number, place, key, _ in result["loaded"]["optimizer"]:
            kept.setdefault((number, place), set()).add(key)
        assert kept and all(keys >= {"exp_avg", "exp_avg_sq", "value"} for keys in kept.values())


def test_the_next_step_is_that_of_the_run_that_went_on_bit_by_bit(layout):
    for went_on, loaded in zip(*layout[:2], strict=True):
        assert loaded["next"] == went_on["next"]


def test_a_save_starts_no_process(layout):
    assert [result["started"] for result in layout[0]] == [set()] * len(layout[0])


def save_at_once_and_train(trainer: Trainer, update, folder: Path) -> dict:
    trainer.save(folder, STATE)
    report = trainer.train(update)
    return {"next": (report.sums, report.grad_norm, report.lr, snapshot(trainer))}


@pytest.mark.parametrize("name", ["one", "dp2_distributed_optimizer"])
def test_a_run_that_has_not_trained_yet_can_be_saved(name, source, tmp_path):
    folder = step_folder(tmp_path, 0)
    run = settings(source.folder, **LAYOUTS[name])
    update = batch(run, samples(2))
    went_on = on_trainers(run, save_at_once_and_train, update, folder)
    loaded = on_trainers(run, load_train_only, update, folder)
    assert loaded == went_on


def load_train_only(trainer: Trainer, update, folder: Path) -> dict:
    trainer.load(folder)
    report = trainer.train(update)
    return {"next": (report.sums, report.grad_norm, report.lr, snapshot(trainer))}


def test_a_saved_folder_says_that_it_is_whole(layout):
    check_finished(layout[2])
    assert last_checkpoint(layout[2].parents[1]) == layout[2]
    assert not unfinished_folder(layout[2]).exists()
    assert Origin.load(layout[2]).precision in ("fp32", "bf16")


# Megatron's helper process.


def helpers_of_megatron() -> set[str]:
    """Names of the processes that Megatron's own queue for write results starts; they are ended here."""
    filesystem_async._results_queue = None
    before = children()
    filesystem_async.get_write_results_queue()
    started = [psutil.Process(pid) for pid in children() - before]
    names = {child.name() for child in started}
    for child in started:
        child.kill()
    return names


def test_megatron_would_start_a_process_for_its_write_results():
    """If this fails, Megatron has changed and `_keep_results_in_process` in checkpoints.py can go."""
    assert run_ranks(helpers_of_megatron, 1, timeout=60)[0]


# Whole or not there.


def broken_off(folder: Path, at: str) -> None:
    """A save of 'data' that ends while it writes, or at one of the steps that finish it."""
    failing = {"rename": (Path, "rename"), "marker": (checkpoint_folder, "write_atomic")}
    with pytest.raises(OSError, match="the disk is gone"):
        with checkpoints.writing_checkpoint(folder, ORIGIN) as unfinished:
            (unfinished / "data").write_text("all of it")
            if at == "writing":
                raise OSError("the disk is gone")
            owner, name = failing[at]
            original = getattr(owner, name)

            def fail(path, *args):
                if at == "marker" and path.name != MARKER:
                    return original(path, *args)
                raise OSError("the disk is gone")

            setattr(owner, name, fail)


@pytest.mark.parametrize("at", ["writing", "rename", "marker"])
def test_a_save_that_is_broken_off_leaves_no_folder_that_looks_whole(tmp_path, at):
    older, folder = step_folder(tmp_path, 10), step_folder(tmp_path, 20)
    older.mkdir(parents=True)
    (older / MARKER).touch()
    run_ranks(broken_off, 1, folder, at, timeout=60)
    assert not (folder / MARKER).exists()
    with pytest.raises(ValueError, match=f"{folder}: has no COMPLETE marker"):
        check_finished(folder)
    assert last_checkpoint(tmp_path) == older
    drop_old_checkpoints(tmp_path, keep=1)
    assert last_checkpoint(tmp_path) == older and not unfinished_folder(folder).exists()


def saved_again(folder: Path) -> None:
    with checkpoints.writing_checkpoint(folder, ORIGIN) as unfinished:
        (unfinished / "new").touch()


@pytest.mark.parametrize("remains", ["an unfinished folder", "a folder without marker", "a whole checkpoint"])
def test_a_save_replaces_what_an_earlier_one_left(tmp_path, remains):
    folder = step_folder(tmp_path, 10)
    old = unfinished_folder(folder) if remains == "an unfinished folder" else folder
    old.mkdir(parents=True)
    (old / "old").touch()
    if remains == "a whole checkpoint":
        (old / MARKER).touch()
    run_ranks(saved_again, 1, folder, timeout=60)
    assert sorted(path.name for path in folder.iterdir()) == [MARKER, "new", "origin.json"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def load_without_marker(trainer: Trainer, folder: Path) -> str:
    with pytest.raises(ValueError) as refusal:
        trainer.load(folder)
    return str(refusal.value)


def test_a_checkpoint_without_its_marker_is_not_loaded(source, tmp_path):
    folder = step_folder(tmp_path, 10)
    folder.mkdir(parents=True)
    STATE.save(folder / checkpoint_folder.STATE_FILE)
    message = on_trainers(settings(source.folder), load_without_marker, folder)[0]
    assert message == f"{folder}: has no COMPLETE marker, so it is not a finished checkpoint"


@pytest.mark.parametrize(("keep", "left"), [(0, [5, 10, 15, 20]), (1, [20]), (2, [15, 20]), (9, [5, 10, 15, 20])])
def test_old_checkpoints_are_dropped_and_what_never_became_whole_with_them(tmp_path, keep, left):
    for step in (5, 10, 15, 20):
        step_folder(tmp_path, step).mkdir(parents=True)
        (step_folder(tmp_path, step) / MARKER).touch()
        (step_folder(tmp_path, step) / "data").touch()
    unfinished_folder(step_folder(tmp_path, 25)).mkdir()
    drop_old_checkpoints(tmp_path, keep)
    assert sorted((tmp_path / "checkpoints").iterdir()) == [step_folder(tmp_path, step) for step in left]
    assert last_checkpoint(tmp_path) == step_folder(tmp_path, 20)


def test_a_run_without_checkpoints_has_no_last_one(tmp_path):
    assert last_checkpoint(tmp_path) is None
    drop_old_checkpoints(tmp_path, keep=2)


def first_update(trainer: Trainer) -> tuple[dict, dict]:
    """Before and after one step."""
    before = snapshot(trainer)
    trainer.train(batch(trainer.run, samples(4)))
    return before, snapshot(trainer)


def test_a_run_starts_from_a_converted_checkpoint_as_from_its_source(source, tmp_path):
    """The folder in `model.checkpoint` is another one's, so that weights cannot have come from there."""
    other = write_tiny_checkpoint(
        tmp_path / "hf", layers=4, experts=4, mtp=False, vision=False, seed=1, dtype="float32"
    )
    hf_to_megatron(other, tmp_path / "megatron")
    layout = LAYOUTS["ep2"]
    expected = on_trainers(settings(other, **layout), first_update)
    converted = settings(source.folder, model__megatron_checkpoint=str(tmp_path / "megatron"), **layout)
    assert on_trainers(converted, first_update) == expected
    assert expected[0][0] != expected[0][1], "the step should change something"
