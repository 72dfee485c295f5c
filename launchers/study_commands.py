"""What `replay-study` does and prints."""

from pathlib import Path
from typing import Any

from rich.console import Console

from glm5_next.launchers.cpu_process import use_cpu
from glm5_next.launchers.replay_study import BUCKETS, Study, tables, write_study

console = Console(highlight=False, soft_wrap=True)
# Eight layers with two of sparse attention that keep 16 of up to 512 tokens, and enough experts to disagree about.
MODEL: dict[str, Any] = {"layers": 8, "experts": 16, "mtp": False, "vision": False}
PROMPT_LENGTHS = tuple(length for high in BUCKETS for length in range(high // 2, high - 31, max(1, high // 16)))


def replay_study(out: Path, checkpoint: Path | None, *, copies: int, new_tokens: int, seed: int) -> Study:
    """Writes table, plot and numbers to `out`, and without a checkpoint a tiny one as well."""
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out}: is not empty; name a new folder")
    out.mkdir(parents=True, exist_ok=True)
    use_cpu()
    from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
    from glm5_next.launchers.runtime.replay_study import run_side

    folder = checkpoint or write_tiny_checkpoint(out / "checkpoint", seed=seed, **MODEL)
    task: dict[str, Any] = {"prompt_lengths": PROMPT_LENGTHS, "copies": copies, "new_tokens": new_tokens, "seed": seed}
    sides = []
    for precision in ("bf16", "fp32"):
        console.print(f"sampling and scoring in {precision} ...")
        sides.append(run_side(folder, precision=precision, **task))
    study = Study({"checkpoint": str(folder), "model": MODEL if checkpoint is None else None, **task}, tuple(sides))
    write_study(study, out)
    for table in tables(study):
        console.print(table)
    console.print(f"wrote {out / 'study.md'}, study.json and study.png")
    return study
