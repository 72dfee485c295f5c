"""What `convert`, `slice` and `verify` do and print."""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.closeness import closeness
from glm5_next.bridge.conversion import Options, Plan, Report
from glm5_next.bridge.hf_folder import ExportDtype
from glm5_next.bridge.memory import GIB
from glm5_next.bridge.pieces import Share
from glm5_next.bridge.shards import shorten
from glm5_next.bridge.slice import slice_checkpoint as run_slice
from glm5_next.bridge.verify import compare

console = Console(highlight=False, soft_wrap=True)
bars = Console(stderr=True)  # so that --json leaves one object on standard output


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a conversion runs. `budget` in GiB."""

    workers: int | None
    budget: float | None
    share: str
    as_json: bool


def convert(
    source: Path, out: Path, *, to_hf: bool, hf: Path | None, dtype: ExportDtype | None, settings: Settings
) -> None:
    """Hugging Face folder -> Megatron distributed checkpoint, or back."""
    from glm5_next.launchers.runtime.convert import hf_to_megatron, megatron_to_hf

    with _options(settings) as options:
        report = megatron_to_hf(source, out, hf, dtype, options) if to_hf else hf_to_megatron(source, out, options)
    where = "copied from the source" if to_hf else "left in the source, from where an export copies it"
    _print_report(report, settings, where)


def slice_checkpoint(hf: Path, out: Path, *, layers: int, mtp: bool, vision: bool, settings: Settings) -> None:
    """Writes a checkpoint's first layers."""
    with _options(settings) as options:
        report = run_slice(Checkpoint(hf), out, layers=layers, mtp=mtp, vision=vision, options=options)
    _print_report(report, settings, "")


def verify(a: Path, b: Path, *, workers: int | None, as_json: bool) -> bool:
    """Prints the differences of two folders in bits; returns whether there are none."""
    first, second = Checkpoint(a), Checkpoint(b)
    with _bar("comparing", _size(first)) as on_bytes:
        comparison = compare(first, second, workers=workers or _cores(), on_bytes=on_bytes)
    if as_json:
        lines = [dict(zip(("difference", "name", "detail"), line)) for line in comparison.lines()]
        _print_json({"equal": comparison.equal, "tensors": comparison.num_tensors, "differences": lines})
    elif comparison.equal:
        console.print(f"equal: {comparison.num_tensors} tensors and all other files")
    else:
        for kind, name, detail in comparison.lines():
            console.print(f"{kind}: {name}{detail and ': '}{detail}")
    return comparison.equal


def verify_numbers(a: Path, b: Path, tolerance: float, *, worst: int, workers: int | None, as_json: bool) -> bool:
    """Prints the tensors that are furthest apart (JSON: null where one is infinite or NaN); returns whether all are within the tolerance."""
    first, second = Checkpoint(a), Checkpoint(b)
    with _bar("comparing", _size(first)) as on_bytes:
        result = closeness(first, second, workers=workers or _cores(), on_bytes=on_bytes)
    close, listed = result.within(tolerance), result.errors[:worst]
    if as_json:
        rest = {key: list(getattr(result, key)) for key in ("only_in_a", "only_in_b", "shapes")}
        errors = [{"name": e.name, "relative": _finite(e.relative), "worst": _finite(e.worst)} for e in listed]
        _print_json({"equal": close, "tolerance": tolerance, "tensors": len(result.errors), **rest, "worst": errors})
        return close
    for key, names in (("only in a", result.only_in_a), ("only in b", result.only_in_b)):
        for name in names:
            console.print(f"{key}: {name}")
    for name, in_a, in_b in result.shapes:
        console.print(f"shape: {name}: {list(in_a)} -> {list(in_b)}")
    console.print(f"the {len(listed)} worst tensors: relative error, largest difference, name")
    for error in listed:
        console.print(f"{error.relative:9.3g} {error.worst:9.3g} {error.name}")
    console.print(f"{len(result.errors)} tensors, {'all' if close else 'NOT all'} within {tolerance:g}")
    return close


@contextmanager
def _options(settings: Settings) -> Iterator[Options]:
    """Options that say what will be done, and draw a bar while it is."""
    with _bar("writing", None) as on_bytes:
        yield Options(
            workers=settings.workers,
            budget=None if settings.budget is None else int(settings.budget * GIB),
            share=Share.parse(settings.share),
            on_plan=lambda plan: _announce(plan, on_bytes, settings),
            on_bytes=on_bytes,
        )


class _Bar:
    """Counts bytes; the total may come later."""

    def __init__(self, progress: Progress, name: str, total: int | None):
        self.progress, self.task = progress, progress.add_task(name, total=total)

    def __call__(self, count: int) -> None:
        self.progress.advance(self.task, count)

    def set_total(self, total: int) -> None:
        self.progress.update(self.task, total=total)


@contextmanager
def _bar(name: str, total: int | None) -> Iterator[_Bar]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=bars, transient=True, disable=not bars.is_terminal) as shown:
        yield _Bar(shown, name, total)


def _announce(plan: Plan, bar: Callable[[int], None], settings: Settings) -> None:
    assert isinstance(bar, _Bar)
    bar.set_total(plan.todo_bytes)
    if not settings.as_json:
        done = plan.num_bytes - plan.todo_bytes
        before = f", {done / 1e9:.2f} GB of {plan.num_bytes / 1e9:.2f} GB are there or another share's" if done else ""
        console.print(
            f"to write: {plan.todo_bytes / 1e9:.2f} GB in {plan.memory.workers} threads{before}; predicted peak memory "
            f"{plan.memory.predicted_peak / GIB:.2f} GiB of a budget of {plan.memory.budget / GIB:.2f} GiB"
        )


def _print_report(report: Report, settings: Settings, where: str) -> None:
    if settings.as_json:
        _print_json({**asdict(report), "out": str(report.out), "gb_per_second": report.gb_per_second})
        return
    for kind, names in report.passed_through.items():
        console.print(f"{kind}: {len(names)} tensors {where}: {shorten(names, 3)}")
    if report.written_pieces:
        console.print(
            f"{report.written_bytes / 1e9:.2f} GB in {report.seconds:.1f} s, {report.gb_per_second:.2f} GB/s; "
            f"measured peak memory {report.measured_peak / GIB:.2f} GiB"
        )
    if not report.is_finished:
        console.print(f"this share of {report.out} is written; it takes its name when the other shares are, too")
    elif report.written_pieces:
        console.print(f"wrote {report.out}")
    else:
        console.print(f"{report.out} is complete; nothing was left to do")


def _print_json(content: dict[str, Any]) -> None:
    console.print_json(json.dumps(content))


def _finite(number: float) -> float | None:
    """JSON has no word for infinite or no number."""
    return number if math.isfinite(number) else None


def _size(checkpoint: Checkpoint) -> int:
    return sum(stored.end - stored.begin for stored in checkpoint.tensors.values())


def _cores() -> int:
    return len(os.sched_getaffinity(0))
