"""Engine and trainer score the same tokens: before the first update, and after each one."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from glm5_next.launchers.grpo import mismatch_stats
from glm5_next.launchers.types import Sample

# Largest median |log-probability difference| of the probes after a weight sync: rounding of the run's precision.
PROBE_BOUND = {"fp32": 1e-4, "bf16": 0.1}


def check_finite(scores: Mapping[str, np.ndarray], learning_rate: float) -> None:
    """RuntimeError unless the trainer's log-probabilities after an update, by sample id, are numbers."""
    if not all(np.isfinite(values).all() for values in scores.values()):
        raise RuntimeError(
            f"the model's log-probabilities are not finite after this update; optimizer.lr = {learning_rate} "
            "is too large, or the rewards are"
        )


def check_probes(ours: Sequence[np.ndarray], theirs: Sequence[Sequence[np.ndarray]], precision: str) -> None:
    """RuntimeError if an engine scores the probes otherwise than the trainer does; `theirs` by engine, then by probe.

    What an engine derives from stale weights shows in every probe; a near tie of the router, which rounding may
    decide differently on the two sides, only in one of them. So the median over probes has to be small.
    """
    for number, scores in enumerate(theirs):
        difference = float(np.median([np.median(np.abs(a - b)) for a, b in zip(ours, scores)]))
        if not difference <= PROBE_BOUND[precision]:
            raise RuntimeError(
                f"engine {number} holds the new weights bit by bit but scores probes differently: median difference "
                f"{difference:.2e}; it computes with something derived from older weights"
            )


def start_mismatch(samples: Sequence[Sample], scores: Mapping[str, np.ndarray], limit: float) -> dict[str, float]:
    """`mismatch_stats` of all sampled tokens before the first update; RuntimeError if their mean is above `limit`.

    `scores`: the trainer's log-probability of every label, by sample id.
    """
    ours, theirs = (
        torch.from_numpy(np.concatenate(parts))
        for parts in (
            [scores[sample.sample_id][sample.prompt_length - 1 :] for sample in samples],
            [sample.rollout_logprobs for sample in samples],
        )
    )
    mismatch = mismatch_stats(ours, theirs, torch.ones_like(ours))
    if not mismatch["mean"] <= limit:
        raise RuntimeError(
            f"engine and trainer disagree before the first update: mean KL {mismatch['mean']:.2e} per token over "
            f"{mismatch['tokens']:.0f} tokens, train.max_start_mismatch_kl is {limit:.0e}; their weights or their maths "
            "differ"
        )
    return mismatch
