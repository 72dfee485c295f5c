"""A job for Slurm: what it asks for, the plan file its nodes read, and the script that starts them. Needs no torch."""

import json
import re
import shlex
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from glm5_next.launchers.atomic_write import write_atomic

SETTINGS_FILE, PLAN_FILE, SCRIPT_FILE = "run.toml", "job.json", "job.sbatch"
NAME = re.compile(r"[\w.-]*\w[\w.-]*")
SIGNAL = "USR1"  # sent to every node's task when the time limit is near


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """What every node of a job knows. Seconds: `start_deadline` until all nodes are there, `grace` before the time limit
    at which the run is asked to save. `interface`: of the network; None lets each node choose."""

    name: str
    nodes: int
    gpus_per_node: int
    folder: str
    run_dir: str
    interface: str | None = None
    start_deadline: int = 600
    grace: int = 900

    @property
    def settings(self) -> Path:
        return Path(self.folder) / SETTINGS_FILE

    def write(self) -> None:
        write_atomic(Path(self.folder) / PLAN_FILE, self.text().encode())

    def text(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> "JobPlan":
        """Raises ValueError for anything that is not a whole plan."""
        try:
            values = json.loads(path.read_text())
        except OSError as error:
            raise ValueError(f"{path}: the plan cannot be read ({error.strerror})") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not valid JSON ({error})") from None
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            raise ValueError(f"{path}: not a plan of this version; it needs exactly {', '.join(sorted(names))}")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What only Slurm is asked. `image`: of a container, for pyxis; `mounts`: source:target pairs."""

    program: str
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    image: str | None = None
    mounts: tuple[str, ...] = ()


def script(plan: JobPlan, submission: Submission) -> str:
    """The sbatch script: options and one command."""
    options = {
        "job-name": f"glm5-next-{plan.name}",
        "partition": submission.partition,
        "account": submission.account,
        "time": submission.time,
        "nodes": str(plan.nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(plan.gpus_per_node),
        "mem": "0",
        "output": "slurm-%j.out",
        "open-mode": "append",
        "signal": f"{SIGNAL}@{plan.grace}",
    }
    lines = [f"#SBATCH --{name}={shlex.quote(value)}" for name, value in options.items() if value is not None]
    command = ["srun", "--kill-on-bad-exit=1", "--cpu-bind=none"]
    if submission.image is not None:
        command.append(f"--container-image={submission.image}")
    if submission.mounts:
        command.append(f"--container-mounts={','.join(submission.mounts)}")
    command += [submission.program, "node", "--role", "auto", "--plan", str(Path(plan.folder) / PLAN_FILE)]
    flags = ["#SBATCH --exclusive", "#SBATCH --requeue"]
    return "\n".join(["#!/bin/bash", *lines, *flags, f"exec {shlex.join(command)}"]) + "\n"


def check_name(name: str) -> None:
    """Raises ValueError for a name that is no plain file name."""
    if not NAME.fullmatch(name):
        raise ValueError(f"--name {name!r}: use letters, digits, dots, dashes and underscores")
