"""The run state: saved whole, loaded strictly; and the seeds derived from it."""

import json
import os

import pytest

from glm5_next.launchers.atomic_write import write_atomic
from glm5_next.launchers.run_state import RunState, step_seed

STATE = RunState(
    next_step=3,
    weights_version=3,
    prompt_cursor=24,
    seed=7,
    prompts_digest="ab" * 32,
    samples_drawn=192,
    samples_trained=128,
    samples_dropped=64,
    dropped_by_reason={"equal rewards": 60, "request deadline": 4},
)


def test_a_state_loads_as_it_was_saved(tmp_path):
    path = tmp_path / "run_state.json"
    STATE.save(path)
    assert RunState.load(path) == STATE
    assert os.listdir(tmp_path) == ["run_state.json"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"next_step": None}, "next_step must be a whole number of at least 0, got None"),
        ({"next_step": True}, "next_step must be a whole number"),
        ({"next_step": 1.0}, "next_step must be a whole number"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"prompts_digest": 5}, "prompts_digest must be a text"),
        ({"nxet_step": 1}, r"missing keys \[\], unknown keys \['nxet_step'\]"),
        ({"dropped_by_reason": {"equal rewards": 63}}, "dropped_by_reason .*is not samples_dropped .64."),
        ({"dropped_by_reason": {"equal rewards": "64"}}, "dropped_by_reason must be whole numbers by reason"),
        ({"dropped_by_reason": [64]}, "dropped_by_reason must be whole numbers by reason"),
        ({"samples_dropped": 63}, "samples_drawn .192. is not samples_trained .128."),
    ],
)
def test_a_changed_file_is_refused_with_its_key(tmp_path, change, problem):
    path = tmp_path / "run_state.json"
    STATE.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=f"{path}: not a run state .*{problem}"):
        RunState.load(path)


def test_every_missing_key_is_refused(tmp_path):
    path = tmp_path / "run_state.json"
    STATE.save(path)
    values = json.loads(path.read_text())
    for key in values:
        path.write_text(json.dumps({name: value for name, value in values.items() if name != key}))
        with pytest.raises(ValueError, match=f"missing keys \\['{key}'\\]"):
            RunState.load(path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"next_step": '])
def test_a_torn_file_is_refused(tmp_path, content):
    path = tmp_path / "run_state.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"{path}: not a run state"):
        RunState.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.json: cannot be read"):
        RunState.load(tmp_path / "nowhere.json")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "run_state.json"
    write_atomic(path, b"old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["run_state.json"]


def test_seeds_differ_by_run_step_and_purpose_and_fit_in_32_bits():
    seeds = [step_seed(seed, step, stream) for seed in range(3) for step in range(50) for stream in ("rollout", "eval")]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**32 for seed in seeds)
    assert step_seed(1, 23, "x") != step_seed(12, 3, "x")


def test_seeds_are_the_same_on_every_machine():
    assert step_seed(0, 0, "rollout") == 1283151900
