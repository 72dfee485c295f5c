"""Made-up records: experts and pools that say which token and layer they belong to."""

from collections.abc import Callable
from typing import Any

import numpy as np

from glm5_next.launchers.config_sections import ReplaySection
from glm5_next.launchers.replay_plan import ReplayPlan
from glm5_next.plugins.pick_coding import PickRecord, encode_picks, visible_pools

KPOOL, SELECTED = 4, 4  # of the tiny models


def plan_of(**changes: Any) -> ReplayPlan:
    """Of a model with one MoE layer and one sparse-attention layer; routes from the engine unless said otherwise."""
    settings = {name: changes.pop(name) for name in ("routing", "indexer", "routing_weights") if name in changes}
    shapes = {"moe_layers": (1,), "num_experts": 1000, "experts_per_token": 2, "dsa_layers": (3,)}
    return ReplayPlan(
        settings=ReplaySection(**settings), **{**shapes, "num_selected": SELECTED, "kpool": KPOOL, **changes}
    )


def pools_of(tokens: np.ndarray, layer: int) -> np.ndarray:
    """int32 `[T, 4]`: a choice of visible pools that depends on token, position and layer; -1 unused."""
    pools = np.full((len(tokens), SELECTED), -1, dtype=np.int32)
    for row, (token, visible) in enumerate(zip(tokens.tolist(), visible_pools(0, len(tokens), KPOOL).tolist())):
        chosen = np.random.default_rng((token, row, layer)).permutation(visible)[:SELECTED]
        pools[row, : len(chosen)] = chosen
    return pools


def picks_of(tokens: np.ndarray, layers: tuple[int, ...] = (3,)) -> PickRecord:
    """The record an engine would send for tokens that were fed to it."""
    pools = np.stack([pools_of(tokens, layer) for layer in layers], axis=1)
    return encode_picks(pools, layers=layers, kpool=KPOOL, name="made up")


def reads_nothing(original: Callable) -> Callable:
    """`HyperTransformerLayer._record` of a layer that ignores the routes of its rows."""
    return lambda self, stream, row: (
        None if stream == "routes" and self.layer_number == 3 else original(self, stream, row)
    )
