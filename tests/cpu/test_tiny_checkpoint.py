"""The tiny checkpoint has everything the release has, is the same every time, and has values that hide nothing."""

import json
import string
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, GenerationConfig

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.bridge.tiny_config import TinyModel, composite_config
from glm5_next.bridge.tiny_tokenizer import TOKEN_IDS, VOCAB_SIZE
from glm5_next.plugins.config import Glm5NextConfig


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Checkpoint:
    return Checkpoint(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "hf"))


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny.folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"dtype": "float32"},
        {"layers": 8, "dense_layers": 3, "streams": 2},
        {"layers": 3, "dense_layers": 0, "mtp": False, "vision": False, "shards": 1},
        {"layers": 12, "dense_layers": 12, "index_topk": 8, "index_kpool": 2, "shards": 30},
    ],
)
def test_every_shape_has_exactly_the_inventory_of_its_config(tmp_path, sizes):
    checkpoint = Checkpoint(write_tiny_checkpoint(tmp_path / "hf", **sizes))
    checkpoint.check_inventory()
    model, config = TinyModel(**sizes), checkpoint.config
    assert (config.num_layers, config.num_streams, config.dtype) == (model.layers, model.streams, model.dtype)
    assert (config.num_mtp_layers, config.vision is not None) == (model.mtp, model.vision)
    assert config.mlp_kinds.count("dense") == model.dense_layers


def test_the_same_arguments_give_the_same_bytes(tiny, tmp_path):
    assert contents(write_tiny_checkpoint(tmp_path / "again")) == contents(tiny.folder)


def test_another_seed_changes_tensors_only(tiny, tmp_path):
    other = contents(write_tiny_checkpoint(tmp_path / "other", seed=1))
    changed = {name for name, data in contents(tiny.folder).items() if data != other[name]}
    assert changed == {name for name in other if name.endswith(".safetensors")}


def test_the_layout_is_that_of_the_release(tiny):
    files = sorted({stored.file for stored in tiny.tensors.values()})
    assert files == [f"model-{n:05}-of-00005.safetensors" for n in range(1, 6)]
    assert list(tiny.tensors) == sorted(tiny.tensors)
    assert [tiny.tensors[name].file for name in sorted(tiny.tensors)] == sorted(s.file for s in tiny.tensors.values())
    layer = {stored.file for name, stored in tiny.tensors.items() if ".layers.4.mlp.experts." in name}
    assert len(layer) == 2
    index = json.loads((tiny.folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(s.end - s.begin for s in tiny.tensors.values())


def test_dtypes_are_those_of_the_release(tiny):
    wide = {name.rsplit(".", 1)[1] for name, stored in tiny.tensors.items() if stored.dtype == "F32"}
    assert wide == {
        *("A_log", "dt_bias", "e_score_correction_bias"),
        *("hc_attn_base", "hc_attn_scale", "hc_ffn_base", "hc_ffn_scale"),
    }
    assert {stored.dtype for stored in tiny.tensors.values()} == {"F32", "BF16"}


def test_no_value_is_neutral(tiny):
    for name in tiny.tensors:
        tensor = tiny.read(name).float()
        assert tensor.isfinite().all() and (tensor != 0).all(), name
        assert tensor.std() > 0.01, name
        if "norm" in name and name.endswith("weight"):
            assert (tensor != 1).float().mean() > 0.9 and 0.5 < tensor.mean() < 1.5, name


def test_f32_tensors_would_notice_a_bf16_buffer(tiny):
    for name, stored in tiny.tensors.items():
        if stored.dtype == "F32":
            assert not torch.equal(tiny.read(name).bfloat16().float(), tiny.read(name)), name


def test_every_tensor_has_its_own_values(tiny):
    starts = {tuple(tiny.read(name).flatten()[:3].tolist()) for name in tiny.tensors}
    assert len(starts) == len(tiny.tensors)


def test_a_tensor_does_not_depend_on_the_others(tiny, tmp_path):
    deeper = Checkpoint(write_tiny_checkpoint(tmp_path / "deeper", layers=8, vision=False))
    name = "model.language_model.layers.1.mlp.experts.3.up_proj.weight"
    assert torch.equal(tiny.read(name), deeper.read(name))


def test_stream_scale_reaches_what_writes_into_the_streams(tiny, tmp_path):
    scaled = Checkpoint(write_tiny_checkpoint(tmp_path / "scaled", stream_scale=0.25))
    ratio = {name: (scaled.read(name).float() / tiny.read(name).float()).unique().tolist() for name in tiny.tensors}
    quarter = {name for name, values in ratio.items() if values == [0.25]}
    assert all(values in ([0.25], [1.0]) for values in ratio.values())
    assert {name.rsplit(".", 2)[1] for name in quarter} == {"embed_tokens", "o_proj", "down_proj"}
    assert not any("visual" in name for name in quarter)


def test_spread_multiplies_the_deviations(tiny, tmp_path):
    narrow = Checkpoint(write_tiny_checkpoint(tmp_path / "narrow", spread=0.1))
    name = "model.language_model.layers.0.hc_attn_base"
    assert torch.allclose(narrow.read(name) - 0.1, (tiny.read(name) - 0.1) * 0.1, atol=1e-6)


def test_config_json_reads_like_the_released_one(tiny):
    raw, text = tiny.raw_config, tiny.raw_config["text_config"]
    assert raw["model_type"] == "glm5_next" and raw["architectures"] == ["Glm5NextForConditionalGeneration"]
    assert text["layer_types"] == [*["linear_attention"] * 3, "deepseek_sparse_attention", "linear_attention"]
    assert text["mlp_layer_types"] == ["dense", *["sparse"] * 4] and text["indexer_types"] == ["full"] * 5
    assert (text["head_dim"], text["qk_rope_head_dim"], text["num_nextn_predict_layers"]) == (0, 0, 1)
    assert (text["topk_method"], text["moe_router_dtype"], text["mhc"]) == ("noaux_tc", "float32", True)
    assert raw["vision_config"]["out_hidden_size"] == text["hidden_size"]
    assert all(0 <= raw[key] < text["vocab_size"] for key in raw if key.endswith("token_id"))


def test_transformers_reads_the_same_config(tiny):
    config = AutoConfig.from_pretrained(tiny.folder)
    text, ours = config.text_config, tiny.config
    assert text.linear_num_heads == ours.kda_num_heads and text.linear_lower_bound == ours.kda_gate_lower_bound
    assert (text.index_kpool, text.index_topk, text.hc_mult) == (ours.index_kpool, ours.index_topk, ours.num_streams)
    assert config.vision_config.out_hidden_size == ours.hidden_size
    generation = GenerationConfig.from_pretrained(tiny.folder)
    assert generation.eos_token_id == text.eos_token_id and generation.pad_token_id == text.pad_token_id


def test_the_image_processor_loads(tiny):
    processor = AutoImageProcessor.from_pretrained(tiny.folder)
    image = np.zeros((56, 84, 3), dtype=np.uint8)
    assert processor(images=image, return_tensors="pt")["pixel_values"].shape[1] == 3 * 2 * 14 * 14


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ({"vocab": 50}, "vocab must be at least 117, got 50"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"layers": 2, "dense_layers": 3}, r"dense_layers \(3\) exceeds layers \(2\)"),
        ({"index_topk": 10}, "multiple of index_kpool"),
        ({"experts_per_token": 9}, "num_experts_per_tok"),
        ({"dtype": "float16"}, "float16"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_writing(tmp_path, sizes, match):
    with pytest.raises(ValueError, match=match):
        write_tiny_checkpoint(tmp_path / "hf", **sizes)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_overwritten(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        write_tiny_checkpoint(tmp_path)


def test_the_config_needs_no_files():
    assert Glm5NextConfig.from_hf(composite_config(TinyModel())).num_layers == 5


# --- tokenizer -------------------------------------------------------------------------------------------------------


def test_text_comes_back(tokenizer):
    for text in (string.printable, "  2 spaces , and 'quotes' n't . \n\n", "", "17+25=42"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("ab") == [TOKEN_IDS["a"], TOKEN_IDS["b"]]


def test_other_characters_become_the_unknown_token(tokenizer):
    assert tokenizer.encode("a\u00e9\u4e2d") == [TOKEN_IDS["a"], *[TOKEN_IDS["<|unknown|>"]] * 2]


def test_the_vocabulary_fits_the_config(tiny, tokenizer):
    assert len(tokenizer) == len(TOKEN_IDS) <= tiny.config.vocab_size == VOCAB_SIZE and VOCAB_SIZE % 8 == 0
    assert tokenizer.get_vocab() == TOKEN_IDS
    assert tokenizer.convert_tokens_to_ids("<|image|>") == tiny.raw_config["image_token_id"]
    assert tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"


def test_the_chat_template_renders_turns(tokenizer):
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|user|>1+1?<|assistant|>2"
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
    assert prompt == tokenizer.encode("<|user|>1+1?<|assistant|>")
    assert prompt[0] == TOKEN_IDS["<|user|>"] and prompt[-1] == TOKEN_IDS["<|assistant|>"]
    assert tokenizer.decode(prompt, skip_special_tokens=True) == "1+1?"
