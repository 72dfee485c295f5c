"""What Megatron is told about the model, and what is refused because it would quietly compute something else."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from glm5_next.plugins import megatron_config as megatron_config_module
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.megatron_config import (
    CHOICES,
    UNSUPPORTED,
    Glm5NextTransformerConfig,
    check_supported,
    megatron_config,
)
from glm5_next.plugins.topology import Topology
from tests.cpu.test_model_config import RELEASED
from tests.support.parity import models
from tests.support.tiny import Case

CASE = Case(layers=8, dense_layers=3)
MODEL = CASE.config()
PP2 = Topology(world_size=2, pp=2)
VPP2 = Topology(world_size=2, pp=2, vpp=2)
TP2 = Topology(world_size=2, tp=2)


def build(topology: Topology | None = None, dtype: torch.dtype = torch.float32, **overrides: Any):
    return megatron_config(MODEL, topology or Topology(), dtype=dtype, on_cpu=True, **overrides)


def refusal(*args: Any, **overrides: Any) -> str:
    with pytest.raises(ValueError) as caught:
        build(*args, **overrides)
    return str(caught.value)


OTHER_VALUES = {
    "apply_residual_connection_post_layernorm": True,
    "attention_dropout": 0.1,
    "bias_activation_fusion": True,
    "context_parallel_size": 2,
    "cpu_offloading": True,
    "fp32_residual_connection": True,
    "hidden_dropout": 0.1,
    "layernorm_zero_centered_gamma": True,
    "moe_expert_capacity_factor": 1.0,
    "moe_router_force_load_balancing": True,
    "moe_router_num_groups": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_shared_expert_overlap": True,
    "moe_z_loss_coeff": 1e-3,
    "overlap_moe_expert_parallel_comm": True,
    "qk_layernorm": True,
    "softmax_scale": 0.1,
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_unsupported_value_is_refused_by_name(field):
    settings = vars(build()) | {field: OTHER_VALUES[field]}
    with pytest.raises(ValueError, match=f"{field}={OTHER_VALUES[field]!r} is not supported"):
        check_supported(SimpleNamespace(**settings))


@pytest.mark.parametrize("field", sorted(UNSUPPORTED.keys() - {"overlap_moe_expert_parallel_comm"}))
def test_unsupported_override_stops_the_construction(field):
    assert f"{field}={OTHER_VALUES[field]!r} is not supported" in refusal(**{field: OTHER_VALUES[field]})


@pytest.mark.parametrize("field", sorted(megatron_config_module._architecture(MODEL).keys() - {*CHOICES, *UNSUPPORTED}))
def test_what_the_checkpoint_decides_cannot_be_overridden(field):
    assert f"{field}='another' would be another model: the checkpoint has " in refusal(**{field: "another"})
    assert getattr(build(**{field: megatron_config_module._architecture(MODEL)[field]}), field) is not None


def test_what_training_decides_can():
    assert build(moe_router_bias_update_rate=1e-3).moe_router_bias_update_rate == 1e-3


def test_selective_recompute_of_what_our_layers_do_not_have_is_refused_and_full_recompute_is_not():
    selective = {"recompute_granularity": "selective"}
    assert "recompute_modules ['layernorm'] would do nothing" in refusal(**selective, recompute_modules=["layernorm"])
    assert build(**selective, recompute_modules=["mhc", "moe"]).recompute_modules == ["moe", "mhc"]
    full = build(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert full.recompute_granularity == "full"


def test_tensor_parallelism_needs_sequence_parallelism():
    assert build(TP2).sequence_parallel
    assert "tensor_model_parallel_size=2 needs sequence_parallel=True" in refusal(TP2, sequence_parallel=False)


@pytest.mark.parametrize("p2p", [{"batch_p2p_comm": True}, {"overlap_p2p_comm": False}], ids=str)
def test_virtual_stages_need_overlapped_point_to_point(p2p):
    config = build(VPP2)
    assert config.overlap_p2p_comm and not config.batch_p2p_comm
    assert "overlap_p2p_comm=True and batch_p2p_comm=False" in refusal(VPP2, **p2p)


def test_pipeline_stages_need_exchanged_shapes():
    assert build(PP2).variable_seq_lengths
    assert "variable_seq_lengths=True" in refusal(PP2, variable_seq_lengths=False)


def test_another_number_of_mtp_layers_than_the_checkpoint_has_is_refused():
    assert f"mtp_num_layers={MODEL.num_mtp_layers + 1}, but the checkpoint has" in refusal(
        mtp_num_layers=MODEL.num_mtp_layers + 1
    )


def test_single_expert_per_token_is_refused():
    """Megatron leaves the weight of a single expert unnormalised: 24 percent off the reference on a tiny model."""
    with pytest.raises(ValueError, match="num_experts_per_tok=1 is not supported"):
        megatron_config(replace(MODEL, num_experts_per_token=1), Topology(), dtype=torch.float32, on_cpu=True)


def test_unknown_override_is_refused_by_name():
    assert "no field named ['recompute_granularty']" in refusal(recompute_granularty="full")


def test_sizes_that_do_not_divide_are_refused():
    assert "num_attention_heads (4) is not a multiple of tp (3)" in refusal(Topology(world_size=3, tp=3))


def test_layers_are_listed_one_by_one():
    config = build()
    assert config.linear_attention_freq == [1, 1, 1, 0, 1, 1, 1, 0]
    assert config.moe_layer_freq == [0, 0, 0, 1, 1, 1, 1, 1]
    assert config.num_layers == 8
    model = Glm5NextConfig.from_hf(RELEASED)
    config = megatron_config(model, Topology(), dtype=torch.bfloat16, on_cpu=True)
    assert [i for i, linear in enumerate(config.linear_attention_freq) if not linear] == list(range(3, 45, 4))
    assert config.moe_layer_freq == [0] * 3 + [1] * 42


def test_released_sizes_reach_megatron():
    config = megatron_config(Glm5NextConfig.from_hf(RELEASED), Topology(), dtype=torch.bfloat16, on_cpu=True)
    got = {field: getattr(config, field) for field in RELEASED_FIELDS}
    assert got == RELEASED_FIELDS


RELEASED_FIELDS = {
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "kv_channels": 256,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 256,
    "qk_pos_emb_head_dim": 0,
    "v_head_dim": 256,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "ffn_hidden_size": 12288,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "activation_func": F.silu,
    "activation_func_clamp_value": 10.0,
    "glu_linear_offset": 0.0,
    "num_moe_experts": 288,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_router_topk": 8,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_score_function": "sigmoid",
    "moe_router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.0,
    "moe_router_pre_softmax": False,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_aux_loss_coeff": 0.0,
    "calculate_per_token_loss": True,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_of_the_run_is_the_one_asked_for(dtype):
    config = build(dtype=dtype)
    assert config.params_dtype == config.pipeline_dtype == dtype
    assert config.bf16 == (dtype is torch.bfloat16) and not config.fp16


def test_every_module_of_the_model_sees_the_clamp_and_no_fused_activation():
    """Megatron copies its configuration here and there; its fused SwiGLU takes no clamp and drops it silently."""
    model = models(Case())[1]
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    assert len(configs) > 1, "nobody copies the configuration any more: compare the one that is left"
    for config in configs.values():
        assert config.bias_activation_fusion is False
        assert config.activation_func_clamp_value == 10.0 and config.activation_func is F.silu


def test_configuration_carries_the_model_and_knows_where_parameters_go():
    config = build()
    assert isinstance(config, Glm5NextTransformerConfig) and config.model == MODEL
    assert config.device is None  # torch's default device, which an audit makes "meta"


@pytest.mark.parametrize("topology", [Topology(), TP2, PP2, VPP2, Topology(world_size=2, ep=2)], ids=str)
def test_topology_reaches_megatron(topology):
    config = build(topology)
    assert config.tensor_model_parallel_size == topology.tp
    assert config.pipeline_model_parallel_size == topology.pp
    assert config.virtual_pipeline_model_parallel_size == topology.vpp
    assert config.expert_model_parallel_size == topology.ep
    assert config.expert_tensor_parallel_size == topology.etp
    assert config.sequence_parallel == (topology.tp > 1)
    assert (config.pipeline_model_parallel_layout is not None) == (topology.pp > 1)


def test_transformer_engine_is_refused_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(megatron_config_module, "installed", lambda package: False)
    message = refusal(transformer_impl="transformer_engine")
    assert "package transformer_engine is not installed; install transformer-engine[pytorch,core_cu13]>=2.20" in message


def test_override_takes_the_place_of_our_value():
    assert build(moe_router_bias_update_rate=1e-3).moe_router_bias_update_rate == 1e-3


@pytest.mark.parametrize(
    ("impl", "dtype", "on_cpu", "expected"),
    [
        ("auto", torch.bfloat16, False, "transformer_engine"),
        ("auto", torch.float32, False, "local"),
        ("auto", torch.bfloat16, True, "local"),
        ("local", torch.bfloat16, False, "local"),
        ("transformer_engine", torch.float32, True, "transformer_engine"),
    ],
)
def test_auto_takes_transformer_engine_in_bf16_on_a_gpu_that_has_it(monkeypatch, impl, dtype, on_cpu, expected):
    monkeypatch.setattr(megatron_config_module, "installed", lambda package: True)
    settings = megatron_config_module.backend_settings(impl, "auto", dtype=dtype, on_cpu=on_cpu)
    assert settings == {"transformer_impl": expected, "kernel_backend": "auto", "kernel_backends": {}}
    monkeypatch.setattr(megatron_config_module, "installed", lambda package: False)
    without = megatron_config_module.backend_settings(impl, "auto", dtype=dtype, on_cpu=on_cpu)
    assert without["transformer_impl"] == ("local" if impl == "auto" else impl)


def test_kernels_are_named_one_by_one_or_all_at_once():
    choices = {"naive": ("naive", {}), "kda=fla,rms_norm=naive": ("auto", {"kda": "fla", "rms_norm": "naive"})}
    for text, (default, named) in choices.items():
        settings = megatron_config_module.backend_settings("local", text, dtype=torch.bfloat16, on_cpu=True)
        assert (settings["kernel_backend"], settings["kernel_backends"]) == (default, named)
