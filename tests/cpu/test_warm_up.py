"""The warm-up runs, leaves a loadable folder of the source's own form, and depends on nothing but its seed."""

from pathlib import Path

import pytest
import torch.distributed as dist
from transformers import AutoTokenizer

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.name_map import trained_names
from glm5_next.bridge.reference import load_reference
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.bridge.verify import compare
from glm5_next.launchers.runtime.warm_up import warm_up
from tests.support.ranks import run_ranks

STEPS = 2


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "random", layers=4, experts=4)


def in_a_rank(rank: int, store: dist.Store, source: Path, out: Path, seed: int) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(source)
    losses = list(warm_up(source, out, steps=STEPS, seed=seed, tokenizer=tokenizer))
    assert not dist.is_initialized()
    return losses


@pytest.fixture(scope="module")
def warmed(source, tmp_path_factory) -> list[tuple[list[float], Path]]:
    """Losses and folder of three warm-ups: seed 0, seed 0 again, seed 1."""
    folder = tmp_path_factory.mktemp("warm")
    return [
        (run_ranks(in_a_rank, 1, source, folder / name, seed, timeout=60, start_group=False)[0], folder / name)
        for name, seed in {"first": 0, "again": 0, "other": 1}.items()
    ]


def test_the_loss_of_every_step_is_reported_and_starts_near_chance(warmed):
    losses = warmed[0][0]
    assert len(losses) == STEPS and all(0 < loss < 20 for loss in losses)


def test_the_result_loads_and_keeps_everything_but_the_trained_values(source, warmed):
    folder = warmed[0][1]
    load_reference(folder)
    difference = compare(source, folder)
    assert not (difference.dtypes or difference.shapes or difference.only_in_a or difference.only_in_b)
    assert not difference.files
    changed = {value.name for value in difference.values}
    assert changed <= trained_names(Checkpoint(source).config)
    assert "model.language_model.layers.1.mlp.gate.weight" in changed and "lm_head.weight" in changed
    assert not [name for name in changed if ".indexer." in name or name.endswith("e_score_correction_bias")]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(warmed):
    (losses, first), (losses_again, again), (_, other) = warmed
    assert losses == losses_again
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in again.iterdir()
    }
    assert not compare(first, other).tensors_equal
