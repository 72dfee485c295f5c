"""From what ranks and rollout report to the one record of a step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from glm5_next.launchers.grpo import mismatch_stats
from glm5_next.launchers.packing import covered_rows
from glm5_next.launchers.replay_plan import ReplayPlan
from glm5_next.launchers.runtime.batch import StepReport
from glm5_next.launchers.runtime.rollout import Rollout

MISMATCH = {
    "mismatch_kl_mean": "mean",
    "mismatch_kl_p99": "p99",
    "mismatch_kl_max": "max",
    "mismatch_abs_mean": "abs_mean",
    "mismatch_tokens": "tokens",
}
UPDATE_KEYS = (
    "loss",
    "importance_weight_mean",
    "expert_overlap",
    "replay_reads",
    "entropy",
    "clip_fraction",
    "grad_norm",
    "lr",
    "memory_gib",
    *MISMATCH,
)


def step_metrics(
    rollout: Rollout,
    reports: Sequence[Sequence[StepReport]],
    micro_batches: Sequence[int],
    weights_version: int,
    replay: ReplayPlan,
) -> dict[str, Any]:
    """The step's metrics (see `metrics.STEP_METRICS`) except times, plus `tokens_all` for the rate.

    `reports` are by mini-batch and rank; without any (every group was dropped) the update's metrics are None.
    """
    samples = rollout.samples
    trained = [sample for group in rollout.kept for sample in group.samples]
    rewards = np.array([sample.reward for sample in samples])
    values: dict[str, Any] = {
        "reward_mean": _mean(rewards),
        "reward_std": float(rewards.std()) if samples else None,
        "response_tokens_mean": _mean([sample.num_response_tokens for sample in samples]),
        "truncated_fraction": _mean([sample.finish_reason == "length" for sample in samples]),
        "samples_lost": len(rollout.lost),
        "samples_dropped": rollout.not_trained.total(),
        "groups_sampled": len(rollout.kept) + len(rollout.dropped) + len(rollout.short),
        "groups_dropped": len(rollout.dropped),
        "resample_rounds": rollout.rounds,
        "samples_trained": len(trained),
        "tokens_without_record": sum(
            len(sample.tokens) - 1 - covered_rows(sample, replay.recording) for sample in trained
        ),
        "micro_batches": sum(micro_batches),
        "weights_version": weights_version,
        "tokens_trained": 0,
        "seconds_sync": 0.0,
        "seconds_checkpoint": 0.0,
        "seconds_eval": 0.0,
        "samples_all": len(samples),
        "tokens_all": sum(len(sample.tokens) for sample in samples),
    }
    values |= dict.fromkeys(UPDATE_KEYS) if not reports else _update_metrics(reports)
    return values


def _mean(values: Sequence[float] | np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _update_metrics(reports: Sequence[Sequence[StepReport]]) -> dict[str, Any]:
    every = [report for ranks in reports for report in ranks]
    sums: dict[str, float] = {}
    for report in every:
        for name, value in report.sums.items():
            sums[name] = sums.get(name, 0.0) + value
    tokens = sums["tokens"]
    trainer, rollout = (
        torch.from_numpy(np.concatenate([getattr(report, name) for report in every]))
        for name in ("trainer_logprobs", "rollout_logprobs")
    )
    mismatch = mismatch_stats(trainer, rollout, torch.ones_like(rollout))
    same, total = (sum(getattr(ranks[0], name) for ranks in reports) for name in ("experts_same", "experts_total"))
    values: dict[str, Any] = {key: mismatch[name] for key, name in MISMATCH.items()}
    values |= {
        "tokens_trained": int(tokens),
        "loss": sums["loss"] / tokens,
        "importance_weight_mean": sums["importance_weight"] / tokens,
        "expert_overlap": same / total if total else None,
        "replay_reads": sum(report.replay_reads for report in every),
        "entropy": sums["entropy"] / tokens,
        "clip_fraction": sums["clipped"] / tokens,
        "grad_norm": float(np.mean([ranks[0].grad_norm for ranks in reports])),
        "lr": reports[-1][0].lr,
        "memory_gib": max(report.memory_bytes for report in every) / 2**30,
    }
    if "reference_kl" in sums:
        values["reference_kl"] = sums["reference_kl"] / tokens
    return values
