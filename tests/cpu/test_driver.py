"""The run inside a job: what it waits for, and whether it starts or continues."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from glm5_next.launchers.failures import RunFailed
from glm5_next.launchers.runtime import driver
from glm5_next.launchers.slurm import JobPlan


def plan(folder: Path = Path("/jobs/a"), **changes) -> JobPlan:
    values = {"name": "a", "nodes": 2, "gpus_per_node": 4, "folder": str(folder), "run_dir": str(folder / "run")}
    return JobPlan(**values | changes)


def node(gpus: int, alive: bool = True) -> dict:
    return {"Alive": alive, "Resources": {"CPU": 8.0, **({"GPU": float(gpus)} if gpus else {})}}


def test_the_run_waits_for_every_node_and_gpu(monkeypatch):
    monkeypatch.setattr(driver, "POLL", 0)
    answers = iter([[node(4)], [node(4), node(4, alive=False)], [node(4), node(2)], [node(4), node(4)], None])
    driver.wait_for_cluster(plan(), lambda: next(answers))
    assert next(answers) is None, "it waited on"


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([node(4)], "1 of 2 nodes and 4 of 8 GPUs"),
        ([node(4), node(0)], "2 of 2 nodes and 4 of 8 GPUs"),
        ([node(4), node(4), node(4)], "3 of 2 nodes and 12 of 8 GPUs"),
    ],
)
def test_a_count_that_stays_wrong_is_said_at_the_deadline(nodes, message):
    with pytest.raises(RunFailed, match=message):
        driver.wait_for_cluster(plan(start_deadline=0), lambda: nodes)


@pytest.mark.parametrize(("earlier", "finished"), [(False, True), (True, True), (True, False)])
def test_a_job_that_is_started_again_continues_its_run(earlier, finished, tmp_path, monkeypatch):
    done = []
    ray = SimpleNamespace(init=lambda **words: done.append(words["address"]), nodes=lambda: [node(4), node(4)])
    ray.shutdown = lambda: done.append("left")
    monkeypatch.setattr(driver, "ray", ray)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:10700")
    monkeypatch.setenv(driver.STATE_VARIABLE, str(tmp_path))
    outcome = SimpleNamespace(finished=finished)
    monkeypatch.setattr(driver, "start_run", lambda run, name: done.append(("start", name)) or outcome)
    monkeypatch.setattr(driver, "resume_run", lambda folder, changes: done.append(("resume", folder)) or outcome)
    monkeypatch.setattr(driver, "load_run_config", lambda path, preset, overrides: path)
    if earlier:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "run.toml").touch()
    assert driver.drive(plan(tmp_path)) is finished
    expected = ("resume", tmp_path / "run") if earlier else ("start", "a")
    assert done == ["10.0.0.5:10700", "left", expected]
    assert (tmp_path / driver.FINISHED).exists() is finished


def test_a_driver_alone_is_refused(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ValueError, match="RAY_ADDRESS is not set"):
        driver.drive(plan())
