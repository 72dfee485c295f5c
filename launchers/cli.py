"""The `glm5-next` command. Imports nothing heavy until a command runs, so that `--help` is instant."""

from pathlib import Path
from typing import Annotated

import typer

from glm5_next.launchers import cli_bridge, cli_cluster, cli_inspect
from glm5_next.launchers.cli_errors import STOPPED, one_message_on_error

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. --set train.steps=20. Repeatable."),
]


@app.callback()
def main() -> None:
    """Train GLM-5.3-Flash with GRPO on released Megatron-Core.

    Start with: glm5-next tiny-checkpoint runs/tiny-checkpoint, then glm5-next train --preset tiny.
    """


@app.command()
def train(
    preset: Annotated[
        str | None,
        typer.Option(
            help="Named settings to start from: 'tiny' runs on any laptop, 'tiny-gpu' on one GPU, 'tiny-http' with rollout "
            "servers."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with settings (see --dry-run for all of them).")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN_FOLDER", help="Continue a stopped run from its last checkpoint.")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Check everything, print settings and plan, start nothing.")] = False,
) -> None:
    """Train with GRPO: rollouts, rewards, updates, weight sync, checkpoints, plots and an export at the end.

    Ctrl-C stops after the step in progress and saves it; --resume continues.
    """
    with one_message_on_error():
        from glm5_next.launchers import commands

        if resume is not None and (preset or config or dry_run):
            raise ValueError("--resume takes a run's own settings; only --set can be given with it")
        if resume is not None:
            finished = commands.resume(resume, overrides or [])
        elif dry_run:
            finished = commands.dry_run(preset, config, overrides or [])
        else:
            finished = commands.train(preset, config, overrides or [])
    raise typer.Exit(0 if finished else STOPPED)


@app.command("tiny-checkpoint")
def tiny_checkpoint(
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist or be empty.")],
    layers: Annotated[int, typer.Option(help="Layers; 3, 7, 11, ... are sparse attention, the others KDA.")] = 5,
    experts: Annotated[int, typer.Option(help="Routed experts.")] = 8,
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 64,
    streams: Annotated[int, typer.Option(help="Residual streams (mHC).")] = 4,
    dense_layers: Annotated[int, typer.Option(help="Leading layers with a dense MLP.")] = 1,
    seed: Annotated[int, typer.Option(help="Same seed, same bytes.")] = 0,
    warm_up: Annotated[
        int, typer.Option(help="Supervised steps that teach the form of an answer of the built-in task; 0: none.")
    ] = 60,
) -> None:
    """Write a small random checkpoint in the released file layout, with tokenizer, MTP layer and vision tower."""
    with one_message_on_error():
        from glm5_next.launchers import commands

        sizes = {
            "layers": layers,
            "experts": experts,
            "hidden": hidden,
            "streams": streams,
            "dense_layers": dense_layers,
        }
        commands.tiny_checkpoint(out, seed=seed, warm_up_steps=warm_up, sizes=sizes)


app.command()(cli_inspect.parity)
app.command()(cli_inspect.audit)
app.command()(cli_inspect.plan)
app.command("replay-study")(cli_inspect.replay_study)
app.command()(cli_bridge.convert)
app.command("slice")(cli_bridge.slice_)
app.command()(cli_bridge.verify)
app.command()(cli_cluster.prepare)
app.command()(cli_cluster.slurm)
app.command()(cli_cluster.node)
app.command()(cli_cluster.doctor)
