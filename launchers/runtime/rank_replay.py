"""One rank's side of replay: stores for the rows of a batch, its own records between passes, and the count of reads."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from glm5_next.launchers.packing import MicroBatch, plan_digest
from glm5_next.launchers.replay_plan import ReplayPlan
from glm5_next.launchers.runtime.batch import Batch
from glm5_next.launchers.runtime.replay_probe import Seen, digest
from glm5_next.launchers.runtime.train_step import Row
from glm5_next.plugins.layer import HyperTransformerLayer
from glm5_next.plugins.packed_row import packed_row
from glm5_next.plugins.replay import OwnRecord, PickReplay, RouteReplay, check_reads

STREAMS = ("routes", "picks")
Key = tuple[str, tuple[str, ...]]


class RankReplay:
    """Knows which layers of this rank read a record, and what they chose in a pass that was recorded."""

    def __init__(self, plan: ReplayPlan, chunks: Sequence[torch.nn.Module], device: torch.device):
        self.plan, self.device = plan, device
        self.modes = {"routes": plan.settings.routing, "picks": plan.settings.indexer}
        layers = [layer for chunk in chunks for layer in chunk.modules() if isinstance(layer, HyperTransformerLayer)]
        self.layers = {
            stream: tuple(layer.layer_number - 1 for layer in layers if stream in layer.replayed_streams)
            for stream in STREAMS
        }
        self._own: dict[Key, list[dict[str, OwnRecord]]] = {}

    def rows(self, batch: Batch, packed: Sequence[MicroBatch], *, passes: int, own: bool) -> list[Row]:
        """Packed micro-batches with their stores; `own` adds this rank's records of the same batch."""
        kept: Sequence[dict[str, OwnRecord]] = [{}] * len(packed)
        if own and self.plan.from_trainer:
            if _key(batch) not in self._own:
                raise RuntimeError("replay: the batch is trained before the pass that records its choices")
            kept = self._own.pop(_key(batch))
        return [self._row(micro_batch, records, passes) for micro_batch, records in zip(packed, kept, strict=True)]

    def recorded(self, batch: Batch, rows: Sequence[Row], run: Callable[[], Any]) -> Any:
        """`run()`, a forward pass over the rows, while what the layers choose is kept for `rows(own=True)`."""
        kept: list[dict[str, OwnRecord]] = []
        for row in rows:
            kept.append({stream: OwnRecord() for stream in STREAMS if self.modes[stream] == "record"})
            for stream, record in kept[-1].items():
                setattr(row.params, stream, record)
        result = run()
        for number, (row, records) in enumerate(zip(rows, kept)):
            for stream, record in records.items():
                record.close(self.layers[stream], f"replay: micro-batch {number}, {stream}")
                setattr(row.params, stream, None)
        self._own[_key(batch)] = kept
        return result

    def check(self, rows: Sequence[Row], *, passes: int) -> int:
        """The reads of all stores of these rows; RuntimeError unless each layer of this rank read each row's record
        `passes` times."""
        return sum(
            check_reads(choices, self.layers[stream], passes, f"replay: micro-batch {number}, {stream}")
            for number, row in enumerate(rows)
            for stream in STREAMS
            if (choices := getattr(row.params, stream)) is not None
        )

    def sightings(self, rows: Sequence[Row]) -> dict[str, dict[tuple[str, int], Seen]]:
        """What this rank's layers have of every sample."""
        return {
            sample_id: {
                (stream, layer): Seen(digest(choices.content(layer)[part].cpu()), choices.reads.get(layer, 0))
                for stream in STREAMS
                if isinstance(choices := getattr(row.params, stream), (RouteReplay, PickReplay))
                for layer in self.layers[stream]
            }
            for row in rows
            for sample_id, part in zip(row.batch.sample_ids, row.batch.sample_slices)
        }

    def _row(self, batch: MicroBatch, own: dict[str, OwnRecord], passes: int) -> Row:
        batch = batch.to(self.device)
        stores: dict[str, Any] = dict(own)
        if batch.routes is not None:
            stores["routes"] = RouteReplay(batch.routes, self.plan.moe_layers, batch.route_weights)
        if batch.picks is not None:
            stores["picks"] = PickReplay(batch.picks, self.device, passes=passes)
        return Row(batch, packed_row(batch.cu_seqlens, **stores))


def _key(batch: Batch) -> Key:
    return plan_digest(batch.plan), tuple(sample.sample_id for sample in batch.samples)
