"""The training loop: sample, score, train, publish, record. Ordering rules live here and nowhere else.

Weights change only in `_update`, after the step's samples are complete and before the next step asks for any; engines
hold the new version, proved bit by bit and by a scored probe, before `weights_version` advances. A checkpoint is taken
between steps, so `RunState` always describes a whole number of steps.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from glm5_next.launchers.config import RunConfig
from glm5_next.launchers.grpo import group_advantages
from glm5_next.launchers.metrics import MetricsLog
from glm5_next.launchers.packing import Scores, plan_step
from glm5_next.launchers.phase_watch import unwatched
from glm5_next.launchers.progress import Progress
from glm5_next.launchers.replay_plan import ReplayPlan
from glm5_next.launchers.run_state import RunState, step_seed
from glm5_next.launchers.runtime.agreement import check_finite, check_probes, start_mismatch
from glm5_next.launchers.runtime.batch import Batch, StepReport
from glm5_next.launchers.runtime.checkpoint_folder import drop_old_checkpoints, step_folder
from glm5_next.launchers.runtime.cluster import Cluster
from glm5_next.launchers.runtime.loop_control import StopRequest, Timer
from glm5_next.launchers.runtime.preflight import Inputs
from glm5_next.launchers.runtime.replay_probe import probe_replay
from glm5_next.launchers.runtime.rollout import Rollout, Sampler, encode, write_rollout
from glm5_next.launchers.runtime.step_metrics import step_metrics
from glm5_next.launchers.types import Group, Sample

NUM_PROBES = 4


class Controller:
    """Runs steps of a `Cluster` until the run's last one."""

    def __init__(self, run: RunConfig, inputs: Inputs, cluster: Cluster, run_dir: Path, state: RunState):
        self.run, self.inputs, self.cluster, self.run_dir, self.state = run, inputs, cluster, run_dir, state
        self.replay = ReplayPlan.of(run.replay, inputs.checkpoint.config)
        self.sampler = Sampler(run, inputs.tokenizer, cluster, inputs.reward, self.replay)
        self.topology = run.parallel.topology()
        self.saved_step = state.next_step
        self.watch: Callable[[str], AbstractContextManager[None]] = unwatched
        self._ahead: tuple[int, Future[Rollout]] | None = None  # the rollout of a later step, on its way
        self._sampling = ThreadPoolExecutor(1, "rollout")
        self.begun = False
        self.step_in_progress: int | None = None

    @property
    def done(self) -> bool:
        return self.state.next_step >= self.run.train.steps

    def loop(self, log: MetricsLog, progress: Progress, stop: StopRequest) -> None:
        """All remaining steps, with checkpoints, evaluation and one record each."""
        self.begun = True
        if self.state.next_step and not self.done:  # resumed: engines still hold the weights the run started from
            self.cluster.publish(self.state.weights_version)
        if self.replay.from_engine and not self.done:
            first = encode(self.inputs.tokenizer, self.inputs.prompts.take(1, 0)[0][0])
            probe_replay(self.sampler, self.cluster, self._unweighted, first, replicas=self.topology.dp)
        with stop.after_the_step():
            while not self.done and not stop.requested:
                self.step_in_progress, timer = self.state.next_step, Timer(self.watch)
                with timer.phase("step"):
                    values = self._step(self.step_in_progress, timer)
                    if stop.requested or self._saves_now():
                        with timer.phase("checkpoint"):
                            self._save()
                values |= {f"seconds_{name}": seconds for name, seconds in timer.seconds.items()}
                values["tokens_per_second"] = values.pop("tokens_all") / timer.seconds["step"]
                values["rollouts_per_second"] = values.pop("samples_all") / max(timer.seconds["rollout"], 1e-9)
                log.write(self.step_in_progress, values)
                progress.update(self.step_in_progress, values)
            self.step_in_progress = None
            if self.saved_step != self.state.next_step:  # stopped after the step had been left unsaved
                self._save()

    def export(self, out: Path) -> None:
        """Writes the trained model as a Hugging Face folder, in place of an earlier one."""
        new = out.with_name(f".{out.name}.new")
        for leftover in out.parent.glob(f".{out.name}.*"):
            shutil.rmtree(leftover)
        self.cluster.train("export", new)
        if out.exists():
            shutil.rmtree(out)
        new.rename(out)

    def _step(self, step: int, timer: Timer) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if step == 0:
            with timer.phase("eval"):
                extra |= self._compare_at_start()
        with self.watch("rollout"):
            rollout = self._rollout(step)
        timer.seconds |= {"rollout": rollout.seconds_generate, "reward": rollout.seconds_reward}
        write_rollout(self.run_dir, step, rollout)
        reports, plans = self._update(rollout, timer)
        values = step_metrics(rollout, reports, plans, rollout.weights_version, self.replay)
        self._advance(rollout, trained=bool(reports))
        if reports:
            with timer.phase("sync"):
                self._wait_for_rollout()
                self._publish([group.samples[0] for group in rollout.kept[:NUM_PROBES]])
        if self._evaluates_after(step):
            with timer.phase("eval"):
                extra["heldout_reward"] = self._evaluate(step, "heldout")
        return values | extra

    def _rollout(self, step: int) -> Rollout:
        """This step's samples; with `rollout.one_step_off` those of the next one are begun, to be there after training."""
        if self._ahead is not None and self._ahead[0] == step:
            rollout = self._ahead[1].result()
        else:
            rollout = self._sample(step, self.state.prompt_cursor)
        self._ahead = None
        if self.run.rollout.one_step_off and step + 1 < self.run.train.steps:
            self._ahead = step + 1, self._sampling.submit(self._sample, step + 1, rollout.cursor)
        return rollout

    def _sample(self, step: int, cursor: int) -> Rollout:
        return self.sampler.step(step, self.inputs.prompts, cursor, self.state.weights_version)

    def _wait_for_rollout(self) -> None:
        """Weights do not change under samples that are on their way."""
        if self._ahead is not None:
            wait([self._ahead[1]])

    def _update(self, rollout: Rollout, timer: Timer) -> tuple[list[list[StepReport]], list[int]]:
        """Optimizer steps on the kept groups: reports by mini-batch and rank, and micro-batches per replica."""
        reports, plans = [], []
        batches = [self._batch(groups) for groups in _split(rollout.kept, self.run.grpo.mini_batches)]
        old, reference = self._scores(batches, timer)
        for batch in batches:
            batch = replace(batch, old_logprobs=old, reference_logprobs=reference)
            with timer.phase("train"):
                reports.append(self.cluster.train("train", batch))
            plans.append(len(batch.plan[0]))
        timer.seconds.setdefault("train", 0.0)
        return reports, plans

    def _scores(self, batches: Sequence[Batch], timer: Timer) -> tuple[Scores | None, Scores | None]:
        """Log-probabilities under the policy before the update and under the reference, where the step needs them.

        The first pass is also what a run that replays its own choices records: with the plans of the updates, so that
        every rank finds its rows again.
        """
        timer.seconds["logprobs"] = 0.0
        record = {"record": True} if self.replay.from_trainer else {}
        old = reference = None
        with timer.phase("logprobs"):
            if batches and (self.run.grpo.mini_batches > 1 or record):
                old = _merged([scores for batch in batches for scores in self.cluster.train("score", batch, **record)])
            if batches and self.run.grpo.kl_coef > 0:
                every = [self.cluster.train("score", batch, reference=True) for batch in batches]
                reference = _merged([scores for by_rank in every for scores in by_rank])
        return old, reference

    def _batch(self, groups: Sequence[Group]) -> Batch:
        samples = tuple(sample for group in groups for sample in group.samples)
        advantages: dict[str, float] = {}
        for group in groups:
            values = group_advantages(group.rewards, divide_by_std=self.run.grpo.divide_by_std)
            advantages |= {sample.sample_id: value for sample, value in zip(group.samples, values)}
        return self._planned(samples, advantages)

    def _planned(self, samples: tuple[Sample, ...], advantages: Mapping[str, float]) -> Batch:
        plan = plan_step(
            [len(sample.tokens) - 1 for sample in samples],
            num_replicas=self.topology.dp,
            tokens_per_micro_batch=self.run.train.tokens_per_micro_batch,
            multiple=self.topology.pp if self.topology.vpp else 1,
        )
        return Batch(samples=samples, advantages=advantages, plan=plan)

    def _publish(self, probes: Sequence[Sample]) -> None:
        """New weights to the engines, and the same tokens scored on both sides: derived copies escape checksums."""
        ours = self._score(probes, replayed=False)
        check_finite(ours, self.run.optimizer.lr)
        self.cluster.publish(self.state.weights_version)
        theirs = self.cluster.score([probe.tokens for probe in probes])
        check_probes([ours[probe.sample_id] for probe in probes], theirs, self.run.model.precision)

    def _saves_now(self) -> bool:
        every = self.run.train.checkpoint_every
        return self.done or (every > 0 and self.state.next_step % every == 0)

    def _evaluates_after(self, step: int) -> bool:
        every = self.run.train.eval_every
        last = step + 1 == self.run.train.steps
        return bool(self.inputs.heldout) and (last or (every > 0 and (step + 1) % every == 0))

    def _evaluate(self, step: int, stream: str) -> float:
        """Mean reward of one sample per held-out prompt."""
        seed = step_seed(self.run.train.seed, step, f"eval/{stream}")
        version = self.state.weights_version
        groups = self.sampler.groups(self.inputs.heldout, 1, seed, version, f"{stream}.{step}", Rollout())
        return float(np.mean([group.rewards for group in groups]))

    def _compare_at_start(self) -> dict[str, float]:
        """Engine and trainer score the same samples before the first update; raises RuntimeError if they disagree.

        The samples are answers to the held-out prompts (to the first training prompts if there are none), so the same
        pass gives the reward the run starts from.
        """
        settings, seed = self.run.rollout, step_seed(self.run.train.seed, 0, "start")
        prompts = self.inputs.heldout or self.inputs.prompts.take(settings.prompts_per_step, 0)[0]
        groups = self.sampler.groups(prompts, settings.samples_per_prompt, seed, 0, "start", Rollout())
        samples = [sample for group in groups for sample in group.samples]
        mismatch = start_mismatch(samples, self._score(samples, replayed=True), self.run.train.max_start_mismatch_kl)
        values = {f"start_mismatch_kl_{name}": mismatch[name] for name in ("mean", "max")}
        values["start_mismatch_tokens"] = mismatch["tokens"]
        if self.inputs.heldout:
            values["heldout_reward_start"] = float(np.mean([group.rewards for group in groups]))
        return values

    def _score(self, samples: Sequence[Sample], *, replayed: bool) -> dict[str, np.ndarray]:
        """The trainer's log-probability of every label of every sample."""
        return _merged(self.cluster.train("score", self._unweighted(samples), replayed=replayed))

    def _unweighted(self, samples: Sequence[Sample]) -> Batch:
        """Samples that are only looked at."""
        return self._planned(tuple(samples), {sample.sample_id: 0.0 for sample in samples})

    def _advance(self, rollout: Rollout, *, trained: bool) -> None:
        kept = sum(len(group.samples) for group in rollout.kept)
        dropped = rollout.not_trained
        reasons = Counter(self.state.dropped_by_reason) + dropped
        self.state = replace(
            self.state,
            next_step=self.state.next_step + 1,
            weights_version=self.state.weights_version + trained,
            prompt_cursor=rollout.cursor,
            samples_drawn=self.state.samples_drawn + len(rollout.samples) + len(rollout.lost),
            samples_trained=self.state.samples_trained + kept,
            samples_dropped=self.state.samples_dropped + dropped.total(),
            dropped_by_reason=dict(reasons),
        )

    def _save(self) -> None:
        self.cluster.train("save", step_folder(self.run_dir, self.state.next_step), self.state)
        self.saved_step = self.state.next_step
        drop_old_checkpoints(self.run_dir, self.run.train.keep_checkpoints)


def _split(groups: Sequence[Group], parts: int) -> list[list[Group]]:
    """Consecutive, nearly equal parts without empty ones; a group is never split."""
    bounds = [len(groups) * part // parts for part in range(parts + 1)]
    return [list(groups[start:end]) for start, end in pairwise(bounds) if end > start]


def _merged(scores_by_rank: Sequence[Scores]) -> dict[str, np.ndarray]:
    return {name: value for scores in scores_by_rank for name, value in scores.items()}
