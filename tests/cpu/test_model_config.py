"""`Glm5NextConfig`: what is read from config.json, and what is refused instead of guessed."""

import json
from dataclasses import fields
from typing import Any

import pytest

from glm5_next.bridge.reference import import_modeling
from glm5_next.plugins.config import KDA_KEYS, OPTIONAL_VALUES, PLAIN_KEYS, REQUIRED_VALUES, Glm5NextConfig
from tests.support.tiny import Case

# What the released config.json says of the text model, DSA layers in its own spelling.
RELEASED_TEXT: dict[str, Any] = {
    "model_type": "glm5_next_text",
    "vocab_size": 154880,
    "hidden_size": 4096,
    "num_hidden_layers": 45,
    "layer_types": ["deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(45)],
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42,
    "indexer_types": ["full"] * 45,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "intermediate_size": 12288,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "moe_router_dtype": "float32",
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "head_dim": 0,
    "v_head_dim": 256,
    "mla_use_nope": True,
    "attention_bias": False,
    "linear_attn_config": {
        "num_heads": 64,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "safe_gate": True,
    },
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_kpool": 4,
    "index_kpool_always_select_tail": True,
    "index_kpool_compress": True,
    "mhc": True,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
}
VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "num_heads": 16,
    "intermediate_size": 4096,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 4096,
    "projection_intermediate_size": 10240,
}
RELEASED = {
    "model_type": "glm5_next",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "text_config": RELEASED_TEXT,
    "vision_config": VISION,
}
FLAT = Case(layers=8, dense_layers=3).text_config()


def read(**changes: Any) -> Glm5NextConfig:
    """The flat tiny config with some keys changed."""
    return Glm5NextConfig.from_hf({**FLAT, **changes})


def without(key: str, config: dict[str, Any] = FLAT) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


def refusal(source: Any) -> str:
    with pytest.raises(ValueError) as caught:
        Glm5NextConfig.from_hf(source)
    return str(caught.value)


def test_released_file_is_the_released_model():
    config = Glm5NextConfig.from_hf(RELEASED)
    assert config.num_layers == 45 and config.num_mtp_layers == 1
    assert [i for i, kind in enumerate(config.attention_kinds) if kind == "dsa"] == list(range(3, 45, 4))
    assert [i for i, kind in enumerate(config.mlp_kinds) if kind == "dense"] == [0, 1, 2]
    assert config.index_kpool == 4 and config.num_pools_selected == 512
    assert config.kda_width == 8192 and config.kda_gate_lower_bound == -5.0
    assert config.qk_head_dim == config.v_head_dim == 256, "MLA widths come from head_dim, which the file sets to 0"
    assert config.vision is not None and config.vision.out_hidden_size == 4096
    assert config.dtype == "bfloat16"


def test_every_plain_key_ends_in_its_field():
    assert len(set(PLAIN_KEYS)) == len(set(PLAIN_KEYS.values()))
    for number, (field, key) in enumerate(PLAIN_KEYS.items()):
        if field not in ("num_layers", "num_experts_per_token", "index_topk", "index_kpool"):  # tied to other keys
            assert getattr(read(**{key: 1000 + number}), field) == 1000 + number
    changed = read(index_kpool=2, index_topk=30, num_experts_per_tok=7)
    assert (changed.index_kpool, changed.index_topk, changed.num_experts_per_token) == (2, 30, 7)


def test_every_field_of_the_config_comes_from_a_key():
    read_from_keys = {
        *PLAIN_KEYS,
        *KDA_KEYS,
        "attention_kinds",
        "mlp_kinds",
        "dtype",
        "fp8",
        "num_mtp_layers",
        "vision",
    }
    assert {field.name for field in fields(Glm5NextConfig)} == read_from_keys


def test_composite_and_flat_file_say_the_same():
    flat = {**RELEASED_TEXT, "dtype": "bfloat16"}
    composite = {key: value for key, value in RELEASED.items() if key != "vision_config"}
    assert Glm5NextConfig.from_hf(flat) == Glm5NextConfig.from_hf(composite)


def test_flat_file_may_call_itself_by_the_composite_name():
    assert read(model_type="glm5_next") == read()


@pytest.mark.parametrize("spelling", ["deepseek_sparse_attention", "indexed_attention", "full_attention"])
def test_three_spellings_of_a_sparse_layer_are_one(spelling):
    layers = [spelling if kind == "indexed_attention" else kind for kind in FLAT["layer_types"]]
    assert read(layer_types=layers) == read()


def test_spellings_may_be_mixed():
    assert read(layer_types=[*FLAT["layer_types"][:7], "full_attention"]) == read()


def test_what_transformers_writes_reads_back_the_same(tmp_path):
    modeling = import_modeling()
    modeling.Glm5NextConfig(**{**RELEASED, "vision_config": {**VISION, "in_channels": 3}}).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "indexed_attention" in written["text_config"]["layer_types"]
    assert Glm5NextConfig.from_hf(tmp_path) == Glm5NextConfig.from_hf(RELEASED)


def test_folder_file_and_content_are_read_alike(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(RELEASED))
    expected = Glm5NextConfig.from_hf(RELEASED)
    assert all(Glm5NextConfig.from_hf(source) == expected for source in (tmp_path, str(tmp_path), path))


@pytest.mark.parametrize("key", PLAIN_KEYS.values())
def test_missing_key_is_named_and_no_class_default_takes_its_place(key):
    assert f"key {key!r} is missing; no default is assumed" in refusal(without(key))
    assert f"key {key!r} is missing" in refusal({**FLAT, key: None})


@pytest.mark.parametrize("key", [*REQUIRED_VALUES, "layer_types", "mlp_layer_types", "indexer_types", "dtype"])
def test_missing_list_or_switch_is_named_too(key):
    assert f"key {key!r}" in refusal(without(key)) and "missing" in refusal(without(key))


def test_pool_size_does_not_fall_back_to_the_class_default():
    default = import_modeling().Glm5NextTextConfig().index_kpool
    assert default == 16 != RELEASED_TEXT["index_kpool"], "the trap that this test is about is gone"
    text = without("index_kpool", RELEASED_TEXT)
    assert "'index_kpool' is missing" in refusal({**RELEASED, "text_config": text})


@pytest.mark.parametrize("key", KDA_KEYS.values(), ids=[flat for _, flat in KDA_KEYS.values()])
def test_missing_linear_attention_key_is_named_in_both_spellings(key):
    nested_key, flat_key = key
    message = f"keys 'linear_attn_config.{nested_key}' and {flat_key!r} are missing"
    assert message in refusal(without(flat_key))
    nested = without(nested_key, RELEASED_TEXT["linear_attn_config"])
    assert message in refusal({**RELEASED_TEXT, "linear_attn_config": nested, "dtype": "bfloat16"})


def test_nested_linear_attention_keys_win_over_flat_ones():
    nested = {"num_heads": 6, "head_dim": 24, "short_conv_kernel_size": 3, "gate_lower_bound": -4.0}
    config = read(linear_attn_config=nested)
    assert (config.kda_num_heads, config.kda_head_dim, config.kda_conv_width) == (6, 24, 3)
    assert config.kda_gate_lower_bound == -4.0


@pytest.mark.parametrize(
    "nested",
    [
        {"gate_lower_bound": -4.0},
        {"gate_lower_bound": None},
        {"gate_lower_bound": None, "safe_gate": True},
        {"num_heads": 6},
        {"head_dim": 24, "short_conv_kernel_size": 3, "safe_gate": False},
    ],
    ids=str,
)
def test_linear_attention_keys_are_read_as_transformers_reads_them(nested):
    text = {**FLAT, "linear_lower_bound": -3.0, "linear_attn_config": nested}
    theirs, ours = import_modeling().Glm5NextTextConfig(**text), Glm5NextConfig.from_hf(text)
    for field, (_, flat_key) in KDA_KEYS.items():
        assert getattr(ours, field) == getattr(theirs, flat_key), flat_key


def test_null_bound_with_the_safe_gate_is_minus_five():
    assert read(linear_attn_config={"gate_lower_bound": None}, linear_lower_bound=-3.0).kda_gate_lower_bound == -5.0


def test_null_bound_without_the_safe_gate_is_refused():
    nested = {"gate_lower_bound": None, "safe_gate": False}
    theirs = import_modeling().Glm5NextTextConfig(**{**FLAT, "linear_attn_config": nested})
    assert theirs.linear_lower_bound is None, "transformers computes the unbounded gate here"
    assert "safe gate" in refusal({**FLAT, "linear_attn_config": nested})


@pytest.mark.parametrize("bound", [0.0, 1.0, -5.5])
def test_bound_outside_of_what_the_kernels_rely_on_is_refused(bound):
    assert "gate_lower_bound must be in [-5, 0)" in refusal({**FLAT, "linear_lower_bound": bound})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_types": ["full"] * 7 + ["shared"]}, "indexer_types is not 'full' for layers [7]"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim is 64; only 0 is supported: the model has no rotary positions"),
        ({"index_kpool": 3}, "index_topk (16) must be a multiple of index_kpool (3)"),
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types has unknown entries ['sliding_attention']"),
        ({"mlp_layer_types": ["moe"] * 8}, "mlp_layer_types has unknown entries ['moe']"),
        ({"layer_types": FLAT["layer_types"][:-1]}, "layer_types names 7 layers but num_hidden_layers is 8"),
        ({"mlp_layer_types": ["dense"] * 9}, "mlp_layer_types names 9 layers but num_hidden_layers is 8"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok (9) exceeds n_routed_experts (8)"),
        ({"hidden_size": "64"}, "hidden_size must be a positive whole number, got '64'"),
        ({"hidden_size": 64.5}, "hidden_size must be a positive whole number, got 64.5"),
        ({"hc_mult": True}, "hc_mult must be a positive whole number, got True"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be a positive whole number, got 0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number, got '1e-5'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number, got nan"),
        ({"swiglu_limit": 0.0}, "swiglu_limit must be positive, got 0.0"),
        ({"layer_types": "linear_attention"}, "layer_types must be a list of names"),
        ({"dtype": "float16"}, "dtype is 'float16'; only 'bfloat16' and 'float32' are supported"),
        ({"model_type": "glm4_moe"}, "model_type is 'glm4_moe'; this package trains 'glm5_next'"),
        ({"model_type": None}, "model_type is None"),
        ({"text_config": None}, "text_config must be an object, got None"),
        ({"vision_config": {"depth": 2}}, "key 'vision_config.hidden_size' is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_unsupported_or_inconsistent_value_is_refused_by_name(changes, message):
    assert message in refusal({**FLAT, **changes})


OTHER_VALUES = {
    "qk_rope_head_dim": 64,
    "hidden_act": "gelu",
    "norm_topk_prob": False,
    "n_group": 2,
    "topk_group": 2,
    "index_kpool_always_select_tail": False,
    "attention_bias": True,
    "attention_dropout": 0.1,
    "index_kpool_compress": False,
    "mhc": False,
    "mla_use_nope": False,
    "moe_router_dtype": "bfloat16",
    "scoring_func": "softmax",
    "tie_word_embeddings": True,
    "topk_method": "greedy",
}


@pytest.mark.parametrize("key", [*REQUIRED_VALUES, *OPTIONAL_VALUES])
def test_switch_with_another_value_is_refused_by_name(key):
    assert f"{key} is {OTHER_VALUES[key]!r}; only " in refusal({**FLAT, key: OTHER_VALUES[key]})


@pytest.mark.parametrize("key", OPTIONAL_VALUES)
def test_switch_is_checked_at_the_top_of_a_composite_file_too(key):
    assert f"{key} is {OTHER_VALUES[key]!r}; only " in refusal({**RELEASED, key: OTHER_VALUES[key]})


def test_keys_that_transformers_does_not_write_may_be_absent():
    bare = {key: value for key, value in RELEASED_TEXT.items() if key not in OPTIONAL_VALUES}
    assert Glm5NextConfig.from_hf({**RELEASED, "text_config": bare}) == Glm5NextConfig.from_hf(RELEASED)


@pytest.mark.parametrize("value", [0, None])
def test_model_without_mtp_layers_says_so_with_zero_or_nothing(value):
    assert read(num_nextn_predict_layers=value).num_mtp_layers == 0
    assert read().num_mtp_layers == 0


def test_dtype_is_read_in_both_spellings_and_from_both_places():
    assert Glm5NextConfig.from_hf({**without("dtype"), "torch_dtype": "bfloat16"}).dtype == "bfloat16"
    text = {**RELEASED_TEXT, "dtype": "float32"}
    assert Glm5NextConfig.from_hf({**without("dtype", RELEASED), "text_config": text}).dtype == "float32"


@pytest.mark.parametrize(("content", "message"), [("{", "not valid JSON"), ("[1]", "expected a JSON object, got list")])
def test_broken_file_is_named(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_text(content)
    assert message in refusal(path) and str(path) in refusal(path)


def test_absent_file_is_named(tmp_path):
    assert f"{tmp_path / 'config.json'}: no such file" not in refusal(tmp_path / "absent")
    assert str(tmp_path / "absent") in refusal(tmp_path / "absent")


def test_every_message_names_the_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(without("hc_mult")))
    assert refusal(tmp_path) == f"{path}: key 'hc_mult' is missing; no default is assumed"
