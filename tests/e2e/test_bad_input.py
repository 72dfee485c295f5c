"""What a user can get wrong: one message that names it, exit status 2, and nothing written."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from glm5_next.bridge.shards import INDEX_FILE
from glm5_next.launchers.cli import app
from tests.e2e.conftest import Workplace

A_LAYER = "model.language_model.layers.2."
ROUTER = f"{A_LAYER}mlp.gate.weight"


@pytest.fixture
def place(workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """A workplace of its own, in which no run can start."""
    for name in ("grader.py", "prompts.jsonl"):
        shutil.copy(workplace.folder / name, tmp_path)
    shutil.copytree(workplace.folder / "tiny-checkpoint", tmp_path / "tiny-checkpoint")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("glm5_next.launchers.runtime.run.Cluster", _refuse_to_start)
    return Workplace(tmp_path)


def _refuse_to_start(run: object) -> None:
    raise AssertionError("the run has started")


def refused(place: Workplace, arguments: list[str]) -> str:
    """The message of a command that has to fail and to leave the folder as it was."""
    before = sorted(place.folder.rglob("*"))
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    after = [path for path in sorted(place.folder.rglob("*")) if "__pycache__" not in path.parts]
    assert after == before
    message = result.stderr
    assert message.startswith("error: ") and message.count("error:") == 1
    return message


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX_FILE).read_text())["weight_map"][name]


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrites the shard that holds the router, and the index to match."""
    shard = shard_of(folder, ROUTER)
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard)
    index = json.loads((folder / INDEX_FILE).read_text())
    others = {name: file for name, file in index["weight_map"].items() if file != shard.name}
    index["weight_map"] = others | dict.fromkeys(tensors, shard.name)
    (folder / INDEX_FILE).write_text(json.dumps(index))


def remove_all_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()


def remove_shard(folder: Path) -> None:
    shard_of(folder, ROUTER).unlink()


def truncate_shard(folder: Path) -> None:
    shard = shard_of(folder, ROUTER)
    shard.write_bytes(shard.read_bytes()[:-1])


def forget_in_index(folder: Path) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    del index["weight_map"][ROUTER]
    (folder / INDEX_FILE).write_text(json.dumps(index))


def other_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))


BROKEN_CHECKPOINTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no weights": (remove_all_weights, "found no *.safetensors file"),
    "absent shard": (remove_shard, "model-0000"),
    "truncated shard": (truncate_shard, "model-0000"),
    "index without a tensor": (forget_in_index, ROUTER),
    "missing tensor": (
        lambda folder: change_tensors(folder, lambda tensors: tensors.pop(ROUTER)),
        f"missing: {ROUTER}",
    ),
    "extra tensor": (
        lambda folder: change_tensors(folder, lambda tensors: tensors.update({f"{ROUTER}.x": torch.ones(2)})),
        f"unexpected: {ROUTER}.x",
    ),
    "wrong shape": (
        lambda folder: change_tensors(
            folder, lambda tensors: tensors.update({ROUTER: tensors[ROUTER][:, :5].contiguous()})
        ),
        f"{ROUTER} is [8, 5], not [8, 64]",
    ),
    "wrong dtype": (
        lambda folder: change_tensors(folder, lambda tensors: tensors.update({ROUTER: tensors[ROUTER].half()})),
        f"{ROUTER} is F16",
    ),
    "other model": (other_model, "llama"),
    "no checkpoint": (shutil.rmtree, "no such folder"),
}


@pytest.mark.parametrize("name", BROKEN_CHECKPOINTS)
def test_a_checkpoint_that_is_not_whole_is_refused_by_name(name: str, place: Workplace):
    break_it, expected = BROKEN_CHECKPOINTS[name]
    break_it(place.folder / "tiny-checkpoint")
    message = refused(place, place.new("run"))
    assert expected in message and "tiny-checkpoint" in message


@pytest.mark.parametrize("name", ["truncated shard", "missing tensor", "other model"])
def test_conversion_refuses_it_too(name: str, place: Workplace):
    break_it, expected = BROKEN_CHECKPOINTS[name]
    break_it(place.folder / "tiny-checkpoint")
    assert expected in refused(place, ["convert", "tiny-checkpoint", "converted"])


BAD_SETTINGS = {
    "misspelt key": ("train.stepz=3", "unknown key 'train.stepz'; the nearest is 'train.steps'"),
    "value of the wrong type": ("train.steps=many", "train.steps is 'many'"),
    "ranks that do not divide": ("parallel.ranks=3", "3"),
    "experts that do not divide": ("parallel.ep=2", "experts"),
    "reward that is not there": ("data.reward=grader:absent", "module 'grader' has no 'absent'"),
    "reward module that is not there": ("data.reward=absent:spread", "cannot import 'absent'"),
    "unknown reward": ("data.reward=magic", "data.reward is 'magic'"),
    "no such prompt file": ("data.prompts=absent.jsonl", "absent.jsonl: cannot be read"),
    "row too short for a prompt": ("train.tokens_per_micro_batch=8", "does not fit into train.tokens_per_micro_batch"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_a_setting_that_cannot_be_is_refused_by_name(name: str, place: Workplace):
    setting, expected = BAD_SETTINGS[name]
    extra = ["--set", "parallel.ranks=16", "--set", "parallel.ep=16"] if name == "experts that do not divide" else []
    arguments = [*place.new("run"), *extra] if extra else place.new("run", setting)
    assert expected in refused(place, arguments)


def test_a_broken_line_of_a_prompt_file_is_named_by_its_number(place: Workplace):
    with (place.folder / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "abc", "answer"\n')
    assert "prompts.jsonl:9: not valid JSON" in refused(place, place.new("run"))


def test_an_unknown_preset_is_refused_with_the_nearest(place: Workplace):
    assert "unknown preset 'tinny'; the nearest is 'tiny'" in refused(place, ["train", "--preset", "tinny"])


def test_a_run_needs_settings(place: Workplace):
    assert "train needs --preset NAME or --config FILE" in refused(place, ["train"])


def test_an_existing_run_folder_is_not_touched(place: Workplace):
    place.run_dir("run").mkdir(parents=True)
    message = refused(place, place.new("run"))
    assert "exists already" in message and f"--resume {place.run_dir('run')}" in message


@pytest.mark.parametrize("folder", ["absent", "tiny-checkpoint"])
def test_a_folder_that_is_no_run_cannot_be_resumed(folder: str, place: Workplace):
    assert f"{folder}/run.toml: no such file" in refused(place, ["train", "--resume", folder])


def test_a_run_cannot_be_resumed_on_other_prompts_or_another_seed(place: Workplace, straight):
    run = shutil.copytree(straight.run_dir, place.folder / "copy")
    again = ["train", "--resume", str(run), "--set", "train.steps=8"]
    assert "train.seed is 5" in refused(place, [*again, "--set", "train.seed=5"])
    assert "is not what" in refused(place, [*again, "--set", "data.prompts=tiny"])


def test_a_run_that_is_going_on_cannot_be_resumed(place: Workplace, straight):
    run = os.open(straight.run_dir, os.O_RDONLY)
    fcntl.flock(run, fcntl.LOCK_EX)  # as a process that works on it holds it
    assert "another process is running it" in refused(place, ["train", "--resume", str(straight.run_dir)])
    os.close(run)


def test_a_finished_run_says_that_it_is(place: Workplace, straight):
    message = refused(place, ["train", "--resume", str(straight.run_dir)])
    assert "all 6 steps are done; raise train.steps" in message
