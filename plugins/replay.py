"""Routes recorded elsewhere, answered by (micro-batch, layer) to whichever router asks."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class RouteReplay:
    """The experts that the rollout engine used for the tokens of one packed row.

    routes (Tensor): int16 or wider `[T, num_moe_layers, topk]`; -1 in every slot of a token without a record
        (padding), for which the router chooses itself.
    moe_layers (tuple[int, ...]): the 0-based layer each entry of dim 1 belongs to.

    It rides on the row, so pipeline order, virtual stages and recomputation cannot shift it. `same` and `total` count
    expert slots per layer where live routing would have chosen the engine's expert.
    """

    routes: Tensor
    moe_layers: tuple[int, ...]
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

    def experts(self, layer: int, live: Tensor, *, rank: int, size: int) -> Tensor:
        """The experts to use: int64 `[T / size, topk]` for this rank's contiguous share of the row's tokens.

        `live` `[T / size, topk]` is what the router would choose; it fills tokens without a record.
        """
        if layer not in self.moe_layers:
            raise ValueError(
                f"layer {layer} asks for replayed routes, but the record has only layers {self.moe_layers}"
            )
        rows = self.routes[:, self.moe_layers.index(layer)].chunk(size)[rank].long()
        if rows.shape != live.shape:
            raise ValueError(
                f"layer {layer}: the row has {live.shape[0]} tokens on this rank with {live.shape[1]} experts each, "
                f"its record {rows.shape[0]} with {rows.shape[1]}"
            )
        known = rows >= 0
        self.reads[layer] = self.reads.get(layer, 0) + 1
        self.same[layer] = ((rows.unsqueeze(-1) == live.unsqueeze(-2)).any(-1) & known).sum()
        self.total[layer] = known.sum()
        return torch.where(known, rows, live)
