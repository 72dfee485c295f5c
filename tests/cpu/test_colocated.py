"""A server that shares the trainer's device: what it does not take, or takes too early, is loud, and it sleeps afterwards."""

import base64
import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.name_map import model_tensors, on_disk
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.config import load_run_config
from glm5_next.launchers.engines import tiny_payload
from glm5_next.launchers.engines.client import ALL_MEMORY, Request, Shared
from glm5_next.launchers.engines.colocated import ColocatedPublisher
from glm5_next.launchers.engines.order import Order, Outcome
from glm5_next.launchers.engines.shared_bucket import sglang_payload, share, vllm_payload
from glm5_next.launchers.engines.tiny_host import Job, ModelHost
from glm5_next.launchers.engines.tiny_payload import bucket_of_sglang, buckets_of_vllm
from glm5_next.launchers.engines.weight_group import described, flattened
from glm5_next.launchers.engines.wire import Refused
from glm5_next.launchers.runtime import weight_sync
from glm5_next.launchers.runtime.server_updates import ServerUpdates
from tests.support import tiny
from tests.support.colocated import LOADS, Colocated, servers
from tests.support.engine_server import only, status
from tests.support.faults import Fault, edit, planted

REQUEST = Request("r-1", tuple(range(3, 12)), 2, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="module")
def hosts(folder) -> list[ModelHost]:
    return [ModelHost(folder, precision="fp32"), ModelHost(folder, precision="fp32")]


@pytest.fixture(params=["sglang", "vllm"])
def kind(request) -> str:
    return request.param


# What is in our own code, whichever server answers.
ONE_IS_ENOUGH = pytest.mark.parametrize("kind", ["sglang", pytest.param("vllm", marks=pytest.mark.long)], indirect=True)


class Trainer:
    """One rank of a trainer that holds the checkpoint's weights."""

    def __init__(self, folder: Path):
        self.checkpoint, self.add = Checkpoint(folder), 0.0
        self.updates = ServerUpdates(self.weights, self.checkpoint, "source", torch.device("cpu"))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        config = self.checkpoint.config
        for entry in model_tensors(config, mtp=False):
            for name in on_disk(entry, config):
                yield name, self.checkpoint.read(name) + self.add

    def publish(self, order: Order) -> Outcome:
        outcome = self.updates.publish(order)
        assert outcome is not None
        return outcome


@pytest.fixture
def trainer(folder, monkeypatch) -> Trainer:
    tiny.start_single_process()
    monkeypatch.setattr(weight_sync, "BUCKET_BYTES", 200_000)
    return Trainer(folder)


@pytest.fixture
def server(kind, hosts, folder) -> Iterator[Colocated]:
    with servers(kind, hosts, folder, 1, {"ranks": 1}) as made:
        yield made


def test_an_engine_that_sleeps_generates_nothing_and_takes_no_weights(server, kind):
    (one,) = server.engines
    with pytest.raises(Refused, match=r"released|paused"):
        server.ask(one, lambda client: client.score(REQUEST.prompt, 30.0))
    one.host.resume()
    with pytest.raises(Refused, match=r"500.*released"):
        server.ask(one, lambda client: client.generate(REQUEST, 30.0))


def test_an_update_wakes_it_and_the_next_one_too(server, trainer):
    (one,) = server.engines
    for version in (0, 1):
        assert trainer.publish(server.order(version, fresh=version == 0)).failed == {}
        assert not one.host.released and one.host.version == str(version)
        server.ask(one, lambda client: client.generate(REQUEST, 30.0))
        server.sleep()
        trainer.add = 0.125


@ONE_IS_ENOUGH
@pytest.mark.parametrize("skipped", ["weights", "kv_cache"])
def test_memory_that_is_not_taken_back_is_noticed(server, trainer, skipped):
    (one,) = server.engines
    fault = Fault(ColocatedPublisher, "_take_back", edit("self._all(", f"memory == {skipped!r} or self._all("))
    with planted(fault):
        outcome = trainer.publish(server.order(0, fresh=True))
    if skipped == "weights":
        assert "released" in outcome.failed["engine 0"]
    else:  # nothing of an update needs the cache; the first request does
        with pytest.raises(Refused, match=r"500.*released"):
            server.ask(one, lambda client: client.generate(REQUEST, 30.0))


def lost(body: dict[str, Any], go_on: Callable[[Any], Any]) -> Any:
    """The engine says that it has loaded a piece which it has not."""
    return 200, {"success": True, "message": ""}


@ONE_IS_ENOUGH
def test_a_piece_that_is_lost_is_named_at_the_first_update_and_at_a_later_one(server, trainer, kind):
    (one,) = server.engines
    one.fail(LOADS[kind], only(3, lost))
    outcome = trainer.publish(server.order(0, fresh=True))
    assert "is not what it was started with, though version 0 was sent" in outcome.failed["engine 0"]
    server.sleep()
    one.faulty.faults.clear()
    assert trainer.publish(server.order(0, fresh=True)).failed == {}


def two(kind: str, hosts: list[ModelHost], folder: Path) -> Any:
    return servers(kind, hosts, folder, 1, {"ranks": 2})


def both(order: Order, monkeypatch: pytest.MonkeyPatch) -> Order:
    """One rank stands for two: both engines read what it offers."""
    monkeypatch.setattr(ColocatedPublisher, "_beside", lambda self, client, shared: shared)
    return order


@ONE_IS_ENOUGH
def test_an_engine_that_fails_in_the_middle_is_named_and_the_other_sleeps_again(
    kind, hosts, folder, trainer, monkeypatch
):
    with two(kind, hosts, folder) as made:
        trainer.publish(both(made.order(0, fresh=True), monkeypatch))
        made.sleep()
        made.engines[0].fail(LOADS[kind], only(3, status(502)))
        outcome = trainer.publish(made.order(1))
        assert list(outcome.failed) == ["engine 0"] and "status 502" in outcome.failed["engine 0"]
        other = made.engines[1]
        assert other.host.released == set(ALL_MEMORY) and other.host.version == "0"
        trainer.add = 0.25
        assert trainer.publish(made.order(1, 1)).failed == {} and other.host.version == "1"
        for name, tensor in trainer.weights():
            assert torch.equal(other.host.engine.views[name], tensor.float()), name


def test_memory_is_given_back_by_an_idle_server_only(hosts):
    host = hosts[0]
    host.released.clear()
    host._running.append(Job("busy", (1,), 1, 0))
    with pytest.raises(RuntimeError, match="only when the server is idle"):
        host.release(ALL_MEMORY)
    host._running.clear()
    assert not host.released


# the payloads


def bucket() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [("a", torch.randn(3, 5, generator=generator)), ("b", torch.randn(7, generator=generator).bfloat16())]


def test_a_bucket_comes_back_from_both_payloads_and_only_known_names_are_in_them(monkeypatch):
    tiny.start_single_process()
    tensors, flat = described(bucket()), flattened(bucket(), torch.device("cpu"))
    got = [
        bucket_of_sglang(sglang_payload(share(flat), tensors)),
        *buckets_of_vllm(vllm_payload([share(flat)]), tensors),
    ]
    for items in got:
        assert [name for name, _ in items] == ["a", "b"]
        assert all(one.dtype == two.dtype and torch.equal(one, two) for (_, one), (_, two) in zip(items, bucket()))
    assert got[0][0][1].data_ptr() != bucket()[0][1].data_ptr()
    flat[0] += 1
    assert not torch.equal(got[0][0][1], bucket()[0][1]), "the same memory, no copy"
    monkeypatch.setattr(tiny_payload, "MEANINGS", {})
    with pytest.raises(ValueError, match="refused"):
        bucket_of_sglang(sglang_payload(share(flat), tensors))


def test_a_handle_of_a_gpu_names_it_by_its_uuid_and_calls_nothing_that_sglang_would_not_let_through():
    """Its reader (SafeUnpickler) has a list; these were on it in 0.5.23, and one more name would be refused."""
    args = (torch.Tensor, torch.Size((134,)), (1,), 0, torch.storage.TypedStorage, torch.uint8, 3, b"handle")
    rest = (2097152, 512, False, b"counter", 0, b"event", True)
    raw = sglang_payload(Shared("GPU-1234", (*args, *rest)), described(bucket()))
    seen: list[tuple[str, str]] = []
    called: list[Any] = []

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            seen.append((module, name))
            if name == "rebuild_cuda_tensor":
                return lambda *given: called.append(given)
            return super().find_class(module, name)

    Reader(io.BytesIO(raw)).load()
    assert called[0][6] == "GPU-1234" and called[0][7:] == (b"handle", *rest)
    assert set(seen) == {
        ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
        *(("torch", name) for name in ("Tensor", "Size", "uint8", "float32", "bfloat16")),
        ("torch.storage", "TypedStorage"),
        ("types", "SimpleNamespace"),
    }


class Hostile:
    """A pickle that would leave a mark."""

    def __init__(self, *call: Any):
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def test_a_hostile_payload_is_refused_before_anything_runs(tmp_path):
    mark = tmp_path / "mark"
    good = {"metadata": [], "flattened_tensor": None}
    hostile = [
        Hostile(os.mkdir, str(mark)),
        {**good, "flattened_tensor": Hostile(os.system, f"touch {mark}")},
        {**good, "metadata": [Hostile(getattr, Hostile, "call")]},
        {**good, "metadata": [SimpleNamespace(name=Hostile(eval, "1"))]},
        Hostile(torch.load, str(mark)),
    ]
    for thing in hostile:
        raw = pickle.dumps(thing)
        with pytest.raises(ValueError, match=r"refused (posix|nt|builtins|torch)"):
            bucket_of_sglang(raw)
        with pytest.raises(ValueError, match="refused"):
            list(buckets_of_vllm(raw, described(bucket())))
    for raw in (b"", b"\x80\x04", pickle.dumps(3), pickle.dumps(good), base64.b64decode("AAAA")):
        with pytest.raises(ValueError):
            bucket_of_sglang(raw)
    assert not mark.exists()
    pickle.loads(pickle.dumps(hostile[0]))
    assert mark.exists(), "the first of them works"


@pytest.mark.parametrize("change", ["size", "file", "places"])
def test_a_payload_of_known_names_is_checked_too(change):
    tiny.start_single_process()
    tensors, flat = described(bucket()), flattened(bucket(), torch.device("cpu"))
    shared = share(flat)
    if change == "places":
        raw = sglang_payload(shared, tensors).replace(b"end_idx", b"end_id_", 1)
    else:
        manager, _, size = shared.args[1:]
        args = (shared.args[0], manager, b"/etc/passwd", size) if change == "file" else (*shared.args[:3], size + 1)
        raw = sglang_payload(type(shared)(shared.device, args), tensors)
    with pytest.raises(ValueError, match=r"no file in shared memory|no flattened bucket"):
        bucket_of_sglang(raw)


# the settings

CONFLICTS = {
    "no server": (["rollout.engine=transformers"], "rollout.engine is 'transformers', which is no server"),
    "ahead": (["rollout.one_step_off=true"], "rollout.one_step_off is true: nothing is sampled while"),
    "disk": (["rollout.transport=disk"], "rollout.transport is 'disk'"),
    "sizes": (["rollout.engine_tp=2"], "rollout.engine_tp is 2 x 2 and parallel.ranks is 2"),
    "urls": (['rollout.urls=["http://a","http://b"]', "rollout.api_key=env:K"], "rollout.urls names running servers"),
}
COLOCATED = ["rollout.engine=sglang", "rollout.placement=colocated", "parallel.ranks=2", "rollout.num_engines=2"]


@pytest.mark.parametrize("case", CONFLICTS)
def test_settings_that_cannot_work_with_it_are_refused_by_name(case):
    values = {"model": {"checkpoint": "/none"}, "data": {"prompts": "tiny"}}
    changes, message = CONFLICTS[case]
    assert load_run_config(None, values, COLOCATED).rollout.placement == "colocated"
    with pytest.raises(ValueError, match=f"rollout.placement is 'colocated' but .*{message}"):
        load_run_config(None, values, [*COLOCATED, *changes])
