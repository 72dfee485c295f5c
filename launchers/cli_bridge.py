"""Commands that move checkpoints between formats and compare them: convert, slice, verify."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from glm5_next.launchers.cli_errors import one_message_on_error

Workers = Annotated[int | None, typer.Option(min=1, help="Threads; default: one per core, at most 16.")]
Budget = Annotated[
    float | None,
    typer.Option(metavar="GIB", help="Memory for this process; default: the largest group of tensors and 2 GiB."),
]
Share = Annotated[
    str,
    typer.Option(
        metavar="I/N", help="This process's share, when N processes, maybe on several nodes, write one output."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead of text.")]


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="Hugging Face folder, or with --to-hf a checkpoint.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist, be empty, or be of this conversion.")],
    to_hf: Annotated[bool, typer.Option("--to-hf", help="Convert a Megatron checkpoint back.")] = False,
    hf: Annotated[
        Path | None, typer.Option(help="With --to-hf: where config and untrained tensors lie now, if they have moved.")
    ] = None,
    dtype: Annotated[
        Literal["source", "bfloat16", "float32"] | None,
        typer.Option(help="With --to-hf: source keeps FP8 as FP8; default: source, float32 for a checkpoint in fp32."),
    ] = None,
    workers: Workers = None,
    budget: Budget = None,
    share: Share = "0/1",
    as_json: Json = False,
) -> None:
    """Convert a Hugging Face checkpoint to a Megatron distributed checkpoint, or back with --to-hf.

    Streams: memory does not grow with the model. Killed at any moment, the same command goes on where it stopped.
    """
    with one_message_on_error():
        from glm5_next.launchers import bridge_commands

        if not to_hf and (hf is not None or dtype is not None):
            raise ValueError("--hf and --dtype go with --to-hf")
        how = bridge_commands.Settings(workers=workers, budget=budget, share=share, as_json=as_json)
        bridge_commands.convert(source, out, to_hf=to_hf, hf=hf, dtype=dtype, settings=how)


def slice_(
    hf: Annotated[Path, typer.Argument(metavar="HF", help="Hugging Face folder.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist, be empty, or be of this slice.")],
    layers: Annotated[int, typer.Option(min=1, help="Layers to keep, from the first.")],
    mtp: Annotated[bool, typer.Option(help="Keep the multi-token-prediction layer.")] = True,
    vision: Annotated[bool, typer.Option(help="Keep the vision tower.")] = True,
    workers: Workers = None,
    budget: Budget = None,
    as_json: Json = False,
) -> None:
    """Cut a checkpoint to its first layers, for smoke runs on real weights; config and index are rewritten."""
    with one_message_on_error():
        from glm5_next.launchers import bridge_commands

        how = bridge_commands.Settings(workers=workers, budget=budget, share="0/1", as_json=as_json)
        bridge_commands.slice_checkpoint(hf, out, layers=layers, mtp=mtp, vision=vision, settings=how)


def verify(
    a: Annotated[Path, typer.Argument(help="Hugging Face folder.")],
    b: Annotated[Path, typer.Argument(help="Another one.")],
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Compare numbers, not bits: largest relative error (RMS) of a tensor of b against a."),
    ] = None,
    worst: Annotated[int, typer.Option(min=1, help="With --tolerance: how many tensors to list, worst first.")] = 10,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Compare two Hugging Face folders tensor by tensor: names, dtypes, shapes, bits, and the other files.

    With --tolerance: names, shapes and numbers, whatever they are stored as (FP8 with its scales). Exit status 1 if they
    differ.
    """
    with one_message_on_error():
        from glm5_next.launchers import bridge_commands

        if tolerance is None:
            equal = bridge_commands.verify(a, b, workers=workers, as_json=as_json)
        else:
            equal = bridge_commands.verify_numbers(a, b, tolerance, worst=worst, workers=workers, as_json=as_json)
    raise typer.Exit(0 if equal else 1)
