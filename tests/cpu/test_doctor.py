"""What `doctor` finds: each kind of trouble is planted once, and a sound machine is called sound."""

import json
import os
import sys
from importlib import metadata

import pytest
from typer.testing import CliRunner

from glm5_next.launchers import doctor, network
from glm5_next.launchers.cli import app
from glm5_next.launchers.doctor import Finding
from glm5_next.launchers.network import Interface, choose_interface

LO, ETH, IB = Interface("lo", "127.0.0.1"), Interface("eth0", "10.0.0.5"), Interface("ib0", "10.1.0.5")


def problems(findings) -> dict[str, str]:
    return {item.name: item.problem for item in findings if item.problem}


@pytest.fixture
def distributions(monkeypatch):
    """Installed packages by name, in the place of the real ones."""
    installed = {"torch": "2.11.0+cu130", "ray": "2.60.0", "some-kernel": "1.2"}
    requires = ["torch>=2.11", "ray>=2.60", 'fla>=0.6; extra == "gpu"']
    monkeypatch.setattr(metadata, "requires", lambda name: requires)

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    return installed


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / "lock.txt"
    path.write_text("# made by\ntorch==2.11.0 \\\n    --hash=sha256:00\nRay==2.60.0\nsome_kernel==1.2\nabsent==3\n")
    return path


def test_versions_that_fit_are_no_problem(distributions, lock):
    findings = list(doctor.check_versions(lock))
    assert not problems(findings)
    assert {item.name: item.value for item in findings}["fla"] == "not installed (optional)"


@pytest.mark.parametrize(
    ("name", "version", "problem"),
    [
        ("torch", "2.10.0", "needs >=2.11"),
        ("torch", "2.12.0", "the lock says 2.11.0"),
        ("ray", "2.61.0", "the lock says 2.60.0"),
        ("some-kernel", "1.3", "the lock says 1.2"),
        ("fla", "0.5.2", "needs >=0.6"),
        ("ray", None, "install ray>=2.60"),
    ],
)
def test_every_wrong_version_is_listed(distributions, lock, name, version, problem):
    if version is None:
        del distributions[name]
    else:
        distributions[name] = version
    assert problems(doctor.check_versions(lock)) == {name: problem}


def test_without_a_lock_only_ranges_are_checked(distributions):
    distributions["torch"] = "2.12.0"
    assert not problems(doctor.check_versions(None))


def test_a_lock_that_cannot_be_read_is_the_users_mistake(tmp_path):
    result = CliRunner().invoke(app, ["doctor", "--lock", str(tmp_path / "none")])
    assert result.exit_code == 2 and "the lock cannot be read" in result.output


@pytest.mark.parametrize(
    ("code", "needed", "problem"),
    [
        ("", False, None),
        ("raise AttributeError('module has no cute')", False, "AttributeError: module has no cute"),
        ("import os; os.kill(os.getpid(), 11)", False, "killed by signal 11"),
        (None, False, None),
        (None, True, "planted is needed"),
    ],
)
def test_a_half_broken_package_is_found_by_importing_it_elsewhere(code, needed, problem, tmp_path, monkeypatch):
    if code is not None:
        (tmp_path / "planted.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = doctor.check_package("planted", needed=needed)
    assert (finding.problem is None) == (problem is None) and (problem or "") in (finding.problem or "")
    assert "planted" not in sys.modules


def test_an_import_that_hangs_is_broken(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor, "IMPORT_DEADLINE", 0.5)
    assert "did not end" in doctor.check_package("planted", needed=False).problem


@pytest.mark.parametrize(
    ("known", "default", "wanted", "chosen"),
    [
        ([LO, ETH], "eth0", None, ETH),
        ([LO, ETH, IB], "eth0", None, ETH),
        ([LO, ETH, IB], "eth0", "ib0", IB),
        ([LO, ETH], None, None, ETH),
        ([LO], None, None, LO),
        ([LO, ETH, IB], None, None, "several network interfaces"),
        ([LO, ETH], "eth0", "ib0", "'ib0' is not there"),
        ([], None, None, "no network interface is up"),
    ],
)
def test_the_interface_of_the_default_route_is_chosen(known, default, wanted, chosen, monkeypatch):
    monkeypatch.setattr(network, "default_route", lambda: default)
    if isinstance(chosen, str):
        with pytest.raises(ValueError, match=chosen):
            choose_interface(wanted, known)
    else:
        assert choose_interface(wanted, known) == chosen


def test_the_default_route_is_the_one_with_the_smallest_metric(tmp_path, monkeypatch):
    header = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"
    rows = ["ib0 00000000 0102000A 0003 0 0 200 00000000 0 0 0", "eth0 00000000 010200C0 0003 0 0 100 00000000 0 0 0"]
    (tmp_path / "route").write_text("\n".join([header, "lan 000200C0 00000000 0001 0 0 0 00FFFFFF 0 0 0", *rows]))
    monkeypatch.setattr(network, "ROUTES", tmp_path / "route")
    assert network.default_route() == "eth0"


def test_a_socket_listens_on_one_address_only():
    with network.listening_socket("127.0.0.1") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_too_little_room_is_a_problem(tmp_path):
    assert not problems(doctor.check_room(tmp_path, min_disk=1, shared_memory=tmp_path))
    short = problems(doctor.check_room(tmp_path, min_disk=1e18))
    assert list(short) == [f"disk at {tmp_path}"]
    with pytest.raises(ValueError, match="no such folder"):
        doctor.check_room(tmp_path / "none")


@pytest.mark.parametrize("problem", [None, "install it"])
def test_the_exit_status_tells(problem, monkeypatch):
    monkeypatch.setattr(doctor, "check_versions", lambda lock: [Finding("version", "torch", "1", problem)])
    for name in ("check_packages", "check_backends"):
        monkeypatch.setattr(doctor, name, list)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == (1 if problem else 0)
    assert ("problem: version torch: install it" in result.output) == bool(problem)
    as_json = CliRunner().invoke(app, ["doctor", "--json"])
    answer = json.loads(as_json.output)
    assert as_json.exit_code == result.exit_code and answer["ok"] is (problem is None)
    assert answer["findings"][0] == {"topic": "version", "name": "torch", "value": "1", "problem": problem}


def test_the_self_check_is_asked_for(monkeypatch):
    called = []
    monkeypatch.setattr(doctor, "check_gpu", lambda: called.append(1) or [Finding("gpu", "kda by fla", "x", "too far")])
    for name in ("check_packages", "check_backends"):
        monkeypatch.setattr(doctor, name, list)
    monkeypatch.setattr(doctor, "check_versions", lambda lock: [])
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0 and not called
    assert CliRunner().invoke(app, ["doctor", "--gpu"]).exit_code == 1 and called == [1]


def test_without_a_gpu_the_self_check_is_a_problem(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (finding,) = doctor.check_gpu()
    assert finding.problem and "no GPU" in finding.problem


def test_backends_are_those_the_registry_would_choose():
    found = {item.name: item.value for item in doctor.check_backends()}
    assert found["kda"] and found["sparse_attention"] and found["devices"]


def test_a_broken_torch_is_a_finding(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart is missing')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (finding,) = doctor.check_backends()
    assert finding.problem == "OSError: libcudart is missing"


def test_the_store_of_a_run_listens_on_its_nodes_address_only(monkeypatch):
    import psutil
    import torch.distributed as dist

    from glm5_next.launchers.runtime import actors

    monkeypatch.setattr(actors.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    rank = actors.TrainerRank()
    host, port = rank.open_store()
    dist.TCPStore(host, port, is_master=False).set("a", "b")
    assert rank.store.get("a") == b"b"
    listening = {
        item.laddr.ip for item in psutil.Process().net_connections("tcp") if item.laddr.port == port and not item.raddr
    }
    assert listening == {"127.0.0.1"}
    free = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # what torch does by itself
    open_to = {
        item.laddr.ip
        for item in psutil.Process().net_connections("tcp")
        if item.laddr.port == free.port and not item.raddr
    }
    assert "127.0.0.1" not in open_to
