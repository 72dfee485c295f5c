"""From the tokens that an engine's sparse attention reads back to the pools that its indexer chose.

Both engines expand every chosen pool to its tokens, in the order of choice, and put the tokens of the incomplete pool
behind them. Our plugins run this inside an engine, so it needs torch and nothing else.
"""

import torch
from torch import Tensor


def chosen_pools(tokens: Tensor, positions: Tensor, kpool: int, num_selected: int) -> Tensor:
    """int32 `[T, num_selected]` pool ids, numbered from the sequence's first pool; -1 in unused slots.

    tokens: `[T, at least num_selected * kpool]` positions in the sequence that a token attends to, negative where unused.
    positions: `[T]` of the tokens themselves. Those that see no more pools than they may choose have chosen them all,
    whatever order the engine's shortcut for short sequences uses. A slot that is no start of a visible pool becomes -1.
    """
    first = tokens[:, : num_selected * kpool : kpool]
    visible = ((positions.to(torch.int32) + 1) // kpool).unsqueeze(1)
    every = torch.arange(num_selected, dtype=torch.int32, device=tokens.device)
    chosen = torch.where((first >= 0) & (first % kpool == 0), first // kpool, -1)
    pools = torch.where(visible > num_selected, chosen, every)
    return torch.where(pools < visible, pools, -1).to(torch.int32)


def narrowest(longest: int, kpool: int) -> torch.dtype:
    """Integers that hold -1 and every pool of a sequence of `longest` tokens."""
    return torch.int16 if longest // kpool <= torch.iinfo(torch.int16).max else torch.int32
