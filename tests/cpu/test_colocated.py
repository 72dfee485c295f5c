"""A server that shares the trainer's device: what it does not take, or takes too early, is loud, and it sleeps afterwards."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.name_map import model_tensors, on_disk
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.config import load_run_config
from glm5_next.launchers.engines.client import ALL_MEMORY, Request
from glm5_next.launchers.engines.colocated import ColocatedPublisher
from glm5_next.launchers.engines.order import Order, Outcome
from glm5_next.launchers.engines.tiny_host import Job, ModelHost
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
