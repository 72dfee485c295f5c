"""Gets everything that a preset's run reads into place, and checks it. Every step can be run again and takes up its work."""

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.conversion import Options
from glm5_next.bridge.dist_read import DistCheckpoint
from glm5_next.bridge.slice import slice_checkpoint
from glm5_next.bridge.verify_dist import differing_tensors
from glm5_next.launchers.config import RunConfig
from glm5_next.launchers.hub import fetch_model, fetch_prompts
from glm5_next.launchers.presets import Preset
from glm5_next.launchers.prompts import read_prompts
from glm5_next.launchers.prompts_import import import_prompts
from glm5_next.launchers.rewards import check_answers, load_reward
from glm5_next.launchers.runtime.checkpoint_folder import MARKER
from glm5_next.launchers.runtime.convert import hf_to_megatron
from glm5_next.plugins.config import Glm5NextConfig

# How a checkpoint is stored says nothing of what it computes.
STORAGE = {"fp8", "dtype"}


@dataclass(frozen=True)
class Step:
    """What was done: its output, the bytes that lie there, and how long it took this time."""

    name: str
    where: Path
    note: str
    num_bytes: int
    seconds: float


def prepare(
    run: RunConfig, preset: Preset, *, model: str, prompts: str, revision: str | None, options: Options
) -> Iterator[Step]:
    """Model, prompts and a Megatron checkpoint of a preset for the released model, step by step.

    `model`: a folder or the name of a repository; `prompts`: a JSONL file or the name of a data set. Raises ValueError
    for whatever does not fit.
    """
    target = run.model.checkpoint
    source = Path(model)
    if not source.is_dir() and _is_whole(target):
        yield _timed("model", target, lambda: "was there")
    else:
        if not source.is_dir():
            source = target.with_name(model.rpartition("/")[2]) if preset.layers else target
            yield _timed("fetch", source, lambda: _fetched(model, revision, source))
        yield _timed("model", target, lambda: _place(source, target, preset, options))
    yield _timed("check", target, lambda: _check(run, Checkpoint(target), preset))
    yield _timed("prompts", Path(run.data.prompts), lambda: _prompts(run, prompts, revision))
    out = target.with_name(f"{target.name}-megatron")
    yield _timed("convert", out, lambda: f"{_convert(target, out, options)} pieces written")
    yield _timed("verify", out, lambda: _verify(target, out))


def _timed(name: str, where: Path, work: Callable[[], str]) -> Step:
    start = time.monotonic()
    note = work()
    size = where.stat().st_size if where.is_file() else sum(f.stat().st_size for f in where.rglob("*") if f.is_file())
    return Step(name, where, note, size, time.monotonic() - start)


def _is_whole(folder: Path) -> bool:
    try:
        Checkpoint(folder).check_inventory()
    except ValueError:
        return False
    return True


def _fetched(model: str, revision: str | None, out: Path) -> str:
    fetch_model(model, revision, out)
    return f"{model} from the hub"


def _place(source: Path, target: Path, preset: Preset, options: Options) -> str:
    """The model at the place that the settings name: its first layers, or a link to where it lies."""
    if preset.layers is not None:
        report = slice_checkpoint(
            Checkpoint(source), target, layers=preset.layers, mtp=False, vision=True, options=options
        )
        return f"first {preset.layers} layers of {source}" + ("" if report.written_pieces else ", were there")
    if target.exists() and target.resolve() != source.resolve():
        raise ValueError(f"{target}: exists and is not {source}; remove it or set model.checkpoint")
    if not target.exists():
        target.symlink_to(source.resolve())
        return f"link to {source.resolve()}"
    return "is there"


def _check(run: RunConfig, checkpoint: Checkpoint, preset: Preset) -> str:
    """The config is the released one, the tensors are those it calls for, and the topology can hold them."""
    expected, found = preset.released_model(), checkpoint.config
    names = [field.name for field in fields(Glm5NextConfig) if field.name not in STORAGE]
    different = [name for name in names if getattr(found, name) != getattr(expected, name)]
    if different:
        listed = "; ".join(f"{name} is {getattr(found, name)}, not {getattr(expected, name)}" for name in different)
        raise ValueError(f"{checkpoint.folder}: not the model that the preset is for: {listed}")
    checkpoint.check_inventory()
    run.parallel.topology().check_model(found)
    return f"{len(checkpoint.tensors)} tensors fit config.json"


def _prompts(run: RunConfig, source: str, revision: str | None) -> str:
    out = Path(run.data.prompts)
    file = Path(source)
    if not file.is_file() and out.is_file():
        file = out
    elif not file.is_file():
        file = fetch_prompts(source, revision, out.with_name(f"{out.stem}-download"))
    count = import_prompts(file, out)
    check_answers(load_reward(run.data.reward), read_prompts(out))
    return f"{count} prompts of {source}"


def _convert(target: Path, out: Path, options: Options) -> int:
    if (out / MARKER).is_file():
        return 0
    return hf_to_megatron(target, out, options).written_pieces


def _verify(target: Path, out: Path) -> str:
    different = differing_tensors(DistCheckpoint(out), Checkpoint(target))
    if different:
        raise ValueError(
            f"{out}: {len(different)} tensors differ from {target}, first {different[0]}; remove it and run again"
        )
    return "every value is the source's"


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
