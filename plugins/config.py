"""What the model is: `Glm5NextConfig`, read from a checkpoint's config.json and from nothing else.

No default of any Hugging Face config class is used: a missing key is an error, because the class defaults describe
another model (they say `index_kpool` 16, the released file says 4). Needs neither torch nor Megatron.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

AttentionKind = Literal["kda", "dsa"]
MlpKind = Literal["dense", "moe"]

ATTENTION_KINDS: dict[str, AttentionKind] = {
    "linear_attention": "kda",
    "deepseek_sparse_attention": "dsa",  # the released file
    "indexed_attention": "dsa",  # what transformers writes
    "full_attention": "dsa",
}
MLP_KINDS: dict[str, MlpKind] = {"dense": "dense", "sparse": "moe"}

# Keys that are taken over as they are: our field -> key of the text config.
PLAIN_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "max_sequence_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "ffn_hidden_size": "intermediate_size",
    "swiglu_limit": "swiglu_limit",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "routed_scaling_factor": "routed_scaling_factor",
    "num_attention_heads": "num_attention_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "v_head_dim": "v_head_dim",
    "index_num_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "index_kpool": "index_kpool",
    "num_streams": "hc_mult",
    "sinkhorn_iterations": "hc_sinkhorn_iters",
    "hc_eps": "hc_eps",
}
# KDA keys: our field -> (key inside linear_attn_config, flat key). The nested dict wins, as in transformers.
KDA_KEYS = {
    "kda_num_heads": ("num_heads", "linear_num_heads"),
    "kda_head_dim": ("head_dim", "linear_head_dim"),
    "kda_conv_width": ("short_conv_kernel_size", "linear_conv_kernel_dim"),
    "kda_gate_lower_bound": ("gate_lower_bound", "linear_lower_bound"),
}
# All other numbers are counts.
REAL_KEYS = (
    "rms_norm_eps",
    "swiglu_limit",
    "routed_scaling_factor",
    "hc_eps",
    "gate_lower_bound",
    "linear_lower_bound",
)
# Counts that multiply the number of tensors: an absurd one has to be refused before the tensors are listed.
COUNT_LIMITS = {"n_routed_experts": 4096, "num_nextn_predict_layers": 16, "depth": 1024}
# Keys with one supported value. The first group must be present; the second is checked only where a file has it
# (transformers does not write those keys).
REQUIRED_VALUES: dict[str, Any] = {
    "qk_rope_head_dim": 0,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "index_kpool_always_select_tail": True,
}
OPTIONAL_VALUES: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0,
    "index_kpool_compress": True,
    "mhc": True,
    "mla_use_nope": True,
    "moe_router_dtype": "float32",
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
# What `quantization_config` of the FP8 release says of its weights. A `scale_fmt` would ask for scales of another kind.
FP8_VALUES: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": None}
REASONS = {
    "qk_rope_head_dim": "the model has no rotary positions (NoPE)",
    "tie_word_embeddings": "embedding and head are separate tensors",
    "index_kpool_always_select_tail": "an incomplete last pool is always attended to",
}


@dataclass(frozen=True, kw_only=True)
class Glm5NextConfig:
    """The text model of a GLM-5.3-Flash checkpoint. Layers are numbered from 0; widths are of the whole model."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    attention_kinds: tuple[AttentionKind, ...]
    mlp_kinds: tuple[MlpKind, ...]
    max_sequence_length: int
    norm_eps: float
    dtype: Literal["bfloat16", "float32"]  # of the tensors that are not float32 by contract
    fp8: bool = False  # part of the matrices are stored as F8_E4M3 with a scale per 128x128 block

    ffn_hidden_size: int
    swiglu_limit: float
    moe_ffn_hidden_size: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    routed_scaling_factor: float

    kda_num_heads: int
    kda_head_dim: int
    kda_conv_width: int
    kda_gate_lower_bound: float

    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_head_dim: int
    v_head_dim: int
    index_num_heads: int
    index_head_dim: int
    index_topk: int
    index_kpool: int

    num_streams: int
    sinkhorn_iterations: int
    hc_eps: float

    num_mtp_layers: int  # stored in the checkpoint, after the trunk
    vision: "VisionConfig | None"  # None: a text-only checkpoint

    def __post_init__(self) -> None:
        for field in ("attention_kinds", "mlp_kinds"):
            count = len(getattr(self, field))
            if count != self.num_layers:
                key = {"attention_kinds": "layer_types", "mlp_kinds": "mlp_layer_types"}[field]
                raise ValueError(f"{key} names {count} layers but num_hidden_layers is {self.num_layers}")
        for field, key in PLAIN_KEYS.items():
            if getattr(self, field) <= 0:
                raise ValueError(f"{key} must be positive, got {getattr(self, field)}")
        if self.index_topk % self.index_kpool:
            raise ValueError(
                f"index_topk ({self.index_topk}) must be a multiple of index_kpool ({self.index_kpool}): "
                "the indexer selects whole pools"
            )
        if not -5.0 <= self.kda_gate_lower_bound < 0:
            raise ValueError(
                f"linear_attn_config.gate_lower_bound must be in [-5, 0), got {self.kda_gate_lower_bound}: "
                "the KDA kernels rely on a bounded decay"
            )
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_token}) exceeds n_routed_experts ({self.num_experts})"
            )

    @property
    def kda_width(self) -> int:
        """Channels of q, k or v over all KDA heads."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def num_pools_selected(self) -> int:
        """Pools that a query attends to once it sees at least that many."""
        return self.index_topk // self.index_kpool

    def first_layers(self, count: int) -> "Glm5NextConfig":
        """The same model cut to its first layers, without multi-token prediction."""
        if not 1 <= count <= self.num_layers:
            raise ValueError(f"cannot take the first {count} of {self.num_layers} layers")
        return replace(
            self,
            num_layers=count,
            attention_kinds=self.attention_kinds[:count],
            mlp_kinds=self.mlp_kinds[:count],
            num_mtp_layers=0,
        )

    @classmethod
    def from_hf(cls, source: "str | Path | Mapping[str, Any]") -> "Glm5NextConfig":
        """Reads a checkpoint folder, its config.json, or that file's content.

        Takes the composite config (`text_config` inside) and the flat text config. Raises ValueError that names the
        key for anything missing, unsupported or inconsistent.
        """
        raw, where = _read(source)
        if not hasattr(raw, "keys"):
            raise ValueError(f"{where}: expected a JSON object, got {type(raw).__name__}")
        if raw.get("model_type") not in ("glm5_next", "glm5_next_text"):
            raise ValueError(
                f"{where}: model_type is {raw.get('model_type')!r}; this package trains 'glm5_next' "
                "(or its text-only form 'glm5_next_text')"
            )
        try:
            text = _section(raw, "text_config") if "text_config" in raw else raw
            _check_supported(raw, text)
            return cls(
                **{field: _number(text, key) for field, key in PLAIN_KEYS.items()},
                **_kda_fields(text),
                attention_kinds=_kinds(text, "layer_types", ATTENTION_KINDS),
                mlp_kinds=_kinds(text, "mlp_layer_types", MLP_KINDS),
                dtype=_dtype(raw, text),
                fp8=_fp8(raw, text),
                num_mtp_layers=_mtp_layers(raw, text),
                vision=VisionConfig.from_hf(_section(raw, "vision_config")) if raw.get("vision_config") else None,
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Sizes of the vision tower: enough to know its tensors, which are carried from checkpoint to checkpoint."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    projection_intermediate_size: int

    @classmethod
    def from_hf(cls, vision: Mapping[str, Any]) -> "VisionConfig":
        # in_channels is 3 where the file does not say; the shape of patch_embed.proj.weight is checked against it.
        sizes = {"in_channels": 3, **vision}
        config = cls(**{field: _number(sizes, field, "vision_config.") for field in cls.__dataclass_fields__})
        if config.hidden_size % config.num_heads:
            raise ValueError(
                f"vision_config.hidden_size ({config.hidden_size}) must be a multiple of num_heads ({config.num_heads})"
            )
        return config


def _read(source: "str | Path | Mapping[str, Any]") -> tuple[Mapping[str, Any], str]:
    if isinstance(source, Mapping):
        return source, "config"
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    try:
        return json.loads(path.read_text()), str(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; expected a Hugging Face checkpoint folder") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None


def _value(section: Mapping[str, Any], key: str, prefix: str = "") -> Any:
    if section.get(key) is None:
        raise ValueError(f"key {prefix + key!r} is missing; no default is assumed")
    return section[key]


def _number(section: Mapping[str, Any], key: str, prefix: str = "") -> Any:
    value = _value(section, key, prefix)
    if key in REAL_KEYS:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"{prefix}{key} must be a number, got {value!r}")
    elif type(value) is not int or value <= 0:
        raise ValueError(f"{prefix}{key} must be a positive whole number, got {value!r}")
    if value > COUNT_LIMITS.get(key, math.inf):
        raise ValueError(f"{prefix}{key} is {value}; more than {COUNT_LIMITS[key]} is refused")
    return value


def _section(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    if not hasattr(raw[key], "keys"):
        raise ValueError(f"{key} must be an object, got {raw[key]!r}")
    return raw[key]


def _names(text: Mapping[str, Any], key: str) -> list[str]:
    names = _value(text, key)
    if type(names) is not list or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key} must be a list of names, one per layer, got {names!r}")
    return names


def _mtp_layers(raw: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    key = "num_nextn_predict_layers"
    value = text.get(key, raw.get(key))  # transformers does not write it
    return 0 if value is None or value == 0 else _number({key: value}, key)


def _check_supported(raw: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    for key, wanted in REQUIRED_VALUES.items():
        _value(text, key)
        _check_value(key, text[key], wanted)
    for key, wanted in OPTIONAL_VALUES.items():
        for section in (raw, text):
            if section.get(key) is not None:
                _check_value(key, section[key], wanted)
    shared = [layer for layer, kind in enumerate(_names(text, "indexer_types")) if kind != "full"]
    if shared:
        raise ValueError(f"indexer_types is not 'full' for layers {shared}; shared indexers are not supported")


def _check_value(key: str, value: Any, wanted: Any) -> None:
    if value != wanted:
        reason = f": {REASONS[key]}" if key in REASONS else ""
        raise ValueError(f"{key} is {value!r}; only {wanted!r} is supported{reason}")


def _kinds(text: Mapping[str, Any], key: str, names: Mapping[str, Any]) -> tuple:
    layers = _names(text, key)
    unknown = sorted({name for name in layers if name not in names})
    if unknown:
        raise ValueError(f"{key} has unknown entries {unknown}; known are {sorted(names)}")
    return tuple(names[name] for name in layers)


def _kda_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    nested = _section(text, "linear_attn_config") if text.get("linear_attn_config") else {}
    fields = {}
    for field, (nested_key, flat_key) in KDA_KEYS.items():
        if nested.get(nested_key) is not None:
            fields[field] = _number(nested, nested_key, "linear_attn_config.")
        elif field == "kda_gate_lower_bound" and nested_key in nested:
            if not nested.get("safe_gate", True):
                raise ValueError("linear_attn_config turns the safe gate off; only a bounded decay is supported")
            fields[field] = -5.0  # transformers' rule for an explicit null with the safe gate on
        elif text.get(flat_key) is not None:
            fields[field] = _number(text, flat_key)
        else:
            raise ValueError(f"keys 'linear_attn_config.{nested_key}' and {flat_key!r} are missing; one is needed")
    return fields


def _dtype(raw: Mapping[str, Any], text: Mapping[str, Any]) -> Any:
    for section in (raw, text):
        for key in ("dtype", "torch_dtype"):
            if section.get(key) is not None:
                _dtype_is_known(section[key])
                return section[key]
    raise ValueError("key 'dtype' (or 'torch_dtype') is missing; no default is assumed")


def _dtype_is_known(name: str) -> None:
    if name not in ("bfloat16", "float32"):
        raise ValueError(f"dtype is {name!r}; only 'bfloat16' and 'float32' are supported")


def _fp8(raw: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    key = "quantization_config"
    found = [_section(section, key) for section in (raw, text) if section.get(key) is not None]
    for quantization in found:
        for name, wanted in FP8_VALUES.items():
            _check_value(f"{key}.{name}", quantization.get(name), wanted)
    if found and _dtype(raw, text) != "bfloat16":
        raise ValueError(f"dtype is {_dtype(raw, text)!r}; FP8 checkpoints store all other tensors as 'bfloat16'")
    return bool(found)
