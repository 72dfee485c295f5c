"""Prompts in, scored groups out: one step's samples, with groups that teach nothing replaced."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from glm5_next.launchers.atomic_write import write_atomic
from glm5_next.launchers.config import RunConfig
from glm5_next.launchers.grpo import has_spread
from glm5_next.launchers.prompts import PromptCursor
from glm5_next.launchers.replay_payload import check_record
from glm5_next.launchers.replay_plan import ReplayPlan
from glm5_next.launchers.rewards import Reward, score
from glm5_next.launchers.run_state import step_seed
from glm5_next.launchers.runtime.engine import Completion, Lost
from glm5_next.launchers.types import Group, Prompt, Sample

RECORDS = ("routes", "route_weights", "picks")  # fields of a completion and of a sample


class Engines(Protocol):
    """All rollout engines of a run, seen as one."""

    def generate(
        self, prompts: Sequence[np.ndarray], samples_per_prompt: int, *, max_new_tokens: int, seed: int
    ) -> list[list[Completion | Lost]]: ...


@dataclass(frozen=True)
class LostSample:
    """A sample that an engine never delivered."""

    prompt_id: str
    sample_id: str
    reason: str


@dataclass(eq=False)
class Rollout:
    """A step's groups. `dropped` are those whose rewards were all equal, `short` those of which too few samples came;
    `rounds` counts extra rounds of sampling."""

    kept: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    short: list[Group] = field(default_factory=list)
    lost: list[LostSample] = field(default_factory=list)
    rounds: int = 0
    cursor: int = 0
    weights_version: int = 0  # of the engines when it began
    seconds_generate: float = 0.0
    seconds_reward: float = 0.0

    @property
    def samples(self) -> list[Sample]:
        """All that came, trained on or not."""
        return [sample for group in (*self.kept, *self.dropped, *self.short) for sample in group.samples]

    @property
    def not_trained(self) -> Counter[str]:
        """How many samples that were asked for are not trained on, by reason."""
        counts = Counter(lost.reason for lost in self.lost)
        counts["equal rewards"] += sum(len(group.samples) for group in self.dropped)
        counts["short group"] += sum(len(group.samples) for group in self.short)
        return +counts


class Sampler:
    """Turns prompts into scored groups with a tokenizer, engines and a reward."""

    def __init__(self, run: RunConfig, tokenizer: Any, engines: Engines, reward: Reward, replay: ReplayPlan):
        self.run, self.tokenizer, self.engines, self.reward, self.replay = run, tokenizer, engines, reward, replay

    def step(self, step: int, prompts: PromptCursor, cursor: int, weights_version: int) -> Rollout:
        """Samples `prompts_per_step` groups, and up to `max_resample_rounds` times as many as are missing again."""
        settings, rollout = self.run.rollout, Rollout(cursor=cursor, weights_version=weights_version)
        enough = settings.min_samples or settings.samples_per_prompt
        while True:
            wanted = settings.prompts_per_step - len(rollout.kept)
            drawn, rollout.cursor = prompts.take(wanted, rollout.cursor)
            seed = step_seed(self.run.train.seed, step, f"rollout/{rollout.rounds}")
            name = f"{step}.{rollout.rounds}"
            for group in self.groups(drawn, settings.samples_per_prompt, seed, weights_version, name, rollout):
                if len(group.samples) < enough:
                    rollout.short.append(_without_records(group))
                elif self.run.grpo.drop_zero_spread and not has_spread(group.rewards):
                    rollout.dropped.append(_without_records(group))
                else:
                    rollout.kept.append(group)
            done = len(rollout.kept) == settings.prompts_per_step
            if done or rollout.rounds == self.run.grpo.max_resample_rounds:
                return rollout
            rollout.rounds += 1

    def groups(
        self, prompts: Sequence[Prompt], copies: int, seed: int, weights_version: int, name: str, timing: Rollout
    ) -> list[Group]:
        """One scored group per prompt with an answer; sample ids start with `name`. Lost samples go to `timing`."""
        start = time.monotonic()
        tokens = [encode(self.tokenizer, prompt) for prompt in prompts]
        completions = self.engines.generate(tokens, copies, max_new_tokens=self.run.rollout.max_new_tokens, seed=seed)
        timing.seconds_generate += time.monotonic() - start
        start = time.monotonic()
        groups = [
            group
            for number, (prompt, ids, answers) in enumerate(zip(prompts, tokens, completions, strict=True))
            if (group := self._group(prompt, ids, answers, weights_version, f"{name}.{number}", timing.lost))
        ]
        timing.seconds_reward += time.monotonic() - start
        return groups

    def _group(
        self,
        prompt: Prompt,
        tokens: np.ndarray,
        completions: Sequence[Completion | Lost],
        weights_version: int,
        name: str,
        lost: list[LostSample],
    ) -> Group | None:
        reasons = [self._why_lost(completion) for completion in completions]
        lost += [LostSample(prompt.id, f"{name}.{number}", reason) for number, reason in enumerate(reasons) if reason]
        samples = [
            self.sample(prompt.id, tokens, completion, weights_version, f"{name}.{number}")
            for number, completion in enumerate(completions)
            if isinstance(completion, Completion) and not reasons[number]
        ]
        if not samples:
            return None
        scored = [replace(sample, reward=score(self.reward, prompt, sample.response_text)) for sample in samples]
        return Group(prompt=prompt, samples=tuple(scored))

    def _why_lost(self, completion: Completion | Lost) -> str | None:
        """A response that never came, or came with a record of other log-probabilities to a run that replays it."""
        if isinstance(completion, Lost):
            return completion.reason
        return completion.void if self.replay.from_engine else None

    def sample(
        self, prompt_id: str, tokens: np.ndarray, completion: Completion, weights_version: int, sample_id: str
    ) -> Sample:
        """A completion as an unscored sample; ValueError where its record is not what the run replays.

        The record of a void completion is dropped.
        """
        sample = Sample(
            prompt_id=prompt_id,
            sample_id=sample_id,
            tokens=np.concatenate([tokens, completion.tokens]),
            prompt_length=len(tokens),
            rollout_logprobs=completion.logprobs,
            reward=None,
            finish_reason=completion.finish_reason,
            weights_version=weights_version if completion.weights_version is None else completion.weights_version,
            response_text=self.tokenizer.decode(completion.tokens.tolist()),
            void=completion.void,
            **{stream: getattr(completion, stream) if completion.void is None else None for stream in RECORDS},
        )
        if sample.void is None:
            check_record(sample, self.replay)
        return sample


def _without_records(group: Group) -> Group:
    """Of a group that is not trained on: only its texts and rewards are looked at again."""
    bare = (replace(sample, routes=None, route_weights=None, picks=None) for sample in group.samples)
    return replace(group, samples=tuple(bare))


def encode(tokenizer: Any, prompt: Prompt) -> np.ndarray:
    """int32 tokens of a prompt: chat messages through the model's template, plain text as it is."""
    if prompt.messages is None:
        ids = tokenizer.encode(prompt.text, add_special_tokens=False)
    else:
        try:
            ids = tokenizer.apply_chat_template(
                list(prompt.messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # a template is a program of the checkpoint's
            raise ValueError(
                f"prompt {prompt.id!r}: the checkpoint's chat template fails on it ({type(error).__name__}: {error})"
            ) from error
    if not ids:
        raise ValueError(f"prompt {prompt.id!r} has no tokens")
    return np.array(ids, dtype=np.int32)


def longest_prompt(tokenizer: Any, prompts: Sequence[Prompt]) -> tuple[int, str]:
    """Length in tokens and id of the longest prompt."""
    lengths = [(len(encode(tokenizer, prompt)), prompt.id) for prompt in prompts]
    return max(lengths)


def write_rollout(run_dir: Path, step: int, rollout: Rollout) -> None:
    """Every sample of a step, one JSON line each, for people to read and for a resumed run to be compared with."""
    lines = [
        json.dumps(
            {
                "prompt_id": group.prompt.id,
                "sample_id": sample.sample_id,
                "reward": sample.reward,
                "trained": trained,
                "finish_reason": sample.finish_reason,
                "num_tokens": len(sample.tokens),
                "weights_version": sample.weights_version,
                "void": sample.void,
                "prompt": group.prompt.text,
                "response": sample.response_text,
            }
        )
        for trained, groups in ((True, rollout.kept), (False, [*rollout.dropped, *rollout.short]))
        for group in groups
        for sample in group.samples
    ]
    lines += [json.dumps({**asdict(lost), "trained": False}) for lost in rollout.lost]
    folder = run_dir / "rollouts"
    folder.mkdir(exist_ok=True)
    write_atomic(folder / f"step-{step:06d}.jsonl", "".join(f"{line}\n" for line in lines).encode())
