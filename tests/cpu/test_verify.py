"""Comparing two folders finds every difference and nothing else."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5_next.bridge import checkpoint as checkpoint_module
from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.hf_folder import HfFolderWriter
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.bridge.verify import ValueDifference, compare

INDEX = "model.safetensors.index.json"
NAME = "model.language_model.layers.4.mlp.gate.weight"


@pytest.fixture(scope="module")
def a(tmp_path_factory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "hf")


@pytest.fixture
def b(a, tmp_path) -> Path:
    return Path(shutil.copytree(a, tmp_path / "hf"))


def edit(folder: Path, name: str, change) -> None:
    path = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_copy_is_equal(a, b):
    comparison = compare(a, b)
    assert comparison.equal and comparison.lines() == [] and comparison.num_tensors == 324


def test_two_seeds_differ_in_every_tensor_and_in_no_file(a, tmp_path):
    comparison = compare(a, write_tiny_checkpoint(tmp_path / "other", seed=1))
    assert len(comparison.values) == 324 and comparison.files == ()


def test_one_changed_bit_is_found(a, b):
    edit(
        b, NAME, lambda tensor: (tensor.view(torch.int16) ^ (torch.arange(512).view(8, 64) == 70)).view(torch.bfloat16)
    )
    before = Checkpoint(a).read(NAME).double()
    after = Checkpoint(b).read(NAME).double()
    comparison = compare(a, b)
    assert comparison.values == (ValueDifference(NAME, 1, 512, (before - after).abs().max().item()),)
    assert not comparison.equal and not comparison.tensors_equal
    (line,) = comparison.lines()
    assert line[:2] == ("values", NAME) and "1/512 differ" in line[2]


def test_small_pieces_give_the_same_result(a, b, monkeypatch):
    edit(b, NAME, lambda tensor: tensor + torch.arange(512).view(8, 64))
    whole = compare(a, b)
    monkeypatch.setattr(checkpoint_module, "PIECE_ELEMENTS", 100)
    assert compare(a, b) == whole and whole.values[0].num_different == 511


def test_equal_nans_are_equal_and_a_new_nan_is_the_worst_difference(a, b, tmp_path):
    edit(b, NAME, lambda tensor: tensor.masked_fill(torch.arange(64) == 3, math.nan))
    c = Path(shutil.copytree(b, tmp_path / "c"))
    assert compare(b, c).equal
    (value,) = compare(a, b).values
    assert value.num_different == 8 and math.isnan(value.worst)


def test_the_sign_of_zero_counts(a, b, tmp_path):
    edit(b, NAME, torch.zeros_like)
    c = Path(shutil.copytree(b, tmp_path / "c"))
    edit(c, NAME, torch.neg)
    assert compare(b, c).values == (ValueDifference(NAME, 512, 512, 0.0),)


def test_rows_list_the_worst_values_first(a, b):
    for number, name in enumerate(("lm_head.weight", NAME, "model.language_model.norm.weight")):
        edit(b, name, lambda tensor, add=(2.0, math.nan, 4.0)[number]: tensor + add)
    assert [name for _, name, _ in compare(a, b).lines()] == [
        NAME,
        "model.language_model.norm.weight",
        "lm_head.weight",
    ]


def test_missing_tensors_and_other_shapes_are_named(a, b):
    edit(b, NAME, lambda tensor: tensor[:7])
    index = json.loads((b / INDEX).read_text())
    file = index["weight_map"].pop("lm_head.weight")
    (b / INDEX).write_text(json.dumps(index))
    tensors = load_file(b / file)
    del tensors["lm_head.weight"]
    save_file(tensors, b / file)
    comparison = compare(a, b)
    assert comparison.only_in_a == ("lm_head.weight",) and comparison.only_in_b == ()
    assert compare(b, a).only_in_b == ("lm_head.weight",)
    assert comparison.shapes == ((NAME, (8, 64), (7, 64)),)
    assert comparison.values == ()


def test_a_float32_copy_differs_in_dtypes_but_not_in_values(a, tmp_path):
    source = Checkpoint(a)
    with HfFolderWriter(tmp_path / "out", source=source, dtype="float32") as writer:
        writer.copy_from_source(source.tensors)
    comparison = compare(a, tmp_path / "out")
    narrow = [name for name, stored in source.tensors.items() if stored.dtype == "BF16"]
    assert [name for name, *_ in comparison.dtypes] == narrow and comparison.values == ()
    assert comparison.files == (
        ("config.json", "keys differ: dtype"),
        ("config.json", "keys differ: text_config.dtype"),
    )


def test_a_rounded_copy_shows_the_rounding(tmp_path):
    wide = write_tiny_checkpoint(tmp_path / "wide", dtype="float32")
    narrow = write_tiny_checkpoint(tmp_path / "narrow", dtype="bfloat16")
    comparison = compare(wide, narrow)
    assert len(comparison.values) == len(comparison.dtypes) == 291
    assert max(value.worst for value in comparison.values) < 2**-6


def test_the_distribution_over_shards_does_not_count(a, b):
    tensors = {name: tensor for path in b.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for path in (*b.glob("*.safetensors"), b / INDEX):
        path.unlink()
    save_file(tensors, b / "model.safetensors")
    assert compare(a, b).equal


def test_other_files_are_compared(a, b):
    (b / "generation_config.json").unlink()
    (b / "README.md").write_text("new")
    (b / "tokenizer.json").write_text((b / "tokenizer.json").read_text() + " ")
    config = json.loads((b / "config.json").read_text())
    config["text_config"].pop("topk_method")
    config["text_config"]["mhc"] = 1
    (b / "config.json").write_text(json.dumps(config | {"new": None}))
    comparison = compare(a, b)
    assert comparison.tensors_equal and not comparison.equal
    assert comparison.files == (
        ("README.md", "only in b"),
        ("config.json", "keys differ: new"),
        ("config.json", "keys differ: text_config.mhc"),
        ("config.json", "keys differ: text_config.topk_method"),
        ("generation_config.json", "only in a"),
        ("tokenizer.json", "bytes differ"),
    )


def test_config_json_is_compared_by_content(a, b):
    (b / "config.json").write_text(json.dumps(json.loads((b / "config.json").read_text()), sort_keys=True))
    assert compare(a, b).equal
