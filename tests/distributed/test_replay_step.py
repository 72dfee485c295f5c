"""Recorded experts and pools reach the right layer, micro-batch and token, through real schedules."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.load import load_weights
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.runtime import train_step
from glm5_next.launchers.runtime.trainer import Trainer
from glm5_next.plugins.dsa import SparseCoreAttention
from glm5_next.plugins.layer import HyperTransformerLayer
from glm5_next.plugins.moe import Glm5NextRouter
from glm5_next.plugins.pick_coding import encode_picks
from glm5_next.plugins.replay import PickReplay, RouteReplay
from tests.support.faults import Fault, edit
from tests.support.replay import KPOOL, picks_of, pools_of, reads_nothing
from tests.support.training import batch, on_trainers, samples, settings, total, unequal_updates, weights_of

LAYERS, EXPERTS = 4, 8
MOE_LAYERS, DSA_LAYERS = (1, 2, 3), (3,)
FOUR_ROWS = [[[0, 1], [2], [3, 4], [5]]]


def experts_of(token, layer: int):
    """The two experts that a token is sent to in a layer: every (token, layer) has its own, and no two layers agree."""
    first = (token + 3 * layer) % EXPERTS
    return first, (first + 1 + (token // EXPERTS) % (EXPERTS - 1)) % EXPERTS


def recorded(tokens: np.ndarray) -> np.ndarray:
    """int16 `[T, MoE layers, 2]`."""
    layers = [np.stack(experts_of(tokens, layer), axis=-1) for layer in MOE_LAYERS]
    return np.stack(layers, axis=1).astype(np.int16)


SAMPLES = samples(6, routes=recorded, picks=picks_of)
LAYOUTS = {
    "pp2": {"parallel__ranks": 2, "parallel__pp": 2},
    "pp2_vpp2_recompute": {
        "parallel__ranks": 2,
        "parallel__pp": 2,
        "parallel__vpp": 2,
        "train__recompute": "full",
    },
    "tp2_etp2_recompute": {
        "parallel__ranks": 2,
        "parallel__tp": 2,
        "parallel__etp": 2,
        "train__recompute": "full",
    },
    "ep2": {"parallel__ranks": 2, "parallel__ep": 2},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("hf") / "tiny"
    return Checkpoint(write_tiny_checkpoint(folder, layers=LAYERS, dtype="float32", mtp=False, vision=False))


def replaying(source: Checkpoint, **changes):
    return settings(source.folder, replay__routing="engine", replay__indexer="engine", **changes)


@contextmanager
def routing_by_token() -> Iterator[None]:
    """No record at all: every layer works out `experts_of` and `pools_of` from the tokens of the row that is computed.

    Only right where a row's forward pass is over before the next one begins, and with one rank.
    """
    tokens, documents = [], []

    def forward_step(on_output, rows, chunk):
        row = next(rows)
        tokens[:] = [row.batch.input_ids]
        documents[:] = row.batch.cu_seqlens.tolist()
        return original_step(on_output, iter([row]), chunk)

    def routing(self, logits, padding_mask=None):
        return topk_routing_with_score_function(
            logits.view(-1, EXPERTS),
            self.topk,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            precomputed_indices=torch.stack(experts_of(tokens[0], self.layer_number - 1), dim=-1),
        )

    def choose(self, live):
        row = tokens[0].numpy()
        parts = [pools_of(row[start:end], self.layer_number - 1) for start, end in pairwise(documents)]
        return torch.from_numpy(np.concatenate(parts))

    original_step = train_step._forward_step
    with (
        mock.patch.object(train_step, "_forward_step", forward_step),
        mock.patch.object(Glm5NextRouter, "routing", routing),
        mock.patch.object(SparseCoreAttention, "_choose", choose),
    ):
        yield


def scores_and_step(trainer: Trainer, update):
    """Log-probabilities of all samples, then one step: report, weights, and how often each layer read each row."""
    scores = trainer.score(update)
    rows = trainer._rows(update)
    with mock.patch.object(trainer, "_rows", return_value=rows):
        report = trainer.train(update)
    stores = [(row.params.routes, row.params.picks) for row in rows]
    return scores, report, weights_of(trainer), [[store.reads if store else {} for store in both] for both in stores]


def by_token(trainer: Trainer, update):
    with routing_by_token():
        return scores_and_step(trainer, update)


@pytest.fixture(scope="module")
def without_a_record(source):
    """Scores, report and weights of a process that works the experts out instead of replaying them."""
    run = settings(source.folder)
    return on_trainers(run, by_token, batch(run, tuple(replace(s, routes=None) for s in SAMPLES), FOUR_ROWS))[0]


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request, source):
    run = replaying(source, **LAYOUTS[request.param])
    plan = FOUR_ROWS if run.parallel.ep == 1 else [[[0, 1], [2]], [[3, 4], [5]]]
    return run, on_trainers(run, scores_and_step, batch(run, SAMPLES, plan))


def test_every_token_is_sent_where_its_record_says(layout, without_a_record):
    expected, _, _, _ = without_a_record
    scores = {name: values for result in layout[1] for name, values in result[0].items()}
    assert scores.keys() == expected.keys()
    for name, values in expected.items():
        assert np.allclose(scores[name], values, rtol=0, atol=2e-5), name


def test_the_backward_pass_uses_the_record_too(layout, without_a_record, source):
    _, alone, after, _ = without_a_record
    results = layout[1]
    assert math.isclose(total([report for _, report, _, _ in results], "loss"), alone.sums["loss"], rel_tol=1e-6)
    for _, report, weights, _ in results:
        assert math.isclose(report.grad_norm, alone.grad_norm, rel_tol=1e-5)
        assert not unequal_updates(weights, after, source)


def test_every_layer_reads_each_row_once_per_pass(layout):
    run, results = layout
    topology, times = run.parallel.topology(), 2 if run.train.recompute == "full" else 1
    stages = topology.layers_per_stage(LAYERS)
    for rank, (_, _, _, reads) in enumerate(results):
        stage = rank * topology.pp // topology.world_size
        here = [layer for chunk in range(topology.vpp or 1) for layer in stages[stage + chunk * topology.pp]]
        routes, picks = ({layer: times for layer in here if layer in kind} for kind in (MOE_LAYERS, DSA_LAYERS))
        assert reads == [[routes, picks]] * (4 if run.parallel.ep == 1 else 2)


def test_reads_of_both_streams_are_reported(layout):
    run, results = layout
    rows, times = (4 if run.parallel.ep == 1 else 2), 2 if run.train.recompute == "full" else 1
    copies = run.parallel.ranks // run.parallel.pp  # ranks that hold the same layers, or rows of their own
    reads = sum(report.replay_reads for _, report, _, _ in results)
    assert reads == rows * times * copies * (len(MOE_LAYERS) + len(DSA_LAYERS))


def test_overlap_counts_the_slots_of_all_recorded_tokens_once(layout):
    recorded_slots = sum(sample.routes.size for sample in SAMPLES)
    for _, report, _, _ in layout[1]:
        assert report.experts_total == recorded_slots
        # Made-up routes agree with live ones about by chance: two of eight experts.
        assert 0.1 < report.experts_same / recorded_slots < 0.4


def refused_step(trainer: Trainer, update) -> tuple[str, list[str]]:
    """What is said of a step, and the tensors that it changed."""
    with pytest.raises(RuntimeError) as caught:
        trainer.train(update)
    changed = [
        name for name, tensor in weights_of(trainer).items() if not torch.equal(tensor, trainer.source.read(name))
    ]
    return str(caught.value), changed


def test_a_record_that_a_layer_did_not_read_stops_the_step_before_the_update(source):
    fault = Fault(HyperTransformerLayer, "_record", reads_nothing)
    message, changed = on_trainers(replaying(source), refused_step, batch(replaying(source), SAMPLES), fault=fault)[0]
    assert "routes: reads of the record by layer, (found, planned): {2: (0, 1)}" in message
    assert not changed


def with_another_expert(samples_, sample: int, token: int, layer: int):
    """The samples with one expert of one token in one layer replaced by one that the token does not have."""
    routes = samples_[sample].routes.copy()
    slots = routes[token, MOE_LAYERS.index(layer)]
    slots[0] = next(expert for expert in range(EXPERTS) if expert not in slots)
    changed = replace(samples_[sample], routes=routes)
    return (*samples_[:sample], changed, *samples_[sample + 1 :])


def with_another_pool(samples_, sample: int, token: int):
    """The samples with one pool of one token replaced by one that the token did not pick."""
    pools = samples_[sample].picks.decode(3)[:, None].copy()
    row = pools[token, 0]
    row[0] = next(pool for pool in range((token + 1) // KPOOL) if pool not in row)
    changed = replace(samples_[sample], picks=encode_picks(pools, layers=(3,), kpool=KPOOL, name="changed"))
    return (*samples_[:sample], changed, *samples_[sample + 1 :])


def losses_and_scores(trainer: Trainer, updates):
    """Of every update, from the same weights."""
    losses, scores = [], []
    for update in updates:
        load_weights(trainer.chunks, trainer.source)
        scores.append(trainer.score(update))
        losses.append(trainer.train(update).sums["loss"])
    return losses, scores


@pytest.mark.parametrize("stream", ["routes", "picks"])
def test_one_changed_row_of_a_record_changes_the_loss_from_that_token_on_and_nothing_without_replay(source, stream):
    sample, token = {"routes": (3, 4), "picks": (0, 30)}[stream]
    change = {"routes": partial(with_another_expert, layer=2), "picks": with_another_pool}[stream]
    both = (SAMPLES, change(SAMPLES, sample, token))
    run = replaying(source, grpo__is_low=0.0, grpo__is_high=1e9)  # weights that follow every log-probability
    losses, (before, after) = on_trainers(run, losses_and_scores, [batch(run, these, FOUR_ROWS) for these in both])[0]
    assert abs(losses[1] - losses[0]) > 2e-5
    differences = {name: np.abs(after[name] - before[name]) for name in before}
    changed = differences.pop(f"sample-{sample}")
    assert changed[:token].max() < 1e-5 and changed[token] > 1e-3
    assert max(difference.max() for difference in differences.values()) < 1e-5
    run = settings(source.folder)
    losses, (before, after) = on_trainers(run, losses_and_scores, [batch(run, these, FOUR_ROWS) for these in both])[0]
    assert losses[0] == losses[1]
    assert all(np.array_equal(before[name], after[name]) for name in before)


SHIFTS = {
    "routes by a token": (
        RouteReplay,
        "_rows",
        ("self.moe_layers.index(layer)]", "self.moe_layers.index(layer)].roll(-1, 0)"),
    ),
    "routes by a layer": (
        RouteReplay,
        "_rows",
        ("self.moe_layers.index(layer)]", "self.moe_layers.index(layer) - 1]"),
    ),
    "picks by a token": (
        PickReplay,
        "_decode",
        ("record.decode(layer) for", "np.concatenate([record.decode(layer)[:1], record.decode(layer)[:-1]]) for"),
    ),
}


@pytest.mark.parametrize("shift", SHIFTS)
def test_a_record_shifted_by_one_shows(source, without_a_record, shift):
    owner, method, passage = SHIFTS[shift]
    run, fault = replaying(source), Fault(owner, method, edit(*passage))
    scores = on_trainers(run, Trainer.score, batch(run, SAMPLES, FOUR_ROWS), fault=fault)[0]
    assert max(np.abs(scores[name] - values).max() for name, values in without_a_record[0].items()) > 0.05
