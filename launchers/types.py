"""What crosses process borders: prompts, samples and groups, as frozen dataclasses of numpy arrays. Needs no torch."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from glm5_next.plugins.pick_coding import PickRecord

FinishReason = Literal["stop", "length", "aborted"]
FINISH_REASONS = ("stop", "length", "aborted")
Void = Literal["retracted"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question with its expected answer.

    `messages` are chat messages ({"role", "content"}) for the model's chat template; where it is None, `text` is the
    prompt. With messages, `text` is their contents, one per line, for people and rewards to read.
    """

    id: str
    text: str
    answer: str
    messages: tuple[dict[str, str], ...] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One response to a prompt, as the engine sampled it. S is the number of tokens, prompt included.

    tokens: int32 [S], prompt then response.
    prompt_length: prompt tokens; at least 1, because the first token of all has no log-probability.
    rollout_logprobs: float32 [S - prompt_length], natural log, of the response tokens.
    reward: None until it is scored.
    routes: int16 [S - 1, MoE layers, experts per token], the experts of each token that was fed to the model (the last
        token never is), -1 in every slot where the engine has none; or None where routing is not recorded.
    weights_version: number of weight updates behind the policy that sampled it.
    route_weights: float32 of the same shape, the combine weights the engine gave these experts, or None.
    picks: what the indexer of each sparse-attention layer selected for the same tokens, or None.
    void: why its record does not belong to its log-probabilities; such a sample carries no record.

    Records are checked against the model by `replay_payload`.
    """

    prompt_id: str
    sample_id: str
    tokens: np.ndarray
    prompt_length: int
    rollout_logprobs: np.ndarray
    reward: float | None
    routes: np.ndarray | None
    finish_reason: FinishReason
    weights_version: int
    response_text: str
    route_weights: np.ndarray | None = None
    picks: PickRecord | None = None
    void: Void | None = None

    def __post_init__(self) -> None:
        self._check_array("tokens", self.tokens, np.int32, (None,))
        if not 1 <= self.prompt_length < len(self.tokens):
            self._refuse(f"prompt_length is {self.prompt_length} of {len(self.tokens)} tokens; both parts need a token")
        self._check_array("rollout_logprobs", self.rollout_logprobs, np.float32, (self.num_response_tokens,))
        if not np.isfinite(self.rollout_logprobs).all():
            first = int(np.flatnonzero(~np.isfinite(self.rollout_logprobs))[0])
            self._refuse(f"rollout_logprobs[{first}] is {self.rollout_logprobs[first]}")
        if self.reward is not None and not math.isfinite(self.reward):
            self._refuse(f"reward is {self.reward}")
        if self.finish_reason not in FINISH_REASONS:
            self._refuse(f"finish_reason is {self.finish_reason!r}; known are {', '.join(FINISH_REASONS)}")
        if self.weights_version < 0:
            self._refuse(f"weights_version is {self.weights_version}")
        if self.void is not None and not (self.routes is self.route_weights is self.picks is None):
            self._refuse(f"is void ({self.void}) and carries a record")

    @property
    def num_response_tokens(self) -> int:
        return len(self.tokens) - self.prompt_length

    def _check_array(self, name: str, array: Any, dtype: type, shape: tuple[int | None, ...]) -> None:
        """`shape` has None where any size is fine."""
        if not isinstance(array, np.ndarray) or array.dtype != dtype:
            self._refuse(f"{name} is {getattr(array, 'dtype', type(array).__name__)}, expected {np.dtype(dtype)}")
        sizes_fit = all(wanted in (None, size) for wanted, size in zip(shape, array.shape))
        if array.ndim != len(shape) or not sizes_fit:
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            self._refuse(f"{name} has shape {array.shape}, expected ({wanted})")

    def _refuse(self, problem: str) -> None:
        raise ValueError(f"sample {self.sample_id!r}: {problem}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """A prompt and all its samples: what advantages are computed over."""

    prompt: Prompt
    samples: tuple[Sample, ...]

    @property
    def rewards(self) -> list[float]:
        """Of every sample, in order; all samples are scored."""
        rewards = [sample.reward for sample in self.samples if sample.reward is not None]
        if len(rewards) != len(self.samples):
            raise ValueError(f"group of prompt {self.prompt.id!r} has samples without a reward")
        return rewards

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError(f"group of prompt {self.prompt.id!r} has no sample")
        seen: set[str] = set()
        for sample in self.samples:
            if sample.prompt_id != self.prompt.id:
                raise ValueError(
                    f"sample {sample.sample_id!r}: answers prompt {sample.prompt_id!r}, "
                    f"but is in the group of {self.prompt.id!r}"
                )
            if sample.sample_id in seen:
                raise ValueError(f"sample {sample.sample_id!r}: is in its group twice")
            seen.add(sample.sample_id)
