"""Stand-ins for `sbatch`, `srun`, `scontrol` and `ray`, and a job that they run on this machine.

They do what the real ones do with a script, its tasks and its signals, and write down how they were called. The folder
they lie in has a space and a quote in its name.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

SBATCH = """
import os, sys
log("sbatch", sys.argv[1:])
if os.path.exists(os.path.join(HERE, "sbatch-refuses")):
    sys.exit("sbatch: error: invalid partition")
print("Submitted batch job 41")
"""
SCONTROL = """
import sys
log("scontrol", sys.argv[1:])
"""
# One process for each node; signals go to all; the first bad exit ends the others; the worst status is the step's.
SRUN = """
import os, signal, subprocess, sys, time
words = sys.argv[1:]
log("srun", words)
while words[0].startswith("--"):
    words = words[1:]
nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
tasks = {}
def forward(number, frame):
    for task in tasks.values():
        task.send_signal(number)
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, forward)
absent = os.environ.get("STUB_ABSENT", "")
for rank in sorted(range(nodes), reverse=True):  # workers before the head
    if str(rank) not in absent.split(","):
        out = open(os.path.join(os.environ["STUB_OUTPUT"], f"task-{rank}.txt"), "a")
        environment = {**os.environ, "SLURM_PROCID": str(rank)}
        tasks[rank] = subprocess.Popen(words, env=environment, stdout=out, stderr=subprocess.STDOUT)
worst = 0
while tasks:
    for rank, task in list(tasks.items()):
        code = task.poll()
        if code is not None:
            del tasks[rank]
            worst = max(worst, code if code >= 0 else 128 - code)
            if code and "--kill-on-bad-exit=1" in sys.argv:
                forward(signal.SIGTERM, None)
    time.sleep(0.05)
sys.exit(worst)
"""
# The head's node runs the command behind "--", the others stay, as with the real one. What it starts lies in a session of
# its own and outlives it, like Ray's daemons.
RAY = """
import json, os, signal, subprocess, sys, time
words = sys.argv[1:]
rank = int(os.environ["SLURM_PROCID"])
names = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "NCCL_SOCKET_IFNAME", "GLM5_NEXT_JOB")
key = os.environ["RAY_AUTH_TOKEN_PATH"]
mode = oct(os.stat(key).st_mode & 0o777)
usr1 = signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
log("ray", words, {name: os.environ[name] for name in names} | {"rank": rank, "mode": mode, "key": open(key).read(), "usr1": usr1})
assert words[0] == "symmetric-run"
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
plan = json.load(open(os.path.join(HERE, "scenario.json")))
if rank:
    time.sleep(plan.get("worker_dies_after", 600))
    sys.exit(0)
if plan.get("ray_does_not_start"):
    print("Failed to start Ray")
    subprocess.run(["ray", "stop"], check=True)
    sys.exit(0)
entry = words[words.index("--") + 1 :]
code = subprocess.run([sys.executable, os.path.join(HERE, "driver.py"), *entry]).returncode
subprocess.run(["ray", "stop"], check=True)
assert daemon.wait(10) == -signal.SIGTERM
sys.exit(code)
"""
# In the place of the run: ends with a status, or works until it is asked to save.
DRIVER = """
import json, os, signal, sys, time
plan = json.load(open(os.path.join(HERE, "scenario.json")))
log("driver", sys.argv[1:])
def save(number, frame):
    log("saved", [signal.Signals(number).name])
    sys.exit(130)
signal.signal(signal.SIGTERM, save)
time.sleep(plan.get("driver_seconds", 0))
if not plan.get("driver_status"):
    open(os.path.join(os.environ["GLM5_NEXT_JOB_STATE"], "finished"), "w").close()
sys.exit(plan.get("driver_status", 0))
"""
PREAMBLE = """#!{python}
import json as _json, os as _os
HERE = _os.path.dirname(_os.path.abspath(__file__))
def log(program, words, more=None):
    record = {{"program": program, "words": words, "job": _os.environ.get("SLURM_JOB_ID"), **(more or {{}})}}
    with open(_os.path.join(HERE, "calls.jsonl"), "a") as file:
        file.write(_json.dumps(record) + "\\n")
"""


@dataclass
class Stubs:
    """The programs in a folder of their own below `parent`, and what they were called with."""

    parent: Path
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder = self.parent / "it's a cluster"
        self.folder.mkdir()
        preamble = PREAMBLE.format(python=sys.executable)
        for name, body in {
            "sbatch": SBATCH,
            "srun": SRUN,
            "scontrol": SCONTROL,
            "ray": RAY,
            "driver.py": DRIVER,
        }.items():
            (self.folder / name).write_text(preamble + body)
            (self.folder / name).chmod(0o755)
        self.scenario()

    def scenario(self, **values: float) -> None:
        (self.folder / "scenario.json").write_text(json.dumps(values))

    @property
    def path(self) -> str:
        return f"{self.folder}{os.pathsep}{os.environ['PATH']}"

    def calls(self, program: str, job: int | None = None) -> list[dict]:
        path = self.folder / "calls.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in records if call["program"] == program and job in (None, int(call["job"] or 0))]

    def start(self, script: Path, job: int, **environment: str) -> "Job":
        return Job(self, script, job, environment)


class Job:
    """A job that slurmd started: bash with the script, in its folder."""

    def __init__(self, stubs: Stubs, script: Path, job: int, environment: dict[str, str]):
        self.stubs, self.number = stubs, job
        restart = environment.get("SLURM_RESTART_COUNT", "0")
        self.output = stubs.parent / f"output-{job}-{restart}"
        self.output.mkdir()
        slurm = {"SLURM_JOB_ID": str(job), "SLURM_JOB_NUM_NODES": "3", "SLURM_GPUS_ON_NODE": "4"}
        self.process = subprocess.Popen(
            ["bash", script.name],
            cwd=script.parent,
            env={**os.environ, "PATH": stubs.path, "STUB_OUTPUT": str(self.output), **slurm, **environment},
            stdout=(self.output / "script.txt").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def signal(self, number: signal.Signals) -> None:
        """To the step, as --signal without B: and preemption do it."""
        self.process.send_signal(number)

    def wait_for(self, program: str, count: int = 1, deadline: float = 180.0) -> None:
        limit = time.monotonic() + deadline
        while len(self.stubs.calls(program, self.number)) < count:
            assert self.process.poll() is None, f"ended before {program}: {self.text()}"
            assert time.monotonic() < limit, f"no {program} in time: {self.text()}"
            time.sleep(0.05)

    def end(self, deadline: float = 240.0) -> int:
        """The exit status; kills what is left if there is none in time."""
        try:
            return self.process.wait(deadline)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)

    def text(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(self.output.iterdir()))
