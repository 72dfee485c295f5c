"""The k-pool indexer: which pools of earlier tokens a query of a DSA layer attends to. Frozen."""

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from glm5_next.plugins import kernels
from glm5_next.plugins.documents import Documents
from glm5_next.plugins.linear import ReplicatedLinear
from glm5_next.plugins.megatron_config import Glm5NextTransformerConfig
from glm5_next.plugins.packed_row import to_tokens


class KPoolIndexer(torch.nn.Module):
    """Scores complete pools of `index_kpool` tokens and keeps the best `index_topk / index_kpool`.

    Its parameters have no gradient (the reference computes it under no_grad) and are replicated. With sequence
    parallelism each TP rank scores its own queries against all keys and the selections are gathered, so all ranks
    attend to exactly the same tokens. Projections and scores are fp32.
    """

    def __init__(self, config: Glm5NextTransformerConfig, pg_collection: ProcessGroupCollection):
        super().__init__()
        model = config.model
        self.model, self.tp_group = model, pg_collection.tp
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
        model, x = self.model, hidden_states.float()
        keys = self._gather(torch.cat([self._keys(x), F.linear(x, self.index_kpool_compress_gate.float())], dim=-1))
        keys, gate = to_tokens(keys).chunk(2, dim=-1)
        q = to_tokens(F.linear(q_compressed.float(), self.linear_wq_b.weight.float()))
        pools = kernels.select_pools(
            q.unflatten(-1, (model.index_num_heads, model.index_head_dim)),
            to_tokens(F.linear(x, self.linear_weights_proj.weight.float())),
            kernels.pool_keys(keys, gate, self.index_kpool_compress_ape, documents),
            self._queries(hidden_states, documents),
            documents,
            kpool=model.index_kpool,
            num_selected=model.num_pools_selected,
        )
        return to_tokens(self._gather(pools.unflatten(0, (hidden_states.shape[1], -1)).transpose(0, 1)))

    def _keys(self, x: Tensor) -> Tensor:
        keys = F.linear(x, self.linear_wk.weight.float())
        norm = self.k_norm
        return F.layer_norm(keys, norm.normalized_shape, norm.weight.float(), norm.bias.float(), norm.eps)

    def _gather(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return x
        return gather_from_sequence_parallel_region(x.contiguous(), group=self.tp_group)

    def _queries(self, hidden_states: Tensor, documents: Documents) -> Tensor:
        """Row indices of this rank's tokens, in the order of `to_tokens`."""
        length, batch = hidden_states.shape[:2]
        every = torch.arange(documents.num_tokens, device=hidden_states.device).view(batch, -1)
        first = length * self.tp_group.rank() if self.sequence_parallel else 0
        return every[:, first : first + length].flatten()
