"""A linear layer that every TP rank holds whole."""

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5_next.plugins.megatron_config import Glm5NextTransformerConfig


class ReplicatedLinear(torch.nn.Module):
    """`y = x W^T` on this rank's own tokens; with sequence parallelism the gradient of W is summed over TP ranks."""

    def __init__(self, input_size: int, output_size: int, config: Glm5NextTransformerConfig):
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype, device=config.device)
        )
        if config.perform_initialization:
            config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)
