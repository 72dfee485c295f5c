"""Trainer ranks give a new policy to engines that live on the same GPUs: through memory that both sides see.

Such an engine sleeps while trainers work: it has given back the memory of its weights and of its cache. An update takes the
weights' memory first, fills it, and then takes the cache's. One that fails leaves the other engines asleep again; those that
failed are in no known state, and whoever sent the order has to end them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from glm5_next.launchers.engines.client import EngineClient, Memory, Shared
from glm5_next.launchers.engines.order import Order
from glm5_next.launchers.engines.publisher import EnginesFailed, Publisher
from glm5_next.launchers.engines.shared_bucket import Offers
from glm5_next.launchers.engines.weight_group import described, in_order
from glm5_next.launchers.runtime.engine import Bucket


class ColocatedPublisher(Publisher):
    """All servers of an update, on trainer rank 0; the other ranks `follow`."""

    uses_group = False

    def __init__(self, clients: Sequence[EngineClient], **options: Any):
        super().__init__(clients, **options)
        self.offers = Offers(self.device)
        self.awake: list[Memory] = []  # what every engine that has not failed has taken back in this update
        self.started: Mapping[str, dict[str, str]] = {}
        self.engine_tp = 1

    def take(self, order: Order) -> None:
        super().take(order)
        self.started, self.engine_tp = order.started, order.run.rollout.engine_tp

    def begin_update(self, version: int) -> None:
        self.awake.clear()
        self._take_back("weights")
        self._all(lambda client: client.join_shared())
        super().begin_update(version)

    def put_weights(self, bucket: Bucket) -> None:
        self.offers.go_on()
        bucket = in_order(bucket)
        tensors, shared = described(bucket), self.offers.share(bucket)
        self._all(lambda client: client.load_shared(tensors, self._beside(client, shared), self.deadline))

    def sleep_again(self, failed: Mapping[str, str]) -> dict[str, str]:
        """Puts the engines to sleep that have not failed; returns all that have, with the reasons."""
        others = [client for client in self.clients if client.name not in failed]
        try:
            if self.awake:
                self._all(lambda client: client.release(self.awake), others)
        except EnginesFailed as failure:
            return {**failed, **failure.reasons}
        return dict(failed)

    def close(self) -> None:
        self.offers.close()
        super().close()

    def _checksums_at_start(self, fresh: Sequence[EngineClient]) -> dict[str, dict[str, str]]:
        """Taken before they slept for the first time: what they were started with is gone."""
        return {client.name: self.started[client.name] for client in fresh}

    def _closed(self) -> None:
        self._take_back("kv_cache")

    def _take_back(self, memory: Memory) -> None:
        self.awake.append(memory)
        self._all(lambda client: client.take_back(memory))

    def _beside(self, client: EngineClient, shared: Sequence[Shared]) -> Sequence[Shared]:
        """Engine k has the GPUs of trainer ranks k * engine_tp and those after it, one for each of its ranks."""
        first = int(client.name.split()[-1]) * self.engine_tp
        return shared[first : first + self.engine_tp]


def follow(stream: Iterator[Bucket], offers: Offers) -> None:
    """The other trainer ranks' part: to offer each bucket that rank 0 still sends."""
    for bucket in stream:
        if offers.go_on():
            offers.share(in_order(bucket))
    offers.go_on()
    offers.close()


def finish(stream: Iterator[Bucket], offers: Offers) -> None:
    """Rank 0's end of it, after success and after failure: what is left of the stream is not sent."""
    for _ in stream:
        offers.go_on(False)
    offers.go_on(False)
    offers.close()
