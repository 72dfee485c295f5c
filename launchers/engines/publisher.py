"""Trainer rank 0 sends a new policy to all servers at once, and proves that each of them holds it (`proof`)."""

import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Self
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from glm5_next.launchers.engines.client import EngineClient
from glm5_next.launchers.engines.clients import client_of
from glm5_next.launchers.engines.order import Order
from glm5_next.launchers.engines.proof import EnginesFailed, Proof
from glm5_next.launchers.engines.weight_group import ByAddress, ById, broadcast, described, flattened, in_order
from glm5_next.launchers.engines.wire import Address, EngineError, EventLoop, Unreachable
from glm5_next.launchers.runtime.engine import Bucket
from glm5_next.plugins.config import Glm5NextConfig

MEETING_DEADLINE = timedelta(seconds=60)
SECONDS_FOR_REASONS = 2.0  # a broken broadcast ends calls of engines that are alive within this time


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
        publisher.uses_group = cls.uses_group and order.run.rollout.transport == "distributed"
        return publisher

    def take(self, order: Order) -> None:
        """What is different from order to order to the same engines."""
        self.fresh = set(order.fresh)

    def begin_update(self, version: int) -> None:
        self.version = version
        if self.group is None and self.uses_group:
            self._meet()
        self._all(lambda client: client.open_update())
        fresh = [client for client in self.clients if client.name in self.fresh]
        if version == 0:
            self.proof.started = self._checksums_at_start(fresh)
        self._all(lambda client: client.forget(), fresh)

    def put_weights(self, bucket: Bucket) -> None:
        assert self.group is not None
        bucket = in_order(bucket)
        tensors = described(bucket)
        calls = [
            self.loop.start(_named(client, client.receive(self.meeting, tensors, self.deadline)))
            for client in self.clients
        ]
        try:
            broadcast(flattened(bucket, self.device), self.group, lambda: _while_none_failed(calls))
        except (EnginesFailed, RuntimeError) as error:  # torch raises RuntimeError for a broken connection
            self._give_up(calls, str(error))
        self._collect(calls)

    def commit_update(self, digests: Mapping[str, str]) -> None:
        self._all(lambda client: client.close_update(str(self.version)))
        self._closed()
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

    def _checksums_at_start(self, fresh: Sequence[EngineClient]) -> dict[str, dict[str, str]]:
        return self._all(lambda client: client.checksums(), fresh)

    def _closed(self) -> None:
        """After the last weights, before the proof."""

    def _leave(self) -> None:
        if self.group is not None:
            group, self.group = self.group, None
            dist.destroy_process_group(group)
            wait([self.loop.start(client.leave(self.meeting)) for client in self.clients], SECONDS_FOR_REASONS)

    def _meet(self) -> None:
        """One group of rank 0 here and all ranks of all engines."""
        sizes = self._all(lambda client: client.world_size())
        by_id = self.device.type == "cuda" and all(client.meets_by_id for client in self.clients)
        end = (ById if by_id else ByAddress)(self.host, 1 + sum(sizes.values()), self.device, MEETING_DEADLINE)
        self.meeting = end.meeting
        calls: list[Future[Any]] = []
        first = 1
        for client in self.clients:
            calls.append(self.loop.start(_named(client, client.join(self.meeting, first, self.deadline))))
            first += sizes[client.name]
        try:
            self.group = end.join(lambda: _while_none_failed(calls))
        except (EnginesFailed, RuntimeError) as error:
            self._give_up(calls, str(error))
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

    def _give_up(self, calls: Sequence[Future[Any]], why: str) -> NoReturn:
        """A broadcast that will not end: the group is of no use, and calls that are stuck in it are not waited for.

        `why` is told where no engine has a reason; NCCL's last line is in it, such as that two versions of it cannot meet.
        """
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
            reasons or {client.name: f"{client.name}: the broadcast of weights broke: {why}" for client in self.clients}
        )


def _while_none_failed(calls: Sequence[Future[Any]]) -> None:
    """Raises EnginesFailed, without the reasons, if a call has failed."""
    if any(call.done() and call.exception() for call in calls):
        raise EnginesFailed({})


def interface_to(url: str) -> str:
    """This machine's address on the interface that leads to a server."""
    parts = urlsplit(url)
    (family, kind, protocol, _, where), *_ = socket.getaddrinfo(
        parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
    )
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)  # sends nothing
        return probe.getsockname()[0]


class _Failure(Exception):
    def __init__(self, name: str, error: EngineError):
        super().__init__(str(error))
        self.name = name


async def _named(client: EngineClient, call: Awaitable[Any]) -> Any:
    try:
        return await call
    except EngineError as error:
        raise _Failure(client.name, error) from error
