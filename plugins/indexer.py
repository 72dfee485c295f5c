"""The k-pool indexer: which pools of earlier tokens a query of a DSA layer attends to. Frozen."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from glm5_next.plugins.documents import Documents
from glm5_next.plugins.linear import ReplicatedLinear, linear_fp32
from glm5_next.plugins.megatron_config import Glm5NextTransformerConfig
from glm5_next.plugins.packed_row import to_tokens

# Queries scored at a time: their fp32 scores, and the queries themselves, have to fit beside the model at any length.
MAX_SCORES = 2**26
MAX_QUERIES = 2**13


class KPoolIndexer(torch.nn.Module):
    """Scores complete pools of `index_kpool` tokens and keeps the best `index_topk / index_kpool`.

    Its parameters have no gradient (the reference computes it under no_grad) and are replicated. With sequence
    parallelism each TP rank scores its own queries against all keys and the selections are gathered, so all ranks
    attend to exactly the same tokens. Projections, norm, pooling and scores are fp32; queries and pooled keys are rounded
    once to the model's dtype before they meet, as in the reference.
    """

    def __init__(self, config: Glm5NextTransformerConfig, pg_collection: ProcessGroupCollection):
        super().__init__()
        model = config.model
        self.model, self.kernels, self.tp_group = model, config.kernels, pg_collection.tp
        self.sequence_parallel = config.sequence_parallel
        hidden, width = config.hidden_size, model.index_head_dim
        self.linear_wq_b = ReplicatedLinear(model.q_lora_rank, model.index_num_heads * width, config)
        self.linear_wk = ReplicatedLinear(hidden, width, config)
        self.k_norm = torch.nn.LayerNorm(width, eps=1e-6, dtype=config.params_dtype, device=config.device)
        self.linear_weights_proj = ReplicatedLinear(hidden, model.index_num_heads, config)

        def zeros(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(shape, dtype=config.params_dtype, device=config.device))

        self.index_kpool_compress_ape = zeros(model.index_kpool, width)
        self.index_kpool_compress_gate = zeros(width, hidden)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, hidden_states: Tensor, q_compressed: Tensor, documents: Documents) -> Tensor:
        """Selected pools of every token of the row: int32 `[T, index_topk / index_kpool]`, numbered per document.

        hidden_states `[s / tp, b, h]` is the attention's input, q_compressed `[s / tp, b, q_lora_rank]` the query
        latent AFTER its norm.
        """
        longest = max(documents.lengths) // self.model.index_kpool
        if longest <= self.model.num_pools_selected:
            return self._every_pool(documents)
        pooled = self._pooled(hidden_states, documents)
        pools = [
            self._select(hidden_states[rows, b], q_compressed[rows, b], pooled, first, documents)
            for b, rows, first in self._chunks(hidden_states, documents, longest)
        ]
        return to_tokens(self._gather(torch.cat(pools).unflatten(0, (hidden_states.shape[1], -1)).transpose(0, 1)))

    def _every_pool(self, documents: Documents) -> Tensor:
        """The selection where no query sees more pools than it may keep: no score can change it."""
        pool = torch.arange(self.model.num_pools_selected, dtype=torch.int32, device=documents.device)
        visible = (documents.positions.unsqueeze(1) + 1) // self.model.index_kpool
        return torch.where(pool < visible, pool, -1)

    def _pooled(self, hidden_states: Tensor, documents: Documents) -> Tensor:
        norm = self.k_norm
        keys = linear_fp32(hidden_states, self.linear_wk.weight)
        keys = F.layer_norm(keys, norm.normalized_shape, norm.weight.float(), norm.bias.float(), norm.eps)
        gate = linear_fp32(hidden_states, self.index_kpool_compress_gate)
        keys, gate = to_tokens(self._gather(torch.cat([keys, gate], dim=-1))).chunk(2, dim=-1)
        pooled = self.kernels.pool_keys(keys, gate, self.index_kpool_compress_ape, documents)
        return pooled.to(self.linear_wk.weight.dtype)

    def _chunks(self, x: Tensor, documents: Documents, longest: int) -> Iterator[tuple[int, slice, int]]:
        """This rank's queries, a chunk at a time and in the order of `to_tokens`: batch entry, local rows, and the first
        one's index among all tokens."""
        length, batch = x.shape[:2]
        size = max(1, min(MAX_QUERIES, MAX_SCORES // longest))
        rank = self.tp_group.rank() if self.sequence_parallel else 0
        for entry in range(batch):
            first = entry * (documents.num_tokens // batch) + length * rank
            for start in range(0, length, size):
                yield entry, slice(start, min(start + size, length)), first + start

    def _select(self, x: Tensor, q_compressed: Tensor, pooled: Tensor, first: int, documents: Documents) -> Tensor:
        model = self.model
        q = linear_fp32(q_compressed, self.linear_wq_b.weight).to(pooled.dtype)
        return self.kernels.select_pools(
            q.unflatten(-1, (model.index_num_heads, model.index_head_dim)),
            linear_fp32(x, self.linear_weights_proj.weight),
            pooled,
            first,
            documents,
            kpool=model.index_kpool,
            num_selected=model.num_pools_selected,
        )

    def _gather(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return x
        return gather_from_sequence_parallel_region(x.contiguous(), group=self.tp_group)
