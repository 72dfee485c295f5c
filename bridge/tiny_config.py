"""Sizes of a tiny checkpoint, and its config.json with the keys and spellings of the released file."""

from dataclasses import dataclass
from typing import Any, Literal

from glm5_next.bridge.tiny_tokenizer import END_TOKENS, TOKEN_IDS, VOCAB_SIZE

# Sizes of the released model's layers, for measurements at full width with few layers and experts.
RELEASED_WIDTHS = {
    "hidden": 4096,
    "vocab": 154880,
    "dense_width": 12288,
    "expert_width": 2048,
    "kda_heads": 64,
    "kda_head_dim": 128,
    "heads": 64,
    "q_lora": 1536,
    "kv_lora": 512,
    "qk_head_dim": 256,
    "v_head_dim": 256,
    "index_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
}


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """Sizes of a tiny checkpoint. Layers 3, 7, 11, ... are DSA, the others KDA; the MTP layer comes after the last."""

    layers: int = 5
    dense_layers: int = 1
    hidden: int = 64
    streams: int = 4
    vocab: int = VOCAB_SIZE
    max_length: int = 4096
    dense_width: int = 96
    expert_width: int = 32
    experts: int = 8
    experts_per_token: int = 2
    shared_experts: int = 1
    swiglu_limit: float = 10.0
    kda_heads: int = 4
    kda_head_dim: int = 16
    conv_width: int = 4
    heads: int = 4
    q_lora: int = 48
    kv_lora: int = 32
    qk_head_dim: int = 16
    v_head_dim: int = 24
    index_heads: int = 16  # with few heads all of them may be negative: pools then tie at score 0
    index_head_dim: int = 16
    index_topk: int = 16
    index_kpool: int = 4
    mtp: bool = True
    vision: bool = True
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the tensors that are not F32 in the release
    fp8: bool = False  # the matrices that the FP8 release quantises are F8_E4M3 with scales
    shards: int = 5

    def __post_init__(self) -> None:
        for field, least in {"vocab": len(TOKEN_IDS), "shards": 1, "layers": 1, "dense_layers": 0}.items():
            if getattr(self, field) < least:
                raise ValueError(f"{field} must be at least {least}, got {getattr(self, field)}")
        if self.dense_layers > self.layers:
            raise ValueError(f"dense_layers ({self.dense_layers}) exceeds layers ({self.layers})")


def composite_config(model: TinyModel) -> dict[str, Any]:
    """The content of config.json, with the keys and spellings of the released file."""
    special = {
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    }
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": model.dtype,
        **{key: TOKEN_IDS[token] for key, token in special.items()},
        "tie_word_embeddings": False,
        "text_config": _text_config(model),
        **({"quantization_config": _quantization_config()} if model.fp8 else {}),
        **({"vision_config": _vision_config(model)} if model.vision else {}),
    }


def _quantization_config() -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.visual", "model.language_model.embed_tokens"],
    }


def _text_config(model: TinyModel) -> dict[str, Any]:
    kinds = ["deepseek_sparse_attention" if layer % 4 == 3 else "linear_attention" for layer in range(model.layers)]
    return {
        "model_type": "glm5_next_text",
        "dtype": model.dtype,
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "layer_types": kinds,
        "mlp_layer_types": ["dense"] * model.dense_layers + ["sparse"] * (model.layers - model.dense_layers),
        "num_nextn_predict_layers": int(model.mtp),
        "max_position_embeddings": model.max_length,
        "rms_norm_eps": 1e-05,
        "initializer_range": 0.02,
        "hidden_act": "silu",
        "pad_token_id": TOKEN_IDS["<|endoftext|>"],
        "eos_token_id": [TOKEN_IDS[token] for token in END_TOKENS],
        "tie_word_embeddings": False,
        "use_cache": True,
        **_attention_config(model),
        **_feed_forward_config(model),
        "mhc": True,
        "hc_mult": model.streams,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
    }


def _attention_config(model: TinyModel) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads,
        "head_dim": 0,
        "q_lora_rank": model.q_lora,
        "kv_lora_rank": model.kv_lora,
        "qk_nope_head_dim": model.qk_head_dim,
        "qk_rope_head_dim": 0,
        "v_head_dim": model.v_head_dim,
        "mla_use_nope": True,
        "indexer_types": ["full"] * model.layers,
        "index_n_heads": model.index_heads,
        "index_head_dim": model.index_head_dim,
        "index_topk": model.index_topk,
        "index_kpool": model.index_kpool,
        "index_kpool_always_select_tail": True,
        "index_kpool_compress": True,
        "index_share_for_mtp_iteration": True,
        "indexer_rope_interleave": True,
        "linear_attn_config": {
            "num_heads": model.kda_heads,
            "head_dim": model.kda_head_dim,
            "short_conv_kernel_size": model.conv_width,
            "gate_lower_bound": -5.0,
        },
    }


def _feed_forward_config(model: TinyModel) -> dict[str, Any]:
    return {
        "intermediate_size": model.dense_width,
        "swiglu_limit": model.swiglu_limit,
        "moe_intermediate_size": model.expert_width,
        "n_routed_experts": model.experts,
        "n_shared_experts": model.shared_experts,
        "num_experts_per_tok": model.experts_per_token,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_dtype": "float32",
    }


def _vision_config(model: TinyModel) -> dict[str, Any]:
    return {
        "model_type": "glm5_next_vision",
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "out_hidden_size": model.hidden,
        "projection_intermediate_size": 80,
        "in_channels": 3,
        "image_size": 448,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "hidden_act": "silu",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-05,
        "swiglu_limit": 10.0,
        "initializer_range": 0.02,
    }
