"""What `slurm` does: a job folder with settings, plan and script, printed or submitted."""

import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from glm5_next.launchers import slurm
from glm5_next.launchers.atomic_write import write_atomic
from glm5_next.launchers.config import RunConfig, describe, load_run_config, with_absolute_paths
from glm5_next.launchers.presets import find_preset
from glm5_next.launchers.presets import preset as preset_values
from glm5_next.launchers.slurm import JobPlan, Submission

console = Console(highlight=False, soft_wrap=True)


def job(
    preset: str,
    overrides: list[str],
    *,
    name: str | None,
    folder: Path | None,
    nodes: int | None,
    gpus_per_node: int | None,
    interface: str | None,
    start_deadline: int,
    grace: int,
) -> tuple[RunConfig, JobPlan]:
    """Settings and plan of a preset's job; raises ValueError where the ranks do not fill the nodes."""
    name = name or preset
    slurm.check_name(name)
    cluster = find_preset(preset).cluster
    nodes = nodes or (cluster.nodes if cluster else 1)
    gpus_per_node = gpus_per_node if gpus_per_node is not None else (cluster.gpus_per_node if cluster else 0)
    folder = (folder or Path("jobs") / name).resolve()
    run = with_absolute_paths(load_run_config(None, preset_values(preset), overrides))  # nodes start elsewhere
    run_dir = (run.output.runs / (run.output.run_id or name)).resolve()
    output = run.output.model_copy(update={"runs": run_dir.parent, "run_id": run_dir.name})
    run = run.model_copy(update={"output": output})
    has_gpus = run.rollout.engine != "transformers" and run.rollout.placement == "disaggregated"
    servers = run.rollout.num_engines * run.rollout.engine_tp if has_gpus else 0
    if gpus_per_node and nodes * gpus_per_node < run.parallel.ranks + servers:
        raise ValueError(
            f"{nodes} node(s) with {gpus_per_node} GPUs each are fewer than parallel.ranks = {run.parallel.ranks} and "
            f"{servers} GPUs of servers"
        )
    plan = JobPlan(
        name=name,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        folder=str(folder),
        run_dir=str(run_dir),
        interface=interface,
        start_deadline=start_deadline,
        grace=grace,
    )
    return run, plan


def program(image: str | None) -> str:
    """The command as nodes find it: on the PATH of an image, else where it lies here (a file system that all share)."""
    return "glm5-next" if image else str(Path(sys.executable).with_name("glm5-next"))


def dry_run(run: RunConfig, plan: JobPlan, submission: Submission) -> None:
    """Prints all three files and writes none."""
    for file, text in _files(run, plan, submission).items():
        console.print(f"== {Path(plan.folder) / file}", markup=False)
        console.print(text, markup=False)


def write(run: RunConfig, plan: JobPlan, submission: Submission) -> Path:
    """Writes the job folder and returns the script. Raises ValueError for a folder that holds another job."""
    folder = Path(plan.folder)
    files = _files(run, plan, submission)
    for file, text in files.items():
        if (folder / file).exists() and (folder / file).read_text() != text:
            raise ValueError(f"{folder / file}: another job is there; choose another --name or --out, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        write_atomic(folder / file, text.encode())
    console.print(f"wrote {folder}: {', '.join(files)}", markup=False)
    return folder / slurm.SCRIPT_FILE


def submit(script: Path) -> None:
    """Hands the script to sbatch, from its own folder, where the job's output goes too."""
    if shutil.which("sbatch") is None:
        raise ValueError("sbatch is not on PATH; run this on a login node of the cluster, or leave out --submit")
    done = subprocess.run(
        ["sbatch", script.name], cwd=script.parent, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise ValueError(f"sbatch refused {script} (exit status {done.returncode}): {done.stderr.strip()}")
    console.print(done.stdout.strip(), markup=False)


def _files(run: RunConfig, plan: JobPlan, submission: Submission) -> dict[str, str]:
    return {
        slurm.SETTINGS_FILE: describe(run),
        slurm.PLAN_FILE: plan.text(),
        slurm.SCRIPT_FILE: slurm.script(plan, submission),
    }
