"""A training loop on a cluster that only writes down what it is asked."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from glm5_next.launchers.config import load_run_config
from glm5_next.launchers.metrics import MetricsLog, read_metrics
from glm5_next.launchers.prompts import PromptCursor
from glm5_next.launchers.run_state import RunState
from glm5_next.launchers.runtime.batch import Batch, StepReport
from glm5_next.launchers.runtime.checkpoint_folder import MARKER
from glm5_next.launchers.runtime.controller import Controller
from glm5_next.launchers.runtime.engine import Completion
from glm5_next.launchers.runtime.loop_control import StopRequest
from glm5_next.launchers.types import Prompt
from tests.support.tiny import Case

PROMPTS = [Prompt(id=f"p{number}", text="x" * (number + 2), answer="") for number in range(7)]
HELDOUT = (Prompt(id="h0", text="held", answer=""), Prompt(id="h1", text="out", answer=""))
TOKENIZER = SimpleNamespace(
    encode=lambda text, add_special_tokens: [ord(letter) for letter in text],
    decode=lambda tokens: "".join(chr(token) for token in tokens),
)


class Recorder:
    """A cluster of two ranks and one engine. `events` has every call; log-probabilities are a function of the tokens."""

    def __init__(self, *, trainer_offset: float = 0.0, offset_after_updates: float = 0.0):
        self.events: list[Any] = []
        self.batches: list[Batch] = []
        self.versions: list[int] = []
        self.trainer_offset, self.offset_after_updates = trainer_offset, offset_after_updates

    def generate(self, prompts: Sequence[np.ndarray], copies: int, *, max_new_tokens: int, seed: int):
        self.events.append(("generate", len(prompts), copies))
        generator = np.random.default_rng(seed)
        return [[completion(generator.integers(65, 90, size=3)) for _ in range(copies)] for _ in prompts]

    def train(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        self.events.append((method, *kwargs.items()))
        return getattr(self, f"_{method}")(*args)

    def publish(self, version: int) -> int:
        self.events.append(("publish",))
        self.versions.append(version)
        return 0

    def score(self, sequences: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        self.events.append(("engine score",))
        drift = self.offset_after_updates if self.versions else 0.0
        return [[logprobs(sequence) + np.float32(drift) for sequence in sequences]]

    def _score(self, batch: Batch) -> list[dict[str, np.ndarray]]:
        assert sorted(i for rows in batch.plan for row in rows for i in row) == list(range(len(batch.samples)))
        scores = {sample.sample_id: logprobs(sample.tokens) + self.trainer_offset for sample in batch.samples}
        return [scores, {}]

    def _train(self, batch: Batch) -> list[StepReport]:
        self.batches.append(batch)
        tokens = sum(sample.num_response_tokens for sample in batch.samples)
        return [report(tokens), report(0)]

    def _save(self, folder: Path, state: RunState) -> list[None]:
        folder.mkdir(parents=True)
        (folder / MARKER).touch()
        self.events.append(("saved", state))
        return [None, None]

    def _export(self, out: Path) -> list[None]:
        out.mkdir()
        (out / "by").write_text(str(len(self.batches)))
        return [None, None]

    def names(self) -> list[str]:
        return [event[0] for event in self.events]


def logprobs(tokens: np.ndarray) -> np.ndarray:
    """Of every token after the first."""
    return -(tokens[1:] % 5 + 1).astype(np.float32) / 5


def completion(tokens: np.ndarray) -> Completion:
    values = -(tokens % 5 + 1).astype(np.float32) / 5
    return Completion(tokens=tokens.astype(np.int32), logprobs=values, routes=None, finish_reason="stop")


def report(tokens: int) -> StepReport:
    sums = dict.fromkeys(("loss", "importance_weight", "entropy", "clipped"), 0.5 * tokens) | {"tokens": float(tokens)}
    values = np.zeros(tokens, dtype=np.float32)
    return StepReport(
        speaks=tokens > 0,
        sums=sums if tokens else {},
        trainer_logprobs=values,
        rollout_logprobs=values,
        grad_norm=1.0,
        lr=0.1,
        experts_same=0,
        experts_total=0,
        memory_bytes=0,
        replay_reads=0,
    )


def some(prompt: Prompt, text: str) -> float:
    """Groups of two are dropped one time in three or so."""
    return float(ord(text[0]) % 3)


class Loop:
    """A controller on a recorder, with what it is given and what it leaves."""

    def __init__(self, folder: Path, *settings: str, cluster: Recorder | None = None, reward=some, heldout=(), **state):
        values = [
            "rollout.prompts_per_step=3",
            "rollout.samples_per_prompt=2",
            "train.steps=4",
            "train.checkpoint_every=0",
            "parallel.ranks=2",
            "model.precision=fp32",
            "replay.routing=off",
            *(["data.heldout=tiny"] if heldout else []),
            *settings,
        ]
        self.run = load_run_config(None, {"model": {"checkpoint": "/none"}, "data": {"prompts": "tiny"}}, values)
        self.folder = folder
        self.cluster = cluster or Recorder()
        inputs = SimpleNamespace(
            tokenizer=TOKENIZER,
            prompts=PromptCursor(PROMPTS, 0, True),
            heldout=tuple(heldout),
            reward=reward,
            checkpoint=SimpleNamespace(config=Case().config()),
        )
        first = {"next_step": 0, "weights_version": 0, "prompt_cursor": 0, "seed": 0, "prompts_digest": ""} | state
        self.controller = Controller(self.run, inputs, self.cluster, folder, RunState(**first))  # type: ignore
        self.stop = StopRequest()
        self.stop_in_step: int | None = None
        self.shown: list[int] = []

    def go(self) -> "Loop":
        with MetricsLog(self.folder, tensorboard=False, next_step=self.controller.state.next_step) as log:
            self.controller.loop(log, self, self.stop)  # type: ignore
        return self

    def update(self, step: int, values: dict[str, Any]) -> None:
        """The progress display, which is also where this test asks for a stop."""
        self.shown.append(step)
        if step == self.stop_in_step:
            assert self.stop.waits
            self.stop.requested = True

    @property
    def state(self) -> RunState:
        return self.controller.state

    @property
    def records(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def checkpoints(self) -> list[int]:
        return [event[1].next_step for event in self.cluster.events if event[0] == "saved"]
