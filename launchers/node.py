"""What one Slurm task does on its node: the head starts Ray and the run, the others join. Needs no torch.

All nodes run `ray symmetric-run`; the head's node writes the address first, under a name with job number and restart, so
nobody reads that of an earlier start. The head's exit status is the job's; a node that ends before the head fails.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from glm5_next.launchers import own_ray
from glm5_next.launchers.atomic_write import write_atomic
from glm5_next.launchers.cli_errors import STOPPED
from glm5_next.launchers.failures import RunFailed
from glm5_next.launchers.network import choose_interface
from glm5_next.launchers.ray_settings import OBJECT_STORE_BYTES, Ports, key_file_environment, write_key
from glm5_next.launchers.slurm import PLAN_FILE, JobPlan

POLL = 0.2
SAY_EVERY = 30.0
FAREWELL = 10.0  # seconds between a node's own end and the head's word that the job is over
FINISHED = "finished"  # left in the job's state by a run that came to its end
STATE_VARIABLE = "GLM5_NEXT_JOB_STATE"
TERMINATE = 30.0  # seconds that what a node started may take to end before it is killed


@dataclass(frozen=True)
class Task:
    """This node's place in the job."""

    job_id: int
    restart: int
    rank: int
    nodes: int
    gpus: int | None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Task":
        """From Slurm's variables; raises ValueError outside of a job."""
        try:
            job_id, rank = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_PROCID"])
            nodes = int(environment["SLURM_JOB_NUM_NODES"])
        except KeyError as error:
            raise ValueError(
                f"{error.args[0]} is not set: `node` is started by srun in a job (see glm5-next slurm)"
            ) from None
        gpus = environment.get("SLURM_GPUS_ON_NODE")
        return cls(job_id, int(environment.get("SLURM_RESTART_COUNT", "0")), rank, nodes, int(gpus) if gpus else None)

    def check(self, plan: JobPlan) -> None:
        """Raises ValueError unless the allocation is the one that was planned."""
        if self.nodes != plan.nodes:
            raise ValueError(f"the allocation has {self.nodes} node(s), the plan wants {plan.nodes}")
        if self.gpus is not None and self.gpus != plan.gpus_per_node:
            raise ValueError(f"this node has {self.gpus} GPU(s) allocated, the plan wants {plan.gpus_per_node}")


class Node:
    """One task, from its start to its exit status."""

    def __init__(self, plan: JobPlan, task: Task):
        task.check(plan)
        self.plan, self.task = plan, task
        self.interface = choose_interface(plan.interface)
        if plan.nodes > 1 and self.interface.is_loopback:
            raise ValueError(f"only the loopback interface is up, and the job has {plan.nodes} nodes")
        self.ports = Ports.of_job(task.job_id)
        self.state = Path(plan.folder) / "state" / f"{task.job_id}-{task.restart}"
        self.mark = f"{task.job_id}-{task.restart}-{task.rank}"
        self.asked_by: signal.Signals | None = None

    def run(self) -> int:
        """Returns the exit status."""
        self.state.mkdir(parents=True, exist_ok=True)
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        return self._head() if self.task.rank == 0 else self._worker()

    def _head(self) -> int:
        self.ports.check_free(self.interface.address)
        write_key(self._key)
        address = f"{self.interface.address}:{self.ports.gcs}"
        write_atomic(self._address, json.dumps({"address": address}).encode())
        print(f"head of job {self.task.job_id} on {self.interface.name}, {address}", flush=True)
        code = 1
        try:
            code = self._wait(self._start(address), lambda: False)
            if code == 0 and not (self.state / FINISHED).exists():
                code = 1  # `ray symmetric-run` of Ray 2.60.0 ends well if Ray did not start
                raise RunFailed("Ray did not start (see above): the run never began")
        finally:
            write_atomic(self._ended, json.dumps({"code": code}).encode())
            self._key.unlink(missing_ok=True)
        if code == STOPPED and self.asked_by == signal.SIGUSR1:
            self._requeue()
        return code

    def _worker(self) -> int:
        found = wait_for(
            lambda: self._address.exists() or self._ended.exists(), "the head's address", self.plan.start_deadline
        )
        if not found:
            raise RunFailed(f"no address from the head within {self.plan.start_deadline} seconds ({self._address})")
        if self._ended.exists():
            return 0
        child = self._start(json.loads(self._address.read_text())["address"])
        code = self._wait(child, self._ended.exists)
        if wait_for(self._ended.exists, "the head's end", FAREWELL):
            return 0
        raise RunFailed(f"Ray on node {self.task.rank} ended (exit status {code}) before the job did")

    def _start(self, address: str) -> subprocess.Popen:
        """`ray symmetric-run` in a process group of its own; keys go by file, never by command line."""
        entry = [*_ourselves(), "node", "--role", "driver", "--plan", str(Path(self.plan.folder) / PLAN_FILE)]
        command = ["ray", "symmetric-run", "--address", address]
        command += ["--min-nodes", str(self.plan.nodes), "--disable-usage-stats", "--include-dashboard=false"]
        command += [f"--num-gpus={self.plan.gpus_per_node}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        command += [*self.ports.arguments(), "--", *entry]
        # Some Slurm set-ups signal every process of a step: Ray's would end, and with them the run that is to be saved.
        # What is ignored here stays ignored there.
        before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        try:
            return subprocess.Popen(command, env=self.environment(address), start_new_session=True)
        finally:
            signal.signal(signal.SIGUSR1, before)

    def environment(self, address: str) -> dict[str, str]:
        """Of everything that the node starts."""
        programs = own_ray.install(self.state / "bin" / str(self.task.rank))
        deadline = str(self.plan.start_deadline)
        network = dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), self.interface.name)
        return {
            **os.environ,
            **key_file_environment(self._key),
            **network,
            own_ray.MARK: self.mark,
            STATE_VARIABLE: str(self.state),
            "PATH": os.pathsep.join([str(programs), os.environ.get("PATH", ""), str(Path(sys.executable).parent)]),
            "RAY_ADDRESS": address,
            "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT": deadline,
        }

    def _wait(self, child: subprocess.Popen, is_over: Callable[[], bool]) -> int:
        """The child's exit status. When the job is over, or this node was told to end, what it started ends too."""
        try:
            passed_on = None
            while (code := child.poll()) is None and not is_over():
                if self.asked_by is not None and self.asked_by != passed_on and self.task.rank == 0:
                    passed_on = self.asked_by
                    _stop_driver(child)
                time.sleep(POLL)
            return code or 0
        finally:
            _end_group(child)
            own_ray.end_all(self.mark)

    def _on_signal(self, number: int, frame: Any) -> None:
        """The head lets the run save; the others stay, since the run needs them for that, until the head is done."""
        self.asked_by = signal.Signals(number)
        if self.task.rank == 0:
            print(f"{self.asked_by.name}: asking the run to save and stop", flush=True)

    def _requeue(self) -> None:
        """Puts the job back into the queue before its time is over: it continues from the checkpoint just taken."""
        done = subprocess.run(
            ["scontrol", "requeue", str(self.task.job_id)], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise RunFailed(f"scontrol could not requeue job {self.task.job_id}: {done.stderr.strip()}")
        print(f"job {self.task.job_id} is queued again", flush=True)

    @property
    def _address(self) -> Path:
        return self.state / "address.json"

    @property
    def _ended(self) -> Path:
        return self.state / "ended.json"

    @property
    def _key(self) -> Path:
        return self.state / "ray-key"


def wait_for(condition: Callable[[], bool], what: str, deadline: float) -> bool:
    """Whether it came true in time; says every 30 seconds what is waited for."""
    start = said = time.monotonic()
    while not condition():
        now = time.monotonic()
        if now - start > deadline:
            return False
        if now - said > SAY_EVERY:
            said = now
            print(f"waiting for {what}: {now - start:.0f} of {deadline:.0f} seconds", flush=True)
        time.sleep(POLL)
    return True


def _ourselves() -> list[str]:
    return [sys.executable, "-m", "glm5_next.launchers"]


def _stop_driver(child: subprocess.Popen) -> None:
    """Asks the run, which `ray symmetric-run` started, to save and end."""
    for process in psutil.Process(child.pid).children():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if words[-4:-2] == ["--role", "driver"]:
            process.send_signal(signal.SIGTERM)


def _end_group(child: subprocess.Popen) -> None:
    """Ends the child's own process group, which nothing else is in."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None:
            return
        os.killpg(child.pid, number)
        try:
            child.wait(TERMINATE)
        except subprocess.TimeoutExpired:
            continue
