"""Recipes: what each preset for a cluster trains with is on record, and is what the recipe says."""

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from glm5_next.launchers.cli import app
from glm5_next.launchers.config import RunConfig, describe, load_run_config, settings
from glm5_next.launchers.engines.command import engine_command
from glm5_next.launchers.presets import PRESETS, preset

GOLDEN = Path(__file__).parents[1] / "golden" / "presets"
NAMES = [name for name, known in PRESETS.items() if known.cluster]


def run_of(name: str, *overrides: str) -> RunConfig:
    return load_run_config(None, preset(name), overrides)


def dry_run(name: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["train", "--preset", name, "--dry-run", *arguments])


def on_record(printed: str) -> str:
    """The settings that are not their defaults (those are on record in tiny_settings.toml), and the plan."""
    text, _, plan = printed.partition("\nplan\n")
    values = {f"{section}.{key}": value for section, keys in tomllib.loads(text).items() for key, value in keys.items()}
    defaults = {key: "none" if field.default is None else field.default for key, field in settings().items()}
    defaults = {key: list(value) if isinstance(value, tuple) else value for key, value in defaults.items()}
    lines = [f"{key} = {value!r}" for key, value in values.items() if value != defaults[key]]
    return "\n".join([*lines, "", "plan", plan])


@pytest.mark.parametrize("name", NAMES)
def test_dry_run_prints_the_recipe_that_is_on_record(name, tmp_path, monkeypatch):
    """After a change on purpose: write what `on_record` makes of it to tests/golden/presets/NAME.txt."""
    monkeypatch.chdir(tmp_path)  # where there is no checkpoint yet
    result = dry_run(name)
    assert on_record(result.stdout) == (GOLDEN / f"{name}.txt").read_text()
    assert result.exit_code == 2 and f"glm5-next prepare --preset {name} makes it" in result.stderr
    assert not list(tmp_path.iterdir())


def test_another_setting_would_differ_from_the_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for change in ("optimizer.lr=2e-6", "optimizer.offload=false", "grpo.clip_high=0.3"):
        assert on_record(dry_run("16x4", "--set", change).stdout) != (GOLDEN / "16x4.txt").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_is_the_one_of_the_issue(name):
    run = run_of(name)
    assert (run.data.prompts, run.data.reward) == ("dapo-math-17k.jsonl", "math")
    rollout, optimizer, grpo = run.rollout, run.optimizer, run.grpo
    assert rollout.prompts_per_step * rollout.samples_per_prompt // grpo.mini_batches == 64
    assert (rollout.samples_per_prompt, rollout.temperature) == (8, 1.0)
    assert rollout.max_new_tokens == (1024 if PRESETS[name].layers else 32768)
    assert (optimizer.lr, optimizer.schedule, optimizer.betas, optimizer.weight_decay) == (
        1e-6,
        "constant",
        (0.9, 0.98),
        0.1,
    )
    assert (grpo.clip_low, grpo.clip_high, grpo.importance_sampling, grpo.kl_coef) == (0.2, 0.28, "truncated", 0.0)
    assert optimizer.offload
    assert rollout.engine == ("transformers" if name == "slice-1x1" else "sglang")
    assert run_of(name, "replay.routing=off").replay.routing == "off"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "slice-1x1"])
def test_the_engine_accepts_the_flags_of_every_recipe(name, monkeypatch):
    words = engine_command(run_of(name), PRESETS[name].released_model())
    assert words[0] == "python3" and "--enable-return-routed-experts" in words
    flags = "rollout.engine_flags=['--moe-runner-backend', 'flashinfer_trtllm']"
    with pytest.raises(ValueError, match="moe-runner-backend"):
        engine_command(run_of(name, flags), PRESETS[name].released_model())
    monkeypatch.setenv("GLM5_NEXT_ENGINE_PYTHON", "/opt/engine/bin/python")
    assert engine_command(run_of(name), PRESETS[name].released_model())[0] == "/opt/engine/bin/python"


def test_a_settings_file_of_a_recipe_reads_back(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(describe(run_of("8x8")))
    assert load_run_config(path, None, []) == run_of("8x8")
