"""The metrics file: each step once, across kills and resumes."""

import json
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from glm5_next.launchers.metrics import EXTRA_METRICS, PHASES, STEP_METRICS, MetricsLog, read_metrics


def values(step: int = 0, **changes):
    return {**{name: step + number / 100 for number, (name, _) in enumerate(STEP_METRICS)}, **changes}


def write_steps(run_dir, steps, **options) -> None:
    with MetricsLog(run_dir, tensorboard=False, **options) as log:
        for step in steps:
            log.write(step, values(step))


def test_every_metric_has_one_name_and_a_meaning():
    names = [name for name, _ in STEP_METRICS + EXTRA_METRICS]
    assert len(set(names)) == len(names) and all(meaning for _, meaning in STEP_METRICS + EXTRA_METRICS)
    assert PHASES[0] == "seconds_rollout" and "seconds_step" not in PHASES and len(PHASES) == 7


def test_steps_read_as_they_were_written(tmp_path):
    write_steps(tmp_path, [0, 1])
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": step, **values(step)} for step in (0, 1)]


def test_a_step_is_on_disk_before_the_next_begins(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(0, values())
        assert len(read_metrics(log.path)) == 1


def test_a_resumed_file_has_each_step_once(tmp_path):
    write_steps(tmp_path, range(5))
    write_steps(tmp_path, range(3, 6), next_step=3)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == list(range(6))


def test_a_line_torn_by_a_kill_is_not_read_and_goes_on_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(tmp_path, range(3))
    path.write_bytes(path.read_bytes()[:-20])
    assert [record["step"] for record in read_metrics(path)] == [0, 1]
    write_steps(tmp_path, [2, 3], next_step=2)
    assert [record["step"] for record in read_metrics(path)] == [0, 1, 2, 3]


def test_a_run_that_never_saved_starts_over(tmp_path):
    write_steps(tmp_path, range(3))
    write_steps(tmp_path, [0])
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0]


@pytest.mark.parametrize("line", ["nonsense", "[]", '{"loss": 1}', '{"step": 1}'])
def test_a_broken_line_before_the_last_is_an_error(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match=f"{path}:2: "):
        read_metrics(path)


def test_wrong_records_are_refused_by_name(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        short = values()
        del short["lr"], short["entropy"]
        with pytest.raises(ValueError, match="metrics of step 0: missing entropy, lr"):
            log.write(0, short)
        with pytest.raises(ValueError, match="unknown metric 'heldout_rewart'; the nearest is 'heldout_reward'"):
            log.write(0, values(heldout_rewart=1.0))
        for wrong in ("1", True, [1]):
            with pytest.raises(ValueError, match="metric 'lr' must be a number or None"):
                log.write(0, values(lr=wrong))
        assert read_metrics(log.path) == []
        log.write(0, values(heldout_reward=1.0))
        with pytest.raises(ValueError, match="step 0 is already written"):
            log.write(0, values())


def test_a_value_that_is_not_finite_is_null_and_the_line_stays_json(tmp_path):
    with MetricsLog(tmp_path, tensorboard=True) as log:
        log.write(0, values(grad_norm=float("nan"), loss=float("inf"), expert_overlap=None))
    (line,) = log.path.read_text().splitlines()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (record["grad_norm"], record["loss"], record["expert_overlap"]) == (None, None, None)


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    for steps, next_step in ((range(4), 0), (range(2, 5), 2)):
        with MetricsLog(tmp_path, tensorboard=True, next_step=next_step) as log:
            for step in steps:
                log.write(step, values(step, reward_mean=step + next_step / 10, heldout_reward=0.5))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("reward/reward_mean")
    assert [(event.step, round(event.value, 3)) for event in scalars] == [(0, 0), (1, 1), (2, 2.2), (3, 3.2), (4, 4.2)]
    assert {"seconds/seconds_train", "heldout/heldout_reward", "mismatch/mismatch_kl_max"} <= set(
        events.Tags()["scalars"]
    )


def test_without_tensorboard_torch_is_not_needed(tmp_path):
    code = (
        "import sys, pathlib; from glm5_next.launchers.metrics import MetricsLog;"
        "MetricsLog(pathlib.Path(sys.argv[1]), tensorboard=False).close(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0
    assert not (tmp_path / "tensorboard").exists()
