"""Jobs: what is written for Slurm, and what its nodes do on a cluster of stand-ins, also when things go wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from glm5_next.launchers import own_ray
from glm5_next.launchers.cli import app
from glm5_next.launchers.config import describe, load_run_config
from glm5_next.launchers.presets import PRESETS
from glm5_next.launchers.ray_settings import Ports
from glm5_next.launchers.slurm import JobPlan
from tests.support.slurm_stubs import Stubs

GOLDEN = Path(__file__).parents[1] / "golden" / "slurm"
# Eight ranks and a server on three nodes with four GPUs each.
SETTINGS = ("parallel.ranks=8", "parallel.tp=1", "parallel.pp=1", "parallel.ep=8", "rollout.num_engines=1")
SIZES = tuple(word for setting in SETTINGS for word in ("--set", setting))
PARTS = ("run.toml", "job.json", "job.sbatch")


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stubs]:
    made = Stubs(tmp_path)
    monkeypatch.setenv("PATH", made.path)
    monkeypatch.chdir(tmp_path)
    yield made
    left = [process.pid for process in own_ray.psutil.process_iter() if _is_of(process, str(made.folder))]
    assert not left, f"processes {left} outlived their job"


def _is_of(process, folder: str) -> bool:
    try:
        return process.status() != "zombie" and "SLURM_JOB_ID" in (env := process.environ()) and folder in env["PATH"]
    except (own_ray.psutil.Error, OSError):
        return False


def slurm(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["slurm", "--preset", "16x4", "--nodes", "3", *arguments])


def write(stubs: Stubs, name: str = "a", *arguments: str) -> Path:
    """The script of a job on three nodes with four GPUs each."""
    folder = stubs.folder / "jobs" / name
    result = slurm("--name", name, "--out", str(folder), "--start-deadline", "20", *SIZES, *arguments)
    assert result.exit_code == 0, result.output
    return folder / "job.sbatch"


def parts(output: str, folder: Path) -> dict[str, str]:
    found, name = {}, ""
    for line in output.splitlines(keepends=True):
        if line.startswith("== "):
            name = line.strip().removeprefix(f"== {folder}/")
            found[name] = ""
        else:
            found[name] += line
    return {name: text.rstrip("\n") + "\n" for name, text in found.items()}


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.cluster])
def test_dry_run_prints_the_job_that_is_on_record(name, tmp_path, monkeypatch):
    """After a change on purpose: write plan and script as printed, with FOLDER and PROGRAM, to tests/golden/slurm/NAME.txt."""
    monkeypatch.chdir(tmp_path)
    options = ["--partition", "batch", "--account", "lab", "--time", "1-00:00:00"]
    result = CliRunner().invoke(app, ["slurm", "--preset", name, "--dry-run", *options])
    assert result.exit_code == 0, result.output
    printed = parts(result.output, tmp_path / "jobs" / name)
    assert tuple(printed) == PARTS
    program = str(Path(sys.executable).with_name("glm5-next"))
    text = (printed["job.json"] + printed["job.sbatch"]).replace(str(tmp_path), "FOLDER").replace(program, "PROGRAM")
    assert text == (GOLDEN / f"{name}.txt").read_text()
    (tmp_path / "run.toml").write_text(printed["run.toml"])
    run = load_run_config(tmp_path / "run.toml", None, [])
    assert (run.output.run_id, run.output.runs) == (name, tmp_path / "runs")
    assert run.model.checkpoint.parent == tmp_path and run.data.prompts == str(tmp_path / "dapo-math-17k.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_what_is_written_is_what_was_printed_and_a_script_has_no_logic(stubs: Stubs):
    folder = stubs.folder / "jobs" / "a"
    script = write(stubs)
    printed = parts(write_again(folder, "--dry-run").output, folder)
    assert {name: (folder / name).read_text() for name in PARTS} == {name: printed[name] for name in PARTS}
    lines = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == 1 and lines[0].startswith("exec srun --kill-on-bad-exit=1 ")
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert write_again(folder).exit_code == 0
    other = write_again(folder, "--set", "optimizer.lr=2e-6")
    assert other.exit_code == 2 and "another job is there" in other.output


def write_again(folder: Path, *arguments: str) -> Result:
    return slurm("--name", "a", "--out", str(folder), "--start-deadline", "20", *SIZES, *arguments)


def test_a_container_is_started_by_its_own_command(stubs: Stubs):
    script = write(stubs, "c", "--image", "/images/glm5 next.sqsh", "--mount", "/data:/data", "--mount", "/runs:/runs")
    line = script.read_text().splitlines()[-1]
    assert (
        "'--container-image=/images/glm5 next.sqsh' --container-mounts=/data:/data,/runs:/runs glm5-next node" in line
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "a/b"], "--name 'a/b'"),
        (["--gpus-per-node", "4"], "fewer than parallel.ranks = 32 and 32 GPUs of servers"),
        (["--dry-run", "--submit"], "exclude each other"),
        (["--set", "optimizer.lrr=1"], "optimizer.lr"),
    ],
)
def test_a_job_that_cannot_be_is_refused(stubs: Stubs, arguments, message):
    result = slurm(*arguments)
    assert result.exit_code == 2 and message in result.output, result.output
    assert not (stubs.parent / "jobs").exists()


def test_submitting_hands_the_script_to_sbatch_from_its_folder(stubs: Stubs, monkeypatch):
    script = write(stubs, "a", "--submit")
    (call,) = stubs.calls("sbatch")
    assert call["words"] == [script.name]
    (stubs.folder / "sbatch-refuses").touch()
    refused = write_again(script.parent, "--submit")
    assert refused.exit_code == 2 and "invalid partition" in refused.output
    monkeypatch.setenv("PATH", "/nowhere")
    absent = write_again(script.parent, "--submit")
    assert absent.exit_code == 2 and "sbatch is not on PATH" in absent.output


def test_a_job_on_three_nodes_runs_and_leaves_nothing(stubs: Stubs):
    script = write(stubs)
    job = stubs.start(script, 7)
    assert job.end() == 0, job.text()
    calls = {call["rank"]: call for call in stubs.calls("ray")}
    assert sorted(calls) == [0, 1, 2]
    address = f"{calls[0]['RAY_ADDRESS']}"
    assert address.endswith(f":{Ports.of_job(7).gcs}") and not address.startswith("127.")
    assert {call["RAY_ADDRESS"] for call in calls.values()} == {address}
    for call in calls.values():
        words = call["words"]
        assert words[:5] == ["symmetric-run", "--address", address, "--min-nodes", "3"]
        assert "--num-gpus=4" in words and "--include-dashboard=false" in words
        assert call["mode"] == "0o600" and call["RAY_AUTH_MODE"] == "token" and call["usr1"]
        assert call["NCCL_SOCKET_IFNAME"]
    (driver,) = stubs.calls("driver")
    assert driver["words"][-5:] == ["node", "--role", "driver", "--plan", str(script.parent / "job.json")]
    key = calls[0]["key"]
    assert len(key) == 64 and {call["key"] for call in calls.values()} == {key}
    assert key not in job.text() and not any(key in str(call["words"]) for call in stubs.calls("ray"))
    written = [path for path in script.parent.rglob("*") if path.is_file() and path.suffix != ".jsonl"]
    assert not any(key in path.read_text() for path in written), "the key outlived its job"


def test_two_jobs_at_once_do_not_meet(stubs: Stubs):
    """On the same machine: ports, addresses, keys and ends are each job's own."""
    stubs.scenario(driver_seconds=1.0)
    jobs = [stubs.start(write(stubs, name), number) for name, number in (("a", 7), ("b", 8))]
    assert [job.end() for job in jobs] == [0, 0], [job.text() for job in jobs]
    by_job = [{call["RAY_ADDRESS"] for call in stubs.calls("ray", number)} for number in (7, 8)]
    keys = [{call["key"] for call in stubs.calls("ray", number)} for number in (7, 8)]
    assert len(by_job[0]) == len(by_job[1]) == 1 and by_job[0] != by_job[1] and keys[0] != keys[1]


@pytest.mark.parametrize(
    ("scenario", "status", "message"),
    [
        ({"driver_status": 7}, 7, ""),
        ({"driver_seconds": 60, "worker_dies_after": 1}, 1, "ended (exit status 0) before the job did"),
        ({"ray_does_not_start": 1}, 1, "Ray did not start"),
    ],
)
def test_a_role_that_fails_ends_the_job_with_its_status(stubs: Stubs, scenario, status, message):
    stubs.scenario(**scenario)
    job = stubs.start(write(stubs), 7)
    start = time.monotonic()
    code = job.end()
    assert message in job.text(), job.text()
    # A node that lost Ray fails alone and srun ends the others, some by a signal: any status but 0.
    assert code == status or (code and "worker_dies_after" in scenario), job.text()
    assert time.monotonic() - start < 80


def test_a_head_that_never_comes_ends_the_job_at_the_deadline(stubs: Stubs):
    script = write(stubs)
    plan = json.loads((script.parent / "job.json").read_text())
    (script.parent / "job.json").write_text(json.dumps(plan | {"start_deadline": 2}))
    job = stubs.start(script, 7, STUB_ABSENT="0")
    assert job.end() and "no address from the head within 2 seconds" in job.text(), job.text()
    assert not stubs.calls("ray")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SLURM_JOB_NUM_NODES": "2"}, "the allocation has 2 node(s), the plan wants 3"),
        ({"SLURM_GPUS_ON_NODE": "8"}, "has 8 GPU(s) allocated, the plan wants 4"),
    ],
)
def test_another_allocation_than_planned_starts_nothing(stubs: Stubs, environment, message):
    job = stubs.start(write(stubs), 7, **environment)
    assert job.end() and message in job.text(), job.text()
    assert not stubs.calls("ray")


def test_before_the_time_limit_the_run_saves_and_the_job_is_queued_again(stubs: Stubs):
    stubs.scenario(driver_seconds=60)
    script = write(stubs)
    job = stubs.start(script, 7)
    job.wait_for("ray", 3)
    job.wait_for("driver")
    job.signal(signal.SIGUSR1)
    assert job.end() == 130, job.text()
    assert [call["words"] for call in stubs.calls("saved")] == [["SIGTERM"]]
    assert [call["words"] for call in stubs.calls("scontrol")] == [["requeue", "7"]]
    stubs.scenario()
    again = stubs.start(script, 7, SLURM_RESTART_COUNT="1")  # nothing of the first start is taken for the second's
    assert again.end() == 0, again.text()
    assert len({call["key"] for call in stubs.calls("ray")}) == 2


def test_a_preempted_job_saves_and_leaves_queueing_to_slurm(stubs: Stubs):
    stubs.scenario(driver_seconds=60)
    job = stubs.start(write(stubs), 7)
    job.wait_for("ray", 3)
    job.wait_for("driver")
    job.signal(signal.SIGTERM)
    assert job.end() == 130, job.text()
    assert len(stubs.calls("saved")) == 1 and not stubs.calls("scontrol")


def test_a_port_that_is_taken_is_named(stubs: Stubs):
    import socket

    with socket.create_server(("0.0.0.0", Ports.of_job(7).gcs + 3)):
        job = stubs.start(write(stubs), 7)
        assert job.end() and f"port {Ports.of_job(7).gcs + 3} on" in job.text(), job.text()


def test_ray_stop_ends_the_processes_of_its_own_job_only(tmp_path):
    """The real `ray stop` ends everybody's."""
    folder = own_ray.install(tmp_path / "bin")
    sleepers = {
        mark: subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, own_ray.MARK: mark}
        )
        for mark in ("mine", "theirs")
    }
    try:
        environment = {**os.environ, own_ray.MARK: "mine", "PATH": f"{folder}:{os.environ['PATH']}"}
        subprocess.run(["ray", "stop"], env=environment, check=True, timeout=60)
        assert sleepers["mine"].wait(5) == -signal.SIGTERM and sleepers["theirs"].poll() is None
    finally:
        for sleeper in sleepers.values():
            sleeper.kill()
            sleeper.wait()


def test_ports_of_neighbouring_jobs_are_apart_and_below_those_the_system_hands_out():
    blocks = [set(range(ports.first, ports.first + 100)) for ports in map(Ports.of_job, range(1000, 1200))]
    assert len(set.union(*blocks)) == 200 * 100 and max(set.union(*blocks)) < 32768
    numbers = [int(word.rpartition("=")[2]) for word in Ports.of_job(7).arguments()]
    assert len(set(numbers)) == len(numbers) and set(numbers) <= blocks_of(7)


def blocks_of(job: int) -> set[int]:
    return set(range(Ports.of_job(job).first, Ports.of_job(job).first + 100))


def test_a_plan_reads_back_and_a_broken_one_is_refused(tmp_path):
    plan = JobPlan(name="a", nodes=2, gpus_per_node=4, folder=str(tmp_path), run_dir="/runs/a")
    plan.write()
    assert JobPlan.read(tmp_path / "job.json") == plan
    for text, message in (("{", "not valid JSON"), ("{}", "not a plan"), ('{"name": 1}', "gpus_per_node")):
        (tmp_path / "job.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            JobPlan.read(tmp_path / "job.json")


def test_outside_of_a_job_a_node_says_so(tmp_path):
    JobPlan(name="a", nodes=2, gpus_per_node=4, folder=str(tmp_path), run_dir="/runs/a").write()
    result = CliRunner().invoke(app, ["node", "--plan", str(tmp_path / "job.json")])
    assert result.exit_code == 2 and "SLURM_JOB_ID is not set" in result.output


def test_settings_of_a_job_are_the_presets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert slurm("--out", str(tmp_path / "j"), "--gpus-per-node", "24").exit_code == 0
    run = load_run_config(tmp_path / "j" / "run.toml", None, [])
    assert "lr = 1e-06" in describe(run)
