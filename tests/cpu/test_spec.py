"""Which modules the model is made of, and which pipeline stage builds which layers."""

from dataclasses import replace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import import_module

from glm5_next.plugins.dsa import DsaAttention
from glm5_next.plugins.kda import KdaAttention
from glm5_next.plugins.kernels.registry import load
from glm5_next.plugins.layer import HyperTransformerLayer
from glm5_next.plugins.megatron_config import megatron_config
from glm5_next.plugins.mhc import HyperConnection
from glm5_next.plugins.mlp import FusedMLP, FusedSharedExperts
from glm5_next.plugins.moe import Glm5NextRouter
from glm5_next.plugins.norm import RMSNorm, StreamMeanNorm
from glm5_next.plugins.spec import build_gpt_model, get_glm5_next_spec, padded_vocab_size, stage_layers
from glm5_next.plugins.topology import Topology
from tests.support import tiny
from tests.support.parity import logits_of
from tests.support.tiny import Case

MLP_WEIGHTS = tuple(
    f"decoder.layers.{mlp}.{linear}.weight"
    for mlp in ("0.mlp", "1.mlp.shared_experts")
    for linear in ("linear_fc1", "linear_fc2")
)
# Every mix of attention and MLP: KDA and dense, DSA and dense, KDA and MoE, DSA and MoE.
MIXED = Case(layers=4, dense_layers=2, dsa_layers=(1, 3))


def configured(case: Case, topology: Topology | None = None):
    tiny.start_single_process()
    return megatron_config(case.config(), topology or Topology(), dtype=torch.float32, on_cpu=True)


def test_every_mix_of_attention_and_mlp_is_built_as_asked():
    model = build_gpt_model(configured(MIXED))
    attention = [type(layer.self_attention) for layer in model.decoder.layers]
    assert attention == [KdaAttention, DsaAttention, KdaAttention, DsaAttention]
    assert [hasattr(layer.mlp, "router") for layer in model.decoder.layers] == [False, False, True, True]
    for layer in model.decoder.layers:
        assert type(layer) is HyperTransformerLayer
        assert type(layer.input_layernorm) is type(layer.pre_mlp_layernorm) is RMSNorm
        assert type(layer.self_attention_hyper_connection) is type(layer.mlp_hyper_connection) is HyperConnection
        assert type(getattr(layer.mlp, "router", None)) in (Glm5NextRouter, type(None))
    assert type(model.decoder.final_layernorm) is StreamMeanNorm


@pytest.mark.parametrize("attention", ["kda", "dsa"])
@pytest.mark.parametrize("mlp", ["dense", "moe"])
def test_one_layer_of_any_kind_trains(attention, mlp):
    case = Case(layers=1, dense_layers=int(mlp == "dense"), dsa_layers=(0,) if attention == "dsa" else ())
    model = build_gpt_model(configured(case))
    logits = logits_of(model, tiny.tokens(40))
    logits.square().mean().backward()
    without = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None
    ]
    assert logits.isfinite().all() and not without


def test_only_the_first_layer_of_the_model_widens_its_input():
    spec = get_glm5_next_spec(configured(MIXED))
    assert [layer.submodules.widens_input for layer in spec.layer_specs] == [True, False, False, False]
    second_stage = get_glm5_next_spec(configured(MIXED, Topology(world_size=2, pp=2)), pp_rank=1)
    assert [layer.submodules.widens_input for layer in second_stage.layer_specs] == [False, False]


def test_layers_hand_on_all_streams_and_the_last_norm_takes_them_together():
    model = build_gpt_model(configured(MIXED))
    shapes = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda module, args, out: shapes.append(tuple(out[0].shape)))
    hidden = []
    model.decoder.final_layernorm.register_forward_hook(lambda module, args, out: hidden.append(tuple(out.shape)))
    logits_of(model, tiny.tokens(7))
    assert shapes == [(7, 1, 4 * 64)] * 4 and hidden == [(7, 1, 64)]


@pytest.mark.parametrize("num_layers", [5, 7, 8])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_pipeline_stages_cover_each_layer_once(num_layers, pp):
    config = configured(Case(layers=num_layers), Topology(world_size=pp, pp=pp))
    stages = [stage_layers(config, None, pp_rank) for pp_rank in range(pp)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert stages == Topology(world_size=pp, pp=pp).layers_per_stage(num_layers)


@pytest.mark.parametrize(("pp", "num_layers"), [(2, 5), (2, 7), (2, 8), (4, 9), (4, 16)])
def test_virtual_stages_cover_each_layer_once_in_megatrons_order(num_layers, pp, monkeypatch):
    monkeypatch.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", 2)
    topology = Topology(world_size=pp, pp=pp, vpp=2)
    config = configured(Case(layers=num_layers), topology)
    stages = [stage_layers(config, vp_stage, pp_rank) for vp_stage in range(2) for pp_rank in range(pp)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert stages == topology.layers_per_stage(num_layers)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_spec_of_a_stage_has_the_kinds_of_its_layers(pp):
    case = Case(layers=8, dense_layers=3)
    config = configured(case, Topology(world_size=pp, pp=pp))
    kinds = [
        {KdaAttention: "kda", DsaAttention: "dsa"}[layer.submodules.self_attention.module]
        for pp_rank in range(pp)
        for layer in get_glm5_next_spec(config, pp_rank=pp_rank).layer_specs
    ]
    assert tuple(kinds) == case.config().attention_kinds


def test_megatron_finds_the_function_by_the_two_words_of_its_spec_option():
    function = import_module(("glm5_next.plugins.spec", "get_glm5_next_spec"))
    assert function is get_glm5_next_spec


def test_spec_goes_into_gpt_model_directly():
    config = configured(MIXED)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_glm5_next_spec(config),
        vocab_size=tiny.VOCAB,
        max_sequence_length=128,
        share_embeddings_and_output_weights=False,
        position_embedding_type="none",
    )
    names = {name for name, _ in model.named_parameters()}
    assert names == {name for name, _ in build_gpt_model(config).named_parameters()}
    assert not [name for name in names if "position" in name]


def test_configuration_without_the_models_description_is_refused():
    config = configured(MIXED)
    config.glm5_next = None
    with pytest.raises(ValueError, match="does not describe a model"):
        get_glm5_next_spec(config)


@pytest.mark.parametrize(("tp", "size"), [(1, 97), (2, 98), (4, 100)])
def test_vocabulary_is_padded_to_the_tensor_parallel_size(tp, size):
    config = configured(MIXED)
    config.glm5_next = replace(MIXED.config(), vocab_size=97)
    config.tensor_model_parallel_size = tp
    assert padded_vocab_size(config) == size


def test_activation_is_fused_in_every_mlp_where_its_operator_is(monkeypatch):
    """With the kernel interpreted: the same model as Megatron's own MLPs, but through ours."""
    case = Case(layers=2, dense_layers=1, swiglu_limit=0.5, mlp_gain=4.0)
    stock = build_gpt_model(configured(case))
    config = configured(case)
    monkeypatch.setitem(config.kernels.chosen, "clamped_swiglu", "triton")
    monkeypatch.setattr(config.kernels, "clamped_swiglu", load("clamped_swiglu", "triton"))
    fused = build_gpt_model(config)
    fused.load_state_dict(stock.state_dict())
    assert isinstance(fused.decoder.layers[0].mlp, FusedMLP)
    assert isinstance(fused.decoder.layers[1].mlp.shared_experts, FusedSharedExperts)
    results = []
    for model in (stock, fused):
        logits = logits_of(model, tiny.tokens(9))
        logits.square().sum().backward()
        results.append([logits, *(model.get_parameter(name).grad for name in MLP_WEIGHTS)])
    for expected, got in zip(*results):
        assert tiny.relative_error(got, expected) < 1e-5
