"""Commands around a run on a cluster: doctor, prepare, slurm, node."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from glm5_next.launchers.cli_errors import STOPPED, one_message_on_error

Interface = Annotated[
    str | None, typer.Option(help="Network interface of the nodes; default: the one of the default route.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting. Repeatable.")
]


def doctor(
    lock: Annotated[
        Path | None, typer.Option(help="File with name==version lines; default: the image's, or constraints.txt.")
    ] = None,
    interface: Interface = None,
    folder: Annotated[Path, typer.Option(help="Where runs would be written.")] = Path("."),
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Also compute every backend against its reference (minutes).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Say what is installed, what is broken, which backends and which network a run would use, and how much room is left.

    Exit status 1 if something is wrong.
    """
    with one_message_on_error():
        from glm5_next.launchers import doctor_commands

        well = doctor_commands.examine(lock=lock, interface=interface, folder=folder, gpu=gpu, as_json=as_json)
    raise typer.Exit(0 if well else 1)


def prepare(
    preset: Annotated[str, typer.Option(help="A preset for a cluster, e.g. 16x4 or slice-1x1.")],
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub name; default: the released model in bf16.")] = None,
    prompts: Annotated[str | None, typer.Option(help="JSONL file or hub name; default: dapo-math-17k.")] = None,
    revision: Annotated[str | None, typer.Option(help="Commit or tag of what comes from the hub.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Get model and prompts of a preset into place, check them, convert the model to a Megatron checkpoint and verify it.

    Safe to run again: what is done is kept, what was interrupted goes on.
    """
    with one_message_on_error():
        from glm5_next.launchers import prepare_commands

        prepare_commands.prepare(
            preset, overrides or [], model=model, prompts=prompts, revision=revision, as_json=as_json
        )


def slurm(
    preset: Annotated[str, typer.Option(help="Named settings and cluster, e.g. 16x4.")],
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option(help="Of job, job folder and run; default: the preset's.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Job folder, on a file system that all nodes share; default: jobs/NAME.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Default: the preset's.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=0, help="Default: the preset's.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm account.")] = None,
    time: Annotated[str | None, typer.Option(metavar="D-HH:MM:SS", help="Time limit.")] = None,
    image: Annotated[str | None, typer.Option(help="Container image, started by pyxis (see docker/README.md).")] = None,
    mount: Annotated[
        list[str] | None, typer.Option(metavar="SOURCE:TARGET", help="For the container. Repeatable.")
    ] = None,
    interface: Interface = None,
    start_deadline: Annotated[int, typer.Option(min=1, help="Seconds until all nodes must be there.")] = 600,
    grace: Annotated[int, typer.Option(min=60, help="Seconds before the time limit at which the run saves.")] = 900,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print all files, write none.")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="Hand the script to sbatch.")] = False,
) -> None:
    """Write settings, plan and sbatch script of a job, and with --submit submit it.

    The job requeues itself before its time limit and when preempted, and continues from its last checkpoint.
    """
    with one_message_on_error():
        from glm5_next.launchers import slurm_commands
        from glm5_next.launchers.slurm import Submission

        if dry_run and submit:
            raise ValueError("--dry-run and --submit exclude each other")
        run, plan = slurm_commands.job(
            preset,
            overrides or [],
            name=name,
            folder=out,
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            interface=interface,
            start_deadline=start_deadline,
            grace=grace,
        )
        submission = Submission(
            program=slurm_commands.program(image),
            partition=partition,
            account=account,
            time=time,
            image=image,
            mounts=tuple(mount or ()),
        )
        if dry_run:
            slurm_commands.dry_run(run, plan, submission)
            return
        script = slurm_commands.write(run, plan, submission)
        if submit:
            slurm_commands.submit(script)


def node(
    plan: Annotated[Path, typer.Option(help="Plan file of a job, written by glm5-next slurm.")],
    role: Annotated[
        Literal["auto", "driver"],
        typer.Option(help="auto: head or worker, by Slurm's task number; driver: the run itself."),
    ] = "auto",
) -> None:
    """One node of a job. Started by srun in the script that glm5-next slurm writes, not by hand."""
    with one_message_on_error():
        from glm5_next.launchers.slurm import JobPlan

        job = JobPlan.read(plan)
        if role == "driver":
            from glm5_next.launchers.runtime.driver import drive

            code = 0 if drive(job) else STOPPED
        else:
            import os

            from glm5_next.launchers.node import Node, Task

            code = Node(job, Task.of(os.environ)).run()
    raise typer.Exit(code)
