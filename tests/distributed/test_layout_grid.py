"""No layout of ranks changes a result: losses by micro-batch, gradients by name, norms, weights after three steps."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.packing import MicroBatch
from glm5_next.launchers.runtime import megatron, train_step
from glm5_next.launchers.runtime.batch import StepReport
from glm5_next.launchers.runtime.rank_replay import RankReplay
from glm5_next.launchers.runtime.train_step import Row
from glm5_next.launchers.runtime.trainer import Trainer
from glm5_next.plugins.packed_row import PackedRow
from tests.support.training import batch, on_trainers, samples, settings, unequal_updates, weights_of

STEPS = 3
SAMPLES = samples(5, seed=3)
# Micro-batches of unequal length, one of them without a sample; replicas take turns.
ROWS = [[0, 1], [2], [3, 4], []]

LAYOUTS = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "tp2_etp2": {"tp": 2, "etp": 2},
    "etp2": {"ranks": 2, "etp": 2},
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "pp2_vpp2": {"pp": 2, "vpp": 2},
    "ep2": {"ranks": 2, "ep": 2},
    "ep4": {"ranks": 4, "ep": 4},
    "ep2_etp2": {"ranks": 4, "ep": 2, "etp": 2},
    "dp2": {"ranks": 2},
    "dp2_distributed": {"ranks": 2, "distributed_optimizer": True},
    "dp4_distributed": {"ranks": 4, "distributed_optimizer": True},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "tp2_ep2": {"ranks": 2, "tp": 2, "ep": 2},
    "tp2_dp2_ep2_distributed": {"ranks": 4, "tp": 2, "ep": 2, "distributed_optimizer": True},
    "pp2_ep2": {"ranks": 4, "pp": 2, "ep": 2},
    "pp2_dp2_distributed": {"ranks": 4, "pp": 2, "distributed_optimizer": True},
    "tp2_pp2_ep2": {"ranks": 4, "tp": 2, "pp": 2, "ep": 2},
    "tp2_pp2_vpp2": {"ranks": 4, "tp": 2, "pp": 2, "vpp": 2},
}
# Of every kind one, and the products that contain the others; `bash scripts/test.sh --all` runs the rest as well.
ALWAYS = {
    *((5, name) for name in ("tp4", "tp2_etp2", "ep2_etp2", "ep4", "pp4", "pp2_vpp2", "dp2_distributed")),
    *((5, name) for name in ("tp2_pp2_ep2", "tp2_pp2_vpp2", "tp2_dp2_ep2_distributed", "pp2_dp2_distributed")),
    *((9, name) for name in ("tp2", "pp4_vpp2", "pp2_ep2")),
}
LAYOUTS["pp4_vpp2"] = {"pp": 4, "vpp": 2}  # eight stages: the larger model only
EVERY = [
    *((5, name) for name in LAYOUTS if name != "pp4_vpp2"),
    *((9, name) for name in ("tp2", "pp2", "pp4", "pp4_vpp2", "pp2_vpp2", "pp2_ep2", "tp2_pp2_ep2")),
]
CASES = [pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.long) for case in EVERY]
DEADLINE = 200  # seconds; a layout takes a few, unless the machine is busy
Losses = dict[tuple[str, ...], float]  # by the samples of a micro-batch


@dataclass(frozen=True)
class Observed:
    """What one rank saw. Gradients are those of the first step on rank 0: as finalised, and as clipped; the padded
    pass comes before it, on the same weights, and updates nothing."""

    padded_losses: Losses
    padded_gradients: dict[str, Tensor]
    losses: list[Losses]
    gradients: dict[str, Tensor]
    clipped_gradients: dict[str, Tensor]
    reports: list[StepReport]
    weights: dict[str, Tensor]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[int, Checkpoint]:
    found = {}
    for layers in (5, 9):
        folder = tmp_path_factory.mktemp("hf") / f"{layers}-layers"
        found[layers] = Checkpoint(
            write_tiny_checkpoint(folder, layers=layers, dtype="float32", mtp=False, vision=False)
        )
    return found


def run_settings(source: Checkpoint, layout: dict[str, Any]):
    ranks = layout.get("ranks", layout.get("tp", 1) * layout.get("pp", 1))
    parallel = {f"parallel__{key}": value for key, value in {**layout, "ranks": ranks}.items()}
    return settings(source.folder, optimizer__clip_grad=0.05, **parallel)


def observe(trainer: Trainer, update) -> Observed:
    """One pass over padded rows, then three steps on unpadded ones."""
    losses: list[Losses] = []
    gradients: list[dict[str, Tensor]] = []
    original_loss, original_step = train_step._grpo_loss, trainer.optimizer.step

    def loss_and_note(grpo, collected, row, output):
        loss, count, reported = original_loss(grpo, collected, row, output)
        losses[-1][row.batch.sample_ids] = losses[-1].get(row.batch.sample_ids, 0.0) + loss.item()
        return loss, count, reported

    def note() -> None:
        if len(losses) <= 2:
            gradients.append(whole_gradients(trainer))

    def step():
        note()
        return (True, 0.0, None) if len(losses) == 1 else original_step()

    def note_and_reset(chunks, optimizer):
        note()
        megatron.reset_gradients(chunks, optimizer)

    def train() -> StepReport:
        losses.append({})
        return trainer.train(update)

    with (
        mock.patch.object(train_step, "_grpo_loss", loss_and_note),
        mock.patch.object(train_step, "reset_gradients", note_and_reset),
        mock.patch.object(trainer.optimizer, "step", step),
    ):
        with mock.patch.object(RankReplay, "_row", padded_row):
            train()
        trainer.scheduler.step(increment=-1)
        reports = [train() for _ in range(STEPS)]
    weights = weights_of(trainer)
    if trainer.rank:  # only what rank 0 gathered is compared
        gradients, weights = [{}] * 4, {}
    padded, _, finalised, clipped = gradients
    return Observed(losses[0], padded, losses[1:], finalised, clipped, reports, weights)


def whole_gradients(trainer: Trainer) -> dict[str, Tensor]:
    """By HF tensor; those of the frozen indexer are zero."""
    if trainer.run.parallel.distributed_optimizer:
        for chunk in trainer.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                for bucket in buffer.buckets:
                    gather_shards(bucket, buffer.data_parallel_group)
    parameters = [parameter for chunk in trainer.chunks for parameter in chunk.parameters()]
    weights = [parameter.data for parameter in parameters]
    for parameter in parameters:  # what is exported in their place
        parameter.data = parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter)
    found = weights_of(trainer)
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data = weight
    return {name: gradient for name, gradient in found.items() if not name.endswith("e_score_correction_bias")}


def gather_shards(bucket, group) -> None:
    """The distributed optimizer reduces to each replica its own shard; the other shards are left half summed."""
    shards = list(bucket.grad_data.chunk(group.size()))
    dist.all_gather(shards, shards[group.rank()].clone(), group=group)


def padded_row(replay: RankReplay, micro_batch: MicroBatch, own: dict[str, Any], passes: int) -> Row:
    """The same row with every document padded to a multiple of four tokens, as Megatron describes it."""
    lengths = [int(end - start) for start, end in pairwise(micro_batch.cu_seqlens)]
    bounds = [sum(-(-length // 4) * 4 for length in lengths[:i]) for i in range(len(lengths) + 1)]
    places = torch.cat([torch.arange(start, start + length) for start, length in zip(bounds, lengths)])

    def spread(value: Tensor) -> Tensor:
        out = value.new_zeros(bounds[-1], *value.shape[1:])
        out[places] = value
        return out

    tensors = {
        name: spread(value)
        for name, value in vars(micro_batch).items()
        if isinstance(value, Tensor) and name != "cu_seqlens"
    }
    slices = tuple(slice(start, start + length) for start, length in zip(bounds, lengths))
    batch_of_row = replace(micro_batch, sample_slices=slices[: len(micro_batch.sample_ids)], **tensors)
    padded = torch.tensor(bounds, dtype=torch.int32)
    params = PackedRow(
        qkv_format="thd",
        cu_seqlens_q=micro_batch.cu_seqlens,
        cu_seqlens_kv=micro_batch.cu_seqlens,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    return Row(batch_of_row, params)


@pytest.fixture(scope="module")
def one_process(checkpoints) -> dict[int, Observed]:
    found = {}
    for layers, source in checkpoints.items():
        run = run_settings(source, {})
        found[layers] = on_trainers(run, observe, batch(run, SAMPLES, [ROWS]), timeout=DEADLINE)[0]
    return found


@pytest.mark.parametrize(("layers", "name"), CASES, ids=lambda value: str(value))
def test_a_layout_gives_the_result_of_one_process(checkpoints, one_process, layers, name):
    source, alone = checkpoints[layers], one_process[layers]
    run = run_settings(source, LAYOUTS[name])
    replicas = run.parallel.topology().dp
    plan = [ROWS[replica::replicas] for replica in range(replicas)]
    ranks = on_trainers(run, observe, batch(run, SAMPLES, plan), timeout=DEADLINE)
    first = ranks[0]
    for step, expected in enumerate(alone.losses):  # after the first, the weights differ by their rounding
        losses = [rank.losses[step] for rank in ranks if rank.reports[step].speaks]
        check_losses(losses, expected, bound=1e-5 if step else 1e-6)
    check_gradients(first.gradients, alone.gradients)
    check_gradients(first.clipped_gradients, alone.clipped_gradients)
    for report, expected in zip(first.reports, alone.reports):
        assert math.isclose(report.grad_norm, expected.grad_norm, rel_tol=1e-5)
        assert expected.grad_norm > run.optimizer.clip_grad, "nothing was clipped"
    assert not unequal_updates(first.weights, alone.weights, source)
    check_losses([rank.padded_losses for rank in ranks if rank.reports[0].speaks], alone.losses[0], bound=1e-6)
    check_gradients(first.padded_gradients, alone.gradients)


def check_losses(replicas: list[Losses], expected: Losses, bound: float) -> None:
    seen: Losses = {}
    for losses in replicas:
        assert not (seen.keys() & losses.keys()) - {()}, "two replicas trained the same samples"
        seen |= losses
    assert seen.keys() == expected.keys()
    for sample_ids, loss in expected.items():
        assert math.isclose(seen[sample_ids], loss, rel_tol=bound, abs_tol=bound), sample_ids


def check_gradients(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """1e-5 of every gradient, or a rounding error of the largest ones where its own terms cancel."""
    assert got.keys() == expected.keys()
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in expected.values()))
    for name, gradient in expected.items():
        allowed = 1e-5 * gradient.norm().item() + torch.finfo(torch.float32).eps * norm
        error = (got[name] - gradient).norm().item()
        assert error <= allowed, f"{name}: {error:.1e} off a gradient of {gradient.norm().item():.1e}"


def test_the_comparison_of_gradients_sees_clipping_and_a_thousandth_too_much(one_process):
    for observed in one_process.values():
        with pytest.raises(AssertionError):
            check_gradients(observed.clipped_gradients, observed.gradients)
        for name, gradient in observed.gradients.items():
            if gradient.norm() > 1e-3:
                with pytest.raises(AssertionError):
                    check_gradients({**observed.gradients, name: gradient * (1 + 1e-3)}, observed.gradients)


def test_only_frozen_tensors_have_no_gradient(one_process):
    for observed in one_process.values():
        without = {name for name, gradient in observed.gradients.items() if not gradient.any()}
        assert without == {name for name in observed.gradients if ".indexer." in name}
