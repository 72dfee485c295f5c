"""The summary of a run: rewards, and where the time of its steps went."""

import json

from glm5_next.launchers.metrics import PHASES
from glm5_next.launchers.run_report import phase_times, results


def test_phases_are_averaged_over_all_steps_in_their_order():
    records = [
        {"seconds_rollout": 2.0, "seconds_step": 5.0},
        {"seconds_rollout": 1.0, "seconds_eval": 3.0, "seconds_step": 4.0},
    ]
    text = phase_times(records)
    assert text.startswith("rollout 1.50, reward 0.00") and "eval 1.50" in text and text.endswith("step 4.50")
    assert text.count(",") == len(PHASES)


def test_the_first_step_is_left_out_of_the_times_and_in_the_rewards(tmp_path):
    steps = [
        {"step": step, "reward_mean": 0.1 * step, "seconds_train": 90.0 if step == 0 else 1.0, "seconds_step": 1.0}
        for step in range(3)
    ]
    steps[0]["heldout_reward_start"], steps[2]["heldout_reward"] = 0.1, 0.4
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    rewards, heldout, times = results(tmp_path / "metrics.jsonl")
    assert rewards == "mean reward of the last 3 steps: 0.100" and heldout == "held-out reward: 0.100 -> 0.400"
    assert "train 1.00" in times


def test_a_run_that_stopped_at_once_has_nothing_to_say(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert results(tmp_path / "metrics.jsonl") == []
