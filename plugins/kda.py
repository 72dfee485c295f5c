"""Kimi delta attention: the linear-attention layers."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from glm5_next.plugins.documents import Documents
from glm5_next.plugins.linear import ReplicatedLinear
from glm5_next.plugins.megatron_config import Glm5NextTransformerConfig
from glm5_next.plugins.packed_row import documents_of, from_tokens, to_tokens
from glm5_next.plugins.precision import Fp32Weight, KeepFp32
from glm5_next.plugins.recompute import recomputed


@dataclass
class KdaSubmodules:
    """The linear layers that tensor parallelism splits."""

    column_parallel: ModuleSpec | type
    row_parallel: ModuleSpec | type


class HeadNorm(torch.nn.Module):
    """The weight of the output norm: shared by all heads, so its gradient is summed over the TP ranks' heads."""

    def __init__(self, width: int, config: Glm5NextTransformerConfig):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=config.params_dtype, device=config.device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class KdaAttention(KeepFp32):
    """Convolved q, k, v into a delta-rule recurrence with a per-channel decay, normalised and gated on the way out.

    Heads are split over TP ranks. `in_proj` and `conv1d` hold [q_r; k_r; v_r] of this rank's heads.
    """

    fp32_tensors = ("A_log", "dt_bias")

    def __init__(
        self,
        config: Glm5NextTransformerConfig,
        submodules: KdaSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
        **unused: Any,
    ):
        super().__init__()
        model, hidden = config.model, config.hidden_size
        self.config, self.layer_number, self.tp_group = config, layer_number, pg_collection.tp
        self.kernels = config.kernels
        self.head_dim, self.lower_bound = model.kda_head_dim, model.kda_gate_lower_bound
        self.num_heads = model.kda_num_heads // self.tp_group.size()
        width = model.kda_width

        def column_parallel(inputs: int, outputs: int) -> Any:
            return build_module(
                submodules.column_parallel,
                inputs,
                outputs,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                skip_bias_add=False,
                is_expert=False,
                tp_group=self.tp_group,
            )

        self.in_proj = column_parallel(hidden, 3 * width)
        self.conv1d = Fp32Weight(3 * self.width, 1, model.kda_conv_width, device=config.device)
        self.f_a_proj = ReplicatedLinear(hidden, self.head_dim, config)
        self.f_b_proj = column_parallel(self.head_dim, width)
        self.g_a_proj = ReplicatedLinear(hidden, self.head_dim, config)
        self.g_b_proj = column_parallel(self.head_dim, width)
        self.beta_proj = column_parallel(hidden, model.kda_num_heads)
        self.A_log = torch.nn.Parameter(torch.zeros(self.num_heads, dtype=torch.float32, device=config.device))
        self.dt_bias = torch.nn.Parameter(torch.zeros(self.width, dtype=torch.float32, device=config.device))
        self.out_norm = HeadNorm(self.head_dim, config)
        self.out_proj = build_module(
            submodules.row_parallel,
            width,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )
        for parameter in (self.conv1d.weight, self.A_log, self.dt_bias):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            parameter.partition_dim, parameter.partition_stride = 0, 1  # type: ignore[attr-defined]
        if config.perform_initialization:
            torch.nn.init.normal_(self.conv1d.weight, std=model.kda_conv_width**-0.5)

    @property
    def width(self) -> int:
        """Channels of q, k or v on this rank."""
        return self.num_heads * self.head_dim

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, packed_seq_params=None, **unused):
        """`[s / tp, b, h]` -> the same shape, and no bias."""
        batch = hidden_states.shape[1]
        qkv = to_tokens(self.in_proj(hidden_states)[0])
        documents = documents_of(packed_seq_params, qkv.shape[0] // batch, batch, qkv.device)
        decay = to_tokens(self.f_b_proj(self.f_a_proj(hidden_states))[0])
        beta = to_tokens(self.beta_proj(hidden_states)[0])
        gate = to_tokens(self.g_b_proj(self.g_a_proj(hidden_states))[0])
        core = partial(self._core, documents)
        out = recomputed(self.config, "core_attn", core, qkv, decay, beta, gate)
        return self.out_proj(from_tokens(out, batch))[0], None

    def _core(self, documents: Documents, qkv: Tensor, decay: Tensor, beta: Tensor, gate: Tensor) -> Tensor:
        """From projections of `[T, ...]` tokens to the gated, normalised output `[T, width]`."""
        kernels, taps = self.kernels, self.conv1d.weight.squeeze(1).split(self.width)
        parts = (kernels.short_convolution(x, w, documents) for x, w in zip(qkv.split(self.width, dim=-1), taps))
        q, k, v = (self._heads(x) for x in parts)
        decay, gate = self._heads(decay), self._heads(gate)
        out = kernels.kda(q, k, v, decay, self.A_log, self.dt_bias, beta, documents, lower_bound=self.lower_bound)
        return kernels.gated_rms_norm(out, gate, self.out_norm.weight, self.config.layernorm_epsilon).flatten(1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Heads are the split dimension; q, k and v are separate tensors, so that TP sizes can change on load."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        shared = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        state = make_sharded_tensors_for_checkpoint(own, prefix, {"A_log": 0, "dt_bias": 0}, sharded_offsets, **shared)
        for name, module in self.named_children():
            if name == "conv1d":
                state |= make_sharded_tensors_for_checkpoint(
                    module.state_dict(keep_vars=True), f"{prefix}{name}.", {"weight": 0}, sharded_offsets, **shared
                )
            else:
                state |= sharded_state_dict_default(
                    module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
                )
        for name in ("in_proj.weight", "conv1d.weight"):
            key = prefix + name
            state[key] = _split_tensor_factory(state[key], [self.width] * 3, ["query", "key", "value"], 0)
        return state
