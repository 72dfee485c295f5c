"""Multi-latent attention over the tokens that the indexer selects: the sparse-attention layers."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor

from glm5_next.plugins.documents import Documents
from glm5_next.plugins.indexer import KPoolIndexer
from glm5_next.plugins.linear import ReplicatedLinear, headwise
from glm5_next.plugins.megatron_config import Glm5NextTransformerConfig
from glm5_next.plugins.norm import RMSNorm
from glm5_next.plugins.packed_row import documents_of, from_tokens, to_tokens
from glm5_next.plugins.recompute import recomputed
from glm5_next.plugins.replay import Choices, Live


@dataclass
class DsaSubmodules:
    """The linear layers that tensor parallelism splits."""

    column_parallel: ModuleSpec | type
    row_parallel: ModuleSpec | type


class SparseCoreAttention(MegatronModule):
    """Selection and attention in latent space."""

    def __init__(self, config: Glm5NextTransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection):
        super().__init__(config)
        self.layer_number = layer_number
        self.replay: Choices | None = None  # set by the layer right before each call
        self.indexer, self.kernels = KPoolIndexer(config, pg_collection), config.kernels
        self.scale = config.qk_head_dim**-0.5  # of the model's heads, not of the latent width
        self.kpool = config.model.index_kpool

    def forward(
        self, q: Tensor, latent: Tensor, hidden_states: Tensor, q_compressed: Tensor, documents: Documents
    ) -> Tensor:
        """q `[T, heads, C]` absorbed queries, latent `[T, C]` keys and values at once -> `[T, heads, C]`."""
        pools = self._choose(partial(self.indexer, hidden_states, q_compressed, documents))
        indices = self.kernels.expand_pools(pools, documents, self.kpool)
        attend = partial(self.kernels.sparse_attention, indices=indices, scale=self.scale)
        return recomputed(self.config, "core_attn", attend, q, latent)

    def _choose(self, live: Live) -> Tensor:
        return live() if self.replay is None else self.replay.choose(self.layer_number - 1, live)


class DsaAttention(MegatronModule):
    """NoPE multi-latent attention in absorbed form: one latent per token is key and value of every head.

    Heads are split over TP ranks; the latents and both down projections are replicated. Norms are separate modules,
    because the indexer needs the normalised query latent.
    """

    def __init__(
        self,
        config: Glm5NextTransformerConfig,
        submodules: DsaSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
        **unused: Any,
    ):
        super().__init__(config)
        hidden, heads, eps = config.hidden_size, config.num_attention_heads, config.layernorm_epsilon
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        self.num_heads = heads // self.tp_group.size()

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

        self.linear_q_down_proj = ReplicatedLinear(hidden, config.q_lora_rank, config)
        self.q_layernorm = RMSNorm(config, config.q_lora_rank, eps)
        self.linear_q_up_proj = column_parallel(config.q_lora_rank, heads * config.qk_head_dim)
        self.linear_kv_down_proj = ReplicatedLinear(hidden, config.kv_lora_rank, config)
        self.kv_layernorm = RMSNorm(config, config.kv_lora_rank, eps)
        self.linear_kv_up_proj = column_parallel(config.kv_lora_rank, heads * (config.qk_head_dim + config.v_head_dim))
        self.core_attention = SparseCoreAttention(config, layer_number, pg_collection)
        self.linear_proj = build_module(
            submodules.row_parallel,
            heads * config.v_head_dim,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, packed_seq_params=None, **unused):
        """`[s / tp, b, h]` -> the same shape, and no bias."""
        batch = hidden_states.shape[1]
        q_compressed = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        latent = self.kv_layernorm(self.linear_kv_down_proj(hidden_states))
        if self.config.sequence_parallel:
            # Each rank attends with its own heads, so the latent's gradient is a sum over ranks.
            latent = gather_from_sequence_parallel_region(latent, group=self.tp_group)
        latent = to_tokens(latent)
        documents = documents_of(packed_seq_params, latent.shape[0] // batch, batch, latent.device)
        key_up, value_up = self._up_weights()
        q = to_tokens(self.linear_q_up_proj(q_compressed)[0]).unflatten(-1, (self.num_heads, -1))
        q = headwise(q, key_up)
        out = self.core_attention(q, latent, hidden_states, q_compressed, documents)
        out = headwise(out, value_up.transpose(1, 2))
        return self.linear_proj(from_tokens(out.flatten(1), batch))[0], None

    def _up_weights(self) -> tuple[Tensor, Tensor]:
        """Key and value blocks of the up projection, per head: `[heads, qk_head_dim, C]`, `[heads, v_head_dim, C]`."""
        weight = self.linear_kv_up_proj.weight.unflatten(0, (self.num_heads, -1))
        return weight.split([self.config.qk_head_dim, self.config.v_head_dim], dim=1)
