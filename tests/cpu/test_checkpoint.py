"""Opening a checkpoint refuses whatever is not exactly right and names it; reading gives the file's bytes."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from glm5_next.bridge import shards
from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00005.safetensors"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "hf", layers=4, experts=2)


@pytest.fixture
def folder(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "hf"))


def edit_json(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def tensor_kinds(folder: Path) -> list[str]:
    """One tensor of every kind: layer, block and expert numbers make no kind."""
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    return list({re.sub(r"\.\d+\.", ".N.", name): name for name in names}.values())


def refused(folder: Path, *parts: str) -> str:
    """The checkpoint is refused at the latest by its inventory, with a message that has all the parts."""
    with pytest.raises(ValueError) as error:
        Checkpoint(folder).check_inventory()
    message = str(error.value)
    assert all(part in message for part in parts), message
    return message


# --- reading ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_what_safetensors_reads(pristine):
    checkpoint = Checkpoint(pristine)
    checkpoint.check_inventory()
    for file in sorted({stored.file for stored in checkpoint.tensors.values()}):
        for name, expected in load_file(pristine / file).items():
            got = checkpoint.read(name)
            assert got.dtype == expected.dtype and torch.equal(got, expected), name
            assert b"".join(checkpoint.raw_bytes(name)) == expected.view(torch.uint8).numpy().tobytes()


def test_rows_and_columns_equal_slices_of_safetensors(pristine):
    checkpoint = Checkpoint(pristine)
    for name in tensor_kinds(pristine):
        with safe_open(pristine / checkpoint.tensors[name].file, framework="pt") as file:
            whole = file.get_tensor(name)
        for dim, size in enumerate(whole.shape[:2] if whole.ndim == 2 else whole.shape[:1]):
            for start, stop in ((0, size), (size // 3, size // 3 * 2), (size - 1, size), (size, size)):
                got = checkpoint.read_rows(name, *((start, stop) if dim == 0 else (0, None, (start, stop))))
                assert torch.equal(got, whole.narrow(dim, start, stop - start)), (name, dim, start, stop)
                assert got.is_contiguous() and got.untyped_storage().nbytes() == got.nbytes
        if whole.ndim == 2:
            assert torch.equal(checkpoint.read_rows(name, 1, 2, (2, 5)), whole[1:2, 2:5])


O_PROJ = "model.language_model.layers.3.self_attn.o_proj.weight"


@pytest.mark.parametrize("dim", [0, 1])
def test_a_slice_reads_only_its_own_bytes(pristine, monkeypatch, dim):
    checkpoint, preadv, counted = Checkpoint(pristine), os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda *args: counted.append(preadv(*args)) or counted[-1])
    share = checkpoint.tensors[O_PROJ].shape[dim] // 4
    part = checkpoint.read_rows(O_PROJ, *((share, 2 * share) if dim == 0 else (0, None, (share, 2 * share))))
    assert sum(counted) == part.nbytes == checkpoint.read(O_PROJ).nbytes // 4


def test_rows_are_read_straight_into_the_memory_that_is_given(pristine):
    checkpoint, out = Checkpoint(pristine), torch.zeros(8, 96, dtype=torch.bfloat16)
    assert checkpoint.read_rows(O_PROJ, 2, 5, out=out[3:6]).data_ptr() == out[3].data_ptr()
    assert torch.equal(out[3:6], checkpoint.read(O_PROJ)[2:5]) and not out[:3].any() and not out[6:].any()


def test_tensors_outlive_the_files(folder):
    checkpoint = Checkpoint(folder)
    name = "model.language_model.norm.weight"
    before = checkpoint.read(name)
    expected = before.clone()
    for path in folder.iterdir():
        path.unlink()
    assert torch.equal(before, expected)


@pytest.mark.parametrize(
    ("name", "range_"),
    [
        ("lm_head.weight", (-1, 2)),
        ("lm_head.weight", (5, 4)),
        ("lm_head.weight", (0, 2, (0, 65))),
        ("model.language_model.norm.weight", (0, 2, (0, 1))),
    ],
)
def test_a_range_outside_the_tensor_is_refused(pristine, name, range_):
    with pytest.raises(ValueError, match=rf"{name}: rows"):
        Checkpoint(pristine).read_rows(name, *range_)


def test_an_unknown_tensor_is_refused_by_name(pristine):
    with pytest.raises(ValueError, match=r"has no tensor 'lm_head\.bias'"):
        Checkpoint(pristine).read("lm_head.bias")


def test_a_file_that_shrank_after_opening_is_noticed(folder):
    checkpoint = Checkpoint(folder)
    os.truncate(folder / FIRST, 5000)
    with pytest.raises(ValueError, match=r"00001-of-00005.*lm_head\.weight.*ends at byte"):
        checkpoint.read("lm_head.weight")


def test_scalars_are_read(folder):
    save_file({"x": torch.tensor(2.5)}, folder / FIRST)
    tensors, _ = shards.read_tensors(folder / FIRST, FIRST)
    assert tensors["x"].shape == ()
    checkpoint = Checkpoint.__new__(Checkpoint)
    checkpoint.folder, checkpoint.tensors = folder, tensors
    assert checkpoint.read("x").item() == 2.5 and checkpoint.read("x").shape == ()


def test_one_file_without_an_index_is_a_checkpoint(folder):
    merged = {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink()
    save_file(merged, folder / "model.safetensors")
    checkpoint = Checkpoint(folder)
    checkpoint.check_inventory()
    assert checkpoint.index_metadata is None
    assert torch.equal(checkpoint.read("lm_head.weight"), merged["lm_head.weight"])


def test_a_snapshot_of_the_hub_cache_is_a_checkpoint(pristine, tmp_path):
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(pristine.iterdir()):
        shutil.copyfile(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    Checkpoint(snapshot).check_inventory()


# --- every tensor in turn --------------------------------------------------------------------------------------------


def delete(tensors, weight_map, name):
    del tensors[name], weight_map[name]
    return "missing", name


def rename(tensors, weight_map, name):
    tensors[name + "x"] = tensors.pop(name)
    weight_map[name + "x"] = weight_map.pop(name)
    return "missing", "unexpected", name + "x"


def change_shape(tensors, weight_map, name):
    shape = list(tensors[name].shape)
    tensors[name] = torch.cat([tensors[name], tensors[name][:1]])
    return "of wrong shape", f"{name} is {list(tensors[name].shape)}, not {shape}"


def change_dtype(tensors, weight_map, name):
    tensors[name] = tensors[name].half()
    return "of wrong dtype", f"{name} is F16"


def forget_in_index(tensors, weight_map, name):
    del weight_map[name]
    return "in a shard but not in the index", name


def forget_in_shard(tensors, weight_map, name):
    del tensors[name]
    return "in the index but in no shard", name


@pytest.mark.parametrize("damage", [delete, rename, change_shape, change_dtype, forget_in_index, forget_in_shard])
def test_damage_to_any_kind_of_tensor_is_named(folder, damage):
    index = json.loads((folder / INDEX).read_text())
    for name in tensor_kinds(folder):
        weight_map, path = dict(index["weight_map"]), folder / index["weight_map"][name]
        original, tensors = path.read_bytes(), load_file(path)
        expected = damage(tensors, weight_map, name)
        save_file(tensors, path)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        message = refused(folder, *expected)
        assert "\n  1 " in message or "1 tensors are" in message, message
        path.write_bytes(original)


def test_a_second_copy_of_any_kind_of_tensor_is_named(folder):
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    files = sorted(set(weight_map.values()))
    for name in tensor_kinds(folder):
        home = weight_map[name]
        path = folder / files[files.index(home) - 1]
        original, tensors = path.read_bytes(), load_file(path)
        save_file({**tensors, name: load_file(folder / home)[name]}, path)
        refused(folder, "and also in", name, path.name, home)
        path.write_bytes(original)


def test_a_tensor_in_another_shard_than_the_index_says_is_named(folder):
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({"lm_head.weight": FIRST.replace("1-", "2-")}))
    refused(folder, "in another shard than the index says", "lm_head.weight")


def test_long_lists_are_cut_and_counted(folder):
    edit_json(folder / "config.json", lambda config: config["text_config"].update(n_routed_experts=9))
    message = refused(folder, "missing", "of wrong shape", "more)")
    assert len(message) < 6000 and message.count(", ") < 60


# --- hints -----------------------------------------------------------------------------------------------------------


def rewrite(folder: Path, change) -> None:
    """Replaces all tensors by `change(tensors)`, in one shard."""
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for path in folder.glob("*.safetensors"):
        path.unlink()
    tensors = change(tensors)
    save_file(tensors, folder / FIRST)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, FIRST)}))


def test_a_checkpoint_without_its_mtp_layer_gets_the_hint(folder):
    rewrite(folder, lambda tensors: {name: t for name, t in tensors.items() if ".layers.4." not in name})
    refused(folder, "31 missing", "set it to 0 in config.json")


def test_layers_beyond_the_config_get_the_hint(folder):
    edit_json(folder / "config.json", lambda config: config["text_config"].update(num_nextn_predict_layers=0))
    refused(folder, "31 unexpected", "num_nextn_predict_layers in config.json is too small")


def test_fp8_tensors_without_a_word_in_the_config_get_the_hint(folder):
    name = "model.language_model.layers.3.self_attn.q_a_proj.weight"
    scale = {name + "_scale_inv": torch.ones(1, 1)}
    rewrite(folder, lambda tensors: {**tensors, name: tensors[name].to(torch.float8_e4m3fn), **scale})
    refused(folder, "no quantization_config", "_scale_inv", f"{name} is F8_E4M3, not BF16")


def test_a_missing_vision_tower_gets_the_hint(folder):
    rewrite(folder, lambda tensors: {name: t for name, t in tensors.items() if "visual" not in name})
    refused(folder, "39 missing", "remove vision_config")


def test_what_transformers_widens_gets_the_hint(folder):
    rewrite(folder, lambda tensors: {n: t.float() if "conv1d" in n else t for n, t in tensors.items()})
    refused(folder, "9 of wrong dtype", "save_pretrained")


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        Checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("file", ["config.json", FIRST])
def test_an_absent_file_is_named(folder, file):
    (folder / file).unlink()
    refused(folder, file, "no such file")


def test_a_folder_without_weights_is_refused(folder):
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink()
    refused(folder, "found no *.safetensors file")


def test_shards_without_an_index_are_refused(folder):
    (folder / INDEX).unlink()
    refused(folder, INDEX, FIRST)


def test_a_shard_that_the_index_does_not_name_is_refused(folder):
    shutil.copyfile(folder / FIRST, folder / "left-over.safetensors")
    refused(folder, "left-over.safetensors", "remove")


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "x.bin", "x\0", 3])
def test_an_index_that_names_no_plain_shard_file_is_refused(folder, file):
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({"lm_head.weight": file}))
    refused(folder, INDEX, "lm_head.weight", "no plain *.safetensors file name")


@pytest.mark.parametrize("file", [FIRST, "config.json", INDEX])
def test_a_link_that_leads_out_is_refused(folder, tmp_path, file):
    shutil.move(folder / file, tmp_path / "elsewhere")
    (folder / file).symlink_to(tmp_path / "elsewhere")
    refused(folder, file, "leads out of the checkpoint folder")


def test_a_link_inside_the_folder_is_followed(folder):
    shutil.move(folder / FIRST, folder / "data")
    (folder / FIRST).symlink_to("data")
    Checkpoint(folder).check_inventory()


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "\xff", '{"weight_map": {}}', '{"weight_map": []}', "{}", "[" * 100_000, '{"a": 1, "a": 2}']
)
def test_a_broken_index_is_named(folder, text):
    (folder / INDEX).write_text(text, encoding="latin-1")
    refused(folder, INDEX)


def test_a_tensor_named_twice_in_the_index_is_refused(folder):
    text = (folder / INDEX).read_text().replace('"weight_map": {', f'"weight_map": {{"lm_head.weight": "{FIRST}",', 1)
    (folder / INDEX).write_text(text)
    refused(folder, INDEX, "'lm_head.weight' appears twice")


def test_a_config_of_another_model_is_refused(folder):
    edit_json(folder / "config.json", lambda config: config.update(model_type="llama"))
    refused(folder, "config.json", "'llama'")
