"""Where a run's Ray is, and which node and GPU each trainer rank gets."""

import logging
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from glm5_next.launchers.failures import WorkerFailed
from glm5_next.launchers.ray_settings import OBJECT_STORE_BYTES, existing_cluster

STARTS = 3  # of Ray
PLACEMENT_DEADLINE = 120.0  # seconds until all GPUs that the ranks need are free


def init_arguments(num_cpus: int) -> dict[str, Any]:
    """Of `ray.init`: joins the Ray that RAY_ADDRESS names, else starts one for this run."""
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = existing_cluster(os.environ)
    if address is not None:
        return {"address": address, **quiet}
    return {
        "address": "local",
        "num_cpus": num_cpus,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        **quiet,
    }


def start_ray(num_cpus: int) -> None:
    """Ray takes SIGTERM over; afterwards it is handled as before.

    Ray 2.60 gives its own daemons 30 seconds, which a busy machine exceeds: it then gets another try.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        for left in reversed(range(STARTS)):
            try:
                ray.init(**init_arguments(num_cpus))
                return
            except Exception as error:
                if left == 0 or "timed out during startup" not in str(error):
                    raise
                ray.shutdown()
    finally:
        signal.signal(signal.SIGTERM, before)


def is_local() -> bool:
    """All of the run is on this machine: nothing has to listen beyond its loopback interface."""
    return existing_cluster(os.environ) is None


def server_options(ranks: int, servers: int, tp: int) -> dict[str, Any]:
    """Ray options of a rollout server's process: GPUs of one node, apart from those of the trainer ranks.

    Without any GPU servers run on CPUs. Raises ValueError if there are GPUs, but not enough for both.
    """
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus == 0:
        return {}
    if gpus < ranks + servers * tp:
        raise ValueError(
            f"{ranks} trainer ranks and {servers} servers of {tp} GPUs (rollout.num_engines, rollout.engine_tp) need "
            f"{ranks + servers * tp} GPUs, there are {gpus}"
        )
    return {"num_gpus": tp}


def check_cpus(wanted: int) -> None:
    """Raises ValueError if Ray has fewer CPUs than the run has processes: some would wait for ever."""
    there = int(ray.cluster_resources().get("CPU", 0))
    if there < wanted:
        raise ValueError(
            f"the run has {wanted} ranks and engines, a CPU each, and Ray only {there} CPUs on all its nodes"
        )


def trainer_options(ranks: int, guests: int = 0, deadline: float = PLACEMENT_DEADLINE) -> list[dict[str, Any]]:
    """Ray options of each rank's process. With a GPU for each: consecutive ranks on one node, so that tensor-parallel
    groups never leave it; with fewer, all ranks are on CPUs (a job on a cluster has counted its GPUs before).

    `guests` are engines that share the ranks' GPUs: there is a CPU for each beside its rank (`guest_options`).
    Raises ValueError for ranks that do not fill nodes, WorkerFailed if the GPUs are not free in time.
    """
    gpus = sorted(int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"])
    if sum(gpus) < ranks:
        return [{} for _ in range(ranks)]
    per_node = min(ranks, gpus[-1])
    if ranks % per_node:
        raise ValueError(f"parallel.ranks is {ranks}, which does not fill nodes of {per_node} GPUs")
    cpus = per_node * (1 + -(-guests // ranks))
    group = placement_group([{"CPU": cpus, "GPU": per_node}] * (ranks // per_node), strategy="STRICT_SPREAD")
    if not group.wait(deadline):
        free = ray.available_resources().get("GPU", 0)
        raise WorkerFailed(
            f"no place for {ranks} trainer ranks on {ranks // per_node} node(s) with {per_node} GPUs and CPUs each within "
            f"{deadline:.0f} seconds: {len(gpus)} node(s) have {gpus} GPUs, {free:.0f} of them are free"
        )
    return [
        {"num_gpus": 1, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, rank // per_node)}
        for rank in range(ranks)
    ]


def unused_gpus(places: Sequence[dict[str, Any]]) -> int:
    """GPUs that are there while all ranks are on CPUs because there are too few for all."""
    on_gpus = any("num_gpus" in place for place in places)
    return 0 if on_gpus else int(ray.cluster_resources().get("GPU", 0))


def guest_options(host: dict[str, Any]) -> dict[str, Any]:
    """Ray options of an engine that shares the GPU of the trainer rank with these options: the same place, and no GPU of
    its own in Ray's books."""
    return {name: value for name, value in host.items() if name != "num_gpus"}


def shared_ranks(places: Sequence[Mapping[str, Any]], number: int, tp: int) -> range:
    """The trainer ranks, with these options, whose GPUs colocated server `number` shares, one for each of its ranks.

    Raises ValueError unless they are on one node.
    """
    ranks = range(number * tp, (number + 1) * tp)
    nodes = {getattr(places[rank].get("scheduling_strategy"), "placement_group_bundle_index", 0) for rank in ranks}
    if len(nodes) > 1:
        raise ValueError(
            f"rollout.engine_tp is {tp}: a colocated server would share trainer ranks {ranks[0]}-{ranks[-1]}, which are not "
            "all on one node; choose a size that divides the GPUs of a node"
        )
    return ranks
