"""A run with servers on the trainer's GPUs: whoever computes has the memory, and a server in no known state is ended."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from glm5_next.launchers.config import load_run_config
from glm5_next.launchers.engines import servers as servers_module
from glm5_next.launchers.engines.client import ALL_MEMORY
from glm5_next.launchers.engines.guests import environment
from glm5_next.launchers.engines.order import Order, Outcome
from glm5_next.launchers.engines.servers import Servers
from glm5_next.launchers.engines.wire import Address, Malformed, Refused
from glm5_next.launchers.failures import WorkerFailed
from glm5_next.launchers.runtime import cluster as cluster_module
from glm5_next.launchers.runtime.cluster import Cluster
from glm5_next.launchers.runtime.placement import shared_ranks

ALL = ["engine 0", "engine 1"]


class World:
    """Who is awake, and everything that happened in order."""

    def __init__(self) -> None:
        self.awake: set[str] = set()
        self.dead: set[str] = set()
        self.refuses: set[str] = set()
        self.events: list[str] = []


class Client:
    """One server of the world."""

    def __init__(self, name: str, world: World):
        self.name, self.world = name, world

    async def healthy(self) -> bool:
        return self.name not in self.world.dead

    async def close(self) -> None:
        pass

    async def checksums(self) -> dict[str, str]:
        assert self.name in self.world.awake, "what it was started with is gone"
        return {"w": self.name}

    async def release(self, memory: Sequence[str]) -> None:
        assert tuple(memory) == ALL_MEMORY and self.name in self.world.awake
        if self.name in self.world.refuses:
            raise Refused(f"{self.name}: status 500", 500)
        self.world.awake.remove(self.name)
        self.world.events.append(f"{self.name} sleeps")

    async def cached_tokens(self, tokens: Any, deadline: float) -> int:
        raise Malformed(f"{self.name}: nonsense")


class OnTrainers(Servers):
    """Processes are entries of the world."""

    world: World

    def _start_servers(self, names: Sequence[str]) -> None:
        for name in names:
            self.addresses[name] = Address(name, "sglang", "http://x", "k")
            self.actors[name] = SimpleNamespace(end_server=SimpleNamespace(remote=lambda name=name: self.end(name)))
            self.world.dead.discard(name)
            self.world.awake.add(name)
            self.world.events.append(f"{name} starts")
        self._first_sleep(names)

    def _answers(self, names: Sequence[str], calls: Sequence[Any]) -> list[Any]:
        return list(calls)

    def end(self, name: str) -> None:
        self.world.events.append(f"{name} ends")
        self.world.dead.add(name)
        self.world.awake.discard(name)

    def send(self, order: Order) -> Outcome:
        """As a trainer whose update succeeds, unless a server refuses."""
        names = {address.name for address in order.addresses}
        assert not names & self.world.awake and order.started.keys() >= names
        failed = {name: f"{name}: status 500" for name in names & self.world.refuses}
        self.world.awake |= failed.keys() if failed else names
        self.world.events.append(f"version {order.version}" + (" fails" if failed else ""))
        return Outcome(1, failed)


@pytest.fixture
def servers(monkeypatch, tmp_path) -> Iterator[OnTrainers]:
    world = World()
    monkeypatch.setattr(servers_module, "client_of", lambda address, run, model: Client(address.name, world))
    values: dict[str, Any] = {"model": {"checkpoint": "/none"}, "data": {"prompts": "tiny"}, "parallel": {"ranks": 2}}
    values["rollout"] = {"engine": "sglang", "placement": "colocated", "num_engines": 2, "max_restarts": 2}
    made = OnTrainers(load_run_config(None, values, []), None, Path(tmp_path), Client, local=True)  # type: ignore
    made.world = world
    made.start()
    yield made
    made.close()


def test_a_server_sleeps_from_its_start_to_its_first_update_and_whenever_the_trainer_computes(servers):
    assert not servers.world.awake and not servers.can_sample
    assert servers.started == {name: {"w": name} for name in ALL}
    servers.publish(0, servers.send)
    assert servers.world.awake == set(ALL) and servers.can_sample
    servers.release()
    assert not servers.world.awake and not servers.can_sample
    servers.release()
    servers.publish(1, servers.send)
    assert servers.can_sample and servers.world.events.count("engine 0 sleeps") == 2


def test_a_server_whose_update_fails_is_ended_so_that_it_holds_no_memory_and_another_takes_its_place(servers):
    servers.publish(0, servers.send)
    servers.world.refuses = {"engine 1"}
    servers.release()
    assert servers.world.dead == {"engine 1"} and servers.world.events[-1] == "engine 1 ends"
    servers.world.refuses = set()
    servers.publish(1, servers.send)
    assert servers.world.awake == set(ALL) and servers.restarts == 1


def sending(servers, *refusing: set[str]) -> Callable[[Order], Outcome]:
    """Sends orders; in the first ones these servers refuse."""
    failures = iter(refusing)

    def send(order: Order) -> Outcome:
        servers.world.refuses = next(failures, set())
        outcome = servers.send(order)
        servers.world.refuses = set()
        return outcome

    return send


def test_a_fault_in_the_middle_of_an_update_leaves_no_server_awake_that_has_no_weights(servers):
    send = sending(servers, {"engine 1"})
    servers.publish(0, send)
    ready = [member.client.name for member in servers.fleet.ready]
    assert ready == ["engine 0"] and servers.world.awake == {"engine 0"}
    assert servers.world.events[-5:] == [
        "version 0 fails",
        "engine 1 ends",
        "engine 1 starts",
        "engine 1 sleeps",
        "version 0",
    ]
    servers.publish(1, send)
    assert servers.world.awake == set(ALL)


def test_a_server_that_was_put_out_while_it_was_awake_is_put_to_sleep_as_well(servers):
    servers.publish(0, servers.send)
    with pytest.raises(Exception, match="no engine could score"):
        servers.score([np.arange(3)], lambda: None)
    assert not servers.can_sample and servers.world.awake == set(ALL)
    servers.release()
    assert not servers.world.awake


def test_the_trainer_computes_on_memory_that_servers_have_given_back(servers, monkeypatch, tmp_path):
    monkeypatch.setattr(cluster_module, "Servers", lambda *args, **options: servers)
    made = Cluster(servers.run, tmp_path, None)  # type: ignore[arg-type]
    monkeypatch.setattr(made, "_answers", lambda calls, what: servers.world.events.append(what) or [])
    servers.publish(0, servers.send)
    del servers.world.events[:]
    for method in ("score", "train", "save"):
        made.train(method)
    assert servers.world.events == ["engine 0 sleeps", "engine 1 sleeps", "score", "train", "save"]
    monkeypatch.setattr(made, "_send", servers.send)
    monkeypatch.setattr(made, "_reaper", SimpleNamespace(all_started=lambda: None), raising=False)
    made.publish(1)
    assert servers.world.events[5:] == ["make_room", "version 1"]


def test_a_server_and_its_trainer_ranks_are_on_one_node():
    def place(node: int) -> dict[str, Any]:
        return {"scheduling_strategy": SimpleNamespace(placement_group_bundle_index=node)}

    nodes = [place(rank // 4) for rank in range(8)]
    assert [list(shared_ranks(nodes, number, 4)) for number in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match=r"engine_tp is 8: .* ranks 0-7, which are not all on one node"):
        shared_ranks(nodes, 0, 8)
    assert list(shared_ranks([{}, {}], 1, 1)) == [1]


def test_a_server_sees_the_gpus_of_its_ranks_and_vllm_reads_handles():
    assert environment("sglang", []) == {}
    assert environment("sglang", ["4", "5"]) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert environment("vllm", ["4"])["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"


def test_servers_that_all_fail_are_started_again_until_there_are_no_restarts_left(servers):
    servers.publish(0, sending(servers, set(ALL)))
    assert servers.world.awake == set(ALL) and servers.restarts == 2
    with pytest.raises(WorkerFailed, match="no engine is left to publish weights version 1 to"):
        servers.publish(1, sending(servers, set(ALL)))
    assert not servers.world.awake


def test_a_server_that_keeps_its_memory_from_the_start_is_ended(servers):
    servers.world.refuses = {"engine 0"}
    with pytest.raises(WorkerFailed, match="engine 0: status 500"):
        servers._start_servers(["engine 0"])
    assert "engine 0" in servers.world.dead
