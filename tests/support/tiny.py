"""Tiny models for tests: the same random weights in transformers' model and in ours.

Every weight is random and none is zero or one: norm weights, selection bias, A_log, dt_bias, pool gate and position
bias, hyper-connection base and scale. With the library's own initial values most conventions cannot be told apart.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from glm5_next.plugins import cpu_runtime

ON_CPU = not torch.cuda.is_available()
if ON_CPU:
    cpu_runtime.install()

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from glm5_next.bridge.local_tensors import local_tensors, tensor_split
from glm5_next.bridge.reference import disk_views, import_modeling
from glm5_next.bridge.transforms import shard
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.megatron_config import megatron_config
from glm5_next.plugins.spec import build_gpt_model
from glm5_next.plugins.topology import Topology

VOCAB = 96


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tiny model. `small_streams` scales the embeddings to a mean square near 5e-6, where the place of eps shows;
    `mlp_gain` multiplies gate and up projections, so that the clamp of the activation is reached."""

    layers: int = 5
    dense_layers: int = 1
    streams: int = 4
    dsa_layers: tuple[int, ...] | None = None  # default: every fourth, as released
    experts: int = 8
    swiglu_limit: float = 10.0
    mtp: bool = False
    mlp_gain: float = 1.0
    small_streams: bool = False
    seed: int = 0

    def text_config(self) -> dict[str, Any]:
        dsa = self.dsa_layers if self.dsa_layers is not None else tuple(range(3, self.layers, 4))
        return {
            "model_type": "glm5_next_text",
            "dtype": "float32",
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_hidden_layers": self.layers,
            "num_nextn_predict_layers": int(self.mtp),
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_shared_experts": 1,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": 48,
            "qk_rope_head_dim": 0,
            "qk_nope_head_dim": 16,
            "v_head_dim": 24,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "swiglu_limit": self.swiglu_limit,
            "pad_token_id": 0,
            "layer_types": ["indexed_attention" if i in dsa else "linear_attention" for i in range(self.layers)],
            "mlp_layer_types": ["dense"] * self.dense_layers + ["sparse"] * (self.layers - self.dense_layers),
            "indexer_types": ["full"] * self.layers,
            "index_topk": 16,
            "index_kpool": 4,
            "index_head_dim": 16,
            "index_n_heads": 16,
            "index_kpool_always_select_tail": True,
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "linear_lower_bound": -5.0,
            "hc_mult": self.streams,
            "hc_eps": 1e-6,
            "hc_sinkhorn_iters": 20,
        }

    def config(self) -> Glm5NextConfig:
        return Glm5NextConfig.from_hf(self.text_config())


def reference_model(case: Case) -> Any:
    """transformers' model for the case, fp32, in training mode with random weights; no vision tower."""
    modeling = import_modeling()
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 1, "intermediate_size": 8, "projection_intermediate_size": 8}
    config = modeling.Glm5NextConfig(
        text_config=case.text_config(), vision_config={**vision, "out_hidden_size": 64}, dtype="float32"
    )
    config._attn_implementation = config.text_config._attn_implementation = "eager"
    config._experts_implementation = config.text_config._experts_implementation = "eager"
    model = modeling.Glm5NextForConditionalGeneration(config)
    model.model.visual = None
    randomize(model, case)
    return model


@torch.no_grad()
def randomize(model: torch.nn.Module, case: Case) -> None:
    generator = torch.Generator(next(model.parameters()).device).manual_seed(case.seed)
    for name, tensor in sorted(model.state_dict().items()):
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device=tensor.device)
        tensor.copy_(noise.mul_(_spread(name, tensor, case)).add_(_centre(name)))


def _centre(name: str) -> float:
    return 1.0 if name.endswith(("norm.weight", ".scale")) else 0.0


def _spread(name: str, tensor: torch.Tensor, case: Case) -> float:
    if name.endswith("embed_tokens.weight"):
        return 5e-6**0.5 if case.small_streams else 1.0
    if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
        # Small streams: outputs stay as small as the streams they are added to. Ordinary ones: blocks that wrote as
        # much as the streams hold would amplify rounding until sums that nearly cancel (gradients of base and scale)
        # are wrong in the fourth digit, in the reference as much as here.
        return 6e-5 if case.small_streams else 0.25 * tensor.shape[-1] ** -0.5
    if name.endswith(("gate_proj.weight", "up_proj.weight", "gate_up_proj")):
        return case.mlp_gain * tensor.shape[-1] ** -0.5
    if name.endswith(("norm.weight", "norm.bias")):
        return 0.3
    if name.endswith(("A_log", "dt_bias", ".base", "compress_ape")):
        return 0.7
    if name.endswith(".scale"):
        return 0.4
    if name.endswith("e_score_correction_bias"):
        return 0.1
    if name.endswith("conv1d.weight"):
        return 0.5
    if name.endswith("_hc.fn"):
        return 0.05
    return tensor.shape[-1] ** -0.5


def start_single_process() -> None:
    """Megatron's parallel state for one process; does nothing if it is there."""
    if not dist.is_initialized():
        dist.init_process_group("gloo" if ON_CPU else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        if not ON_CPU:
            tensor_parallel.model_parallel_cuda_manual_seed(0)


def our_model(case: Case, reference: torch.nn.Module, **overrides: Any) -> torch.nn.Module:
    """Our model in this process with the reference's weights."""
    start_single_process()
    config = megatron_config(case.config(), Topology(), dtype=torch.float32, on_cpu=ON_CPU, **overrides)
    model = build_gpt_model(config)
    copy_weights([model], case.config(), disk_views(reference))
    return model


@torch.no_grad()
def copy_weights(chunks: list[torch.nn.Module], config: Glm5NextConfig, views: dict[str, torch.Tensor]) -> None:
    """Fills this rank's chunks with its share of whole HF tensors."""
    for local in local_tensors(chunks, config).values():
        rank, size, _ = tensor_split(local.entry)
        value = shard([views[name] for name in local.entry.hf], local.entry.row, rank, size)
        local.tensor.copy_(value.chunk(len(local.entry.megatron))[local.index])


def tokens(length: int, seed: int = 0) -> torch.Tensor:
    """`[1, length]` random token ids."""
    return torch.randint(1, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Root-mean-square difference over the expected root mean square; NaN stays NaN and fails any bound."""
    return ((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


__all__ = ["Case", "replace"]
