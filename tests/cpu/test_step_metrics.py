"""The record of a step says what its ranks and its rollout reported, by hand-computed values."""

import math
from dataclasses import replace

import numpy as np
import pytest

from glm5_next.launchers.metrics import EXTRA_METRICS, STEP_METRICS, MetricsLog
from glm5_next.launchers.runtime.batch import StepReport
from glm5_next.launchers.runtime.rollout import Rollout
from glm5_next.launchers.runtime.step_metrics import step_metrics
from glm5_next.launchers.types import Group, Prompt, Sample
from tests.support.replay import plan_of

OFF = plan_of(routing="off")

NO_LOGPROBS = np.zeros(0, dtype=np.float32)
# What the controller's clock adds.
TIMES = {
    "tokens_per_second",
    "rollouts_per_second",
    *(f"seconds_{phase}" for phase in ("rollout", "reward", "logprobs", "train", "step")),
}


def sample(name: str, reward: float, response: int, finish: str = "stop") -> Sample:
    return Sample(
        prompt_id=name[0],
        sample_id=name,
        tokens=np.zeros(10 + response, dtype=np.int32),
        prompt_length=10,
        rollout_logprobs=np.zeros(response, dtype=np.float32),
        reward=reward,
        routes=None,
        finish_reason=finish,
        weights_version=0,
        response_text="",
    )


def group(name: str, *samples: Sample) -> Group:
    return Group(prompt=Prompt(id=name, text="", answer=""), samples=samples)


ROLLOUT = Rollout(
    kept=[group("a", sample("a0", 1.0, 2), sample("a1", 0.0, 4, "length"))],
    dropped=[group("b", sample("b0", 0.5, 6), sample("b1", 0.5, 8))],
    rounds=1,
)


def report(speaks: bool = True, **changes) -> StepReport:
    values = {
        "speaks": speaks,
        "sums": {},
        "trainer_logprobs": NO_LOGPROBS,
        "rollout_logprobs": NO_LOGPROBS,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "experts_same": 30,
        "experts_total": 40,
        "memory_bytes": 2**30,
        "replay_reads": 5,
    }
    return StepReport(**{**values, **changes})


def sums(tokens: float, scale: float = 1.0, **extra: float) -> dict[str, float]:
    names = ("clipped", "ratio", "old_kl", "importance_weight", "entropy", "loss")
    return {"tokens": tokens, **{name: scale * place for place, name in enumerate(names)}, **extra}


def two_replicas() -> list[StepReport]:
    """Replicas with one rank that speaks and one that does not; together six tokens."""
    return [
        report(
            sums=sums(2.0),
            trainer_logprobs=np.float32([-1.0, -2.0]),
            rollout_logprobs=np.float32([-1.5, -2.0]),
            memory_bytes=3 * 2**30,
        ),
        report(speaks=False),
        report(
            sums=sums(4.0, 2.0),
            trainer_logprobs=np.float32([-1, -1, -1, -1]),
            rollout_logprobs=np.float32([-1, -1, -1, -2]),
        ),
        report(speaks=False, memory_bytes=2**29),
    ]


def test_samples_of_kept_and_dropped_groups_count():
    values = step_metrics(ROLLOUT, [two_replicas()], [3], 7, OFF)
    rewards = [1.0, 0.0, 0.5, 0.5]
    assert values["reward_mean"] == 0.5 and values["reward_std"] == pytest.approx(np.std(rewards))
    assert values["response_tokens_mean"] == 5.0 and values["truncated_fraction"] == 0.25
    assert (values["groups_sampled"], values["groups_dropped"], values["resample_rounds"]) == (2, 1, 1)
    assert (values["samples_trained"], values["micro_batches"], values["weights_version"]) == (2, 3, 7)
    assert values["tokens_all"] == 4 * 10 + 2 + 4 + 6 + 8


def test_sums_of_all_replicas_are_divided_by_all_tokens():
    values = step_metrics(ROLLOUT, [two_replicas()], [1], 0, OFF)
    assert values["tokens_trained"] == 6
    assert values["loss"] == pytest.approx(3 * 5 / 6)
    assert values["entropy"] == pytest.approx(3 * 4 / 6)
    assert values["importance_weight_mean"] == pytest.approx(3 * 3 / 6)
    assert values["clip_fraction"] == 0.0
    assert values["memory_gib"] == 3.0
    assert (values["grad_norm"], values["lr"]) == (0.5, 1e-3)


def test_the_mismatch_is_over_the_tokens_of_all_ranks_at_once():
    values = step_metrics(ROLLOUT, [two_replicas()], [1], 0, OFF)
    # k3 of the two tokens that differ: d = trainer - engine = 0.5 and 1.
    kl = [math.exp(0.5) - 1.5, math.e - 2]
    assert values["mismatch_tokens"] == 6
    assert values["mismatch_kl_mean"] == pytest.approx(sum(kl) / 6, rel=1e-6)
    assert values["mismatch_kl_max"] == values["mismatch_kl_p99"] == pytest.approx(kl[1], rel=1e-6)
    assert values["mismatch_abs_mean"] == pytest.approx(1.5 / 6)


def test_expert_overlap_is_counted_once_per_update_because_every_rank_knows_the_whole():
    values = step_metrics(ROLLOUT, [two_replicas(), [report(experts_same=0, experts_total=40)] * 4], [1, 1], 0, OFF)
    assert values["expert_overlap"] == 30 / 80
    none = [report(sums=sums(1.0), experts_same=0, experts_total=0)]
    assert step_metrics(ROLLOUT, [none], [1], 0, OFF)["expert_overlap"] is None


def test_mini_batches_add_up_and_the_last_rate_counts():
    second = [report(sums=sums(6.0, 1.0), grad_norm=1.5, lr=5e-4)]
    values = step_metrics(ROLLOUT, [two_replicas(), second], [3, 2], 0, OFF)
    assert values["tokens_trained"] == 12 and values["micro_batches"] == 5
    assert values["loss"] == pytest.approx((3 * 5 + 5) / 12)
    assert (values["grad_norm"], values["lr"]) == (1.0, 5e-4)


def test_the_kl_to_the_reference_is_there_only_if_the_run_has_one():
    assert "reference_kl" not in step_metrics(ROLLOUT, [two_replicas()], [1], 0, OFF)
    reports = [report(sums=sums(2.0, reference_kl=0.5))]
    assert step_metrics(ROLLOUT, [reports], [1], 0, OFF)["reference_kl"] == 0.25


@pytest.mark.parametrize("reports", [[], [two_replicas()]], ids=["nothing trained", "trained"])
def test_the_record_is_complete_and_can_be_written(tmp_path, reports):
    values = step_metrics(ROLLOUT, reports, [1], 0, OFF)
    required = {name for name, _ in STEP_METRICS}
    assert required - values.keys() == TIMES
    assert values.keys() - required - {name for name, _ in EXTRA_METRICS} == {"tokens_all", "samples_all"}
    del values["tokens_all"], values["samples_all"]
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(0, {**values, **dict.fromkeys(TIMES, 1.0)})


def test_a_step_in_which_every_group_was_dropped_has_no_update_to_report():
    values = step_metrics(Rollout(dropped=ROLLOUT.dropped, rounds=3), [], [], 5, OFF)
    for name in ("loss", "grad_norm", "lr", "mismatch_kl_max", "expert_overlap", "entropy"):
        assert values[name] is None, name
    assert (values["tokens_trained"], values["samples_trained"], values["micro_batches"]) == (0, 0, 0)
    assert values["reward_mean"] == 0.5


def test_tokens_without_a_record_are_counted():
    """A hole ends its sample's part in the loss."""
    routes = np.arange(2 * 13, dtype=np.int16).reshape(13, 1, 2)
    routes[11] = -1
    holed = replace(sample("a0", 1.0, 4), routes=routes)  # rows 9 to 12 predict the response
    rollout = Rollout(kept=[Group(prompt=Prompt(id="a", text="", answer=""), samples=(holed,))])
    assert step_metrics(rollout, [], [], 0, plan_of(routing="engine"))["tokens_without_record"] == 2
    assert step_metrics(rollout, [], [], 0, OFF)["tokens_without_record"] == 0


def test_reads_of_all_ranks_and_mini_batches_add_up():
    assert step_metrics(ROLLOUT, [two_replicas(), two_replicas()], [1, 1], 0, OFF)["replay_reads"] == 2 * 4 * 5
