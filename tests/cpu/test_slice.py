"""The first layers of a checkpoint as a checkpoint: tensors byte for byte, config and index cut to them."""

import json
from pathlib import Path

import pytest
import torch

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.conversion import Options
from glm5_next.bridge.name_map import LANGUAGE, VISION
from glm5_next.bridge.reference import load_reference
from glm5_next.bridge.slice import slice_checkpoint, sliced_config
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.bridge.tiny_config import TinyModel, composite_config
from glm5_next.bridge.verify import compare
from glm5_next.launchers.runtime.convert import hf_to_megatron, megatron_to_hf


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("source") / "hf"
    return Checkpoint(write_tiny_checkpoint(folder, layers=8, dense_layers=3, experts=4))


def cut(source: Checkpoint, out: Path, layers: int, **parts: bool) -> Checkpoint:
    slice_checkpoint(source, out, layers=layers, options=Options(), **parts)
    return Checkpoint(out)


def read(checkpoint: Checkpoint, name: str) -> bytes:
    return b"".join(checkpoint.raw_bytes(name))


@pytest.mark.parametrize("layers", [1, 4, 8])
def test_every_tensor_is_the_sources_and_the_mtp_layer_moves_down(source, tmp_path, layers):
    sliced = cut(source, tmp_path / "out", layers)
    sliced.check_inventory()
    moved = 0
    for name in sliced.tensors:
        old = name.replace(f"{LANGUAGE}layers.{layers}.", f"{LANGUAGE}layers.8.")
        moved += old != name
        assert read(sliced, name) == read(source, old), name
    assert moved == (0 if layers == 8 else 37)
    text, before = sliced.raw_config["text_config"], source.raw_config["text_config"]
    assert text["layer_types"] == before["layer_types"][:layers]
    assert text["mlp_layer_types"] == before["mlp_layer_types"][:layers]
    assert text["indexer_types"] == ["full"] * layers and text["num_hidden_layers"] == layers
    assert [key for key in text if text[key] != before[key]] == (
        [] if layers == 8 else ["num_hidden_layers", "layer_types", "mlp_layer_types", "indexer_types"]
    )


@pytest.mark.parametrize(("mtp", "vision"), [(False, True), (True, False), (False, False)])
def test_mtp_layer_and_vision_tower_can_be_dropped(source, tmp_path, mtp, vision):
    sliced = cut(source, tmp_path / "out", 4, mtp=mtp, vision=vision)
    sliced.check_inventory()
    assert sliced.config.num_mtp_layers == int(mtp) and (sliced.config.vision is not None) == vision
    assert any(name.startswith(VISION) for name in sliced.tensors) == vision
    assert any(name.startswith(f"{LANGUAGE}layers.4.") for name in sliced.tensors) == mtp


def test_transformers_loads_it_and_its_logits_depend_on_the_layers_that_are_kept(source, tmp_path):
    ids = torch.arange(1, 30)[None]
    logits = {}
    for layers, vision in ((4, False), (5, True)):
        cut(source, tmp_path / f"{layers}", layers, vision=vision)
        logits[layers] = load_reference(tmp_path / f"{layers}")(input_ids=ids).logits
    whole = load_reference(source.folder)
    whole.model.language_model.config.num_hidden_layers = 4
    assert torch.equal(whole(input_ids=ids).logits, logits[4])
    assert not torch.equal(logits[4], logits[5])


def test_the_bridge_converts_it_there_and_back(source, tmp_path):
    cut(source, tmp_path / "hf", 4)
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", None)
    assert compare(tmp_path / "hf", tmp_path / "back").equal


def test_all_layers_are_the_checkpoint_itself(source, tmp_path):
    comparison = compare(source, cut(source, tmp_path / "out", 8))
    assert comparison.equal, comparison.lines()


def test_an_fp8_checkpoint_keeps_scales_and_list_of_what_is_not_quantised(tmp_path):
    source = Checkpoint(write_tiny_checkpoint(tmp_path / "hf", fp8=True, layers=5, experts=2, vision=False))
    raw = json.loads((source.folder / "config.json").read_text())
    modules = [f"model.language_model.layers.{layer}.self_attn.kv_b_proj" for layer in (3, 4, 5)]
    raw["quantization_config"]["modules_to_not_convert"] += modules
    (source.folder / "config.json").write_text(json.dumps(raw))
    sliced = cut(Checkpoint(source.folder), tmp_path / "out", 4)
    sliced.check_inventory()
    kept = sliced.raw_config["quantization_config"]["modules_to_not_convert"]
    assert [module for module in kept if "kv_b" in module] == [modules[0], modules[1]]  # 5 has become 4
    assert any(name.endswith("_scale_inv") for name in sliced.tensors)


def test_a_number_of_layers_that_is_not_there_is_refused_and_nothing_is_written(source, tmp_path):
    for layers in (0, 9):
        with pytest.raises(ValueError, match=f"--layers is {layers}; the checkpoint has 8 layers"):
            cut(source, tmp_path / "out", layers)
    assert list(tmp_path.iterdir()) == []


def test_the_released_config_is_cut_in_every_list():
    released = json.loads((Path(__file__).parents[2] / "launchers/released_config.json").read_text())
    raw = sliced_config(released, 4, mtp=True, vision=True)
    text = raw.get("text_config", raw)
    assert not [key for key, value in text.items() if isinstance(value, list) and len(value) == 45]
    assert text["layer_types"][3] != text["layer_types"][2]


def test_a_list_of_token_ids_is_not_cut_even_if_there_are_as_many_as_layers():
    ids = composite_config(TinyModel())["text_config"]["eos_token_id"]
    raw = composite_config(TinyModel(layers=len(ids)))
    assert sliced_config(raw, 1, mtp=True, vision=True)["text_config"]["eos_token_id"] == ids
