"""The view of a running job, on a terminal and in a file."""

import io

import pytest
from rich.console import Console

from glm5_next.launchers.metrics import EXTRA_METRICS, STEP_METRICS
from glm5_next.launchers.progress import COLUMNS, Progress

VALUES = {name: 1 for name, _ in STEP_METRICS}


def show(terminal: bool, steps, **options) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=160, color_system=None)
    with Progress(100, console=console, **options) as progress:
        for step in steps:
            progress.update(step, {**VALUES, "reward_mean": step / 100, "seconds_step": 60.0, "heldout_reward": None})
    return screen.getvalue()


def test_columns_are_metrics_that_a_step_has():
    assert set(COLUMNS) <= {name for name, _ in STEP_METRICS + EXTRA_METRICS}


def test_without_a_terminal_each_step_is_one_line():
    lines = show(False, range(3)).splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("step 3/100, reward 0.020, held-out -, ") and lines[2].endswith("left 1:37:00")
    assert "\x1b" not in "".join(lines)


def test_a_terminal_shows_the_last_steps_as_a_table():
    screen = show(True, range(30), num_rows=5)
    last = screen[screen.rindex("step 30 of 100") :]
    assert "1:10:00 left" in last
    assert all(f"0.{number}0"[:4] in last for number in (25, 26, 27, 28, 29)) and "0.240" not in last


def test_a_metric_that_is_missing_shows_as_a_dash():
    screen = io.StringIO()
    progress = Progress(2, console=Console(file=screen, force_terminal=False))
    progress.update(0, {})
    assert "reward -" in screen.getvalue() and progress.time_left() == "-"


def test_the_terminal_is_given_back_after_an_error():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True)
    with pytest.raises(RuntimeError, match="stop"), Progress(2, console=console) as progress:
        progress.update(0, VALUES)
        raise RuntimeError("stop")
    hide_cursor, show_cursor = "\x1b[?25l", "\x1b[?25h"
    assert hide_cursor in screen.getvalue() and screen.getvalue().rstrip().endswith(show_cursor)


def test_the_last_step_leaves_no_time():
    assert show(False, [99]).rstrip().endswith("left 0:00:00")
