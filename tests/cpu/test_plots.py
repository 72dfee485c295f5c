"""Plots of a run: what is drawn, and that a file without steps is refused."""

import pytest
from matplotlib.image import imread

from glm5_next.launchers.metrics import STEP_METRICS, MetricsLog, read_metrics
from glm5_next.launchers.plots import curve, write_plots


def write_run(run_dir, num_steps: int, **changes):
    with MetricsLog(run_dir, tensorboard=False) as log:
        for step in range(num_steps):
            values = {name: 0.1 + step for name, _ in STEP_METRICS}
            heldout = {"heldout_reward": 0.5} if step % 2 else {}
            start = {"heldout_reward_start": 0.1} if step == 0 else {}
            log.write(step, {**values, **heldout, **start, **changes})
    return log.path


@pytest.mark.parametrize(
    ("num_steps", "changes"),
    [
        (5, {}),
        (1, {"mismatch_kl_mean": 0.0, "mismatch_kl_p99": 0, "mismatch_kl_max": None, "grad_norm": None}),
    ],
)
def test_every_plot_is_a_readable_image(tmp_path, num_steps, changes):
    paths = write_plots(write_run(tmp_path, num_steps, **changes), tmp_path / "plots")
    assert [path.name for path in paths] == ["reward.png", "mismatch.png", "policy.png", "seconds.png"]
    for path in paths:
        pixels = imread(path)
        assert min(pixels.shape[:2]) > 300 and pixels[..., :3].std() > 0.02
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == sorted(path.name for path in paths)


def test_a_curve_has_only_steps_with_a_value(tmp_path):
    assert curve(read_metrics(write_run(tmp_path, 4)), "heldout_reward") == ([1, 3], [0.5, 0.5])


def test_a_run_without_steps_cannot_be_plotted(tmp_path):
    with pytest.raises(ValueError, match=r"metrics\.jsonl: no step to plot"):
        write_plots(write_run(tmp_path, 0), tmp_path / "plots")
    assert not (tmp_path / "plots").exists()
