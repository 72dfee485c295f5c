"""One decoder layer: an attention site and an MLP site on the residual streams."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from glm5_next.plugins.dsa import DsaAttention
from glm5_next.plugins.megatron_config import Glm5NextTransformerConfig
from glm5_next.plugins.mhc import HyperConnection
from glm5_next.plugins.packed_row import PackedRow
from glm5_next.plugins.recompute import recomputed
from glm5_next.plugins.replay import Choices


@dataclass
class HyperLayerSubmodules(TransformerLayerSubmodules):
    """`widens_input` marks the model's first layer, which copies the embedding into every stream.

    A flag and not `layer_number == 1`: Megatron gives that number to its multi-token-prediction layer too.
    """

    widens_input: bool = False


class HyperTransformerLayer(TransformerLayer):
    """Megatron's layer with hyper-connections instead of residual additions; `[s, b, N * h]` in and out."""

    def __init__(
        self, config: Glm5NextTransformerConfig, submodules: HyperLayerSubmodules, layer_number: int = 1, **kwargs
    ):
        super().__init__(config=config, submodules=submodules, layer_number=layer_number, **kwargs)
        self.widens_input = submodules.widens_input
        self.num_streams = config.model.num_streams
        self.self_attention_hyper_connection = HyperConnection(config)
        self.mlp_hyper_connection = HyperConnection(config)
        if self.is_moe_layer:
            self.mlp.moe_layer_recompute = False  # done here, where a recomputed router gets its own row's record

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: Tensor | None = None,
        **unused,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states `[s / tp, b, N * h]` (`[s / tp, b, h]` for the first layer) -> streams, and the context."""

        def attention(x: Tensor) -> Tensor:
            if isinstance(self.self_attention, DsaAttention):
                self.self_attention.core_attention.replay = self._record("picks", packed_seq_params)
            return self.self_attention(x, attention_mask=attention_mask, packed_seq_params=packed_seq_params)[0]

        def mlp(x: Tensor) -> Tensor:
            if self.is_moe_layer:
                self.mlp.router.replay = self._record("routes", packed_seq_params)
            return self.mlp(x, padding_mask=padding_mask)[0]

        streams = hidden_states.repeat(1, 1, self.num_streams) if self.widens_input else hidden_states
        streams = _site(streams, self.self_attention_hyper_connection, self.input_layernorm, attention)
        mlp_or_again = partial(recomputed, self.config, "moe" if self.is_moe_layer else "mlp", mlp)
        streams = _site(streams, self.mlp_hyper_connection, self.pre_mlp_layernorm, mlp_or_again)
        # A view would be freed by the pipeline schedule together with its base.
        return make_viewless_tensor(streams, requires_grad=streams.requires_grad, keep_graph=True), context

    def _record(self, stream: str, row: PackedSeqParams | None) -> Choices | None:
        """This micro-batch's record, asked for right before it is used: recomputation comes through here too.

        The multi-token-prediction layer is Megatron's own layer and never asks, although its number is a trunk layer's.
        """
        return getattr(row, stream) if isinstance(row, PackedRow) else None

    @property
    def replayed_streams(self) -> tuple[str, ...]:
        """What this layer asks for in every pass."""
        picks = ("picks",) if isinstance(self.self_attention, DsaAttention) else ()
        return (*picks, "routes") if self.is_moe_layer else picks


def _site(streams: Tensor, site: HyperConnection, norm: Callable, block: Callable[[Tensor], Tensor]) -> Tensor:
    collapsed, post, mix = site(streams)
    return site.merge(streams, block(norm(collapsed)), post, mix)
