"""Where the end-to-end tests run their commands, and the runs that several of them look at."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.runtime.checkpoint_folder import last_checkpoint
from tests.support.cli_run import CliRun, records, running

SECONDS_TO_FINISH = 600.0  # a whole run of a few steps, on a busy machine
SECONDS_TO_STOP = 240.0  # from Ctrl-C to the exit: the rest of a step, a checkpoint, plots
SECONDS_TO_FAIL = 180.0  # from what makes a run fail to its exit; a busy machine takes its time
SIX_STEPS = (
    "data.heldout=heldout.jsonl",
    "train.steps=6",
    "train.checkpoint_every=3",
    "train.keep_checkpoints=0",
    "grpo.divide_by_std=true",
)
# Rewards that differ within a group whatever the model says; a file beside it makes the next one go wrong.
GRADER = """
from pathlib import Path

def spread(prompt, text):
    reward = sum(map(ord, text)) % 7 / 7
    fault = Path("fault.txt")
    if not fault.exists():
        return reward
    if fault.read_text() == "raise":
        raise RuntimeError("the grader is out of order")
    return reward * 1e38
"""
LETTERS = "abcdefghhgfedcbabdfhaceg"


@dataclass(frozen=True)
class Workplace:
    """A folder with a tiny random checkpoint, prompt files and a reward module."""

    folder: Path

    def run_dir(self, name: str) -> Path:
        return self.folder / "runs" / name

    def new(self, name: str, *settings: str) -> list[str]:
        """Arguments of a small run called `name`; prompts are longer than the model's `index_topk`."""
        values = (
            "model.checkpoint=tiny-checkpoint",
            f"output.run_id={name}",
            "data.prompts=prompts.jsonl",
            "data.heldout=none",
            "data.reward=grader:spread",
            "rollout.prompts_per_step=4",
            "rollout.samples_per_prompt=4",
            "grpo.divide_by_std=false",
            "optimizer.lr=1e-3",
            "train.eval_every=0",
            *settings,
        )
        return ["train", "--preset", "tiny", *(word for value in values for word in ("--set", value))]

    def start(self, name: str, *settings: str) -> Any:
        return running(self.folder, *self.new(name, *settings))

    def resume(self, name: str, *settings: str) -> Any:
        changed = (word for value in settings for word in ("--set", value))
        return running(self.folder, "train", "--resume", str(self.run_dir(name)), *changed)

    @contextmanager
    def fault(self, kind: str) -> Iterator[None]:
        """While open, rewards go wrong: "raise", or "huge"."""
        path = self.folder / "fault.txt"
        path.write_text(kind)
        try:
            yield
        finally:
            path.unlink()


@dataclass(frozen=True)
class Ended:
    """A command that is over, with no process of it left."""

    run_dir: Path
    code: int
    output: str
    records: list[dict[str, Any]]
    checkpoint: Path | None  # the last whole one

    @property
    def error(self) -> str:
        """The one message at the end of a failed run."""
        return self.output[self.output.index("error: ") :]


def wait_for_steps(run: CliRun, run_dir: Path, count: int) -> None:
    run.wait_until(lambda: len(records(run_dir)) >= count, f"{count} steps")


def wait_for_rollout(run: CliRun, run_dir: Path, step: int) -> None:
    """Until the samples of a step (counted from 0) are there: its update comes next."""
    run.wait_until((run_dir / f"rollouts/step-{step:06d}.jsonl").exists, f"rollout of step {step}")


def end_of(run: CliRun, run_dir: Path, deadline: float = SECONDS_TO_FAIL) -> Ended:
    """Waits for the exit and for all processes to be gone; fails if either takes too long."""
    code = run.wait(deadline)
    run.wait_until_gone()
    return Ended(run_dir, code, run.output, records(run_dir), last_checkpoint(run_dir))


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder = tmp_path_factory.mktemp("workplace")
    write_tiny_checkpoint(folder / "tiny-checkpoint")
    (folder / "grader.py").write_text(GRADER)
    for name, count, shift in (("prompts", 8, 0), ("heldout", 4, 3)):
        texts = [LETTERS[shift : shift + 18 + number % 5] for number in range(count)]
        lines = [
            {"prompt": f"{number}{text}", "answer": "a"}
            if number % 2
            else {"messages": [{"role": "user", "content": f"{number}{text}"}], "answer": "a"}
            for number, text in enumerate(texts)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Workplace(folder)


@pytest.fixture(scope="session")
def straight(workplace: Workplace) -> Ended:
    """Six steps on two expert-parallel ranks, in one go."""
    with workplace.start("straight", *SIX_STEPS) as run:
        return end_of(run, workplace.run_dir("straight"), SECONDS_TO_FINISH)
