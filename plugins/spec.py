"""The only place that says which modules the model is made of."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from glm5_next.plugins.config import AttentionKind, MlpKind
from glm5_next.plugins.dsa import DsaAttention, DsaSubmodules
from glm5_next.plugins.kda import KdaAttention, KdaSubmodules
from glm5_next.plugins.kernels.registry import NAIVE
from glm5_next.plugins.layer import HyperLayerSubmodules, HyperTransformerLayer
from glm5_next.plugins.megatron_config import TRANSFORMER_ENGINE, Glm5NextTransformerConfig
from glm5_next.plugins.mlp import FusedGroupedMLP, FusedMLP, FusedSharedExperts
from glm5_next.plugins.moe import Glm5NextRouter
from glm5_next.plugins.norm import RMSNorm, StreamMeanNorm


@dataclass(frozen=True)
class Linears:
    """The linear layers that tensor and expert parallelism split."""

    column: Any
    row: Any
    grouped_column: Any = None
    grouped_row: Any = None


def linears(config: Glm5NextTransformerConfig) -> Linears:
    """Megatron's own, or Transformer Engine's where `transformer_impl` asks for them.

    Norms are ours in both: Transformer Engine's round once, the reference's twice.
    """
    if config.transformer_impl != TRANSFORMER_ENGINE:
        return Linears(ColumnParallelLinear, RowParallelLinear)
    from megatron.core.extensions import transformer_engine as te

    return Linears(
        te.TEColumnParallelLinear,
        te.TERowParallelLinear,
        te.TEColumnParallelGroupedLinear,
        te.TERowParallelGroupedLinear,
    )


def kda_spec(config: Glm5NextTransformerConfig) -> ModuleSpec:
    chosen = linears(config)
    return ModuleSpec(module=KdaAttention, submodules=KdaSubmodules(chosen.column, chosen.row))


def dsa_spec(config: Glm5NextTransformerConfig) -> ModuleSpec:
    chosen = linears(config)
    return ModuleSpec(module=DsaAttention, submodules=DsaSubmodules(chosen.column, chosen.row))


def dense_spec(config: Glm5NextTransformerConfig) -> Any:
    chosen = linears(config)
    return partial(
        (FusedMLP if _fuses_activation(config) else MLP).as_mlp_submodule,
        submodules=MLPSubmodules(linear_fc1=chosen.column, linear_fc2=chosen.row),
        ffn_hidden_size=config.ffn_hidden_size,
    )


def moe_spec(config: Glm5NextTransformerConfig) -> Any:
    chosen = linears(config)
    dense = MLPSubmodules(linear_fc1=chosen.column, linear_fc2=chosen.row)
    if chosen.grouped_column is None:
        experts = partial(SequentialMLP, submodules=dense)
    else:
        grouped = GroupedMLPSubmodules(linear_fc1=chosen.grouped_column, linear_fc2=chosen.grouped_row)
        experts = partial(FusedGroupedMLP, submodules=grouped)
    shared = FusedSharedExperts if _fuses_activation(config) else SharedExpertMLP
    return partial(
        MoELayer,
        submodules=MoESubmodules(
            router=Glm5NextRouter, experts=experts, shared_experts=partial(shared, submodules=dense)
        ),
    )


def _fuses_activation(config: Glm5NextTransformerConfig) -> bool:
    return config.kernels.chosen["clamped_swiglu"] != NAIVE


ATTENTION = {"kda": kda_spec, "dsa": dsa_spec}
MLPS = {"dense": dense_spec, "moe": moe_spec}


def layer_spec(
    config: Glm5NextTransformerConfig, attention: AttentionKind, mlp: MlpKind, *, widens_input: bool
) -> ModuleSpec:
    """One layer of the given kinds."""
    return ModuleSpec(
        module=HyperTransformerLayer,
        submodules=HyperLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ATTENTION[attention](config),
            pre_mlp_layernorm=RMSNorm,
            mlp=MLPS[mlp](config),
            widens_input=widens_input,
        ),
    )


def get_glm5_next_spec(
    config: Glm5NextTransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """The decoder layers of one pipeline stage and the norm that closes the streams; goes into `GPTModel` as it is.

    On the command line of Megatron-style trainers: `--spec glm5_next.plugins.spec get_glm5_next_spec`.
    """
    model = config.model
    layers = [
        layer_spec(config, model.attention_kinds[i], model.mlp_kinds[i], widens_input=i == 0)
        for i in stage_layers(config, vp_stage, pp_rank)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=StreamMeanNorm)


def stage_layers(config: Glm5NextTransformerConfig, vp_stage: int | None, pp_rank: int | None = None) -> list[int]:
    """0-based numbers of the layers that a pipeline stage builds."""
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage, pp_rank=pp_rank)
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage, pp_rank)))


def get_glm5_next_mtp_spec(config: Glm5NextTransformerConfig) -> MultiTokenPredictionBlockSubmodules | None:
    """Megatron's multi-token-prediction block around sparse-attention and MoE layers of ours; None if there is none.

    It starts from the trunk's output after the last norm, one stream wide. Inside is Megatron's own layer with plain
    residuals: it hands no recorded routes to its router, so a layer number that the trunk has, too, does no harm.
    """
    if not config.mtp_num_layers:
        return None
    inner = TransformerLayerSubmodules(
        input_layernorm=RMSNorm,
        self_attention=dsa_spec(config),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RMSNorm,
        mlp=moe_spec(config),
        mlp_bda=get_bias_dropout_add,
    )
    inner.self_attention.params = {"attn_mask_type": AttnMaskType.causal}  # Megatron's block asks for it by name
    layer = MultiTokenPredictionLayerSubmodules(
        enorm=RMSNorm,
        hnorm=RMSNorm,
        layer_norm=RMSNorm,
        eh_proj=linears(config).column,
        mtp_model_layer=ModuleSpec(module=TransformerLayer, submodules=inner),
    )
    specs = [ModuleSpec(module=MultiTokenPredictionLayer, submodules=layer)] * config.mtp_num_layers
    return MultiTokenPredictionBlockSubmodules(layer_specs=specs)


def build_gpt_model(
    config: Glm5NextTransformerConfig,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    vocab_size: int | None = None,
) -> GPTModel:
    """The model chunk of this rank. `vocab_size` is the padded one, if the caller pads it."""
    model = config.model
    return GPTModel(
        config=config,
        transformer_layer_spec=get_glm5_next_spec(config, vp_stage),
        vocab_size=padded_vocab_size(config) if vocab_size is None else vocab_size,
        max_sequence_length=model.max_sequence_length,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=False,
        position_embedding_type="none",
        vp_stage=vp_stage,
        mtp_block_spec=get_glm5_next_mtp_spec(config),
    )


def padded_vocab_size(config: Glm5NextTransformerConfig) -> int:
    """Rounded up to a multiple of the TP size; the released vocabulary needs no padding up to 256 ranks."""
    tp = config.tensor_model_parallel_size
    return -(-config.model.vocab_size // tp) * tp
