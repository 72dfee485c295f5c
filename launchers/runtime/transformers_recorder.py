"""What transformers' model chose during a forward pass: experts, their weights, and the pools of its indexers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glm5_next.launchers.replay_plan import Recording
from glm5_next.plugins.pick_coding import PickRecord, encode_picks


class Rows(NamedTuple):
    """Consecutive tokens of one sequence: routes int16 and weights float32 `[tokens, MoE layers, experts per token]`,
    pools int32 `[tokens, sparse-attention layers, pools]`; None where they are not recorded."""

    routes: np.ndarray | None
    weights: np.ndarray | None
    pools: np.ndarray | None


class Recorder:
    """Hooks on a model's routers and indexers; `take` after every forward pass."""

    def __init__(self, model: Any, recording: Recording):
        layers, text = model.model.language_model.layers, model.config.text_config
        self.recording, self.kpool = recording, text.index_kpool
        self.num_selected = text.index_topk // text.index_kpool
        self.routers = [layer.mlp.gate for layer in layers if recording.routes and hasattr(layer.mlp, "gate")]
        indexers = {i: getattr(layer.self_attn, "indexer", None) for i, layer in enumerate(layers) if recording.picks}
        self.indexers = {i: indexer for i, indexer in indexers.items() if indexer is not None}
        self._routed: list[tuple[Tensor, Tensor]] = []
        self._picked: list[Tensor] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        hooks = [router.register_forward_hook(self._on_router) for router in self.routers]
        hooks += [indexer.register_forward_hook(self._on_indexer) for indexer in self.indexers.values()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self, mask: Tensor, length: int) -> list[Rows]:
        """The record of the pass that just ended, over the last `length` columns of the attention mask `[batch, slots]`:
        one entry per sequence, without its padding."""
        routed, picked, self._routed, self._picked = self._routed, self._picked, [], []
        assert (len(routed), len(picked)) == (len(self.routers), len(self.indexers)), (
            "a layer did not run, or ran twice"
        )
        routes = weights = pools = None
        batch = len(mask)
        if self.recording.routes:
            routes = _stacked([experts.to(torch.int16) for _, experts in routed], batch, length)
        if self.recording.route_weights:
            weights = _stacked([given.float() for given, _ in routed], batch, length)
        if self.recording.picks:
            pools = _stacked([self._pools(slots, mask) for slots in picked], batch, length)
        return [
            Rows(*(None if rows is None else rows[sequence, real] for rows in (routes, weights, pools)))
            for sequence, real in enumerate(mask[:, -length:].bool().cpu().numpy())
        ]

    def joined(
        self, pieces: Sequence[Rows], name: str
    ) -> tuple[np.ndarray | None, np.ndarray | None, PickRecord | None]:
        """Routes, weights and picks of a whole sequence. ValueError where the picks are no choice of pools."""
        routes, weights, pools = (
            None if parts[0] is None else np.concatenate([part for part in parts if part is not None])
            for parts in zip(*pieces)
        )
        if pools is None:
            return routes, weights, None
        return routes, weights, encode_picks(pools, layers=tuple(self.indexers), kpool=self.kpool, name=name)

    def _on_router(self, module: torch.nn.Module, inputs: tuple, output: tuple) -> None:
        self._routed.append((output[1], output[2]))

    def _on_indexer(self, module: torch.nn.Module, inputs: tuple, output: Tensor) -> None:
        self._picked.append(output)

    def _pools(self, slots: Tensor, mask: Tensor) -> Tensor:
        """Cache slots that were selected `[batch, queries, width]` -> ascending pool ids, -1 unused."""
        padding = (mask == 0).sum(1)[:, None, None]  # on the left; pools start at the first real token
        queries = slots.shape[1]
        position = torch.arange(mask.shape[1] - queries, mask.shape[1], device=mask.device)[None, :, None] - padding
        token = slots - padding
        pool = token // self.kpool
        complete = (slots >= 0) & (token % self.kpool == 0) & (pool < (position + 1) // self.kpool)
        none = torch.iinfo(pool.dtype).max
        pool = torch.where(complete, pool, none).sort(-1).values[..., : self.num_selected]
        return torch.where(pool == none, -1, pool).int()


def _stacked(layers: Sequence[Tensor], batch: int, length: int) -> np.ndarray:
    """`[batch, length, layers, ...]`."""
    flat = [layer.reshape(batch, length, -1) for layer in layers]
    return (torch.stack(flat, dim=2) if flat else torch.zeros(batch, length, 0, 0)).cpu().numpy()
