"""Selective recomputation: which parts of a layer can be computed again in the backward pass instead of being stored."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from glm5_next.plugins.megatron_config import Glm5NextTransformerConfig


def recomputed(config: Glm5NextTransformerConfig, module: str, function: Callable[..., Any], *tensors: Tensor) -> Any:
    """`function(*tensors)`; where the run recomputes `module`, only the tensors are kept until the backward pass."""
    chosen = config.recompute_granularity == "selective" and module in (config.recompute_modules or ())
    if chosen and torch.is_grad_enabled():
        return tensor_parallel.checkpoint(function, False, *tensors)
    return function(*tensors)
