"""What `parity` and `audit` do and print."""

import io
import json
from dataclasses import asdict
from math import lcm
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from glm5_next.launchers.atomic_write import write_atomic
from glm5_next.launchers.cpu_process import use_cpu
from glm5_next.launchers.parity import ParityReport, draw_depth
from glm5_next.launchers.presets import RELEASED_CONFIG, find_preset
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.topology import Topology

console = Console(highlight=False, soft_wrap=True)
GIB = 2**30


def topology_of(ranks: int | None, *, tp: int, pp: int, ep: int, etp: int, vpp: int | None) -> Topology:
    """The sizes as a topology, of as few ranks as they allow unless a number is given."""
    return Topology(world_size=ranks or pp * lcm(tp, ep * etp), tp=tp, pp=pp, ep=ep, etp=etp, vpp=vpp)


def preset_topology(name: str) -> Topology:
    """The topology that a preset trains with."""
    parallel = find_preset(name).values["parallel"]
    sizes = {key: parallel[key] for key in ("tp", "pp", "ep", "etp", "vpp") if key in parallel}
    return Topology(world_size=parallel["ranks"], **sizes)


def model_config(source: Path | None) -> Glm5NextConfig:
    """A checkpoint's description, or the released model's."""
    return Glm5NextConfig.from_hf(source or RELEASED_CONFIG)


def parity(
    hf: Path,
    topology: Topology,
    *,
    dtype: str,
    tokens: int,
    seed: int,
    max_kl: float | None,
    plot: Path | None,
    as_json: bool,
) -> bool:
    """Prints where our model departs from transformers'; returns whether it does not."""
    use_cpu()
    from glm5_next.launchers.runtime.parity import run_parity

    long_names: dict[str, Any] = {"fp32": "float32", "bf16": "bfloat16"}
    report = run_parity(hf, topology, dtype=long_names[dtype], num_tokens=tokens, seed=seed)
    limit = max_kl if max_kl is not None else 1e-8 if report.own_mean_kl is None else report.own_mean_kl
    if plot is not None:
        image = io.BytesIO()
        draw_depth(report).savefig(image, format="png", dpi=100)
        write_atomic(plot, image.getvalue())
    same = report.first is None and report.mean_kl <= limit
    if as_json:
        console.print_json(json.dumps(report.as_json() | {"max_kl_allowed": limit, "equal": same}))
        return same
    _print_parity(report, limit)
    return same


def _print_parity(report: ParityReport, limit: float) -> None:
    table = Table("layer", "kind", "stage", "error", "bound", "")
    for stage in report.stages:
        layer = str(stage.layer) if stage.kind else ""
        mark = "departs" if stage.departs else ""
        table.add_row(layer, stage.kind, stage.stage, f"{stage.error:.1e}", f"{stage.bound:.1e}", mark)
    console.print(table)
    console.print(f"KL per token: mean {report.mean_kl:.2e} (allowed {limit:.2e}), max {report.max_kl:.2e}")
    if report.own_mean_kl is not None:
        ratio = report.mean_kl / report.own_mean_kl if report.own_mean_kl else float("nan")
        console.print(f"the reference's own bf16 run: mean KL {report.own_mean_kl:.2e}; ours is {ratio:.2f} of it")
    agreements = {"indexer sets": report.indexer_agreement, "router sets": report.router_agreement}
    shown = [f"{name} {share:.2%}" for name, share in agreements.items() if share is not None]
    console.print(", ".join([f"top-1 agreement {report.top1_agreement:.2%}", *shown]))
    if report.first is not None:
        first = report.first
        place = f"layer {first.layer} ({first.kind}): {first.stage}" if first.kind else first.stage
        console.print(f"first departure: {place}, error {first.error:.1e} over {first.bound:.1e}")
    else:
        console.print("no stage departs")


def audit(source: Path | None, topology: Topology, *, as_json: bool) -> bool:
    """Prints what every stage holds; returns whether the ranks hold the whole checkpoint."""
    config = model_config(source)
    topology.check_model(config)
    use_cpu()
    from glm5_next.bridge.audit import AuditReport
    from glm5_next.bridge.audit import audit as run_audit

    report = AuditReport()
    columns = (*Progress.get_default_columns()[:1], BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("building ranks on the meta device", total=topology.world_size)
        for report in run_audit(config, topology):
            progress.update(task, completed=len(report.ranks))
    if as_json:
        totals = {name: getattr(report, name) for name in ("tensors", "parameters")}
        console.print_json(json.dumps(asdict(report) | totals))
    else:
        _print_audit(report, topology)
    return not report.problems


def _print_audit(report: Any, topology: Topology) -> None:
    table = Table(
        *("stage", "layers", "ranks", "parameters a rank", "experts", "kept in fp32", "frozen", "bf16 weights"),
        title=f"TP {topology.tp} x PP {topology.pp} x EP {topology.ep} x ETP {topology.etp}, DP {topology.dp}",
    )
    for stage in range(topology.pp):
        ranks = [rank for rank in report.ranks if rank.pp == stage]
        largest = max(ranks, key=lambda rank: rank.weight_bytes)
        counts = (largest.parameters, largest.expert_parameters, largest.fp32_parameters, largest.frozen_parameters)
        table.add_row(
            str(stage),
            spans(largest.layers),
            str(len(ranks)),
            *(f"{count:,}" for count in counts),
            f"{largest.weight_bytes / GIB:.1f} GiB",
        )
    console.print(table)
    console.print(
        f"{report.tensors:,} tensors, {report.parameters:,} parameters: {report.built_tensors:,} tensors "
        f"({report.built_parameters:,} parameters) in the ranks, {report.passed_tensors:,} "
        f"({report.passed_parameters:,}) passed through"
    )
    for problem in report.problems:
        console.print(f"problem: {problem}", markup=False)
    console.print(
        "every tensor is held, once per replica, in the right slices" if not report.problems else "incomplete"
    )


def spans(layers: tuple[int, ...]) -> str:
    """Layer numbers with runs shortened: 0-2, 6-8."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][1] + 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ", ".join(f"{first}-{last}" if first != last else str(first) for first, last in parts) or "none"
