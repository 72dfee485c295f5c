"""Megatron's view of the model: every field that matters, set on purpose."""

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.kernels.registry import AUTO, DISTRIBUTIONS, Kernels, Place, choose, installed
from glm5_next.plugins.topology import Topology

# `transformer_impl` for linear layers and grouped experts of Transformer Engine, and what goes with it.
TRANSFORMER_ENGINE, LOCAL = "transformer_engine", "local"
WITH_TRANSFORMER_ENGINE = {"moe_grouped_gemm": True, "moe_permute_fusion": True}

# What our modules do not implement; a run that asks for it would silently get something else.
UNSUPPORTED = {
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "bias_activation_fusion": False,  # Megatron's fused SwiGLU takes no clamp and drops it silently
    "context_parallel_size": 1,
    "cpu_offloading": False,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "layernorm_zero_centered_gamma": False,
    "moe_expert_capacity_factor": None,  # replayed routes are not dropped
    "moe_z_loss_coeff": None,  # nor do they get this loss
    "moe_router_load_balancing_type": "none",  # nor any other
    "moe_router_num_groups": None,  # the model's experts are chosen among all
    "moe_router_force_load_balancing": False,
    "overlap_moe_expert_parallel_comm": False,  # schedules sublayers itself and would skip the hyper-connections
    "moe_shared_expert_overlap": False,
    "qk_layernorm": False,  # True sums complete gradients of anything named q_layernorm once more over TP
    "softmax_scale": None,
}

# Fields beside the checkpoint's that training may choose.
CHOICES = ("moe_router_bias_update_rate", "moe_token_dispatcher_type", "mtp_num_layers")

# What `recompute_granularity="selective"` can name: hyper-connections, the cores of both attention kinds (convolution,
# recurrence and output norm; sparse attention), dense MLPs, whole MoE layers, shared experts.
OWN_RECOMPUTE_MODULES = ("mhc",)
RECOMPUTE_MODULES = (*OWN_RECOMPUTE_MODULES, "core_attn", "mlp", "moe", "shared_experts")


@dataclass
class Glm5NextTransformerConfig(MLATransformerConfig):
    """`MLATransformerConfig` that also carries the model's own description for our modules.

    `kernel_backends` names the implementation of single operators (`kernels.registry.OPERATORS`); the others use
    `kernel_backend`: "auto" takes what fits the device, "naive" plain torch.
    """

    glm5_next: Glm5NextConfig | None = None
    recompute_modules: list[str] | None = None
    kernel_backend: str = AUTO
    kernel_backends: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Megatron refuses module names that it does not know, and puts a default in place of none.
        own = [name for name in self.recompute_modules or () if name in OWN_RECOMPUTE_MODULES]
        if self.recompute_modules is not None:
            self.recompute_modules = [name for name in self.recompute_modules if name not in own]
        super().__post_init__()
        self.recompute_modules = [*(self.recompute_modules or ()), *own]
        check_supported(self)

    @property
    def model(self) -> Glm5NextConfig:
        """The model's own description."""
        if self.glm5_next is None:
            raise ValueError("this configuration does not describe a model; build it with megatron_config()")
        return self.glm5_next

    def chosen_kernels(self) -> dict[str, str]:
        """{operator: backend name}, for a run to print; ValueError if a backend asked for by name cannot be used."""
        on_cpu = self.use_cpu_initialization
        place = Place(
            self.model,
            self.params_dtype,
            "cpu" if on_cpu else "cuda",
            None if on_cpu else torch.cuda.get_device_capability(),
            self.tensor_model_parallel_size,
        )
        return choose(self.kernel_backends, place, self.kernel_backend)

    @cached_property
    def kernels(self) -> Kernels:
        """The operators that this model's modules call."""
        return Kernels(self.chosen_kernels())

    @property
    def device(self) -> torch.device | None:
        """Where parameters are created: the current GPU, or (None) torch's default device, which may be "meta"."""
        return None if self.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())


def backend_settings(transformer_impl: str, kernels: str, *, dtype: torch.dtype, on_cpu: bool) -> dict[str, Any]:
    """The fields of a configuration for a run's `model.transformer_impl` and `model.kernels`."""
    if transformer_impl == AUTO:
        fits = not on_cpu and dtype is torch.bfloat16 and installed("transformer_engine")
        transformer_impl = TRANSFORMER_ENGINE if fits else LOCAL
    named = dict(choice.split("=") for choice in kernels.split(",") if "=" in choice)
    return {
        "transformer_impl": transformer_impl,
        "kernel_backend": AUTO if named else kernels,
        "kernel_backends": named,
    }


def check_supported(config: TransformerConfig) -> None:
    """Raises ValueError for settings under which Megatron would quietly compute something else."""
    for name, wanted in UNSUPPORTED.items():
        if getattr(config, name) != wanted:
            raise ValueError(f"{name}={getattr(config, name)!r} is not supported for GLM-5.3-Flash, use {wanted!r}")
    if config.recompute_granularity == "selective":
        unknown = set(config.recompute_modules or ()) - set(RECOMPUTE_MODULES)
        if unknown:
            raise ValueError(
                f"recompute_modules {sorted(unknown)} would do nothing in GLM-5.3-Flash's layers; "
                f"choose from {', '.join(RECOMPUTE_MODULES)}"
            )
    model = getattr(config, "glm5_next", None)
    if config.mtp_num_layers is not None and model is not None and config.mtp_num_layers != model.num_mtp_layers:
        raise ValueError(
            f"mtp_num_layers={config.mtp_num_layers}, but the checkpoint has {model.num_mtp_layers} "
            "multi-token-prediction layers; use that number, or None to leave them untrained"
        )
    if config.moe_router_topk == 1:
        raise ValueError(
            "num_experts_per_tok=1 is not supported: Megatron does not normalise the weight of a single expert, "
            "the model does"
        )
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise ValueError(
            f"tensor_model_parallel_size={config.tensor_model_parallel_size} needs sequence_parallel=True: replicated "
            "parameters (hyper-connections, router, norms) get partial gradients that are summed only with it"
        )
    if config.virtual_pipeline_model_parallel_size is not None and (
        config.batch_p2p_comm or not config.overlap_p2p_comm
    ):
        raise ValueError(
            "virtual pipeline stages need overlap_p2p_comm=True and batch_p2p_comm=False: with Megatron 0.19.2's "
            "defaults losses are silently wrong at two stages and the run hangs at four"
        )
    if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths:
        raise ValueError(
            "pipeline stages exchange the widened residual streams: variable_seq_lengths=True makes Megatron exchange "
            "their shape first, without it the receiver allocates the wrong size"
        )


def megatron_config(
    model: Glm5NextConfig, topology: Topology, *, dtype: torch.dtype, on_cpu: bool, **overrides: Any
) -> Glm5NextTransformerConfig:
    """The configuration that `GPTModel` is built with.

    `dtype` is torch.float32 or torch.bfloat16; tensors that the model keeps in fp32 are so in both. `overrides` are
    Megatron fields (recompute, finalisation hooks; `mtp_num_layers` builds the multi-token-prediction layers, on the last
    pipeline stage), none of which changes the architecture. Raises ValueError for what does not fit.
    """
    topology.check_model(model)
    unknown = set(overrides) - {field.name for field in fields(Glm5NextTransformerConfig)}
    if unknown:
        raise ValueError(f"Megatron-Core's configuration has no field named {sorted(unknown)}")
    architecture = _architecture(model)
    for name, value in overrides.items():
        if name not in (*CHOICES, *UNSUPPORTED) and value != architecture.get(name, value):
            raise ValueError(f"{name}={value!r} would be another model: the checkpoint has {architecture[name]!r}")
    num_mtp = overrides.get("mtp_num_layers") or 0
    settings = {**architecture, **_parallelism(model, topology, num_mtp), **_numerics(dtype, on_cpu)}
    if overrides.get("transformer_impl") == TRANSFORMER_ENGINE:
        if not installed("transformer_engine"):
            raise ValueError(
                f"transformer_impl={TRANSFORMER_ENGINE!r}: package transformer_engine is not installed; "
                f"install {DISTRIBUTIONS['transformer_engine']}, or use transformer_impl='local'"
            )
        settings |= WITH_TRANSFORMER_ENGINE
    settings |= overrides
    return Glm5NextTransformerConfig(glm5_next=model, **settings)


def _architecture(model: Glm5NextConfig) -> dict[str, Any]:
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_attention_heads,
        "kv_channels": model.qk_head_dim,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_head_dim": model.qk_head_dim,
        "qk_pos_emb_head_dim": 0,  # NoPE
        "v_head_dim": model.v_head_dim,
        "rope_type": "rope",
        "qk_layernorm": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_eps,
        "ffn_hidden_size": model.ffn_hidden_size,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "activation_func_clamp_value": model.swiglu_limit,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Lists, so that distributed checkpoints name every layer: they are not all alike.
        "linear_attention_freq": [int(kind == "kda") for kind in model.attention_kinds],
        "moe_layer_freq": [int(kind == "moe") for kind in model.mlp_kinds],
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.moe_ffn_hidden_size * model.num_shared_experts,
        "moe_router_topk": model.num_experts_per_token,
        "moe_router_topk_scaling_factor": model.routed_scaling_factor,
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "mtp_num_layers": None,
    }


def _parallelism(model: Glm5NextConfig, topology: Topology, num_mtp: int) -> dict[str, Any]:
    stages = topology.layers_per_stage(model.num_layers)
    layout = [["decoder"] * len(layers) for layers in stages]
    layout[0].insert(0, "embedding")
    layout[-1] += ["mtp"] * num_mtp + ["loss"]
    return {
        "tensor_model_parallel_size": topology.tp,
        "pipeline_model_parallel_size": topology.pp,
        "virtual_pipeline_model_parallel_size": topology.vpp,
        "pipeline_model_parallel_layout": layout if topology.pp > 1 else None,
        "expert_model_parallel_size": topology.ep,
        "expert_tensor_parallel_size": topology.etp,
        "context_parallel_size": 1,
        "sequence_parallel": topology.tp > 1,
        "variable_seq_lengths": True,
        "overlap_p2p_comm": topology.vpp is not None,
        "batch_p2p_comm": False,
    }


def _numerics(dtype: torch.dtype, on_cpu: bool) -> dict[str, Any]:
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "calculate_per_token_loss": True,
        "use_cpu_initialization": on_cpu,
        "transformer_impl": LOCAL,
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
    }
