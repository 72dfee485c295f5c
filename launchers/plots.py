"""PNG plots of a run, drawn from its metrics.jsonl."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from glm5_next.launchers.atomic_write import write_atomic
from glm5_next.launchers.metrics import PHASES, read_metrics

Records = Sequence[dict[str, Any]]


def write_plots(metrics_path: Path, folder: Path) -> list[Path]:
    """Draws reward, mismatch, policy and seconds as PNG files in `folder`; returns their paths.

    Steps without a value are left out of a curve. Raises ValueError where the file has no record.
    """
    records = read_metrics(metrics_path)
    if not records:
        raise ValueError(f"{metrics_path}: no step to plot")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, (draw, num_panels) in PLOTS.items():
        figure = Figure(figsize=(8, 1.5 + 3 * num_panels), layout="constrained")
        panels = list(figure.subplots(num_panels, 1, sharex=True, squeeze=False)[:, 0])
        draw(panels, records)
        panels[-1].set_xlabel("step")
        path = folder / f"{name}.png"
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=100)
        write_atomic(path, image.getvalue())
        paths.append(path)
    return paths


def curve(records: Records, name: str) -> tuple[list[int], list[float]]:
    """Steps that have the metric, and its values."""
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _draw_reward(panels: Sequence[Axes], records: Records) -> None:
    (axes,) = panels
    _line(axes, records, "reward_mean", "training prompts")
    steps, values = curve(records, "heldout_reward")
    start_steps, start_values = curve(records, "heldout_reward_start")
    # weights from before a step's update stand one step earlier than those from after it
    points = [step - 1 for step in start_steps] + steps
    axes.plot(points, start_values + values, "s--", label="held-out prompts")
    axes.set_ylabel("mean reward")
    axes.legend()


def _draw_mismatch(panels: Sequence[Axes], records: Records) -> None:
    (axes,) = panels
    for statistic in ("mean", "p99", "max"):
        _line(axes, records, f"mismatch_kl_{statistic}", statistic)
    # steps that agree to the bit have no logarithm, and a run of only such steps has no logarithmic axis
    if any((record["mismatch_kl_max"] or 0) > 0 for record in records):
        axes.set_yscale("log", nonpositive="mask")
    axes.set_ylabel("KL(engine || trainer) per token")
    axes.legend()


def _draw_policy(panels: Sequence[Axes], records: Records) -> None:
    for axes, name in zip(panels, ("entropy", "clip_fraction", "grad_norm")):
        _line(axes, records, name, name)
        axes.set_ylabel(name.replace("_", " "))


def _draw_seconds(panels: Sequence[Axes], records: Records) -> None:
    (axes,) = panels
    steps = [record["step"] for record in records]
    bottom = [0.0] * len(records)
    for phase in PHASES:
        seconds = [record.get(phase) or 0.0 for record in records]
        axes.bar(steps, seconds, bottom=bottom, label=phase.removeprefix("seconds_"))
        bottom = [low + height for low, height in zip(bottom, seconds)]
    axes.set_ylabel("seconds")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))


def _line(axes: Axes, records: Records, name: str, label: str) -> None:
    axes.plot(*curve(records, name), ".-", label=label)


# file name -> (what draws it, number of panels)
PLOTS: dict[str, tuple[Callable[[Sequence[Axes], Records], None], int]] = {
    "reward": (_draw_reward, 1),
    "mismatch": (_draw_mismatch, 1),
    "policy": (_draw_policy, 3),
    "seconds": (_draw_seconds, 1),
}
