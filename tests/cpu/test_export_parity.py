"""What a run exports gives the trainer's log-probabilities in transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.reference import load_reference
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.runtime.trainer import Trainer
from tests.support.training import batch, on_trainers, samples, settings

SAMPLES = samples(6, seed=1)


def train_score_export(trainer: Trainer, update, out: Path):
    """The log-probabilities of all labels before and after three updates."""
    before = trainer.score(update)
    for _ in range(3):
        trainer.train(update)
    trainer.export(out)
    return before, trainer.score(update)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A bf16 checkpoint trained in fp32: what leaves the run is fp32, or it would be another policy."""
    folder = tmp_path_factory.mktemp("parity")
    source = write_tiny_checkpoint(folder / "hf")
    run = settings(source, train__tokens_per_micro_batch=64)
    scores = on_trainers(run, train_score_export, batch(run, SAMPLES), folder / "export")[0]
    return folder / "export", *scores


@torch.no_grad()
def reference_scores(folder: Path) -> dict[str, np.ndarray]:
    model, scores = load_reference(folder), {}
    for sample in SAMPLES:
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        logprobs = model(input_ids=tokens).logits[0, :-1].float().log_softmax(-1)
        scores[sample.sample_id] = logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy()
    return scores


def largest_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


def test_the_exported_folder_gives_the_trainers_log_probabilities_in_transformers(trained):
    folder, before, after = trained
    assert sum(len(sample.tokens) > 20 for sample in SAMPLES) >= 3, "no sample is past index_topk"
    assert largest_difference(after, reference_scores(folder)) < 1e-5
    assert largest_difference(after, before) > 0.1, "the updates changed nothing, so the export is not tested"


def test_an_fp32_run_exports_fp32_tensors_and_says_so(trained):
    checkpoint = Checkpoint(trained[0])
    assert {stored.dtype for stored in checkpoint.tensors.values()} == {"F32"}
    assert checkpoint.config.dtype == "float32"
