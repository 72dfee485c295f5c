"""Commands that look at a model and its topologies before anything is trained: parity, audit, plan."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from glm5_next.launchers.cli_errors import one_message_on_error

Tp = Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel size of the dense part.")]
Pp = Annotated[int, typer.Option("--pp", min=1, help="Pipeline stages.")]
Ep = Annotated[int, typer.Option("--ep", min=1, help="Expert-parallel size.")]
Etp = Annotated[int, typer.Option("--etp", min=1, help="Tensor-parallel size inside an expert.")]
Vpp = Annotated[int | None, typer.Option("--vpp", min=2, help="Model chunks per pipeline rank.")]
Ranks = Annotated[int | None, typer.Option("--ranks", min=1, help="Ranks in all; default: as few as the sizes allow.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Config = Annotated[
    Path | None, typer.Argument(help="Checkpoint folder or config.json; default: the released GLM-5.3-Flash.")
]


def parity(
    hf: Annotated[Path, typer.Argument(metavar="HF", help="Hugging Face checkpoint folder.")],
    tp: Tp = 1,
    pp: Pp = 1,
    ep: Ep = 1,
    etp: Etp = 1,
    vpp: Vpp = None,
    ranks: Ranks = None,
    dtype: Annotated[
        Literal["fp32", "bf16"], typer.Option(help="Precision of our model; the reference is fp32.")
    ] = "fp32",
    tokens: Annotated[int, typer.Option(min=1, help="Length of the random sequence that both sides read.")] = 96,
    seed: Annotated[int, typer.Option(help="Of the sequence.")] = 0,
    max_kl: Annotated[
        float | None, typer.Option(help="Largest mean KL per token; default 1e-8 in fp32, the reference's own in bf16.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG file to draw the error by depth into.")] = None,
    as_json: Json = False,
) -> None:
    """Run our model and transformers' on the same tokens and name the first stage where they depart.

    Exit status 1 if a stage departs or the logits are further apart than --max-kl. Runs on the CPU, one process a rank.
    """
    with one_message_on_error():
        from glm5_next.launchers import inspect_commands
        from glm5_next.launchers.inspect_commands import topology_of

        topology = topology_of(ranks, tp=tp, pp=pp, ep=ep, etp=etp, vpp=vpp)
        same = inspect_commands.parity(
            hf, topology, dtype=dtype, tokens=tokens, seed=seed, max_kl=max_kl, plot=plot, as_json=as_json
        )
    raise typer.Exit(0 if same else 1)


def audit(
    config: Config = None,
    tp: Tp = 1,
    pp: Pp = 1,
    ep: Ep = 1,
    etp: Etp = 1,
    vpp: Vpp = None,
    ranks: Ranks = None,
    preset: Annotated[str | None, typer.Option(help="Take the topology of a preset.")] = None,
    as_json: Json = False,
) -> None:
    """Build every rank of a topology on the meta device and check that together they hold the whole checkpoint.

    Needs no weights and no GPU. Exit status 1 if a tensor is missing, doubled, cut wrongly or not mapped.
    """
    with one_message_on_error():
        from glm5_next.launchers import inspect_commands
        from glm5_next.launchers.inspect_commands import topology_of

        sizes: dict[str, Any] = {"tp": tp, "pp": pp, "ep": ep, "etp": etp, "vpp": vpp}
        if preset is not None and (ranks is not None or sizes != {"tp": 1, "pp": 1, "ep": 1, "etp": 1, "vpp": None}):
            raise ValueError("--preset brings its own topology; leave out --tp, --pp, --ep, --etp, --vpp and --ranks")
        topology = inspect_commands.preset_topology(preset) if preset else topology_of(ranks, **sizes)
        whole = inspect_commands.audit(config, topology, as_json=as_json)
    raise typer.Exit(0 if whole else 1)


def plan(
    config: Config = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs in all.")] = None,
    gpu_memory: Annotated[float | None, typer.Option(metavar="GB", min=1, help="Memory of one GPU.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Machines; default: 8 GPUs each, or fewer.")] = None,
    preset: Annotated[str | None, typer.Option(help="Judge a preset's topology on its own cluster.")] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a packed row; default 32768, or the preset's.")
    ] = None,
    recompute: Annotated[
        Literal["none", "full"] | None, typer.Option(help="Activation recomputation; default full, or the preset's.")
    ] = None,
    offload: Annotated[
        bool | None,
        typer.Option("--offload/--no-offload", help="Optimizer state in host memory; default no, or the preset's."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Topologies to list.")] = 12,
    as_json: Json = False,
) -> None:
    """List every legal topology for given GPUs with its memory, best first, and why the others are out.

    Exit status 1 if nothing fits (or the preset does not). Memory beyond weights, gradients and optimizer is an estimate.
    """
    with one_message_on_error():
        from glm5_next.launchers import plan_commands

        workload = {"tokens": sequence_length, "recompute": recompute, "offload": offload}
        if preset is not None:
            if (gpus, gpu_memory, nodes) != (None, None, None):
                raise ValueError("--preset brings its own cluster; leave out --gpus, --gpu-memory and --nodes")
            fits = plan_commands.judge_preset(config, preset, workload, as_json=as_json)
        else:
            if gpus is None or gpu_memory is None:
                raise ValueError(
                    "plan needs --gpus N and --gpu-memory GB (e.g. --gpus 64 --gpu-memory 141), or --preset"
                )
            fits = plan_commands.plan(config, gpus, gpu_memory, nodes, workload, top=top, as_json=as_json)
    raise typer.Exit(0 if fits else 1)


def replay_study(
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist or be empty.")] = Path(
        "runs/replay-study"
    ),
    checkpoint: Annotated[
        Path | None, typer.Option(help="Hugging Face folder; default: a random tiny one, written to OUT.")
    ] = None,
    copies: Annotated[int, typer.Option(min=1, help="Responses to each prompt.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each response.")] = 32,
    seed: Annotated[int, typer.Option(help="Of weights, prompts and sampling.")] = 0,
) -> None:
    """Measure how much of the mismatch between engine and trainer comes from routing and from the indexer.

    The embedded engine samples with its caches, the trainer scores the same tokens in packed rows, with replay off, of
    experts, of the indexer's picks, and of both; in bf16, and in fp32 as a control.
    """
    with one_message_on_error():
        from glm5_next.launchers import study_commands

        study_commands.replay_study(out, checkpoint, copies=copies, new_tokens=new_tokens, seed=seed)
