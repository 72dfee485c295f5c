"""Megatron's MLPs with the clamped activation in one kernel: dense, shared and grouped experts.

Megatron's own forward passes spell the clamp out in torch (seven passes over memory) or fuse the activation without it.
"""

from typing import Any

from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from glm5_next.plugins.megatron_config import Glm5NextTransformerConfig


class FusedMLP(MLP):
    """fc1, clamped SwiGLU, fc2."""

    config: Glm5NextTransformerConfig

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **unused: Any
    ) -> tuple[Tensor, None]:
        """`[..., h]` -> the same shape, and no bias. `per_token_scale` fp32 `[...]` multiplies the activation."""
        gate_up, _ = self.linear_fc1(hidden_states)
        hidden = self.config.kernels.clamped_swiglu(gate_up, self.config.activation_func_clamp_value, per_token_scale)
        return self.linear_fc2(hidden)[0], None


class FusedSharedExperts(FusedMLP, SharedExpertMLP):
    """Added to every token's output, ungated."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        return FusedMLP.forward(self, hidden_states)[0]


class FusedGroupedMLP(TEGroupedMLP):
    """Routed experts as two grouped matrix products. Combine weights multiply the activation, in the same kernel."""

    config: Glm5NextTransformerConfig

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, tokens_per_expert: Tensor, probs: Tensor, *unused: Any
    ) -> tuple[Tensor, None]:
        """hidden_states `[rows, h]` by expert, tokens_per_expert `[local experts]`, probs fp32 `[rows]`."""
        counts = tokens_per_expert.tolist()
        gate_up, _ = self.linear_fc1(hidden_states, counts)
        hidden = self.config.kernels.clamped_swiglu(gate_up, self.config.activation_func_clamp_value, probs)
        return self.linear_fc2(hidden, counts)[0], None
