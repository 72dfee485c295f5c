"""Settings: where they come from, what is refused, and how the refusal reads."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from glm5_next.launchers.config import RunConfig, describe, load_run_config, settings
from glm5_next.launchers.presets import PRESETS, preset
from glm5_next.plugins.topology import Topology

BASE = {"model": {"checkpoint": "/models/glm"}, "data": {"prompts": "prompts.jsonl"}}


def load(*overrides: str, preset_values=BASE, path: Path | None = None) -> RunConfig:
    return load_run_config(path, preset_values, overrides)


def refusal(*overrides: str, **kwargs) -> str:
    with pytest.raises(ValueError) as caught:
        load(*overrides, **kwargs)
    assert not isinstance(caught.value, ValidationError)  # pydantic's own text is not for users
    return str(caught.value)


def test_every_setting_says_what_it_means_and_all_but_two_have_a_default():
    assert len(settings()) > 40
    assert not [key for key, field in settings().items() if not field.description]
    assert [key for key, field in settings().items() if field.is_required()] == ["model.checkpoint", "data.prompts"]


def test_later_layers_win(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 7\nseed = 5\n[optimizer]\nlr = 1\n")
    config = load("train.seed=6", "train.seed=8", path=path, preset_values={**BASE, "train": {"steps": 3, "seed": 4}})
    assert (config.train.steps, config.train.seed) == (7, 8)
    assert config.optimizer.lr == 1.0 and isinstance(config.optimizer.lr, float)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("model.checkpoint=/a/b c", "checkpoint", Path("/a/b c")),
        ('model.checkpoint="/a/b"', "checkpoint", Path("/a/b")),
        ("model.precision=fp32", "precision", "fp32"),
        ("model={precision = 'fp32'}", "precision", "fp32"),
    ],
)
def test_set_takes_toml_values_and_bare_strings(text, key, value):
    assert getattr(load(text).model, key) == value


def test_set_takes_lists_booleans_and_none():
    config = load("optimizer.betas=[0.8, 0.9]", "output.plots=false", "data.heldout=tiny", "data.heldout=none")
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.output.plots is False
    assert config.data.heldout is None


def test_a_value_that_would_smuggle_in_a_second_key_stays_one_value():
    assert load("model.checkpoint=1\nvalue2 = 2").model.checkpoint == Path("1\nvalue2 = 2")


@pytest.mark.parametrize("text", ["train.steps", "=3", "train.steps=", ""])
def test_set_without_key_or_value_is_refused(text):
    assert f"--set {text}: expected section.key=value" in refusal(text)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("train.stpes", "train.steps"),
        ("trian.steps", "train.steps"),
        ("steps", "train.steps"),
        ("stpes", "train.steps"),
        ("grpo.lr", "optimizer.lr"),
        ("rollout.tempratur", "rollout.temperature"),
    ],
)
def test_an_unknown_key_is_named_with_its_source_and_the_nearest(key, nearest, tmp_path):
    assert refusal(f"{key}=3") == f"--set: unknown key {key!r}; the nearest is {nearest!r}"
    path = tmp_path / "run.toml"
    path.write_text(f"{key} = 3\n")
    assert refusal(path=path) == f"{path}: unknown key {key!r}; the nearest is {nearest!r}"


def test_an_unknown_empty_section_is_refused_and_a_known_one_is_fine(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[optimiser]\n")
    assert "unknown key 'optimiser'; the nearest is 'optimizer'" in refusal(path=path)
    path.write_text("[optimizer]\n")
    assert load(path=path) == load()


def test_a_key_like_no_other_lists_its_section():
    assert "section 'replay' has routing" in refusal("replay.qqqqqq=1")
    assert "the sections are model, parallel" in refusal("qqqqqq.zzz=1")


def test_a_section_cannot_be_a_value():
    assert "'train' is a section and cannot be set to 3" in refusal("train=3")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("train.steps=1.5", ["train.steps is 1.5", "valid integer"]),
        ("train.steps=true", ["train.steps is True", "valid integer"]),
        ('optimizer.lr="1"', ["optimizer.lr is '1'", "valid number"]),
        ("optimizer.lr=nan", ["optimizer.lr is nan", "finite"]),
        ("train.steps=0", ["train.steps is 0", "greater than or equal to 1"]),
        ("train.tokens_per_micro_batch=0", ["train.tokens_per_micro_batch is 0", "greater than or equal to 1"]),
        ("rollout.samples_per_prompt=0", ["rollout.samples_per_prompt is 0", "greater than or equal to 1"]),
        ("model.precision=fp16", ["model.precision is 'fp16'", "'fp32' or 'bf16'"]),
        ("optimizer.betas=[0.9]", ["optimizer.betas is [0.9]", "each in [0, 1)"]),
        ("optimizer.betas=[0.9, 1.0]", ["optimizer.betas is [0.9, 1.0]", "[0, 1)"]),
        ("optimizer.betas=[0.9, true]", ["optimizer.betas is [0.9, True]", "valid number"]),
        ("rollout.temperature=0.7", ["rollout.temperature is 0.7", "only 1.0", "log-probabilities"]),
        ("rollout.top_p=0.9", ["rollout.top_p is 0.9", "only 1.0", "log-probabilities"]),
        ("data.reward=exakt", ["data.reward is 'exakt'", "module:function"]),
        ("output.run_id=../up", ["output.run_id is '../up'", "folder name"]),
        ("output.run_id=..", ["output.run_id is '..'"]),
        ("parallel.vpp=1", ["parallel.vpp is 1", "greater than or equal to 2"]),
        ("model.checkpoint=5", ["model.checkpoint is 5", "path"]),
        ("train.steps.x=1", ["train.steps is {'x': 1}", "valid integer"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(text, parts):
    message = refusal(text)
    assert "\n" not in message and message.startswith("--set: ")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["parallel.ranks=3", "parallel.tp=2"], "parallel.ranks: 3 ranks"),
        (["parallel.ranks=2", "parallel.ep=4"], "parallel.ranks: 2 ranks"),
        (["parallel.vpp=2"], "parallel.vpp: "),
        (["train.steps=5", "optimizer.warmup_steps=6"], "optimizer.warmup_steps (6) exceeds train.steps (5)"),
        (["grpo.is_low=3"], "grpo.is_low (3.0) exceeds grpo.is_high (2.0)"),
        (["optimizer.min_lr=1"], "optimizer.min_lr (1.0) exceeds"),
        (["grpo.mini_batches=9"], "grpo.mini_batches (9) exceeds rollout.prompts_per_step (8)"),
        (["train.tokens_per_micro_batch=99"], "train.tokens_per_micro_batch (99) is below"),
        (["train.eval_every=5"], "data.heldout"),
        (["parallel.distributed_optimizer=false"], "model.precision is 'bf16' but parallel.distributed_optimizer"),
    ],
)
def test_settings_that_contradict_each_other_are_named(overrides, key):
    message = refusal(*overrides)
    assert key in message and "\n" not in message


def test_all_problems_come_in_one_error():
    assert refusal("train.stpes=1", "steps=2").count("\n") == 1
    assert refusal("train.steps=0", "grpo.clip_low=2").count("\n") == 1
    assert refusal("grpo.is_low=3", "optimizer.min_lr=1").count("\n") == 1


def test_what_must_be_given_is_asked_for():
    message = refusal(preset_values=None)
    assert "model.checkpoint is not set" in message and "data.prompts is not set" in message


def test_a_missing_or_broken_file_is_named(tmp_path):
    path = tmp_path / "run.toml"
    assert f"{path}: cannot be read" in refusal(path=path)
    path.write_text("[train\n")
    assert f"{path}: not valid TOML" in refusal(path=path)
    path.write_bytes(b"\xff")
    assert f"{path}: not valid TOML" in refusal(path=path)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.checkpoint='quote \" back\\slash \u00e9'", "optimizer.lr=1e-20", "grpo.is_high=1e16"],
        ["parallel.ranks=4", "parallel.pp=2", "parallel.vpp=2", "output.run_id=a.b-c", "data.heldout=tiny"],
    ],
)
def test_described_settings_load_as_the_same_settings(overrides, tmp_path):
    config = load(*overrides)
    path = tmp_path / "run.toml"
    path.write_text(describe(config), encoding="utf-8")
    assert load_run_config(path, None, []) == config
    written = tomllib.loads(describe(config))
    assert [f"{section}.{key}" for section, values in written.items() for key in values] == list(settings())


def test_settings_do_not_change_after_loading():
    with pytest.raises(ValidationError):
        load().train.steps = 3


def test_parallel_sizes_become_a_topology():
    config = load("parallel.ranks=8", "parallel.tp=2", "parallel.pp=2", "parallel.ep=2", "parallel.vpp=2")
    assert config.parallel.topology() == Topology(world_size=8, tp=2, pp=2, ep=2, etp=1, vpp=2)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_alone(name):
    assert load_run_config(None, preset(name), []).parallel.ranks >= 1


def test_the_tiny_preset_is_what_the_quickstart_promises():
    config = load_run_config(None, preset("tiny"), [])
    assert (config.parallel.ranks, config.parallel.ep, config.model.precision) == (2, 2, "fp32")
    assert (config.data.prompts, config.replay.routing) == ("tiny", "engine")


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match="unknown preset 'tinny'; the nearest is 'tiny'"):
        preset("tinny")


def test_a_preset_cannot_be_changed_by_its_user():
    preset("tiny")["train"]["steps"] = -1
    assert preset("tiny")["train"]["steps"] > 0


def test_settings_need_no_torch():
    code = "import glm5_next.launchers.config, glm5_next.launchers.presets, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("replay.routing_weights=engine", "replay.routing=record"),
            "replay.routing_weights is 'engine' but replay.routing",
        ),
        (("replay.routing_weights=engine", "rollout.engine=vllm"), "which hands over no weights of experts"),
        (("replay.indexer=both",), "replay.indexer is 'both'"),
    ],
)
def test_replay_that_nothing_could_feed_is_refused(overrides, message):
    assert message in refusal(*overrides)
    assert load("replay.routing=engine", "replay.indexer=record", "rollout.engine=sglang").replay.indexer == "record"
