"""Other layouts and objectives through the command line; each run is then ended in another way."""

import math
import signal

import pytest

from glm5_next.launchers.metrics import STEP_METRICS
from tests.e2e.conftest import (
    SECONDS_TO_STOP,
    Ended,
    Workplace,
    end_of,
    wait_for_steps,
)

DATA_PARALLEL = pytest.param("data_parallel", marks=pytest.mark.long)
ENDLESS = ("train.steps=1000", "train.checkpoint_every=2", "optimizer.schedule=constant")


@pytest.fixture(scope="module")
def tensor_parallel(workplace: Workplace) -> Ended:
    """Ended by rewards so large that gradients are not finite."""
    run_dir = workplace.run_dir("tp2")
    with workplace.start("tp2", *ENDLESS, "parallel.ep=1", "parallel.tp=2") as run:
        wait_for_steps(run, run_dir, 2)
        with workplace.fault("huge"):
            return end_of(run, run_dir)


@pytest.fixture(scope="module")
def pipeline_parallel(workplace: Workplace) -> Ended:
    """With a KL to the start; ended by Ctrl-C twice."""
    run_dir = workplace.run_dir("pp2")
    with workplace.start("pp2", *ENDLESS, "parallel.ep=1", "parallel.pp=2", "grpo.kl_coef=0.1") as run:
        wait_for_steps(run, run_dir, 2)
        run.process_of("trainer rank 1").suspend()
        run.interrupt()
        run.wait_until(lambda: "stopping after this step" in run.output, "word of the stop")
        run.interrupt()
        return end_of(run, run_dir)


@pytest.fixture(scope="module")
def data_parallel(workplace: Workplace) -> Ended:
    """With the distributed optimizer; ended by SIGTERM to the driver alone, as a scheduler does."""
    run_dir = workplace.run_dir("dp2")
    layout = ("parallel.ep=1", "parallel.distributed_optimizer=true")
    with workplace.start("dp2", *ENDLESS, *layout) as run:
        wait_for_steps(run, run_dir, 2)
        run.process.send_signal(signal.SIGTERM)
        return end_of(run, run_dir, SECONDS_TO_STOP)


@pytest.fixture(scope="module")
def other_objective(workplace: Workplace, data_parallel: Ended) -> Ended:
    """The data-parallel run resumed with everything else that can be chosen; ended by a reward that raises."""
    changed = ("grpo.mini_batches=2", "grpo.importance_sampling=off", "replay.routing=off", "grpo.kl_coef=0.1")
    with workplace.resume("dp2", *changed) as run:
        wait_for_steps(run, data_parallel.run_dir, len(data_parallel.records) + 2)
        with workplace.fault("raise"):
            return end_of(run, data_parallel.run_dir)


@pytest.fixture(scope="module")
def stopped_early(workplace: Workplace) -> Ended:
    """Ctrl-C while Ray starts, of a run of one rank in bf16."""
    layout = ("parallel.ranks=1", "parallel.ep=1", "model.precision=bf16", "parallel.distributed_optimizer=true")
    with workplace.start("bf16", *ENDLESS, *layout) as run:
        run.wait_until(lambda: len(run.processes()) > 3, "Ray's first processes")
        run.interrupt()
        return end_of(run, workplace.run_dir("bf16"))


@pytest.fixture(scope="module")
def bf16(workplace: Workplace, stopped_early: Ended) -> Ended:
    """The same run again; ended by kill -9 of the engine."""
    run_dir = stopped_early.run_dir
    with workplace.resume("bf16") as run:
        wait_for_steps(run, run_dir, 2)
        engine = run.process_of("engine 0")
        engine.suspend()
        engine.kill()
        return end_of(run, run_dir)


@pytest.mark.parametrize("layout", ["tensor_parallel", "pipeline_parallel", DATA_PARALLEL])
def test_engine_and_trainer_agree_before_the_first_update(layout: str, request: pytest.FixtureRequest):
    first = request.getfixturevalue(layout).records[0]
    assert first["start_mismatch_kl_mean"] <= 1e-8 and first["start_mismatch_tokens"] >= 16


@pytest.mark.parametrize("layout", ["pipeline_parallel", DATA_PARALLEL])
def test_the_first_step_does_not_depend_on_the_layout(
    layout: str, tensor_parallel: Ended, request: pytest.FixtureRequest
):
    ours, theirs = request.getfixturevalue(layout).records[0], tensor_parallel.records[0]
    assert ours["reward_mean"] == theirs["reward_mean"] and ours["tokens_trained"] == theirs["tokens_trained"]
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


def test_kl_to_the_start_is_zero_at_first_and_grows_with_the_policys_way(pipeline_parallel: Ended):
    first, second = pipeline_parallel.records[:2]
    assert 0 <= first["reference_kl"] <= 1e-8
    assert second["reference_kl"] > 1e-6


@pytest.mark.long
def test_mini_batches_without_replay_and_weights_take_finite_steps(other_objective: Ended, data_parallel: Ended):
    resumed = other_objective.records[len(data_parallel.records) :]
    assert len(resumed) >= 2
    for record in resumed:
        assert all(math.isfinite(record[name]) for name, _ in STEP_METRICS if name != "expert_overlap")
        assert record["expert_overlap"] is None
        assert record["micro_batches"] == 2 and record["importance_weight_mean"] == 1.0
        assert record["reference_kl"] > 0
    assert resumed[1]["weights_version"] == resumed[0]["weights_version"] + 1


def test_bf16_trains_close_to_its_engine(bf16: Ended):
    assert all(record["mismatch_kl_mean"] < 0.01 for record in bf16.records)


def test_gradients_that_are_not_finite_end_the_run_with_one_message(tensor_parallel: Ended):
    expect_failure(tensor_parallel, "failed in train: gradients are not finite")


@pytest.mark.long
def test_a_reward_that_raises_is_named_with_its_prompt(other_objective: Ended):
    expect_failure(other_objective, "reward 'grader:spread' on prompt 'prompts:")
    assert "RuntimeError: the grader is out of order" in other_objective.error
    assert other_objective.checkpoint is not None


def test_a_killed_engine_is_named(bf16: Ended):
    expect_failure(bf16, "engine 0 died during ")


@pytest.mark.long
def test_sigterm_is_a_first_ctrl_c(data_parallel: Ended):
    assert data_parallel.code == 130
    newest = data_parallel.checkpoint
    assert newest is not None and newest.name == f"step-{len(data_parallel.records):06d}"


def test_a_second_ctrl_c_stops_at_once(pipeline_parallel: Ended):
    assert pipeline_parallel.code == 130
    assert "step 3/" not in pipeline_parallel.output
    assert f"continue with: glm5-next train --resume {pipeline_parallel.run_dir}" in pipeline_parallel.output


def test_ctrl_c_before_the_first_step_stops_at_once_and_the_run_can_still_be_resumed(stopped_early: Ended, bf16: Ended):
    assert stopped_early.code == 130
    assert "started in" not in stopped_early.output
    assert f"continue with: glm5-next train --resume {stopped_early.run_dir}" in stopped_early.output
    assert [record["step"] for record in bf16.records[:2]] == [0, 1]


def expect_failure(ended: Ended, text: str) -> None:
    """Exit status 1; one message with the step, the cause, the way on and where the traceback is."""
    assert ended.code == 1
    first, *others = ended.error.splitlines()
    assert first.startswith(f"error: step {len(ended.records) + 1} of 1000: ") and text in first, first
    assert others == [
        f"continue with: glm5-next train --resume {ended.run_dir}",
        f"traceback: {ended.run_dir / 'error.log'}",
    ]
    assert "Traceback" not in ended.output and "Traceback" in (ended.run_dir / "error.log").read_text()
