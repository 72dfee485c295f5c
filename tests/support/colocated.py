"""Servers as a run with `rollout.placement = "colocated"` leaves them before its first update: asleep."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from glm5_next.launchers.config import RunConfig
from glm5_next.launchers.engines.client import ALL_MEMORY
from glm5_next.launchers.engines.clients import client_of
from glm5_next.launchers.engines.order import Order
from glm5_next.launchers.engines.tiny_host import ModelHost
from glm5_next.launchers.engines.tiny_sglang import SGLangProtocol
from glm5_next.launchers.engines.tiny_vllm import VllmProtocol
from glm5_next.launchers.engines.wire import EventLoop
from tests.support.engine_server import Engine, engine
from tests.support.training import settings

PROTOCOLS: dict[str, Any] = {"sglang": SGLangProtocol, "vllm": VllmProtocol}
LOADS = {"sglang": "/update_weights_from_tensor", "vllm": "/update_weights"}


class Colocated:
    """The running servers, and what a run knows of them."""

    def __init__(self, run: RunConfig, engines: list[Engine]):
        self.run, self.engines, self.loop = run, engines, EventLoop()
        self.started: dict[str, dict[str, str]] = {}

    def ask(self, one: Engine, call: Callable[[Any], Any]) -> Any:
        async def asked() -> Any:
            client = client_of(one.address, self.run, one.host.config)
            try:
                return await call(client)
            finally:
                await client.close()

        return self.loop.run(asked())

    def sleep(self) -> None:
        """As before a training step."""
        for one in self.engines:
            self.ask(one, lambda client: client.release(ALL_MEMORY))

    def order(self, version: int, *numbers: int, fresh: bool = False) -> Order:
        """To the engines of these numbers, or all."""
        addresses = tuple(self.engines[number].address for number in numbers or range(len(self.engines)))
        names = frozenset(address.name for address in addresses) if fresh else frozenset()
        return Order(addresses, names, version, self.run, Path("/none"), self.started)


@contextmanager
def servers(
    kind: str, hosts: list[ModelHost], folder: Path, tp: int, parallel: Mapping[str, int]
) -> Iterator[Colocated]:
    """One for every `tp` trainer ranks, with the checkpoint's weights noted."""
    count = parallel["ranks"] // tp
    changes: dict[str, Any] = {f"parallel__{key}": value for key, value in parallel.items()}
    changes |= {"rollout__engine": kind, "rollout__placement": "colocated"}
    changes |= {"rollout__engine_tp": tp, "rollout__num_engines": count}
    with ExitStack() as stack:
        engines = []
        for number, host in enumerate(hosts[:count]):
            host.released.clear()
            host.load_folder(folder)
            host.version, host.paused = "default", False
            protocol = PROTOCOLS[kind](host, tp=tp)
            stack.callback(host.released.clear)
            if kind == "vllm":
                stack.callback(protocol.merged.remove)
            engines.append(stack.enter_context(engine(f"engine {number}", protocol, kind)))
        made = Colocated(settings(folder, **changes), engines)
        stack.callback(made.loop.close)
        made.started = {one.address.name: made.ask(one, lambda client: client.checksums()) for one in engines}
        made.sleep()
        for one in engines:
            one.faulty.calls.clear()
        yield made
