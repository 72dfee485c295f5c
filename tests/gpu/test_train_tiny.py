"""The tiny task in bf16 on the GPU, from the command line: the loop, Transformer Engine's layers and the embedded engine."""

import json
from pathlib import Path

import pytest

from tests.support.cli_run import records, running

SHOWN = ("reward_mean", "mismatch_kl_mean", "mismatch_kl_max", "expert_overlap")


def finished(folder: Path, *arguments: str) -> str:
    folder.mkdir(exist_ok=True)
    with running(folder, *arguments) as run:
        assert run.wait(deadline=300.0) == 0, run.output
        return run.output


def trained(folder: Path, checkpoint: Path, *settings: str) -> tuple[str, list[dict]]:
    """What a run printed, and its record."""
    overrides = [f"model.checkpoint={checkpoint}", *settings]
    arguments = [word for setting in overrides for word in ("--set", setting)]
    output = finished(folder, "train", "--preset", "tiny-gpu", *arguments)
    (run_dir,) = (folder / "runs").iterdir()
    return output, records(run_dir)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    finished(folder, "tiny-checkpoint", "tiny")
    return folder / "tiny"


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory) -> tuple[str, list[dict]]:
    return trained(tmp_path_factory.mktemp("whole"), checkpoint)


def test_reward_reaches_what_it_reaches_on_a_cpu(whole):
    output, steps = whole
    print(output)
    for step in steps:
        seconds = {name: round(value, 2) for name, value in step.items() if name.startswith("seconds") and value}
        print(step["step"], {name: step[name] for name in SHOWN if step.get(name) is not None}, seconds)
    assert "transformer_engine" in output
    assert sum(step["reward_mean"] for step in steps[-5:]) / 5 > 0.9
    assert steps[-1]["heldout_reward"] > 0.9
    assert max(step["mismatch_kl_mean"] for step in steps) < 0.01


def test_optimizer_state_in_host_memory_trains_the_same(whole, checkpoint, tmp_path):
    """The second step starts from what the first made of the weights."""
    _, offloaded = trained(tmp_path, checkpoint, "optimizer.offload=true", "train.steps=2", "train.checkpoint_every=0")
    found = [(step["reward_mean"], step["grad_norm"]) for step in (*whole[1][:2], *offloaded)]
    print(json.dumps(found))
    assert found[0] == pytest.approx(found[2], rel=1e-3)
    assert found[1] == pytest.approx(found[3], rel=0.1)
