"""One optimizer step is the same step in every layout of ranks and however its samples are cut into micro-batches."""

import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.export import export_weights
from glm5_next.bridge.load import load_weights
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.packing import Plan
from glm5_next.launchers.runtime import megatron, train_step
from glm5_next.launchers.runtime.batch import StepReport
from glm5_next.launchers.runtime.trainer import Trainer
from glm5_next.plugins.mhc import HyperConnection
from tests.support.faults import Fault, edit
from tests.support.training import (
    batch,
    on_trainers,
    samples,
    settings,
    total,
    unequal_updates,
    weights_of,
)

STEPS = 3
SAMPLES = samples(5)
# Virtual stages and expert tensor parallelism are in test_replay_step.py, with the same comparisons.
# tests/distributed/test_layout_grid.py has all of them; here one of each kind that reports in its own way.
LAYOUTS = {
    "dp2_distributed_optimizer": {"parallel__ranks": 2, "parallel__distributed_optimizer": True},
    "tp2": {"parallel__ranks": 2, "parallel__tp": 2},
    "pp2": {"parallel__ranks": 2, "parallel__pp": 2},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Checkpoint:
    """Three KDA layers and a DSA layer, the first of them dense."""
    folder = tmp_path_factory.mktemp("hf") / "tiny"
    return Checkpoint(write_tiny_checkpoint(folder, layers=4, experts=4, dtype="float32", mtp=False, vision=False))


@pytest.fixture(scope="module")
def run(source):
    return settings(source.folder, optimizer__schedule="linear")


def some_steps(trainer: Trainer, update, count: int = STEPS) -> tuple[list[StepReport], list[dict[str, Tensor]]]:
    """A rank's report and the weights after each of `count` steps on the same samples."""
    steps = [(trainer.train(update), weights_of(trainer)) for _ in range(count)]
    return [report for report, _ in steps], [weights for _, weights in steps]


def by_step(results) -> list[list[StepReport]]:
    return [list(reports) for reports in zip(*(reports for reports, _ in results))]


@pytest.fixture(scope="module")
def one_process(run) -> tuple[list[list[StepReport]], list[dict[str, Tensor]]]:
    results = on_trainers(run, some_steps, batch(run, SAMPLES))
    return by_step(results), results[0][1]


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request, source):
    run = settings(source.folder, optimizer__schedule="linear", **LAYOUTS[request.param])
    results = on_trainers(run, some_steps, batch(run, SAMPLES))
    return by_step(results), [weights[-1] for _, weights in results]


def test_loss_and_gradient_norm_of_three_steps_are_those_of_one_process(layout, one_process):
    for reports, (alone,) in zip(layout[0], one_process[0], strict=True):
        assert math.isclose(total(reports, "loss"), alone.sums["loss"], rel_tol=1e-6)
        assert total(reports, "tokens") == alone.sums["tokens"] == sum(s.num_response_tokens for s in SAMPLES)
        for report in reports:
            assert math.isclose(report.grad_norm, alone.grad_norm, rel_tol=1e-5)


def test_weights_after_three_steps_are_those_of_one_process(layout, one_process, source):
    for weights in layout[1]:
        assert not unequal_updates(weights, one_process[1][-1], source)


def test_what_the_last_stage_saw_of_a_step_is_what_one_process_saw(layout, one_process):
    for reports, (alone,) in zip(layout[0], one_process[0], strict=True):
        seen = np.sort(np.concatenate([report.trainer_logprobs for report in reports]))
        assert np.allclose(seen, np.sort(alone.trainer_logprobs), rtol=0, atol=2e-5)
        for name in ("clipped", "ratio", "old_kl", "entropy", "importance_weight"):
            assert math.isclose(total(reports, name), alone.sums[name], rel_tol=1e-5, abs_tol=1e-6), name


def test_every_tensor_but_the_frozen_ones_moved(one_process, source):
    after = one_process[1][-1]
    still = {name for name, tensor in after.items() if torch.equal(tensor, source.read(name))}
    assert still == {name for name in after if ".indexer." in name or name.endswith("e_score_correction_bias")}


def test_learning_rates_follow_the_schedule(layout, one_process, run):
    expected = [run.optimizer.lr * (1 - step / run.train.steps) for step in range(STEPS)]
    for steps in (layout[0], one_process[0]):
        assert [reports[0].lr for reports in steps] == pytest.approx(expected, rel=1e-12)


def test_without_the_mark_of_sequence_parallelism_hyper_connections_train_on_half_their_gradient(source, one_process):
    run = settings(source.folder, **LAYOUTS["tp2"])
    unmarked = edit("parameter.sequence_parallel = config.sequence_parallel", "parameter.sequence_parallel = False")
    fault = Fault(HyperConnection, "__init__", unmarked)
    (_, (got,)), _ = on_trainers(run, some_steps, batch(run, SAMPLES), 1, fault=fault)
    wrong = unequal_updates(got, one_process[1][0], source, bound=0.05)
    assert {name.rsplit(".", 1)[1] for name in wrong} == {
        f"hc_{site}_{tensor}" for site in ("attn", "ffn") for tensor in ("fn", "base", "scale")
    }


def changed_bits(trainer: Trainer, update) -> list[str]:
    """Trained tensors that a step at learning rate zero changes, in the checkpoint's own dtypes."""
    report = trainer.train(update)
    assert report.lr == 0 and report.grad_norm > 0
    exported = dict(export_weights(trainer.chunks, trainer.model))
    return [name for name, tensor in exported.items() if not torch.equal(tensor, trainer.source.read(name))]


def test_a_step_at_rate_zero_leaves_every_bit_of_a_bf16_checkpoint_fp32_tensors_included(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "hf", layers=4, mtp=False, vision=False)
    run = settings(
        folder,
        model__precision="bf16",
        parallel__ranks=2,
        parallel__ep=2,
        parallel__distributed_optimizer=True,
        optimizer__warmup_steps=1,
    )
    assert on_trainers(run, changed_bits, batch(run, SAMPLES[:3])) == [[], []]


# How a step is cut.


class Cut:
    """Trains one step in several ways from the same weights and remembers the gradients of each."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.gradients: dict[str, Tensor] = {}

    def step(self, rows) -> tuple[float, float, dict[str, Tensor]]:
        """Sum of the losses, gradient norm, gradients."""
        trainer = self.trainer
        load_weights(trainer.chunks, trainer.source)
        with mock.patch.object(train_step, "reset_gradients", self._keep_and_reset):
            collected = train_step.accumulate_gradients(trainer.chunks, rows, trainer.run.grpo)
            norm, _ = train_step.update_weights(trainer.chunks, trainer.optimizer, trainer.scheduler)
        return collected.sums["loss"], norm, self.gradients

    def _keep_and_reset(self, chunks, optimizer) -> None:
        self.gradients = {
            name: parameter.main_grad.clone()
            for name, parameter in chunks[0].named_parameters()
            if parameter.requires_grad
        }
        megatron.reset_gradients(chunks, optimizer)


def in_several_cuts(trainer: Trainer, run) -> dict[str, tuple[float, float, dict[str, Tensor]]]:
    cut = Cut(trainer)
    everything = batch(run, SAMPLES)
    plans: dict[str, Plan] = {
        "one row": [[[0, 1, 2, 3, 4]]],
        "one sample in each row": [[[4], [3], [2], [1], [0]]],
        "empty rows": [[[], [0, 1, 2], [3, 4], []]],
    }
    steps = {name: cut.step(trainer._rows(replace(everything, plan=plan))) for name, plan in plans.items()}
    steps["without a sample"] = cut.step(trainer._rows(replace(everything, plan=[[[0, 1, 2, 4]]])))
    for name, hidden in {"sample hidden": [3], "sample alone in its row hidden": [3]}.items():
        plan = [[[0, 1, 2, 3, 4]]] if name == "sample hidden" else [[[0, 1, 2, 4], [3]]]
        steps[name] = cut.step(hide(trainer._rows(replace(everything, plan=plan)), {f"sample-{i}" for i in hidden}))
    return steps


def hide(rows, sample_ids: set[str]):
    """The engine's log-probabilities of these samples become NaN and infinite, which is what a broken engine returns."""
    for row in rows:
        for sample_id, where in zip(row.batch.sample_ids, row.batch.sample_slices):
            if sample_id in sample_ids:
                row.batch.rollout_logprobs[where] = float("nan")
                row.batch.rollout_logprobs[where.stop - 1] = float("-inf")
    return rows


@pytest.fixture(scope="module")
def cuts(run):
    return on_trainers(run, in_several_cuts, run)[0]


def check_same_step(got, expected) -> None:
    assert math.isclose(got[0], expected[0], rel_tol=1e-6)
    assert math.isclose(got[1], expected[1], rel_tol=1e-5)
    for name, gradient in expected[2].items():
        # The gradient of the first attention site is zero but for rounding: all streams are still the same there.
        allowed = 1e-4 * gradient.norm().item() + 1e-8 * expected[1]
        assert (got[2][name] - gradient).norm().item() <= allowed, name


@pytest.mark.parametrize("cut", ["one sample in each row", "empty rows"])
def test_a_step_does_not_depend_on_how_it_is_cut(cuts, cut):
    check_same_step(cuts[cut], cuts["one row"])


@pytest.mark.parametrize("cut", ["sample hidden", "sample alone in its row hidden"])
def test_a_sample_whose_engine_log_probabilities_are_not_finite_leaves_loss_and_denominator(cuts, cut):
    check_same_step(cuts[cut], cuts["without a sample"])
    assert not math.isclose(cuts[cut][1], cuts["one row"][1], rel_tol=1e-2), "the sample makes no difference"


def test_a_replica_without_a_trained_token_takes_part_and_changes_nothing(source, one_process):
    ((expected,), *_), two = one_process[0], settings(source.folder, parallel__ranks=2)
    uneven = batch(two, SAMPLES, [[[0, 1, 2, 3, 4]], [[]]])
    for rank, ((report,), _) in enumerate(on_trainers(two, some_steps, uneven, 1)):
        assert report.sums["tokens"] == (0, expected.sums["tokens"])[rank == 0]
        assert math.isclose(report.grad_norm, expected.grad_norm, rel_tol=1e-5)


def train_on_own_plan(trainer: Trainer, updates) -> tuple[str, int]:
    """The refusal, and how many forward passes had been started."""
    update = updates[trainer.rank]
    with mock.patch.object(train_step, "_forward_step", side_effect=train_step._forward_step) as forward:
        try:
            trainer.train(update)
        except RuntimeError as error:
            return str(error), forward.call_count
    return "", forward.call_count


def test_ranks_that_planned_different_steps_are_refused_before_the_first_forward(source):
    run = settings(source.folder, parallel__ranks=2)
    updates = [batch(run, SAMPLES, plan) for plan in ([[[0], [1]], [[2], [3]]], [[[0], [1]], [[2, 3]]])]
    for refusal, forwards in on_trainers(run, train_on_own_plan, updates, timeout=30):
        assert "ranks [1] planned another step than rank 0" in refusal and forwards == 0


# Gradients between steps.


RESETS = {
    "both": megatron.reset_gradients,
    "neither": lambda chunks, optimizer: None,
    "only Megatron's buffers": lambda chunks, optimizer: [chunk.zero_grad_buffer() for chunk in chunks],
    "only the optimizer's gradients": lambda chunks, optimizer: optimizer.zero_grad(),
}


def refusal_and_norms(trainer: Trainer, update, reset) -> tuple[str, list[float]]:
    """What is said of a second step after `reset`, and the norms of three steps if nobody looks."""
    message, norms = "", []
    with mock.patch.object(train_step, "reset_gradients", reset):
        try:
            trainer.train(update)
            trainer.train(update)
        except RuntimeError as error:
            message = str(error)
        megatron.reset_gradients(trainer.chunks, trainer.optimizer)
        with mock.patch.object(train_step, "check_gradients_are_reset"):
            norms = [trainer.train(update).grad_norm for _ in range(STEPS)]
    megatron.reset_gradients(trainer.chunks, trainer.optimizer)
    return message, norms


def with_every_reset(trainer: Trainer, update) -> dict[str, tuple[str, list[float]]]:
    return {name: refusal_and_norms(trainer, update, reset) for name, reset in RESETS.items()}


def test_a_forgotten_gradient_reset_is_refused_and_would_have_made_a_wrong_step(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "hf", layers=1, mtp=False, vision=False)
    # So small a rate that the weights, and with them the true norm, stay as they are.
    run = settings(folder, optimizer__lr=1e-12, optimizer__clip_grad=0.0)
    found = on_trainers(run, with_every_reset, batch(run, SAMPLES[:2]))[0]
    message, right = found.pop("both")
    assert not message and right == pytest.approx([right[0]] * STEPS, rel=1e-6)
    for name, (message, norms) in found.items():
        assert "was not reset before the step" in message, name
        assert max(abs(norm / right[0] - 1) for norm in norms) > 0.01, f"{name}: the norms {norms} are right"
