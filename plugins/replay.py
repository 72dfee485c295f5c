"""Choices made elsewhere, answered by (packed row, global layer) to whichever layer asks.

A store rides on its row, so pipeline order, virtual stages and recomputation cannot shift it: nothing is ever popped.
Routers and indexers only know `Choices`. Each counts its reads by layer; `check_reads` holds the counts against the plan.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from glm5_next.plugins.pick_coding import PickRecord

Live = Callable[[], Tensor]  # what the layer would choose by itself


class Choices(Protocol):
    """What a layer uses in place of its own choice."""

    reads: dict[int, int]

    def choose(self, layer: int, live: Live, *, rank: int = 0, size: int = 1) -> Tensor:
        """The choice of this rank's contiguous share of the row's tokens, like `live()` gives it for them."""
        ...


@dataclass(eq=False)
class RouteReplay:
    """The experts that the rollout engine used for the tokens of one packed row.

    routes (Tensor): int16 or wider `[T, num_moe_layers, topk]`; -1 in every slot of a token without a record
        (padding), for which the router chooses itself.
    moe_layers (tuple[int, ...]): the 0-based layer each entry of dim 1 belongs to.
    given (Tensor | None): fp32 of the same shape, the engine's combine weights.

    `same` and `total` count expert slots per layer where live routing would have chosen the engine's expert.
    """

    routes: Tensor
    moe_layers: tuple[int, ...]
    given: Tensor | None = None
    same: dict[int, Tensor] = field(default_factory=dict)
    total: dict[int, Tensor] = field(default_factory=dict)
    reads: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.routes.ndim != 3 or self.routes.shape[1] != len(self.moe_layers):
            raise ValueError(
                f"routes have shape {tuple(self.routes.shape)}, expected [tokens, {len(self.moe_layers)} MoE layers, topk]"
            )
        # An engine that records nothing hands over zeros: they must not pass for expert 0.
        experts = self.routes.sort(dim=-1).values
        known = experts >= 0
        twice = (experts[..., 1:] == experts[..., :-1]) & known[..., 1:]
        broken = twice.any(-1) | (known.any(-1) & ~known.all(-1))
        if broken.any():
            token, layer = broken.nonzero()[0].tolist()
            raise ValueError(
                f"token {token}, layer {self.moe_layers[layer]}: {self.routes[token, layer].tolist()} is no record; "
                "experts must be distinct, or -1 in every slot"
            )

    def choose(self, layer: int, live: Live, *, rank: int = 0, size: int = 1) -> Tensor:
        """int64 `[T / size, topk]`; the router's own choice fills tokens without a record."""
        rows, own = self._rows(self.routes, layer, rank, size).long(), live()
        if rows.shape != own.shape:
            raise ValueError(
                f"layer {layer}: the row has {own.shape[0]} tokens on this rank with {own.shape[1]} experts each, "
                f"its record {rows.shape[0]} with {rows.shape[1]}"
            )
        known = rows >= 0
        _count(self.reads, layer)
        self.same[layer] = ((rows.unsqueeze(-1) == own.unsqueeze(-2)).any(-1) & known).sum()
        self.total[layer] = known.sum()
        return torch.where(known, rows, own)

    def content(self, layer: int) -> Tensor:
        """The record of a layer for all tokens of the row, `[T, topk]`."""
        return self._rows(self.routes, layer, 0, 1)

    def weights(self, layer: int, live: Tensor, *, rank: int = 0, size: int = 1) -> Tensor:
        """Combine weights of the experts that were just given, `[T / size, topk]`: the engine's values with the gradient
        of the live ones, which fill tokens without a record."""
        assert self.given is not None
        known = self._rows(self.routes, layer, rank, size) >= 0
        return torch.where(known, self._rows(self.given, layer, rank, size) + (live - live.detach()), live)

    def _rows(self, stream: Tensor, layer: int, rank: int, size: int) -> Tensor:
        if layer not in self.moe_layers:
            raise ValueError(
                f"layer {layer} asks for replayed routes, but the record has only layers {self.moe_layers}"
            )
        return stream[:, self.moe_layers.index(layer)].chunk(size)[rank]


class PickReplay:
    """The pools that the engine's indexer selected for the tokens of one packed row.

    records: one per document, padding included. Ids count from a document's first pool, as the indexer's own do; the
    one place that turns either into tokens of the row is `expand_pools`. A layer is decoded at its first read and
    forgotten after the last of `passes`, so that little is decoded at a time.
    """

    def __init__(self, records: Sequence[PickRecord], device: torch.device, *, passes: int):
        self.records, self.device, self.passes = records, device, passes
        self.reads: dict[int, int] = {}
        self._decoded: dict[int, tuple[Tensor, Tensor | None]] = {}

    def choose(self, layer: int, live: Live, *, rank: int = 0, size: int = 1) -> Tensor:
        """int32 `[T, pools]`; the indexer runs only where a token has no record of a choice."""
        assert size == 1, "every rank selects for all tokens"
        if layer not in self._decoded:
            self._decoded[layer] = self._decode(layer)
        _count(self.reads, layer)
        pools, holes = self._decoded[layer] if self.reads[layer] < self.passes else self._decoded.pop(layer)
        return pools if holes is None else torch.where(holes, live(), pools)

    def content(self, layer: int) -> Tensor:
        """The record of a layer for all tokens of the row, `[T, pools]`."""
        return self._decode(layer)[0]

    def _decode(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Pools, and which rows have none: bool `[T, 1]`, None if every row has."""
        for record in self.records:
            if layer not in record.layers:
                raise ValueError(
                    f"layer {layer} asks for replayed pools, but the record has only layers {record.layers}"
                )
        pools = np.concatenate([record.decode(layer) for record in self.records])
        holes = np.concatenate([record.holes[:, record.layers.index(layer)] for record in self.records])
        missing = torch.from_numpy(holes).unsqueeze(1).to(self.device) if holes.any() else None
        return torch.from_numpy(pools).to(self.device), missing


class OwnRecord:
    """What this rank's own layers chose in one pass over a row, for later passes over the same row.

    It keeps the rank's share of the tokens, so it needs no exchange: the same row is cut in the same way again.
    """

    def __init__(self) -> None:
        self.chosen: dict[int, Tensor] = {}
        self.reads: dict[int, int] = {}
        self.recording = True

    def choose(self, layer: int, live: Live, *, rank: int = 0, size: int = 1) -> Tensor:
        if self.recording:
            if layer in self.chosen:
                raise RuntimeError(f"layer {layer} chose twice while its choice was recorded")
            self.chosen[layer] = live()
            return self.chosen[layer]
        _count(self.reads, layer)
        return self.chosen[layer]

    def close(self, layers: Iterable[int], what: str) -> None:
        """Ends the recording; RuntimeError unless every one of `layers` made its choice and no other layer did."""
        if self.chosen.keys() != set(layers):
            raise RuntimeError(f"{what}: layers {sorted(self.chosen)} recorded their choice, planned {sorted(layers)}")
        self.recording = False


def check_reads(choices: Choices, layers: Iterable[int], passes: int, what: str) -> int:
    """The number of reads, if every one of `layers` read its record `passes` times and no other layer did; RuntimeError
    otherwise."""
    expected = dict.fromkeys(layers, passes)
    if choices.reads != expected:
        wrong = {
            layer: (choices.reads.get(layer, 0), expected.get(layer, 0))
            for layer in sorted(choices.reads.keys() | expected.keys())
            if choices.reads.get(layer, 0) != expected.get(layer, 0)
        }
        raise RuntimeError(f"{what}: reads of the record by layer, (found, planned): {wrong}")
    return sum(expected.values())


def _count(reads: dict[int, int], layer: int) -> None:
    reads[layer] = reads.get(layer, 0) + 1
