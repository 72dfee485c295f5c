"""The run inside a job: begins when every planned node and GPU is in Ray, and continues what an earlier start left."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from glm5_next.launchers.config import load_run_config
from glm5_next.launchers.failures import RunFailed
from glm5_next.launchers.node import FINISHED, STATE_VARIABLE
from glm5_next.launchers.ray_settings import existing_cluster
from glm5_next.launchers.runtime.placement import init_arguments
from glm5_next.launchers.runtime.run import SETTINGS_FILE, resume_run, start_run
from glm5_next.launchers.slurm import JobPlan

POLL, SAY_EVERY = 1.0, 30.0


def drive(plan: JobPlan) -> bool:
    """Trains; returns whether the run finished (it was stopped and can be resumed otherwise)."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the run has its own handler
    if existing_cluster(os.environ) is None:
        raise ValueError("RAY_ADDRESS is not set: `node --role driver` is started by `node --role auto`")
    ray.init(**init_arguments(0))
    wait_for_cluster(plan, ray.nodes)
    ray.shutdown()
    run_dir = Path(plan.run_dir)
    if (run_dir / SETTINGS_FILE).is_file():
        outcome = resume_run(run_dir, [])
    else:
        outcome = start_run(load_run_config(plan.settings, None, []), name=plan.name)
    if outcome.finished:
        (Path(os.environ[STATE_VARIABLE]) / FINISHED).touch()
    return outcome.finished


def wait_for_cluster(plan: JobPlan, nodes: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
    """Returns when Ray has exactly the planned nodes and GPUs; raises RunFailed that counts them after the deadline."""
    start = said = time.monotonic()
    wanted = (plan.nodes, plan.nodes * plan.gpus_per_node)
    while (found := _count(nodes())) != wanted:
        state = f"{found[0]} of {wanted[0]} nodes and {found[1]} of {wanted[1]} GPUs are in Ray"
        now = time.monotonic()
        if now - start > plan.start_deadline:
            raise RunFailed(f"{state} after {plan.start_deadline} seconds; nothing was started")
        if now - said > SAY_EVERY:
            said = now
            print(f"waiting: {state}", flush=True)
        time.sleep(POLL)


def _count(nodes: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    alive = [node for node in nodes if node["Alive"]]
    return len(alive), sum(int(node["Resources"].get("GPU", 0)) for node in alive)
