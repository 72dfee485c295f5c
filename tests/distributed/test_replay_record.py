"""A trainer replays what it chose in the pass before the update, whatever the layout, and only there."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.runtime.train_step import score_rows
from glm5_next.launchers.runtime.trainer import Trainer
from glm5_next.plugins.layer import HyperTransformerLayer
from glm5_next.plugins.pick_coding import encode_picks
from glm5_next.plugins.replay import OwnRecord
from tests.support.faults import Fault, edit
from tests.support.replay import KPOOL
from tests.support.training import batch, on_trainers, samples, settings, total, unequal_updates, weights_of

MOE_LAYERS, DSA_LAYERS = (1, 2, 3), (3,)
SAMPLES = samples(6)
FOUR_ROWS = [[[0, 1], [2], [3, 4], [5]]]
LAYOUTS = {
    "pp2_vpp2_recompute": {"parallel__ranks": 2, "parallel__pp": 2, "parallel__vpp": 2, "train__recompute": "full"},
    "tp2_etp2": {"parallel__ranks": 2, "parallel__tp": 2, "parallel__etp": 2},
    "ep2": {"parallel__ranks": 2, "parallel__ep": 2},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("hf") / "tiny"
    return Checkpoint(write_tiny_checkpoint(folder, layers=4, dtype="float32", mtp=False, vision=False))


def modes(source: Checkpoint, mode: str, **changes):
    return settings(source.folder, replay__routing=mode, replay__indexer=mode, **changes)


@torch.no_grad()
def disturb(trainer: Trainer) -> None:
    """Other routers and indexers, the same on every rank: live choices are no longer those of the record."""
    for chunk in trainer.chunks:
        for layer in chunk.modules():
            if isinstance(layer, HyperTransformerLayer):
                generator = torch.Generator().manual_seed(layer.layer_number)
                weights = [layer.mlp.router.weight] if layer.is_moe_layer else []
                if "picks" in layer.replayed_streams:
                    weights.append(layer.self_attention.core_attention.indexer.linear_wk.weight)
                for weight in weights:
                    weight.add_(torch.randn(weight.shape, generator=generator) * weight.std())


def record_then_train(trainer: Trainer, update):
    scores = trainer.score(update, record=True)
    disturb(trainer)
    return scores, trainer.train(update), weights_of(trainer)


def engine_step(trainer: Trainer, update):
    """The same step from a record that came with the samples."""
    disturb(trainer)
    return trainer.train(update), weights_of(trainer)


def choices(trainer: Trainer, update):
    """Every sample with what one process chooses for it, as an engine would have recorded it."""
    rows = trainer.replay.rows(update, trainer._packed(update), passes=1, own=False)
    for row in rows:
        row.params.routes, row.params.picks = OwnRecord(), OwnRecord()
    score_rows(trainer.chunks, rows)
    found = {}
    for row in rows:
        for name, part in zip(row.batch.sample_ids, row.batch.sample_slices):
            routes = torch.stack([row.params.routes.chosen[layer][part] for layer in MOE_LAYERS], dim=1)
            pools = torch.stack([row.params.picks.chosen[layer][part] for layer in DSA_LAYERS], dim=1)
            picks = encode_picks(pools.numpy(), layers=DSA_LAYERS, kpool=KPOOL, name=name)
            found[name] = routes.to(torch.int16).numpy(), picks
    return found


@pytest.fixture(scope="module")
def recorded_samples(source):
    run = modes(source, "off")
    found = on_trainers(run, choices, batch(run, SAMPLES, FOUR_ROWS))[0]
    return tuple(
        replace(sample, routes=found[sample.sample_id][0], picks=found[sample.sample_id][1]) for sample in SAMPLES
    )


@pytest.fixture(scope="module")
def expected(source, recorded_samples):
    run = modes(source, "engine")
    return on_trainers(run, engine_step, batch(run, recorded_samples, FOUR_ROWS))[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_uses_the_choices_of_the_pass_before(name, source, expected):
    run = modes(source, "record", **LAYOUTS[name])
    plan = FOUR_ROWS if run.parallel.ep == 1 else [[[0, 1], [2]], [[3, 4], [5]]]
    alone, after = expected
    results = on_trainers(run, record_then_train, batch(run, SAMPLES, plan))
    assert math.isclose(total([report for _, report, _ in results], "loss"), alone.sums["loss"], rel_tol=1e-5)
    for _, report, weights in results:
        assert math.isclose(report.grad_norm, alone.grad_norm, rel_tol=1e-5)
        assert not unequal_updates(weights, after, source)
        assert report.replay_reads > 0


def test_without_replay_the_disturbed_routers_train_something_else(source, expected):
    """The control: the step above is not just what any router would give."""
    run = modes(source, "off")
    report, _ = on_trainers(run, engine_step, batch(run, SAMPLES, FOUR_ROWS))[0]
    assert abs(report.grad_norm - expected[0].grad_norm) > 1e-3 * expected[0].grad_norm


def test_a_batch_that_was_not_recorded_is_refused(source):
    run = modes(source, "record")
    with pytest.raises(RuntimeError, match="trained before the pass that records its choices"):
        on_trainers(run, Trainer.train, batch(run, SAMPLES, FOUR_ROWS))


def test_a_layer_that_skips_its_record_stops_the_step(source, recorded_samples):
    """Even where its own choice would have been the same."""
    run = modes(source, "engine")
    ignores = edit("getattr(row, stream) if isinstance(row, PackedRow) else None", "None")
    fault = Fault(HyperTransformerLayer, "_record", ignores)
    with pytest.raises(RuntimeError, match=r"replay: micro-batch 0, routes: reads of the record by layer"):
        on_trainers(run, Trainer.train, batch(run, recorded_samples, FOUR_ROWS), fault=fault)


def test_the_reference_chooses_by_itself(source, recorded_samples):
    """Samples with another sample's experts: the policy's scores follow them, the reference's do not."""
    run = modes(source, "engine", grpo__kl_coef=0.1)
    shifted = tuple(replace(sample, routes=((sample.routes + 3) % 8).astype(np.int16)) for sample in recorded_samples)

    def both(trainer: Trainer, updates):
        return [(trainer.score(update), trainer.score(update, reference=True)) for update in updates]

    updates = [batch(run, these, FOUR_ROWS) for these in (recorded_samples, shifted)]
    (policy, reference), (other_policy, other_reference) = on_trainers(run, both, updates)[0]
    for name, values in reference.items():
        assert np.array_equal(values, other_reference[name])
        assert np.abs(values - policy[name]).max() < 2e-5
    assert max(np.abs(policy[name] - other_policy[name]).max() for name in policy) > 0.1
