"""Checkpoint folders on disk: where they are, which are whole, where their weights came from. Needs no Megatron."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from glm5_next.launchers.atomic_write import write_atomic

STATE_FILE = "run_state.json"
ORIGIN_FILE = "origin.json"
MARKER = "COMPLETE"


@dataclass(frozen=True)
class Origin:
    """Where a checkpoint's untrained rest lies (`hf`, a Hugging Face folder) and in which precision its weights are."""

    hf: str
    precision: str

    @property
    def export_dtype(self) -> Literal["source", "float32"]:
        """An fp32 run's weights leave as fp32: rounded, they would be another policy than the one that was trained."""
        return "float32" if self.precision == "fp32" else "source"

    @classmethod
    def load(cls, folder: Path) -> "Origin":
        return cls(**json.loads((folder / ORIGIN_FILE).read_text()))


def unfinished_folder(folder: Path) -> Path:
    """Where a checkpoint is written until it is whole."""
    return folder.with_name(f".{folder.name}.unfinished")


def begin(folder: Path) -> None:
    """Makes an empty `unfinished_folder`, over the remains of an earlier attempt."""
    for old in (unfinished_folder(folder), folder):
        if old.exists():
            shutil.rmtree(old)
    unfinished_folder(folder).mkdir(parents=True)


def finish(folder: Path, origin: Origin) -> None:
    """Renames a written checkpoint to its name; the marker is the last file."""
    write_atomic(unfinished_folder(folder) / ORIGIN_FILE, json.dumps(asdict(origin)).encode())
    unfinished_folder(folder).rename(folder)
    write_atomic(folder / MARKER, b"")


def check_finished(folder: Path) -> None:
    """Raises ValueError for a folder without its marker."""
    if not (folder / MARKER).is_file():
        raise ValueError(f"{folder}: has no {MARKER} marker, so it is not a finished checkpoint")


def step_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint taken before step `step` lies."""
    return run_dir / "checkpoints" / f"step-{step:06d}"


def last_checkpoint(run_dir: Path) -> Path | None:
    """The newest finished checkpoint of a run."""
    finished = [path.parent for path in (run_dir / "checkpoints").glob(f"step-*/{MARKER}")]
    return max(finished, default=None)


def drop_old_checkpoints(run_dir: Path, keep: int) -> None:
    """Removes all but the newest `keep` finished checkpoints (0: keeps all), and what a killed run left unfinished."""
    folder = run_dir / "checkpoints"
    for unfinished in folder.glob(".step-*.unfinished"):
        shutil.rmtree(unfinished)
    finished = sorted(path.parent for path in folder.glob(f"step-*/{MARKER}"))
    for old in finished[: max(0, len(finished) - keep)] if keep else []:
        (old / MARKER).unlink()  # first: a removal that is interrupted must not leave a checkpoint that looks whole
        shutil.rmtree(old)
