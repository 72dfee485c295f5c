"""Manifold-constrained hyper-connections: the residual streams around every attention and MLP block."""

import torch
from torch import Tensor

from glm5_next.plugins.megatron_config import Glm5NextTransformerConfig
from glm5_next.plugins.precision import Fp32Weight, KeepFp32
from glm5_next.plugins.recompute import recomputed


class HyperConnection(KeepFp32):
    """One site: how N streams become a block's input, and how its output goes back into them.

    Parameter names are those of Megatron's development line, so that checkpoints can move over. All of them are fp32
    and replicated; with sequence parallelism their gradients are summed over TP ranks. Source: mHC (Xie et al., 2026).
    """

    fp32_tensors = ("bias", "alpha_pre", "alpha_post", "alpha_res")

    def __init__(self, config: Glm5NextTransformerConfig):
        super().__init__()
        self.config, self.model, self.kernels = config, config.model, config.kernels
        streams = self.model.num_streams
        outputs = streams * (streams + 2)
        self.mapping_proj = Fp32Weight(outputs, streams * config.hidden_size, device=config.device)

        def vector(values: Tensor) -> torch.nn.Parameter:
            return torch.nn.Parameter(values.to(device=config.device, dtype=torch.float32))

        self.bias = vector(torch.zeros(outputs))
        self.alpha_pre, self.alpha_post, self.alpha_res = (vector(torch.ones(1)) for _ in range(3))
        if config.perform_initialization:
            torch.nn.init.normal_(self.mapping_proj.weight, std=config.init_method_std)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[s, b, N * h]` -> the block's input `[s, b, h]`, and for `merge` post `[s, b, N]` and mix `[s, b, N, N]`."""
        return recomputed(self.config, "mhc", self._collapse, streams)

    def merge(self, streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        """The streams after the block: `[s, b, N * h]`."""
        return recomputed(self.config, "mhc", self.kernels.mhc_merge, streams, output, post, mix)

    def _collapse(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # One node of its own collects the gradients of mapping and collapse before they meet the merge's: the order in
        # which recomputation adds them, so that it changes no bit.
        streams = streams.view_as(streams)
        return self.kernels.mhc_site(
            streams,
            self.mapping_proj.weight,
            self.bias,
            (self.alpha_pre, self.alpha_post, self.alpha_res),
            num_streams=self.model.num_streams,
            norm_eps=self.model.norm_eps,
            hc_eps=self.model.hc_eps,
            iterations=self.model.sinkhorn_iterations,
        )
