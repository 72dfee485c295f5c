"""Trainer rank 0 sends a new policy to all servers at once, and proves that each of them holds it.

Proof, beside the probe that the controller scores: what an engine reports as checksums is by its own fused and sharded names,
so bits cannot be compared name by name. Instead an engine that joins is filled with noise before its first update. If that
update carries the weights it was started from (version 0), its checksums must come back to what they were: the update
writes every tensor, to the bit. Later, engines must agree with each other, and a layer's checksums change where the trainer's
bits changed, and nowhere else.
"""

import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Self
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from glm5_next.launchers.engines.client import EngineClient, Meeting
from glm5_next.launchers.engines.clients import client_of
from glm5_next.launchers.engines.order import Order
from glm5_next.launchers.engines.weight_group import broadcast, described, flattened, group_name, in_order, join, listen
from glm5_next.launchers.engines.wire import Address, EngineError, EventLoop, Unreachable
from glm5_next.launchers.runtime.engine import Bucket
from glm5_next.plugins.config import Glm5NextConfig

MEETING_DEADLINE = timedelta(seconds=60)
SECONDS_FOR_REASONS = 2.0  # a broken broadcast ends calls of engines that are alive within this time
LAYER = re.compile(r"\blayers\.(\d+)\.")


class EnginesFailed(RuntimeError):
    """Engines that do not hold the new weights, by name, with the reason. No engine of the update may be used then."""

    def __init__(self, reasons: Mapping[str, str]):
        super().__init__("; ".join(reasons.values()))
        self.reasons = dict(reasons)


class Publisher:
    """All servers of an update, as one `WeightSink`. Kept between updates for the process group and old checksums."""

    addresses: tuple[Address, ...] = ()
    uses_group = True

    def __init__(self, clients: Sequence[EngineClient], *, host: str, deadline: float):
        self.clients, self.host, self.deadline = list(clients), host, deadline
        self.loop = EventLoop()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.version = 0
        self.fresh: set[str] = set()  # engines whose every tensor this update has to write
        self.group: dist.ProcessGroup | None = None
        self.proof = Proof()

    @classmethod
    def of(cls, order: Order, model: Glm5NextConfig) -> Self:
        """For the engines of an order; the process group is on the interface that leads to them."""
        clients = [client_of(address, order.run, model) for address in order.addresses]
        host = interface_to(order.addresses[0].url)
        publisher = cls(clients, host=host, deadline=order.run.rollout.update_deadline)
        publisher.addresses = order.addresses
        publisher.uses_group = order.run.rollout.transport == "distributed"
        return publisher

    def begin_update(self, version: int) -> None:
        self.version = version
        if self.group is None and self.uses_group:
            self._meet()
        self._all(lambda client: client.open_update())
        fresh = [client for client in self.clients if client.name in self.fresh]
        if version == 0:
            self.proof.started = self._all(lambda client: client.checksums(), fresh)
        self._all(lambda client: client.forget(), fresh)

    def put_weights(self, bucket: Bucket) -> None:
        assert self.group is not None
        bucket = in_order(bucket)
        tensors = described(bucket)
        calls = [
            self.loop.start(_named(client, client.receive(self.meeting, tensors, self.deadline)))
            for client in self.clients
        ]

        def go_on() -> None:
            if any(call.done() and call.exception() for call in calls):
                raise EnginesFailed({})  # the reasons are collected below

        try:
            broadcast(flattened(bucket, self.device), self.group, go_on)
        except (EnginesFailed, RuntimeError):  # torch raises RuntimeError for a broken connection
            self._give_up(calls)
        self._collect(calls)

    def commit_update(self, digests: Mapping[str, str]) -> None:
        self._all(lambda client: client.close_update(str(self.version)))
        self.proof.check(digests, self._all(lambda client: client.checksums()), self.version)
        self._all(lambda client: client.resume())
        self.fresh.clear()

    def load_folder(self, folder: Path) -> None:
        """In place of `put_weights`: all weights from a folder that engines read themselves."""
        self._all(lambda client: client.load_folder(str(folder), self.deadline))

    def close(self) -> None:
        """Leaves the group and lets go of the engines."""
        self._leave()
        for client in self.clients:
            self.loop.run(client.close())
        self.loop.close()

    def _leave(self) -> None:
        if self.group is not None:
            group, self.group = self.group, None
            dist.destroy_process_group(group)
            wait([self.loop.start(client.leave(self.meeting)) for client in self.clients], SECONDS_FOR_REASONS)

    def _meet(self) -> None:
        """One group of rank 0 here and all ranks of all engines."""
        sizes = self._all(lambda client: client.world_size())
        store = listen(self.host, MEETING_DEADLINE)
        self.meeting = Meeting(
            host=self.host,
            port=store.port,
            world_size=1 + sum(sizes.values()),
            group=group_name(store.port),
            backend="nccl" if self.device.type == "cuda" else "gloo",
        )
        calls, first = [], 1
        for client in self.clients:
            calls.append(self.loop.start(_named(client, client.join(self.meeting, first, self.deadline))))
            first += sizes[client.name]
        try:
            self.group = join(self.meeting, store, MEETING_DEADLINE)
        except RuntimeError:
            self._give_up(calls)
        self._collect(calls)

    def _all(
        self, call: Callable[[EngineClient], Awaitable[Any]], clients: Sequence[EngineClient] | None = None
    ) -> dict[str, Any]:
        """Calls all engines at once: answers by name; raises EnginesFailed after the last has answered."""
        chosen = self.clients if clients is None else clients
        answers = self._collect([self.loop.start(_named(client, call(client))) for client in chosen])
        return dict(zip([client.name for client in chosen], answers, strict=True))

    def _collect(self, calls: Sequence[Future[Any]]) -> list[Any]:
        outcomes = [call.exception() or call.result() for call in calls]
        reasons = {error.name: str(error) for error in outcomes if isinstance(error, _Failure)}
        others = [error for error in outcomes if isinstance(error, BaseException) and not isinstance(error, _Failure)]
        if others:
            raise others[0]
        if reasons:
            raise EnginesFailed(reasons)
        return outcomes

    def _give_up(self, calls: Sequence[Future[Any]]) -> NoReturn:
        """A broadcast that will not end: the group is of no use, and calls that are stuck in it are not waited for."""
        failures = [error for call in calls if call.done() and isinstance(error := call.exception(), _Failure)]
        self._leave()
        wait(calls, SECONDS_FOR_REASONS)
        if not failures:  # the group broke first: a peer is gone, and the others say so
            failures = [error for call in calls if call.done() and isinstance(error := call.exception(), _Failure)]
        for call in calls:
            call.cancel()
        gone = [error for error in failures if isinstance(error.__cause__, Unreachable)]
        reasons = {error.name: str(error) for error in gone or failures}
        raise EnginesFailed(
            reasons or {client.name: f"{client.name}: the broadcast of weights broke" for client in self.clients}
        )


def interface_to(url: str) -> str:
    """This machine's address on the interface that leads to a server."""
    parts = urlsplit(url)
    (family, kind, protocol, _, where), *_ = socket.getaddrinfo(
        parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
    )
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)  # sends nothing
        return probe.getsockname()[0]


class Proof:
    """What is known of the checksums of engines and the digests of the trainer."""

    def __init__(self) -> None:
        self.started: dict[str, dict[str, str]] = {}
        self.digests: dict[str, str] = {}
        self.checksums: dict[str, dict[str, str]] = {}

    def check(self, digests: Mapping[str, str], checksums: Mapping[str, dict[str, str]], version: int) -> None:
        """Raises EnginesFailed that names the tensors; remembers both for the next update."""
        failed: dict[str, str] = {}
        first = next(iter(checksums), "")
        for name, held in checksums.items():
            reason = (
                _differences(
                    "is not what it was started with, though version 0 was sent", self.started.get(name, held), held
                )
                or _differences(f"is not that of {first}", checksums[first], held)
                or self._unexpected_changes(name, digests, held)
            )
            if reason:
                failed[name] = f"{name}, weights version {version}: {reason}"
        self.started = {}
        if failed:
            raise EnginesFailed(failed)
        self.digests, self.checksums = dict(digests), dict(checksums)

    def _unexpected_changes(self, name: str, digests: Mapping[str, str], held: Mapping[str, str]) -> str:
        before = self.checksums.get(name)
        if before is None or not self.digests:
            return ""
        sent, changed = changed_parts(self.digests, digests), changed_parts(before, held)
        if sent == changed:
            return ""
        return (
            f"parts of the model changed in the trainer but not here: {sorted(sent - changed)[:5]}; "
            f"here but not in the trainer: {sorted(changed - sent)[:5]}"
        )


def changed_parts(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    """The layers ("layer 3", or "outside layers") of all names whose value is not what it was."""
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    matches = (LAYER.search(name) for name in names)
    return {f"layer {match[1]}" if match else "outside layers" for match in matches}


class _Failure(Exception):
    def __init__(self, name: str, error: EngineError):
        super().__init__(str(error))
        self.name = name


async def _named(client: EngineClient, call: Awaitable[Any]) -> Any:
    try:
        return await call
    except EngineError as error:
        raise _Failure(client.name, error) from error


def _differences(what: str, expected: Mapping[str, str], held: Mapping[str, str]) -> str:
    wrong = sorted(name for name in expected.keys() | held.keys() if expected.get(name) != held.get(name))
    return f"the checksum of {len(wrong)} of {len(held)} tensors {what}, first {wrong[:5]}" if wrong else ""
