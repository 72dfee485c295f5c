"""The run as somebody watches it: a live table of the last steps, or plain lines where there is no terminal."""

from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

# metric -> (heading, format)
COLUMNS = {
    "reward_mean": ("reward", "{:.3f}"),
    "heldout_reward": ("held-out", "{:.3f}"),
    "mismatch_kl_mean": ("mismatch KL", "{:.1e}"),
    "expert_overlap": ("experts", "{:.1%}"),
    "entropy": ("entropy", "{:.3f}"),
    "clip_fraction": ("clipped", "{:.1%}"),
    "grad_norm": ("grad norm", "{:.3f}"),
    "lr": ("lr", "{:.1e}"),
    "groups_dropped": ("dropped", "{:.0f}"),
    "rollouts_per_second": ("rollouts/s", "{:.1f}"),
    "tokens_per_second": ("tokens/s", "{:.0f}"),
    "seconds_step": ("seconds", "{:.1f}"),
}
NOTHING = "-"


class Progress:
    """Shows each step of a run of `num_steps` steps; use it as a context manager.

    On a terminal: one table of the last `num_rows` steps that is redrawn. Elsewhere: one line per step.
    """

    def __init__(self, num_steps: int, *, console: Console | None = None, num_rows: int = 10) -> None:
        self.num_steps = num_steps
        self.console = console or Console()
        self._rows: deque[tuple[int, Mapping[str, float | int | None]]] = deque(maxlen=num_rows)
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None

    def update(self, step: int, values: Mapping[str, float | int | None]) -> None:
        """Shows a finished step (counted from 0) with its metrics; a metric that is missing or None shows as "-"."""
        self._rows.append((step, values))
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            return
        cells = [f"{heading} {_cell(name, values)}" for name, (heading, _) in COLUMNS.items()]
        line = ", ".join([f"step {step + 1}/{self.num_steps}", *cells, f"left {self.time_left()}"])
        self.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def time_left(self) -> str:
        """From the mean time of the steps in the table, as h:mm:ss."""
        seconds = [values.get("seconds_step") for _, values in self._rows]
        known = [value for value in seconds if value is not None]
        if not known:
            return NOTHING
        left = round(sum(known) / len(known) * (self.num_steps - 1 - self._rows[-1][0]))
        return f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def _table(self) -> Table:
        done = self._rows[-1][0] + 1
        table = Table(title=f"step {done} of {self.num_steps}, {self.time_left()} left")
        table.add_column("step", justify="right")
        for heading, _ in COLUMNS.values():
            table.add_column(heading, justify="right")
        for step, values in self._rows:
            table.add_row(str(step + 1), *(_cell(name, values) for name in COLUMNS))
        return table


def _cell(name: str, values: Mapping[str, float | int | None]) -> str:
    value = values.get(name)
    return NOTHING if value is None else COLUMNS[name][1].format(value)
