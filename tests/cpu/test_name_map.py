"""The table against what is known of the released checkpoint (counts from its safetensors headers)."""

import math
from collections import Counter

import pytest

from glm5_next.bridge import name_map
from glm5_next.bridge.tiny_config import TinyModel, composite_config
from glm5_next.plugins.config import Glm5NextConfig

BYTES = {"BF16": 2, "F32": 4}


RELEASED = TinyModel(
    layers=45,
    dense_layers=3,
    hidden=4096,
    vocab=154880,
    dense_width=12288,
    expert_width=2048,
    experts=288,
    kda_heads=64,
    kda_head_dim=128,
    heads=64,
    q_lora=1536,
    kv_lora=512,
    qk_head_dim=256,
    v_head_dim=256,
    index_heads=32,
    index_head_dim=128,
)
RELEASED_VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "num_heads": 16,
    "intermediate_size": 4096,
    "projection_intermediate_size": 10240,
}


@pytest.fixture(scope="module")
def released() -> Glm5NextConfig:
    raw = composite_config(RELEASED)
    return Glm5NextConfig.from_hf(raw | {"vision_config": raw["vision_config"] | RELEASED_VISION})


@pytest.fixture(scope="module")
def tiny() -> Glm5NextConfig:
    raw = composite_config(TinyModel(layers=8, dense_layers=3, index_heads=4, index_head_dim=16))
    raw["text_config"]["vocab_size"] = 96
    return Glm5NextConfig.from_hf(raw)


def totals(tensors: dict[str, name_map.TensorInfo]) -> tuple[int, int]:
    return len(tensors), sum(math.prod(info.shape) for info in tensors.values())


def group(config: Glm5NextConfig, wanted: str) -> dict[str, name_map.TensorInfo]:
    mtp = f"{name_map.LANGUAGE}layers.{config.num_layers}."

    def kind(name: str) -> str:
        return "vision" if name.startswith(name_map.VISION) else "mtp" if name.startswith(mtp) else "text"

    return {name: info for name, info in name_map.inventory(config).items() if kind(name) == wanted}


def test_the_released_inventory_has_the_published_totals(released):
    inventory = name_map.inventory(released)
    assert totals(inventory) == (38_770, 321_323_031_390)
    assert sum(math.prod(info.shape) * BYTES[info.dtype] for info in inventory.values()) == 642_646_653_816


@pytest.mark.parametrize(
    ("part", "expected"),
    [("text", (37_534, 313_326_811_966)), ("mtp", (889, 7_432_592_416)), ("vision", (347, 563_627_008))],
)
def test_each_part_of_the_released_inventory_has_its_count(released, part, expected):
    assert totals(group(released, part)) == expected


@pytest.mark.parametrize(("part", "expected"), [("text", (339, 626_032)), ("vision", (39, 83_648))])
def test_the_tiny_inventory_has_the_counted_sizes(tiny, part, expected):
    assert totals(group(tiny, part)) == expected


def test_the_tiny_mtp_layer_has_49_tensors(tiny):
    assert len(group(tiny, "mtp")) == 49


def test_the_f32_tensors_are_those_of_the_release(released):
    wide = [name for name, info in name_map.inventory(released).items() if info.dtype == "F32"]
    assert Counter(name.rsplit(".", 1)[1] for name in wide) == {
        **dict.fromkeys(("hc_attn_base", "hc_attn_scale", "hc_ffn_base", "hc_ffn_scale"), 45),
        **dict.fromkeys(("A_log", "dt_bias"), 34),
        "e_score_correction_bias": 43,
    }


def test_every_name_occurs_once_on_both_sides(released):
    entries = [*name_map.text_tensors(released), *name_map.mtp_tensors(released)]
    for side in ("megatron", "hf"):
        names = Counter(name for entry in entries for name in getattr(entry, side))
        assert names.most_common(1)[0][1] == 1, names.most_common(3)


def test_megatron_holds_the_counted_number_of_tensors(released):
    text = [name for entry in name_map.text_tensors(released) for name in entry.megatron]
    assert len(text) == 25_437
    assert sum("mlp.experts." in name for name in text) == 24_192
    assert sum(len(entry.megatron) for entry in name_map.mtp_tensors(released)) == 600


def test_rows_have_as_many_elements_on_both_sides(tiny):
    sizes = name_map.sizes(tiny)
    for entry in name_map.text_tensors(tiny):
        rows = len(entry.hf) * sizes[entry.row.shape[0]]
        assert rows % len(entry.megatron) == 0, entry


def test_grouped_and_sequential_experts_are_found_under_the_same_row(tiny):
    prefix = "decoder.layers.4.mlp.experts."
    grouped = name_map.find(tiny, prefix + "linear_fc1.weight5")
    assert name_map.find(tiny, prefix + "local_experts.5.linear_fc1.weight") == grouped
    expert = "model.language_model.layers.4.mlp.experts.5."
    assert grouped.hf == (expert + "gate_proj.weight", expert + "up_proj.weight")


def test_a_parameter_without_a_row_is_named(tiny):
    with pytest.raises(ValueError, match=r"decoder\.layers\.8\.input_layernorm\.weight"):
        name_map.find(tiny, "decoder.layers.8.input_layernorm.weight")
