"""An engine's server inside the test's own process, with everything that can be made to go wrong."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from glm5_next.launchers.engines.tiny_host import ModelHost
from glm5_next.launchers.engines.tiny_server import Server
from glm5_next.launchers.engines.wire import Address

KEY = "the-key-of-the-test"
Answer = tuple[int, Any]
# (body, go on) -> answer; `go on` asks the real protocol
Fault = Callable[[dict[str, Any], Callable[[dict[str, Any]], Answer]], Answer]


class Faulty:
    """A protocol whose answers on some paths go through a fault. `calls` has every request."""

    def __init__(self, protocol: Any):
        self.protocol, self.open_paths = protocol, protocol.open_paths
        protocol.group_timeout = timedelta(seconds=5)  # an end that waits for ever keeps its thread
        self.faults: dict[str, Fault] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def handle(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> Answer:
        self.calls.append((path, body))

        def go_on(changed: dict[str, Any]) -> Answer:
            return self.protocol.handle(method, path, query, changed)

        return self.faults.get(path, lambda given, ask: ask(given))(body, go_on)

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]


class Engine:
    """A running server, its address, and the way to kill it."""

    def __init__(self, name: str, protocol: Any, kind: str):
        self.faulty = Faulty(protocol)
        self.host: ModelHost = protocol.host
        self.server = _Killable(("127.0.0.1", 0), self.faulty, KEY)
        self.address = Address(name, kind, f"http://127.0.0.1:{self.server.server_address[1]}", KEY)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def fail(self, path: str, fault: Fault) -> None:
        self.faulty.faults[path] = fault

    def die(self) -> None:
        """Every connection breaks, and no new one is taken; those of the weight group too, as of a process that is gone.

        Else rank 0's end of it, which has something to send, would keep the thread that frees it, and with it the
        interpreter, until its deadline.
        """
        for ends in ("groups", "ends"):  # SGLang's protocol, vLLM's
            getattr(self.faulty.protocol, ends, []).clear()
        self.server.shutdown()
        self.server.server_close()
        for connection in list(self.server.connections):
            connection.shutdown(socket.SHUT_RDWR)


class _Killable(Server):
    def __init__(self, *args: Any):
        self.connections: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or a test that broke the connection."""


@contextmanager
def engine(name: str, protocol: Any, kind: str = "sglang") -> Iterator[Engine]:
    running = Engine(name, protocol, kind)
    try:
        yield running
    finally:
        if running.server.socket.fileno() != -1:
            running.die()


def status(code: int) -> Fault:
    """What a gateway in front of the engine answers."""
    return lambda body, go_on: (code, f"<html>{code}</html>")


def stall(until: threading.Event) -> Fault:
    """No answer before the event."""

    def fault(body: dict[str, Any], go_on: Callable[[dict[str, Any]], Answer]) -> Answer:
        until.wait(30.0)
        return go_on(body)

    return fault


def strips(*fields: str) -> Fault:
    """A router that passes on only the fields it knows."""
    return lambda body, go_on: go_on({key: value for key, value in body.items() if key not in fields})


def retracts(when: Callable[[str], bool]) -> Fault:
    """SGLang computed those requests twice: old log-probabilities come back with the record of the second pass."""

    def fault(body: dict[str, Any], go_on: Callable[[dict[str, Any]], Answer]) -> Answer:
        code, answer = go_on(body)
        if when(body["rid"]):
            answer["meta_info"]["num_retractions"] = 1
        return code, answer

    return fault


def only(count: int, fault: Fault) -> Fault:
    """The fault at the given call (from 1) and the normal answer at all others."""
    calls = iter(range(1, 1_000_000))

    def sometimes(body: dict[str, Any], go_on: Callable[[dict[str, Any]], Answer]) -> Answer:
        return fault(body, go_on) if next(calls) == count else go_on(body)

    return sometimes
