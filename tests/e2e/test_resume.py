"""A run that is killed and resumed, again and again, is the run that went straight through."""

import signal
from dataclasses import dataclass

import pytest

from glm5_next.launchers.runtime.checkpoint_folder import last_checkpoint
from tests.e2e.conftest import (
    SECONDS_TO_FINISH,
    SECONDS_TO_STOP,
    SIX_STEPS,
    Ended,
    Workplace,
    end_of,
    wait_for_rollout,
    wait_for_steps,
)

# What a step is made of, and what it reports that does not depend on the machine's speed.
REPRODUCED = (
    "step",
    "reward_mean",
    "reward_std",
    "response_tokens_mean",
    "groups_sampled",
    "groups_dropped",
    "samples_trained",
    "tokens_trained",
    "micro_batches",
    "weights_version",
    "lr",
)


@dataclass(frozen=True)
class Interrupted:
    """The same six steps, in four parts."""

    killed_driver: Ended  # in step 4, after the checkpoint of step 3
    killed_rank: Ended  # in step 4 again
    stopped: Ended  # by Ctrl-C, in step 5
    finished: Ended


@pytest.fixture(scope="module")
def interrupted(workplace: Workplace) -> Interrupted:
    name, run_dir = "interrupted", workplace.run_dir("interrupted")
    with workplace.start(name, *SIX_STEPS) as run:
        wait_for_steps(run, run_dir, 3)
        # a rank that is held back makes the step last until the kill
        run.process_of("trainer rank 1").suspend()
        wait_for_rollout(run, run_dir, 3)
        run.process.kill()
        killed_driver = end_of(run, run_dir)
    (run_dir / "rollouts/step-000003.jsonl").unlink()
    with workplace.resume(name) as run:
        wait_for_rollout(run, run_dir, 3)
        rank = run.process_of("trainer rank 1")
        rank.suspend()
        rank.kill()
        killed_rank = end_of(run, run_dir)
    with workplace.resume(name) as run:
        wait_for_steps(run, run_dir, 4)
        rank = run.process_of("trainer rank 1")
        rank.suspend()
        wait_for_rollout(run, run_dir, 4)  # step 5 is in progress
        run.interrupt(signal.SIGINT)
        run.wait_until(lambda: "stopping after this step" in run.output, "word of the stop")
        rank.resume()
        stopped = end_of(run, run_dir, SECONDS_TO_STOP)
        assert last_checkpoint(run_dir) == run_dir / "checkpoints/step-000005"
    with workplace.resume(name) as run:
        finished = end_of(run, run_dir, SECONDS_TO_FINISH)
    return Interrupted(killed_driver, killed_rank, stopped, finished)


def test_a_killed_driver_leaves_no_process_behind(interrupted: Interrupted):
    assert interrupted.killed_driver.code == -signal.SIGKILL


def test_a_killed_rank_ends_the_run_with_one_message_that_names_it_and_the_way_on(interrupted: Interrupted):
    ended = interrupted.killed_rank
    assert ended.code == 1
    first, *others = ended.error.splitlines()
    assert first.startswith("error: step 4 of 6: trainer rank 1 died during ")
    assert others[0] == f"continue with: glm5-next train --resume {ended.run_dir}"
    assert len(others) == 2 and "Traceback" not in ended.output


def test_ctrl_c_ends_the_step_saves_it_and_says_how_to_continue(interrupted: Interrupted):
    ended = interrupted.stopped
    assert ended.code == 130
    assert "step 5/6" in ended.output and "step 6/6" not in ended.output
    assert f"stopped; continue with: glm5-next train --resume {ended.run_dir}" in ended.output


def test_the_last_part_ends_well_and_clears_the_old_error(interrupted: Interrupted):
    ended = interrupted.finished
    assert ended.code == 0, ended.output
    assert f"resumed from {ended.run_dir}/checkpoints/step-000005 at step 6" in ended.output
    assert not (ended.run_dir / "error.log").exists()
    assert (ended.run_dir / "export/config.json").exists()


def test_every_step_is_recorded_once(interrupted: Interrupted):
    assert [record["step"] for record in interrupted.finished.records] == list(range(6))


def test_it_samples_the_same_texts_and_gives_the_same_rewards(interrupted: Interrupted, straight: Ended):
    for step in range(6):
        name = f"rollouts/step-{step:06d}.jsonl"
        assert (interrupted.finished.run_dir / name).read_text() == (straight.run_dir / name).read_text()


def test_it_takes_the_same_steps(interrupted: Interrupted, straight: Ended):
    for ours, theirs in zip(interrupted.finished.records, straight.records, strict=True):
        assert {name: ours[name] for name in REPRODUCED} == {name: theirs[name] for name in REPRODUCED}
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


def test_it_trains_the_same_model(interrupted: Interrupted, straight: Ended):
    reward = "heldout_reward"
    assert interrupted.finished.records[-1][reward] == straight.records[-1][reward]
