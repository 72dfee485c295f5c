"""What a replay study found, as JSON, as a table and as a plot. Needs no torch."""

import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from glm5_next.launchers.atomic_write import write_atomic

# name -> replayed streams
MODES: dict[str, tuple[str, ...]] = {
    "off": (),
    "routing": ("routes",),
    "indexer": ("picks",),
    "both": ("routes", "picks"),
}
# Tokens of a bucket have at most so many tokens before them, and more than the bucket before.
BUCKETS = (64, 128, 256, 512)
ALL = "all"


@dataclass(frozen=True)
class Kl:
    """KL(engine || trainer) per response token, k3 estimate."""

    mean: float
    p99: float
    tokens: int


@dataclass(frozen=True)
class Scored:
    """One mode. `differing`: share of (token, layer) pairs whose set of experts or pools is not the engine's, among those
    with a choice; 0 where the stream is replayed. `reads`: records that layers read, as many as planned."""

    kl: dict[str, Kl]
    differing: dict[str, float]
    reads: int


@dataclass(frozen=True)
class Side:
    """All modes in one precision, on the same samples."""

    precision: str
    modes: dict[str, Scored]


@dataclass(frozen=True)
class Study:
    """`settings` are all that the numbers depend on."""

    settings: dict[str, object]
    sides: tuple[Side, ...]

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Precision, bucket, tokens, mean and p99 by mode."""
        for side in self.sides:
            for bucket in side.modes["off"].kl:
                by_mode = [side.modes[mode].kl[bucket] for mode in MODES]
                numbers = (f"{kl.mean:.2e} / {kl.p99:.2e}" for kl in by_mode)
                yield side.precision, bucket, str(by_mode[0].tokens), *numbers

    def differences(self) -> Iterator[tuple[str, ...]]:
        """Precision and mode, share of routes and of picks that differ, and reads."""
        for side in self.sides:
            for name, mode in side.modes.items():
                shares = (f"{mode.differing[stream]:.2%}" for stream in ("routes", "picks"))
                yield side.precision, name, *shares, str(mode.reads)


KL_COLUMNS = ("precision", "context", "tokens", *(f"{mode}: mean / p99" for mode in MODES))
DIFFERENCE_COLUMNS = ("precision", "replayed", "routes that differ", "picks that differ", "records read")


def tables(study: Study) -> list[Table]:
    """For a terminal."""
    titles = (
        "KL(engine || trainer) per response token",
        "choices that differ from the engine's, and reads of its record",
    )
    shown = []
    for title, columns, rows in zip(titles, (KL_COLUMNS, DIFFERENCE_COLUMNS), (study.rows(), study.differences())):
        shown.append(Table(*columns, title=title))
        for row in rows:
            shown[-1].add_row(*row)
    return shown


def markdown(study: Study) -> str:
    """The same two tables, for a README."""
    lines: list[str] = []
    for columns, rows in ((KL_COLUMNS, study.rows()), (DIFFERENCE_COLUMNS, study.differences())):
        lines += [_line(columns), _line(("---",) * len(columns)), *map(_line, rows), ""]
    return "\n".join(lines)


def write_study(study: Study, folder: Path) -> None:
    """`study.json`, `study.md` and `study.png` in a folder that exists."""
    write_atomic(folder / "study.json", json.dumps(asdict(study), indent=1).encode())
    write_atomic(folder / "study.md", markdown(study).encode())
    image = io.BytesIO()
    _draw(study).savefig(image, format="png", dpi=100)
    write_atomic(folder / "study.png", image.getvalue())


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _draw(study: Study) -> Figure:
    """Mean KL by context length, one curve per mode and one panel per precision."""
    figure = Figure(figsize=(5 * len(study.sides), 4), layout="constrained")
    for axes, side in zip(figure.subplots(1, len(study.sides), squeeze=False, sharey=True)[0], study.sides):
        for name, mode in side.modes.items():
            buckets = [bucket for bucket in mode.kl if bucket != ALL]
            axes.plot(buckets, [max(mode.kl[bucket].mean, 1e-16) for bucket in buckets], ".-", label=name)
        axes.set(yscale="log", title=side.precision, xlabel="tokens of context", ylabel="mean KL(engine || trainer)")
        axes.legend(title="replayed")
    return figure
