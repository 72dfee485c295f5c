"""Which topologies can train a model on given GPUs, and why the others cannot. Needs no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from glm5_next.launchers.memory import GIB, RankMemory, Workload, rank_memories
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.topology import Topology

RESERVE = 0.05  # of the card, for fragmentation
PARTS = ("weights", "gradients", "optimizer", "activations", "transient", "engine")  # of `RankMemory`


@dataclass(frozen=True)
class Cluster:
    """`nodes` equal machines; memory in GB as vendors count (10**9 bytes)."""

    nodes: int
    gpus_per_node: int
    gpu_memory_gb: float

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def usable_bytes(self) -> float:
        return self.gpu_memory_gb * 1e9 * (1 - RESERVE)


@dataclass(frozen=True)
class Candidate:
    """A legal topology with the memory of its fullest rank."""

    topology: Topology
    memory: RankMemory
    position: int  # pipeline rank that is fullest
    usable: float

    @property
    def headroom(self) -> float:
        return self.usable - self.memory.total

    @property
    def fits(self) -> bool:
        return self.headroom >= 0


@dataclass(frozen=True)
class Refusal:
    """Why a size, or a combination of sizes, is out."""

    sizes: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """`candidates` best first: those that fit, with the fewest cuts (TP x PP, then expert-TP), then the most headroom."""

    candidates: tuple[Candidate, ...]
    refusals: tuple[Refusal, ...]

    @property
    def best(self) -> Candidate | None:
        return next((candidate for candidate in self.candidates if candidate.fits), None)


def make_plan(config: Glm5NextConfig, cluster: Cluster, workload: Workload) -> Plan:
    """Every legal (TP, PP, EP, ETP) with CP 1 on the cluster; each illegal size once, with its reason."""
    refusals = {refusal.sizes: refusal for refusal in _illegal_sizes(config, cluster)}
    candidates = []
    for topology in _topologies(cluster):
        if any(f"{name} {size}" in refusals for name, size in _named_sizes(topology)):
            continue
        if workload.tokens % topology.tp:
            refusals[f"TP {topology.tp}"] = Refusal(
                f"TP {topology.tp}", f"a row of {workload.tokens} tokens is not a multiple of it (sequence parallelism)"
            )
            continue
        try:
            topology.check_model(config)
        except ValueError as error:
            label = ", ".join(f"{name} {size}" for name, size in _named_sizes(topology))
            refusals[label] = Refusal(label, str(error))
            continue
        candidates.append(candidate(config, topology, cluster, workload))
    candidates.sort(key=_rank)
    return Plan(tuple(candidates), tuple(refusals.values()))


def candidate(config: Glm5NextConfig, topology: Topology, cluster: Cluster, workload: Workload) -> Candidate:
    """One topology's fullest rank against the card."""
    memories = rank_memories(config, topology, workload)
    position = max(range(len(memories)), key=lambda rank: memories[rank].total)
    return Candidate(topology, memories[position], position, cluster.usable_bytes)


def what_it_lacks(chosen: Candidate) -> str | None:
    """Why a topology does not fit, in words; None if it does."""
    if chosen.fits:
        return None
    memory, missing = chosen.memory, -chosen.headroom / GIB
    parts = {name: getattr(memory, name) for name in PARTS}
    largest = max(parts, key=lambda name: parts[name])
    helps = (
        " (--offload would move it to the host)" if largest == "optimizer" and missing <= parts[largest] / GIB else ""
    )
    return (
        f"pipeline rank {chosen.position} needs {memory.total / GIB:.0f} GiB, {missing:.0f} more than there is; "
        f"the largest part is {largest} ({parts[largest] / GIB:.0f} GiB){helps}"
    )


def _rank(item: Candidate) -> tuple:
    topology = item.topology
    cuts = topology.tp * topology.pp
    if not item.fits:
        return (1, -item.headroom, cuts)
    return (0, cuts, topology.etp, topology.tp, -item.headroom)


def _topologies(cluster: Cluster) -> Iterator[Topology]:
    sizes = _divisors(cluster.gpus)
    for tp in sizes:
        for pp in sizes:
            for ep in sizes:
                for etp in sizes:
                    if cluster.gpus % (tp * pp) == 0 and cluster.gpus % (ep * etp * pp) == 0:
                        yield Topology(world_size=cluster.gpus, tp=tp, pp=pp, ep=ep, etp=etp)


def _named_sizes(topology: Topology) -> list[tuple[str, int]]:
    return [("TP", topology.tp), ("PP", topology.pp), ("EP", topology.ep), ("ETP", topology.etp)]


def _illegal_sizes(config: Glm5NextConfig, cluster: Cluster) -> Iterator[Refusal]:
    """Sizes that are out whatever the others are."""
    for size in _divisors(cluster.gpus):
        if size > cluster.gpus_per_node:
            for name in ("TP", "ETP"):
                yield Refusal(f"{name} {size}", f"spans nodes of {cluster.gpus_per_node} GPUs")
        else:
            alone = {"TP": Topology(world_size=size, tp=size), "ETP": Topology(world_size=size, etp=size)}
            yield from _refused(config, size, alone)
        yield from _refused(
            config, size, {"PP": Topology(world_size=size, pp=size), "EP": Topology(world_size=size, ep=size)}
        )


def _refused(config: Glm5NextConfig, size: int, alone: dict[str, Topology]) -> Iterator[Refusal]:
    for name, topology in alone.items():
        try:
            topology.check_model(config)
        except ValueError as error:
            yield Refusal(f"{name} {size}", str(error))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
