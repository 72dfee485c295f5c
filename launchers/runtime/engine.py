"""What the training loop asks of a rollout engine, whatever serves the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from glm5_next.launchers.types import FinishReason, Void
from glm5_next.plugins.pick_coding import PickRecord

# (name on disk, tensor): a piece of a weight update.
Bucket = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """One sampled response.

    tokens: int32 [R], an end-of-turn token included if it was sampled.
    logprobs: float32 [R], raw: natural log of the model's own distribution at temperature 1.
    routes: int16 [P + R - 1, MoE layers, experts per token] of prompt and response (P prompt tokens), or None; -1 in
        every slot of a token without a record. MoE layers in order; the MTP layer is not one of them.
    route_weights: float32 of the same shape: the weights these experts were given, routed scaling included; or None.
    picks: the indexer's pools for the same P + R - 1 tokens (`encode_picks`), or None.
    void: "retracted" where the engine computed part of it twice: its record would not belong to its log-probabilities.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    routes: np.ndarray | None
    finish_reason: FinishReason
    weights_version: int | None = None  # where the engine says it
    route_weights: np.ndarray | None = None
    picks: PickRecord | None = None
    void: Void | None = None


@dataclass(frozen=True)
class Lost:
    """A response that never came, and why: a few words that are counted, such as "request deadline", and the engine's."""

    reason: str
    error: str = field(default="", compare=False)


class RolloutEngine(Protocol):
    """An engine holds one version of the weights and samples from it.

    Weights change only between `begin_update` and `commit_update`; nothing is generated in between.
    """

    def generate(
        self, prompts: Sequence[np.ndarray], samples_per_prompt: int, *, max_new_tokens: int, seed: int
    ) -> list[list[Completion]]:
        """Samples from int32 prompts at temperature 1 and top-p 1: one list of completions per prompt."""
        ...

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """float32 [S - 1] raw log-probability of every token after the first, per sequence."""
        ...

    def begin_update(self, version: int) -> None:
        """Opens an update to weights version `version`."""
        ...

    def put_weights(self, bucket: Bucket) -> None:
        """Takes whole tensors under their names on disk; an unknown name is an error."""
        ...

    def commit_update(self) -> dict[str, str]:
        """Closes the update and returns a digest of what the engine holds NOW of every tensor that training changes.

        Tensors that were not put in are there, too. See `weight_digest`; dtypes are those of the update.
        """
        ...

    def weights_version(self) -> int:
        """The version of the last committed update; 0 is the checkpoint the engine was started from."""
        ...
