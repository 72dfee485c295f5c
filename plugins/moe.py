"""The router: Megatron's, with fp32 weights and with replay."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from glm5_next.plugins.megatron_config import Glm5NextTransformerConfig
from glm5_next.plugins.precision import KeepFp32
from glm5_next.plugins.replay import Choices, RouteReplay


class Glm5NextRouter(KeepFp32, TopKRouter):
    """Sigmoid scores in fp32; a per-expert bias takes part in the selection only.

    The bias is the checkpoint's and stays as it is unless `moe_router_bias_update_rate` is set.
    """

    fp32_tensors = ("weight", "expert_bias", "local_tokens_per_expert")  # bf16 cannot count beyond 256
    config: Glm5NextTransformerConfig
    weight: torch.nn.Parameter
    expert_bias: Tensor
    topk: int
    layer_number: int
    score_function: str
    tp_group: dist.ProcessGroup

    def __init__(self, config, pg_collection=None, is_mtp_layer: bool = False):
        super().__init__(config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer)
        self.weight.data = self.weight.data.float()
        self.frozen_expert_bias = config.moe_router_bias_update_rate == 0
        self.replay: Choices | None = None  # set by the layer right before each call

    def gating(self, input: Tensor) -> Tensor:
        """`[s, b, h]` -> fp32 logits `[s, b, experts]`."""
        return F.linear(input.float(), self.weight)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Megatron's routing, with recorded experts in place of the live choice where there is a record.

        Combine weights are computed from live unbiased scores in both cases, so gradients flow; a record that brings the
        engine's weights replaces their values only. Experts are always chosen here: megatron-core 0.19.2 sorts them by
        score in a pass with gradients only, and their weights, whose sum depends on the order, then differ in the last bit
        between a forward pass and its recomputation.
        """
        layer, share = self.layer_number - 1, {"rank": self.tp_group.rank(), "size": self.tp_group.size()}
        logits = logits.view(-1, self.config.num_moe_experts)
        with torch.no_grad():
            live = (logits.sigmoid() + self.expert_bias).topk(self.topk, dim=-1).indices
            experts = live if self.replay is None else self.replay.choose(layer, lambda: live, **share)
        weights, routing_map = topk_routing_with_score_function(
            logits,
            self.topk,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            precomputed_indices=experts,
        )
        if isinstance(self.replay, RouteReplay) and self.replay.given is not None:
            given = self.replay.weights(layer, weights.gather(1, experts), **share)
            weights = torch.zeros_like(weights).scatter(1, experts, given.to(weights.dtype))
        # Counts tokens per expert, for runs that let the bias move.
        self._apply_expert_bias(routing_map)  # type: ignore[operator]  # a compiled method to mypy
        return weights, routing_map
