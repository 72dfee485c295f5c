"""A whole run from the command line: what it writes, what it measures, and what it trained."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.reference import load_reference
from glm5_next.launchers.config import load_run_config
from glm5_next.launchers.metrics import STEP_METRICS
from glm5_next.launchers.plots import PLOTS
from tests.e2e.conftest import Ended, Workplace
from tests.support.tiny import start_single_process


def test_it_ends_well_and_says_where_the_results_are(straight: Ended):
    assert straight.code == 0, straight.output
    for name in ("plots", "tensorboard", "export"):
        assert str(straight.run_dir / name) in straight.output


def test_every_step_is_recorded_once_with_every_metric(straight: Ended):
    assert [record["step"] for record in straight.records] == list(range(6))
    for record in straight.records:
        assert {name for name, _ in STEP_METRICS} <= record.keys()
        assert None not in record.values()


def test_engine_and_trainer_agree_on_every_sampled_token_before_the_first_update(straight: Ended):
    first = straight.records[0]
    assert first["start_mismatch_kl_mean"] <= 1e-8 and first["start_mismatch_kl_max"] <= 1e-6
    assert first["start_mismatch_tokens"] >= 4 * 4
    assert first["mismatch_tokens"] == first["tokens_trained"]


def test_the_trainers_own_router_chooses_the_experts_that_the_engine_used(straight: Ended):
    assert all(record["expert_overlap"] > 0.999 for record in straight.records)


def test_weights_version_advances_with_every_update_and_the_learning_rate_follows_its_schedule(straight: Ended):
    assert [record["weights_version"] for record in straight.records] == list(range(6))
    assert [record["lr"] for record in straight.records] == pytest.approx([1e-3 * (1 - step / 6) for step in range(6)])


def test_held_out_prompts_are_evaluated_at_start_and_end(straight: Ended):
    assert "heldout_reward_start" in straight.records[0]
    assert [record["step"] for record in straight.records if "heldout_reward" in record] == [5]


def test_settings_are_stored_as_they_were_resolved(straight: Ended, workplace: Workplace):
    run = load_run_config(straight.run_dir / "run.toml", None, [])
    assert run.train.steps == 6 and run.parallel.ep == 2
    assert run.model.checkpoint == workplace.folder / "tiny-checkpoint"
    assert tomllib.loads((straight.run_dir / "run.toml").read_text())["data"]["prompts"].endswith("/prompts.jsonl")


def test_every_sample_is_on_disk_as_text(straight: Ended):
    for step in range(6):
        samples = read_rollout(straight.run_dir, step)
        trained = [sample for sample in samples if sample["trained"]]
        assert len(trained) == straight.records[step]["samples_trained"] == 16
        assert np.mean([sample["reward"] for sample in samples]) == pytest.approx(straight.records[step]["reward_mean"])
        assert {sample["weights_version"] for sample in samples} == {step}


def test_tensorboard_has_every_step(straight: Ended):
    events = EventAccumulator(str(straight.run_dir / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/reward_mean")] == list(range(6))


def test_every_plot_is_drawn(straight: Ended):
    assert {path.stem for path in (straight.run_dir / "plots").glob("*.png")} == set(PLOTS)


def test_checkpoints_are_whole_and_nothing_unfinished_is_left(straight: Ended):
    folders = sorted(path.name for path in (straight.run_dir / "checkpoints").iterdir())
    assert folders == ["step-000003", "step-000006"]
    assert all((straight.run_dir / "checkpoints" / name / "COMPLETE").exists() for name in folders)
    assert not list(straight.run_dir.glob(".*"))


def test_the_exported_model_gives_the_trainers_log_probabilities_in_transformers(straight: Ended):
    """The trainer's, from Megatron on its own last checkpoint; the model has moved away from where it started."""
    export = straight.run_dir / "export"
    tokenizer_text = read_rollout(straight.run_dir, 5)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(export)
    texts = [sample["prompt"] + sample["response"] for sample in tokenizer_text[:4]]
    tokens = [torch.tensor([tokenizer.encode(text, add_special_tokens=False)]) for text in texts]
    trained = megatron_model(export, straight.run_dir / "checkpoints" / "step-000006")
    exported, source = load_reference(export), load_reference(source_of(straight))
    with torch.no_grad():
        for row in tokens:
            ours = trained(row, torch.arange(row.shape[1]).unsqueeze(0), None).log_softmax(-1)
            theirs = exported(input_ids=row).logits.log_softmax(-1)
            assert (ours - theirs).abs().max() <= 1e-5
            assert (theirs - source(input_ids=row).logits.log_softmax(-1)).abs().max() > 1e-2


def megatron_model(config: Path, checkpoint: Path) -> torch.nn.Module:
    """The trained model in this process, read from a run's distributed checkpoint."""
    start_single_process()
    from megatron.core import dist_checkpointing

    from glm5_next.launchers.runtime.checkpoints import METADATA
    from glm5_next.plugins.chunks import build_chunks
    from glm5_next.plugins.megatron_config import megatron_config
    from glm5_next.plugins.topology import Topology

    model_config = Checkpoint(config).config
    (model,) = build_chunks(
        megatron_config(model_config, Topology(), dtype=torch.float32, on_cpu=True, perform_initialization=False)
    )
    state = dist_checkpointing.load({"model0": model.sharded_state_dict(metadata=METADATA)}, str(checkpoint))
    model.load_state_dict(state["model0"], strict=True)
    return model.eval()


def source_of(ended: Ended) -> Path:
    return load_run_config(ended.run_dir / "run.toml", None, []).model.checkpoint


def read_rollout(run_dir: Path, step: int) -> list[dict]:
    lines = (run_dir / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
