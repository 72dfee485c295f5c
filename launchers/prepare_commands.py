"""What `prepare` prints."""

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from glm5_next.bridge.conversion import Options
from glm5_next.launchers.config import load_run_config
from glm5_next.launchers.presets import HUB_MODEL, HUB_PROMPTS, find_preset
from glm5_next.launchers.presets import preset as preset_values

console = Console(highlight=False, soft_wrap=True)
progress = Console(stderr=True, highlight=False, soft_wrap=True)  # so that --json leaves one object on standard output


def prepare(
    name: str, overrides: list[str], *, model: str | None, prompts: str | None, revision: str | None, as_json: bool
) -> None:
    """Runs all steps, saying each as it ends, and reports disk and time."""
    known = find_preset(name)
    if known.cluster is None:
        raise ValueError(f"preset {name!r} needs no preparation; presets for clusters do, e.g. slice-1x1")
    run = load_run_config(None, preset_values(name), overrides)
    from glm5_next.launchers.prepare import free_bytes
    from glm5_next.launchers.prepare import prepare as all_steps

    options = Options(on_plan=lambda plan: progress.print(f"writing {_gb(plan.todo_bytes)}"))
    steps = []
    for step in all_steps(
        run, known, model=model or HUB_MODEL, prompts=prompts or HUB_PROMPTS, revision=revision, options=options
    ):
        progress.print(f"{step.name}: {step.note} ({step.seconds:.0f} s)", markup=False)
        steps.append(step)
    free = free_bytes(run.model.checkpoint.parent)
    if as_json:
        listed = [asdict(step) | {"where": str(step.where)} for step in steps]
        console.print_json(json.dumps({"steps": listed, "free_bytes": free}))
        return
    table = Table("step", "where", "what", "on disk", "seconds")
    for step in steps:
        table.add_row(step.name, str(step.where), step.note, _gb(step.num_bytes), f"{step.seconds:.0f}")
    console.print(table, markup=False)
    console.print(f"free: {_gb(free)}; next: glm5-next train --preset {name}, or glm5-next slurm --preset {name}")
    console.print(f"weights from the converted checkpoint: add --set model.megatron_checkpoint={steps[-1].where}")


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
