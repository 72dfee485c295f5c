"""What `plan` does and prints."""

import json
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from glm5_next.bridge.stage_sizes import stage_sizes
from glm5_next.launchers.engines.shared_words import SHARE_OF_GPU
from glm5_next.launchers.inspect_commands import console, model_config, preset_topology
from glm5_next.launchers.memory import GIB, RankMemory, Workload
from glm5_next.launchers.plan import PARTS, Candidate, Cluster, Plan, candidate, make_plan, what_it_lacks
from glm5_next.launchers.presets import Preset, find_preset
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.topology import Topology

HEADINGS = dict(zip(PARTS, ("weights", "grads", "optim", "activ", "burst", "engine"), strict=True))
DEFAULT_TOKENS = 32768


def plan(
    source: Path | None,
    gpus: int,
    gpu_memory: float,
    nodes: int | None,
    workload: dict[str, Any],
    *,
    top: int,
    as_json: bool,
) -> bool:
    """Lists topologies for a cluster; returns whether one fits."""
    cluster = _cluster(gpus, gpu_memory, nodes)
    work = _workload(workload)
    made = make_plan(model_config(source), cluster, work)
    if as_json:
        console.print_json(json.dumps(_as_json(made, cluster)))
    else:
        _print_plan(made, cluster, work, top)
    return made.best is not None


def judge_preset(source: Path | None, name: str, workload: dict[str, Any], *, as_json: bool) -> bool:
    """Says whether a preset's topology fits the cluster it is for."""
    preset = find_preset(name)
    if preset.cluster is None:
        raise ValueError(f"preset {name!r} runs on a CPU; there is no GPU memory to plan")
    config = preset.released_model() if source is None else model_config(source)
    topology = preset_topology(name)
    topology.check_model(config)
    train = preset.values["train"]
    given = {key: value for key, value in workload.items() if value is not None}
    defaults = {
        "tokens": train["tokens_per_micro_batch"],
        "recompute": train["recompute"],
        "offload": preset.values["optimizer"].get("offload", False),
    }
    work = _workload(defaults | _engine_bytes(preset, config) | given)
    chosen = candidate(config, topology, preset.cluster, work)
    lacks = what_it_lacks(chosen)
    if as_json:
        console.print_json(json.dumps(_candidate_json(chosen) | {"preset": name, "lacks": lacks}))
    else:
        _print_candidates([chosen], preset.cluster, work)
        console.print(f"{name} fits" if lacks is None else f"{name} does not fit: {lacks}")
    return chosen.fits


def _engine_bytes(preset: Preset, config: Glm5NextConfig) -> dict[str, float]:
    """What an engine takes on a trainer rank's card: an embedded one its weights, a colocated server its share."""
    rollout = preset.values["rollout"]
    assert preset.cluster is not None
    if rollout["engine"] == "transformers":
        (whole,) = stage_sizes(config, Topology())
        return {"guest": 2.0 * whole.parameters}
    if rollout.get("placement") == "colocated":
        return {"awake": SHARE_OF_GPU * preset.cluster.gpu_memory_gb * 1e9}
    return {}


def _cluster(gpus: int, gpu_memory: float, nodes: int | None) -> Cluster:
    if nodes is None:
        nodes = max(1, -(-gpus // 8))
    if gpus % nodes:
        raise ValueError(f"{gpus} GPUs cannot be spread evenly over {nodes} nodes; give --nodes")
    return Cluster(nodes, gpus // nodes, gpu_memory)


def _workload(values: dict[str, Any]) -> Workload:
    return Workload(**{"tokens": DEFAULT_TOKENS} | {key: value for key, value in values.items() if value is not None})


def _print_plan(made: Plan, cluster: Cluster, work: Workload, top: int) -> None:
    fitting = sum(item.fits for item in made.candidates)
    _print_candidates(list(made.candidates[:top]), cluster, work)
    console.print(f"{fitting} of {len(made.candidates)} legal topologies fit; --top lists more than {top}")
    refusals: dict[str, list[str]] = {}
    for refusal in made.refusals:
        refusals.setdefault(refusal.reason, []).append(refusal.sizes)
    table = Table("out", "why")
    for reason, sizes in refusals.items():
        table.add_row(", ".join(sizes), reason)
    console.print(table)
    unfit = [item for item in made.candidates if not item.fits]
    if unfit:
        console.print(f"of the {len(unfit)} that do not fit, the nearest: {_name(unfit[0])}: {what_it_lacks(unfit[0])}")


def _print_candidates(candidates: list[Candidate], cluster: Cluster, work: Workload) -> None:
    table = Table(
        *("TP", "PP", "EP", "ETP", "DP", *HEADINGS.values(), "total", "free"),
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title=(
            f"{cluster.nodes} x {cluster.gpus_per_node} GPUs of {cluster.gpu_memory_gb:g} GB, rows of {work.tokens} "
            f"tokens, recompute {work.recompute}; GiB on the fullest rank"
        ),
        caption="activations, burst (logits, or one module's weight gradients) and total are estimates; total includes 4 GiB "
        "for CUDA, NCCL and workspaces, and a colocated engine in place of activations if that is more",
    )
    for item in candidates:
        topology, memory = item.topology, item.memory
        sizes = (topology.tp, topology.pp, topology.ep, topology.etp, topology.dp)
        parts = [_gib(getattr(memory, part)) for part in PARTS]
        table.add_row(*map(str, sizes), *parts, _gib(memory.total), _gib(item.headroom))
    console.print(table)
    if candidates and candidates[0].memory.host:
        console.print(f"host memory: {_gib(candidates[0].memory.host * cluster.gpus_per_node)} GiB a node")


def _gib(value: float) -> str:
    value /= GIB
    return f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def _name(item: Candidate) -> str:
    topology = item.topology
    return f"TP {topology.tp} PP {topology.pp} EP {topology.ep} ETP {topology.etp}"


def _as_json(made: Plan, cluster: Cluster) -> dict[str, Any]:
    return {
        "cluster": vars(cluster),
        "candidates": [_candidate_json(item) for item in made.candidates],
        "refusals": [vars(refusal) for refusal in made.refusals],
    }


def _candidate_json(item: Candidate) -> dict[str, Any]:
    memory: RankMemory = item.memory
    bytes_ = {**vars(memory), "total": memory.total, "headroom": item.headroom}
    return {"topology": vars(item.topology), "fits": item.fits, "fullest_stage": item.position, "bytes": bytes_}
