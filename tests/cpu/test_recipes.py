"""Recipes: what each preset for a cluster trains with is on record, and is what the recipe says."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from glm5_next.launchers.cli import app
from glm5_next.launchers.config import RunConfig, describe, load_run_config
from glm5_next.launchers.presets import PRESETS, preset

GOLDEN = Path(__file__).parents[1] / "golden" / "presets"
NAMES = [name for name, known in PRESETS.items() if known.cluster]


def run_of(name: str, *overrides: str) -> RunConfig:
    return load_run_config(None, preset(name), overrides)


@pytest.mark.parametrize("name", NAMES)
def test_dry_run_prints_the_recipe_that_is_on_record(name, tmp_path, monkeypatch):
    """After a change on purpose: write what is printed before the error to tests/golden/presets/NAME.txt."""
    monkeypatch.chdir(tmp_path)  # where there is no checkpoint yet
    result = CliRunner().invoke(app, ["train", "--preset", name, "--dry-run"])
    assert result.stdout == (GOLDEN / f"{name}.txt").read_text()
    assert result.exit_code == 2 and f"glm5-next prepare --preset {name} makes it" in result.stderr
    assert not list(tmp_path.iterdir())


def test_another_setting_would_differ_from_the_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", "--preset", "16x4", "--dry-run", "--set", "optimizer.lr=2e-6"])
    assert result.stdout != (GOLDEN / "16x4.txt").read_text()


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
    assert run_of(name, "replay.routing=off").replay.routing == "off"


def test_a_settings_file_of_a_recipe_reads_back(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(describe(run_of("8x8")))
    assert load_run_config(path, None, []) == run_of("8x8")
