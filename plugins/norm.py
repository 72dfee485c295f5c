"""RMSNorm with the reference's rounding, and the one that closes the residual streams."""

import torch
from torch import Tensor

from glm5_next.plugins.megatron_config import Glm5NextTransformerConfig


class RMSNorm(torch.nn.Module):
    """Rounds to the input dtype before the weight multiplies; fused norms round once and differ in a quarter of bits.

    Under sequence parallelism every rank sees its own tokens, so the weight's gradient is summed over TP ranks.
    """

    def __init__(self, config: Glm5NextTransformerConfig, hidden_size: int, eps: float):
        super().__init__()
        self.eps, self.rms_norm = eps, config.kernels.rms_norm
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=config.device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden_size]`, same shape out."""
        return self.rms_norm(x, self.weight, self.eps)


class StreamMeanNorm(RMSNorm):
    """The model's last norm: the unweighted mean of the residual streams, then RMSNorm."""

    def __init__(self, config: Glm5NextTransformerConfig, hidden_size: int, eps: float):
        super().__init__(config, hidden_size, eps)
        self.num_streams = config.model.num_streams

    def forward(self, x: Tensor) -> Tensor:
        """`[s, b, N * h]` -> `[s, b, h]`."""
        return super().forward(x.unflatten(-1, (self.num_streams, -1)).mean(-2))
