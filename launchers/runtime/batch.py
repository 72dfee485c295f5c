"""What the controller sends to every trainer rank for one update, and what comes back. Needs no Megatron."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from glm5_next.launchers.packing import Plan, Scores
from glm5_next.launchers.types import Sample


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The samples of one update, for all ranks: who trains which is in the plan.

    `old_logprobs` and `reference_logprobs` are scores of the same samples; None where the loss needs none.
    """

    samples: tuple[Sample, ...]
    advantages: Mapping[str, float]
    plan: Plan
    old_logprobs: Scores | None = None
    reference_logprobs: Scores | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class StepReport:
    """What one rank knows of a step. `sums` and the log-probabilities are empty except where `speaks`."""

    speaks: bool  # the rank that reports for its replica: last stage, first TP rank
    sums: Mapping[str, float]
    trainer_logprobs: np.ndarray
    rollout_logprobs: np.ndarray
    grad_norm: float
    lr: float
    experts_same: int  # over all ranks
    experts_total: int
    replay_reads: int  # of this rank's layers, all of them as planned
    memory_bytes: int
