"""An update goes on until every engine that is left holds it; one that failed is out until a whole update has succeeded."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from glm5_next.launchers.config import load_run_config
from glm5_next.launchers.engines import servers as servers_module
from glm5_next.launchers.engines.order import Order, Outcome
from glm5_next.launchers.engines.servers import Servers
from glm5_next.launchers.failures import WorkerFailed


class Client:
    """An engine that answers its health check."""

    def __init__(self, name: str):
        self.name, self.alive = name, True

    async def healthy(self) -> bool:
        return self.alive

    async def close(self) -> None:
        pass


@pytest.fixture
def servers(monkeypatch, tmp_path) -> Iterator[Servers]:
    monkeypatch.setattr(servers_module, "client_of", lambda address, run, model: Client(address.name))
    monkeypatch.setenv("ENGINE_KEY", "k")
    values: dict[str, Any] = {"model": {"checkpoint": "/none"}, "data": {"prompts": "tiny"}}
    urls = [f"http://127.0.0.1:{port}" for port in (1, 2, 3)]
    values["rollout"] = {"engine": "sglang", "urls": urls, "api_key": "env:ENGINE_KEY"}
    made = Servers(load_run_config(None, values, []), None, Path(tmp_path), Client, local=True)  # type: ignore[arg-type]
    made.start()
    yield made
    made.close()


class Sends:
    """Trainer rank 0: `outcomes[i]` says which engines fail in the i-th attempt."""

    def __init__(self, *failing: set[str]):
        self.failing, self.orders = list(failing), list[Order]()

    def __call__(self, order: Order) -> Outcome:
        self.orders.append(order)
        names = {address.name for address in order.addresses}
        failing = self.failing.pop(0) if self.failing else set()
        return Outcome(10, {name: f"{name}: bucket 3: status 400" for name in failing & names})

    @property
    def names(self) -> list[list[str]]:
        return [[address.name for address in order.addresses] for order in self.orders]


def ready(servers: Servers) -> list[str]:
    return [member.client.name for member in servers.fleet.ready]


def engine(servers: Servers, number: int) -> Any:
    return servers.fleet.members[f"engine {number}"].client


ALL = ["engine 0", "engine 1", "engine 2"]


def test_nothing_is_sampled_before_the_first_update(servers):
    assert not servers.can_sample
    assert servers.publish(0, Sends()) == 10
    assert ready(servers) == ALL and servers.fleet.version == 0


def test_engines_are_proved_once_and_again_after_a_failure(servers):
    sends = Sends(set(), {"engine 1"})
    for version in range(3):
        servers.publish(version, sends)
    assert [sorted(order.fresh) for order in sends.orders] == [ALL, [], [], ["engine 1"]]
    servers.publish(3, sends)
    assert not sends.orders[-1].fresh


def test_an_engine_that_fails_is_left_out_and_the_others_are_sent_everything_again(servers):
    sends = Sends(set(), {"engine 1"})
    servers.publish(0, sends)
    servers.publish(1, sends)
    assert sends.names[1:] == [ALL, ["engine 0", "engine 2"]]
    assert ready(servers) == ["engine 0", "engine 2"] and servers.fleet.version == 1
    assert servers.fleet.members["engine 1"].why == "engine 1: bucket 3: status 400"
    servers.publish(2, sends)
    assert sends.names[-1] == ALL and ready(servers) == ALL


def test_no_engine_is_ready_while_an_update_is_given_up(servers):
    seen: list[list[str]] = []
    sends = Sends(set(), {"engine 0"}, {"engine 2"})

    def watching(order: Order) -> Outcome:
        seen.append(ready(servers))
        return sends(order)

    servers.publish(0, watching)
    servers.publish(1, watching)
    assert seen == [[], ALL, [], []]
    assert ready(servers) == ["engine 1"]


def test_an_engine_that_does_not_answer_is_left_out_from_the_start(servers):
    engine(servers, 2).alive = False
    sends = Sends()
    servers.publish(0, sends)
    assert sends.names == [["engine 0", "engine 1"]] and servers.fleet.members["engine 2"].state == "gone"


@pytest.mark.parametrize("how", ["refuse", "dead"])
def test_a_run_without_engines_says_why_each_is_out(servers, how):
    if how == "dead":
        for number in range(3):
            engine(servers, number).alive = False
    with pytest.raises(WorkerFailed, match="no engine is left to publish weights version 4 to: engine 0") as error:
        servers.publish(4, Sends(set(ALL)))
    assert ("status 400" if how == "refuse" else "does not answer") in str(error.value)
    assert not servers.can_sample


class Restarting(Servers):
    """Servers of this run: the start of a process is only noted."""

    def _start_servers(self, names: Any) -> None:
        self.started = [*getattr(self, "started", []), *names]


def restarting(servers: Servers, budget: int, act: Callable[[Servers], None] = lambda made: None) -> Restarting:
    servers.__class__ = Restarting
    servers.actors = dict.fromkeys(ALL)
    rollout = servers.run.rollout.model_copy(update={"max_restarts": budget})
    servers.run = servers.run.model_copy(update={"rollout": rollout})
    act(servers)
    return servers  # type: ignore[return-value]


def test_a_server_that_died_is_started_again_and_has_to_be_proved(servers):
    made = restarting(servers, 3)
    sends = Sends()
    made.publish(0, sends)
    engine(made, 1).alive = False
    made.publish(1, sends)
    assert made.started == ["engine 1"] and sends.orders[-1].fresh == {"engine 1"} and ready(made) == ALL


def test_restarts_are_counted_and_end(servers):
    made = restarting(servers, 1)
    made.publish(0, Sends())
    for _ in range(2):
        engine(made, 1).alive = False
        made.publish(1, Sends())
    assert made.started == ["engine 1"] and ready(made) == ["engine 0", "engine 2"]


def test_the_last_servers_that_refuse_are_started_again(servers):
    made = restarting(servers, 3)
    made.publish(0, Sends(set(ALL)))
    assert sorted(made.started) == ALL and ready(made) == ALL
