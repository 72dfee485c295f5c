"""What every trainer rank does in an update of servers: all export, rank 0 talks to the servers."""

import shutil
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.export import save_hf_folder
from glm5_next.bridge.hf_folder import ExportDtype
from glm5_next.launchers.engines.colocated import ColocatedPublisher, finish, follow
from glm5_next.launchers.engines.order import Order, Outcome
from glm5_next.launchers.engines.publisher import EnginesFailed, Publisher
from glm5_next.launchers.engines.shared_bucket import Offers
from glm5_next.launchers.runtime.weight_digest import weight_digest
from glm5_next.launchers.runtime.weight_sync import buckets, publish, publish_buckets

Weights = Iterator[tuple[str, torch.Tensor]]


class ServerUpdates:
    """One rank's. `export` is collective and gives the same stream on every rank."""

    def __init__(self, export: Callable[[], Weights], source: Checkpoint, dtype: ExportDtype, device: torch.device):
        self.export, self.source, self.dtype, self.device = export, source, dtype, device
        self.is_first = dist.get_rank() == 0
        self.publisher: Publisher | None = None

    def publish(self, order: Order) -> Outcome | None:
        """Sends the current weights; failures of servers are in the outcome (rank 0)."""
        rollout = order.run.rollout
        if rollout.placement == "colocated":
            return self._through_memory(order)
        return self._through_folder(order) if rollout.transport == "disk" else self._through_group(order)

    def _through_group(self, order: Order) -> Outcome | None:
        weights = self.export()
        if not self.is_first:
            for _ in weights:
                pass
            return None
        publisher = self._publisher(order, Publisher)
        try:
            return Outcome(publish(weights, [publisher], order.version), {})
        except EnginesFailed as failure:
            self._drop_publisher()
            return Outcome(0, failure.reasons)
        finally:
            for _ in weights:  # the other ranks are still in the export
                pass

    def _through_memory(self, order: Order) -> Outcome | None:
        """To engines on the ranks' own GPUs."""
        stream = buckets(self.export())
        if not self.is_first:
            follow(stream, Offers(self.device))
            return None
        publisher = self._publisher(order, ColocatedPublisher)
        failed: dict[str, str] = {}
        num_bytes = 0
        try:
            num_bytes = publish_buckets(stream, [publisher], order.version)
        except EnginesFailed as failure:
            failed = failure.reasons
        finish(stream, publisher.offers)
        if failed:
            failed = publisher.sleep_again(failed)
            self._drop_publisher()
        return Outcome(num_bytes, failed)

    def _through_folder(self, order: Order) -> Outcome | None:
        """A folder is written anew; engines read it themselves."""
        digests: dict[str, str] = {}
        sent = 0

        def noted() -> Weights:
            nonlocal sent
            for name, tensor in self.export():
                if self.is_first:
                    digests[name] = weight_digest(tensor, tensor.dtype)
                    sent += tensor.nbytes
                yield name, tensor

        if self.is_first:
            shutil.rmtree(order.folder, ignore_errors=True)
        save_hf_folder(noted(), self.source, order.folder, dtype=self.dtype)
        if not self.is_first:
            return None
        publisher = self._publisher(order, Publisher)
        try:
            publisher.begin_update(order.version)
            publisher.load_folder(order.folder)
            publisher.commit_update(digests)
        except EnginesFailed as failure:
            self._drop_publisher()
            return Outcome(0, failure.reasons)
        finally:
            shutil.rmtree(order.folder)
        return Outcome(sent, {})

    def _publisher[P: Publisher](self, order: Order, kind: type[P]) -> P:
        """Kept from update to update, while the engines are the same."""
        if not isinstance(self.publisher, kind) or self.publisher.addresses != order.addresses:
            self._drop_publisher()
            self.publisher = kind.of(order, self.source.config)
        assert isinstance(self.publisher, kind)
        self.publisher.take(order)
        return self.publisher

    def _drop_publisher(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
        self.publisher = None
