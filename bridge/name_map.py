"""The one table of Hugging Face <-> Megatron names, shapes, splits and dtypes.

Load, export, weight sync, audit, the tiny checkpoint and the tests all read it. Needs no torch.
Source of the inventory: the released safetensors headers (38,770 tensors in the BF16 release).

A row says that the concatenation (dim 0) of the Megatron tensors equals the concatenation of the HF tensors:
one Megatron tensor may be made of several HF tensors (q, k, v) and one HF tensor of several Megatron ones (the three
hyper-connection scales). Under tensor parallelism every HF part is split by itself, so a rank holds [q_r; k_r; v_r].
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from glm5_next.plugins.config import Glm5NextConfig

LANGUAGE = "model.language_model."
VISION = "model.visual."
SCALE_SUFFIX = "_scale_inv"  # the scales of an FP8 tensor: its name and this
FP8_BLOCK = 128  # rows and columns that share a scale


@dataclass(frozen=True, kw_only=True)
class Row:
    """Names are relative to their layer (or whole names for the three global tensors).

    `shape` is the shape of ONE HF part in symbols (`SIZES`), `split` the dimension of every HF part that tensor
    parallelism divides (None: replicated). `always_fp32`: stored as F32 in every release; otherwise the tensor has the
    checkpoint's dtype. `fp32_in_model`: kept in fp32 while training whatever the precision of the run.
    """

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    shape: tuple[str, ...]
    split: int | None = None
    always_fp32: bool = False
    fp32_in_model: bool = False
    fp8: bool = False  # quantised in the FP8 release
    together: str = ""  # rows of a layer with the same word: servers fuse them and need them in one call

    @property
    def is_expert(self) -> bool:
        """A routed expert's tensor: split over expert-TP ranks, and owned by one EP rank."""
        return "{e}" in self.hf[0]

    @property
    def is_frozen(self) -> bool:
        """Never trained: the k-pool indexer, and the selection bias, which is a buffer."""
        return ".indexer." in self.megatron[0] or self.megatron[0].endswith("router.expert_bias")


def _row(megatron: str, hf: str, *shape: str, **kwargs) -> Row:
    return Row(megatron=tuple(megatron.split()), hf=tuple(hf.split()), shape=shape, **kwargs)


GLOBALS = (
    _row("embedding.word_embeddings.weight", LANGUAGE + "embed_tokens.weight", "V", "H", split=0),
    _row("output_layer.weight", "lm_head.weight", "V", "H", split=0),
    _row("decoder.final_layernorm.weight", LANGUAGE + "norm.weight", "H"),
)
NORMS = (
    _row("input_layernorm.weight", "input_layernorm.weight", "H"),
    _row("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "H"),
)


def _hyper_connection(megatron: str, hf: str) -> tuple[Row, ...]:
    scales = f"{megatron}.alpha_pre {megatron}.alpha_post {megatron}.alpha_res"
    return (
        _row(f"{megatron}.mapping_proj.weight", f"{hf}_fn", "MIX", "NH", fp32_in_model=True),
        _row(f"{megatron}.bias", f"{hf}_base", "MIX", always_fp32=True, fp32_in_model=True),
        _row(scales, f"{hf}_scale", "3", always_fp32=True, fp32_in_model=True),
    )


HYPER_CONNECTIONS = (
    *_hyper_connection("self_attention_hyper_connection", "hc_attn"),
    *_hyper_connection("mlp_hyper_connection", "hc_ffn"),
)


def _at(megatron: str, hf: str, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    return tuple(
        Row(
            **{
                **row.__dict__,
                "megatron": tuple(megatron + name for name in row.megatron),
                "hf": tuple(hf + name for name in row.hf),
            }
        )
        for row in rows
    )


KDA = _at(
    "self_attention.",
    "self_attn.",
    (
        _row("in_proj.weight", "q_proj.weight k_proj.weight v_proj.weight", "Kd", "H", split=0, together="kda_in"),
        _row("f_a_proj.weight", "f_a_proj.weight", "d", "H", together="kda_in"),
        _row("g_a_proj.weight", "g_a_proj.weight", "d", "H", together="kda_in"),
        _row("beta_proj.weight", "b_proj.weight", "K", "H", split=0, together="kda_in"),
        _row(
            "conv1d.weight",
            "q_conv1d.weight k_conv1d.weight v_conv1d.weight",
            *("Kd", "1", "W"),
            split=0,
            fp32_in_model=True,
        ),
        _row("f_b_proj.weight", "f_b_proj.weight", "Kd", "d", split=0),
        _row("g_b_proj.weight", "g_b_proj.weight", "Kd", "d", split=0),
        _row("A_log", "A_log", "K", split=0, always_fp32=True, fp32_in_model=True),
        _row("dt_bias", "dt_bias", "Kd", split=0, always_fp32=True, fp32_in_model=True),
        _row("out_norm.weight", "o_norm.weight", "d"),
        _row("out_proj.weight", "o_proj.weight", "H", "Kd", split=1),
    ),
)
INDEXER = _at(
    "core_attention.indexer.",
    "indexer.",
    (
        _row("linear_wq_b.weight", "wq_b.weight", "Jj", "Q"),
        _row("linear_wk.weight", "wk.weight", "j", "H"),
        _row("k_norm.weight", "k_norm.weight", "j"),
        _row("k_norm.bias", "k_norm.bias", "j"),
        _row("linear_weights_proj.weight", "weights_proj.weight", "J", "H"),
        _row("index_kpool_compress_ape", "index_kpool_compress_ape", "P", "j"),
        _row("index_kpool_compress_gate", "index_kpool_compress_gate", "j", "H"),
    ),
)
DSA = _at(
    "self_attention.",
    "self_attn.",
    (
        _row("linear_q_down_proj.weight", "q_a_proj.weight", "Q", "H", fp8=True, together="dsa_in"),
        _row("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight", "C", "H", fp8=True, together="dsa_in"),
        _row("q_layernorm.weight", "q_a_layernorm.weight", "Q"),
        _row("linear_q_up_proj.weight", "q_b_proj.weight", "ADq", "Q", split=0, fp8=True),
        _row("kv_layernorm.weight", "kv_a_layernorm.weight", "C"),
        _row("linear_kv_up_proj.weight", "kv_b_proj.weight", "ADqDv", "C", split=0),
        _row("linear_proj.weight", "o_proj.weight", "H", "ADv", split=1, fp8=True),
        *INDEXER,
    ),
)


def _glu(megatron: str, hf: str, width: str) -> tuple[Row, ...]:
    return (
        _row(f"{megatron}linear_fc1.weight", f"{hf}gate_proj.weight {hf}up_proj.weight", width, "H", split=0, fp8=True),
        _row(f"{megatron}linear_fc2.weight", f"{hf}down_proj.weight", "H", width, split=1, fp8=True),
    )


DENSE = _glu("mlp.", "mlp.", "I")
MOE = (
    _row("mlp.router.weight", "mlp.gate.weight", "E", "H", fp32_in_model=True),
    _row("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", "E", always_fp32=True, fp32_in_model=True),
    *_glu("mlp.shared_experts.", "mlp.shared_experts.", "sM"),
    *_glu("mlp.experts.{e}.", "mlp.experts.{e}.", "M"),
)
# The multi-token-prediction layer: a DSA + MoE block without hyper-connections, after the trunk's last layer.
MTP_HEAD = (
    _row("enorm.weight", "enorm.weight", "H"),
    _row("hnorm.weight", "hnorm.weight", "H"),
    _row("eh_proj.weight", "eh_proj.weight", "H", "2H", split=0),
    _row("final_layernorm.weight", "shared_head.norm.weight", "H"),
)
MTP_BLOCK = (*NORMS, *DSA, *MOE)

ATTENTION = {"kda": KDA, "dsa": DSA}
MLP = {"dense": DENSE, "moe": MOE}

# Grouped and sequential experts spell the same tensor in two ways; the table has one.
EXPERT_SPELLINGS = (
    (re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$"), r"mlp.experts.\1.\2.weight"),
    (re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$"), r"mlp.experts.\2.\1.weight"),
)


@dataclass(frozen=True)
class Tensors:
    """One row for one layer and, if it is an expert's, one expert: names filled in."""

    row: Row
    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    layer: int | None = None
    expert: int | None = None


@dataclass(frozen=True)
class TensorInfo:
    """What a safetensors header says of a tensor."""

    dtype: str  # "BF16", "F32", "F8_E4M3"
    shape: tuple[int, ...]


def sizes(config: Glm5NextConfig) -> dict[str, int]:
    """The symbols used in `Row.shape`."""
    heads, streams = config.num_attention_heads, config.num_streams
    return {
        "1": 1,
        "3": 3,
        "V": config.vocab_size,
        "H": config.hidden_size,
        "2H": 2 * config.hidden_size,
        "NH": streams * config.hidden_size,
        "MIX": streams * (streams + 2),
        "I": config.ffn_hidden_size,
        "M": config.moe_ffn_hidden_size,
        "sM": config.moe_ffn_hidden_size * config.num_shared_experts,
        "E": config.num_experts,
        "Q": config.q_lora_rank,
        "C": config.kv_lora_rank,
        "ADq": heads * config.qk_head_dim,
        "ADv": heads * config.v_head_dim,
        "ADqDv": heads * (config.qk_head_dim + config.v_head_dim),
        "K": config.kda_num_heads,
        "d": config.kda_head_dim,
        "Kd": config.kda_width,
        "W": config.kda_conv_width,
        "J": config.index_num_heads,
        "j": config.index_head_dim,
        "Jj": config.index_num_heads * config.index_head_dim,
        "P": config.index_kpool,
    }


def layer_rows(config: Glm5NextConfig, layer: int) -> tuple[Row, ...]:
    """The rows of one trunk layer; expert rows stand for every expert."""
    return (
        *NORMS,
        *HYPER_CONNECTIONS,
        *ATTENTION[config.attention_kinds[layer]],
        *MLP[config.mlp_kinds[layer]],
    )


def _fill(rows: tuple[Row, ...], megatron: str, hf: str, layer: int | None, num_experts: int) -> Iterator[Tensors]:
    for row in _at(megatron, hf, rows):
        if not row.is_expert:
            yield Tensors(row, row.megatron, row.hf, layer)
            continue
        for expert in range(num_experts):
            names, hf_names = (tuple(name.format(e=expert) for name in names) for names in (row.megatron, row.hf))
            yield Tensors(row, names, hf_names, layer, expert)


@lru_cache(maxsize=8)
def text_tensors(config: Glm5NextConfig) -> tuple[Tensors, ...]:
    """Every tensor of the trunk, embedding and head, in model order."""
    tensors = list(_fill(GLOBALS, "", "", None, 0))
    for layer in range(config.num_layers):
        rows, names = layer_rows(config, layer), f"layers.{layer}."
        tensors += _fill(rows, f"decoder.{names}", LANGUAGE + names, layer, config.num_experts)
    return tuple(tensors)


def mtp_tensors(config: Glm5NextConfig) -> Iterator[Tensors]:
    """Every tensor of the multi-token-prediction layers."""
    for depth in range(config.num_mtp_layers):
        layer = config.num_layers + depth
        megatron, hf = f"mtp.layers.{depth}.", f"{LANGUAGE}layers.{layer}."
        yield from _fill(MTP_HEAD, megatron, hf, layer, 0)
        yield from _fill(MTP_BLOCK, megatron + "mtp_model_layer.", hf, layer, config.num_experts)


@lru_cache(maxsize=8)
def megatron_index(config: Glm5NextConfig) -> dict[str, Tensors]:
    """Global Megatron name (experts in the table's spelling) -> its tensors."""
    return {name: tensors for tensors in (*text_tensors(config), *mtp_tensors(config)) for name in tensors.megatron}


def find(config: Glm5NextConfig, megatron_name: str) -> Tensors:
    """The table's entry for a Megatron parameter or buffer, by its global name (layer and expert numbers global).

    Raises ValueError for a name that the table does not have.
    """
    name = table_name(megatron_name)
    if name not in megatron_index(config):
        raise ValueError(f"{megatron_name}: this parameter has no row in bridge/name_map.py")
    return megatron_index(config)[name]


def table_name(megatron_name: str) -> str:
    """A Megatron name with its expert part spelt as in the table."""
    for pattern, replacement in EXPERT_SPELLINGS:
        megatron_name = pattern.sub(replacement, megatron_name)
    return megatron_name


def model_tensors(config: Glm5NextConfig, *, mtp: bool) -> Iterator[Tensors]:
    """What a model holds that was built with its multi-token-prediction layers, or without them."""
    yield from text_tensors(config)
    if mtp:
        yield from mtp_tensors(config)


def on_disk(entry: Tensors, config: Glm5NextConfig) -> dict[str, TensorInfo]:
    """The tensors that a checkpoint has for an entry, in order; an FP8 tensor is followed by its scales."""
    size = sizes(config)
    shape = tuple(size[symbol] for symbol in entry.row.shape)
    if config.fp8 and entry.row.fp8:
        scales = tuple(-(-length // FP8_BLOCK) for length in shape)
        both = {"": TensorInfo("F8_E4M3", shape), SCALE_SUFFIX: TensorInfo("F32", scales)}
        return {name + suffix: info for name in entry.hf for suffix, info in both.items()}
    dtype = "F32" if entry.row.always_fp32 or config.dtype == "float32" else "BF16"
    return dict.fromkeys(entry.hf, TensorInfo(dtype, shape))


def inventory(config: Glm5NextConfig) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint on disk: trunk, MTP layers and vision tower, with shape and dtype."""
    tensors: dict[str, TensorInfo] = {}
    for entry in model_tensors(config, mtp=True):
        tensors.update(on_disk(entry, config))
    dtype = "F32" if config.dtype == "float32" else "BF16"
    return tensors | {name: TensorInfo(dtype, shape) for name, shape in vision_shapes(config)}


def passed_through(config: Glm5NextConfig, *, mtp: bool = False) -> dict[str, list[str]]:
    """What a model does not hold, by kind; export copies it from the source folder."""
    held = trained_names(config, mtp=mtp)
    rest: dict[str, list[str]] = {}
    for name in inventory(config):
        if name not in held:
            kind = "vision tower" if name.startswith(VISION) else "multi-token-prediction layer"
            rest.setdefault(kind, []).append(name)
    return rest


def trained_names(config: Glm5NextConfig, *, mtp: bool = False) -> set[str]:
    """The tensors on disk that a model holds; the rest of the inventory is passed through unread."""
    return {name for entry in model_tensors(config, mtp=mtp) for name in on_disk(entry, config)}


@lru_cache(maxsize=1)
def _words_together() -> dict[str, str]:
    """HF name inside its layer, experts as {e} -> the word that names what has to arrive in one call."""
    rows = (*KDA, *DSA, *DENSE, *MOE)
    return {name: row.together or row.megatron[0] for row in rows for name in row.hf}


def together(name: str) -> str:
    """A key that is equal for the checkpoint tensors which a server has to be given in one call, by their HF names.

    Servers fuse q_a with kv_a, the KDA projections of the layer's input, gate with up, the three convolutions, and
    apply a scale to its weight; half of such a group would be fused with old values.
    """
    name = name.removesuffix(SCALE_SUFFIX)
    match = re.fullmatch(rf"({re.escape(LANGUAGE)}layers\.\d+\.)(?:(mlp\.experts\.)(\d+)(\..+)|(.+))", name)
    if match is None:
        return name
    layer, experts, expert, rest, other = match.groups()
    inside = f"{experts}{{e}}{rest}" if experts else other
    return f"{layer}{expert or ''}{_words_together().get(inside, inside)}"


def vision_shapes(config: Glm5NextConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the vision tower, which is never trained, only carried along."""
    vision = config.vision
    if vision is None:
        return
    width, out, inner = vision.hidden_size, vision.out_hidden_size, vision.projection_intermediate_size
    head = width // vision.num_heads
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)

    def linear(name: str, *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{VISION}{name}.weight", shape
        yield f"{VISION}{name}.bias", shape[:1]

    yield from linear("patch_embed.proj", width, *patch)
    for block in range(vision.depth):
        prefix = f"blocks.{block}."
        yield from ((f"{VISION}{prefix}norm{i}.weight", (width,)) for i in (1, 2))
        yield from linear(f"{prefix}attn.qkv", 3 * width, width)
        yield from linear(f"{prefix}attn.proj", width, width)
        yield from ((f"{VISION}{prefix}attn.{part}_norm.weight", (head,)) for part in "qk")
        yield from linear(f"{prefix}mlp.gate_proj", vision.intermediate_size, width)
        yield from linear(f"{prefix}mlp.up_proj", vision.intermediate_size, width)
        yield from linear(f"{prefix}mlp.down_proj", width, vision.intermediate_size)
    yield f"{VISION}post_layernorm.weight", (width,)
    yield from linear("downsample", out, width, vision.spatial_merge_size, vision.spatial_merge_size)
    yield f"{VISION}merger.proj.weight", (out, out)
    yield f"{VISION}merger.post_projection_norm.weight", (out,)
    yield f"{VISION}merger.post_projection_norm.bias", (out,)
    yield from ((f"{VISION}merger.{part}_proj.weight", (inner, out)) for part in ("gate", "up"))
    yield f"{VISION}merger.down_proj.weight", (out, inner)
