"""Writing a checkpoint folder: all of it at once, byte for byte where nothing changed, nothing at all on an error."""

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5_next.bridge import checkpoint as checkpoint_module
from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.hf_folder import HfFolderWriter, staged_folder
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint

INDEX = "model.safetensors.index.json"
NAME = "model.language_model.layers.4.mlp.gate.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Checkpoint:
    return Checkpoint(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "hf"))


@pytest.fixture
def own_source(source, tmp_path) -> Path:
    """A copy of the source folder that a test may change."""
    return Path(shutil.copytree(source.folder, tmp_path / "source"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_unchanged_tensors_give_the_same_bytes_in_every_file(source, tmp_path):
    names = list(source.tensors)
    random.Random(0).shuffle(names)
    with HfFolderWriter(tmp_path / "out", source=source) as writer:
        for name in names[:150]:
            writer.add(name, source.read(name))
        writer.copy_from_source(names[150:])
    assert contents(tmp_path / "out") == contents(source.folder)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_changed_tensor_changes_its_shard_only(source, tmp_path):
    with HfFolderWriter(tmp_path / "out", source=source) as writer:
        writer.add(NAME, source.read(NAME) + 1)
        writer.copy_from_source(name for name in source.tensors if name != NAME)
    before, after = contents(source.folder), contents(tmp_path / "out")
    assert {name for name in before if before[name] != after[name]} == {source.tensors[NAME].file}
    assert torch.equal(Checkpoint(tmp_path / "out").read(NAME), source.read(NAME) + 1)


def test_tensors_are_copied_in_small_pieces_too(source, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "PIECE_ELEMENTS", 100)
    with HfFolderWriter(tmp_path / "out", source=source) as writer:
        writer.copy_from_source(source.tensors)
    assert contents(tmp_path / "out") == contents(source.folder)


def test_what_the_source_header_says_besides_is_kept(own_source, tmp_path):
    path = next(own_source.glob("*.safetensors"))
    save_file(load_file(path), path, metadata={"format": "pt", "note": "by hand"})
    (own_source / INDEX).write_text(json.dumps(json.loads((own_source / INDEX).read_text()) | {"metadata": {"a": 1}}))
    source = Checkpoint(own_source)
    for dtype in ("source", "float32"):
        out = tmp_path / f"out-{dtype}"
        with HfFolderWriter(out, source=source, dtype=dtype) as writer:
            writer.copy_from_source(source.tensors)
        assert Checkpoint(out).metadata[path.name] == {"format": "pt", "note": "by hand"}
        metadata = json.loads((out / INDEX).read_text())["metadata"]
        sizes = sum(s.end - s.begin for s in Checkpoint(out).tensors.values())
        assert metadata == {"a": 1, "total_size": sizes}


def test_float32_keeps_values_layout_and_config_but_for_dtypes(source, tmp_path):
    with HfFolderWriter(tmp_path / "out", source=source, dtype="float32") as writer:
        writer.add(NAME, source.read(NAME).float())
        writer.copy_from_source(name for name in source.tensors if name != NAME)
    out = Checkpoint(tmp_path / "out")
    out.check_inventory()
    assert {stored.dtype for stored in out.tensors.values()} == {"F32"}
    assert {n: s.file for n, s in out.tensors.items()} == {n: s.file for n, s in source.tensors.items()}
    assert all(torch.equal(out.read(name), source.read(name).float()) for name in source.tensors)
    expected = json.loads(json.dumps(source.raw_config).replace('"bfloat16"', '"float32"'))
    assert out.raw_config == expected and list(out.raw_config) == list(expected)


def test_one_file_without_an_index_stays_that(own_source, tmp_path):
    merged = {name: tensor for path in own_source.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for path in (*own_source.glob("*.safetensors"), own_source / INDEX):
        path.unlink()
    save_file(merged, own_source / "model.safetensors")
    source = Checkpoint(own_source)
    with HfFolderWriter(tmp_path / "out", source=source) as writer:
        writer.copy_from_source(source.tensors)
    assert contents(tmp_path / "out") == contents(own_source)


def test_other_files_are_carried_over_but_no_foreign_weights(own_source, tmp_path):
    for name in ("README.md", "vocab.txt", "pytorch_model.bin", "old.pt", ".hidden", "pytorch_model.bin.index.json"):
        (own_source / name).write_text(name)
    (own_source / "original").mkdir()
    (own_source / "original" / "x.txt").write_text("x")
    source = Checkpoint(own_source)
    with HfFolderWriter(tmp_path / "out", source=source) as writer:
        writer.copy_from_source(source.tensors)
    left_out = {"pytorch_model.bin", "old.pt", ".hidden", "pytorch_model.bin.index.json", "original"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {p.name for p in own_source.iterdir()} - left_out


def test_permissions_follow_the_umask(source, tmp_path):
    with HfFolderWriter(tmp_path / "out", source=source) as writer:
        writer.copy_from_source(source.tensors)
    (tmp_path / "ordinary").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


# --- refusals --------------------------------------------------------------------------------------------------------


def fails(source: Checkpoint, out: Path, use, match: str, **options) -> None:
    with pytest.raises(ValueError, match=match):
        with HfFolderWriter(out, source=source, **options) as writer:
            use(writer)
    assert [path for path in out.parent.iterdir() if path != source.folder] == []


@pytest.mark.parametrize(
    ("name", "tensor", "match"),
    [
        (NAME + "x", torch.zeros(8, 64, dtype=torch.bfloat16), r"gate\.weightx.*has no such tensor"),
        (NAME, torch.zeros(64, 8, dtype=torch.bfloat16), r"gate\.weight: got torch.bfloat16 \[64, 8\].*\[8, 64\]"),
        (NAME, torch.zeros(8, 64), r"gate\.weight: got torch.float32.*stores torch.bfloat16"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(source, tmp_path, name, tensor, match):
    fails(source, tmp_path / "out", lambda writer: writer.add(name, tensor), match)


def test_a_tensor_given_twice_is_refused(source, tmp_path):
    fails(source, tmp_path / "out", lambda writer: writer.copy_from_source([NAME, NAME]), f"{NAME}: written twice")


def test_tensors_that_never_came_are_named(source, tmp_path):
    rest = [name for name in source.tensors if name != NAME]
    fails(
        source, tmp_path / "out", lambda writer: writer.copy_from_source(rest), f"1 tensors were never written: {NAME}"
    )
    fails(source, tmp_path / "out", lambda writer: None, r"324 tensors were never written.*\(314 more\)")


def test_an_error_in_the_block_leaves_nothing(source, tmp_path):
    for error in (RuntimeError("stop"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            with HfFolderWriter(tmp_path / "out", source=source) as writer:
                writer.copy_from_source([NAME])
                raise error
        assert list(tmp_path.iterdir()) == []


def test_an_output_with_content_is_refused_untouched(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="out: exists and is not an empty folder"):
        with HfFolderWriter(out, source=source):
            pytest.fail("the block must not run")
    assert contents(out) == {"mine.txt": b"mine"} and list(tmp_path.iterdir()) == [out]
    with pytest.raises(ValueError, match=r"mine\.txt: exists"):
        with HfFolderWriter(out / "mine.txt", source=source):
            pytest.fail("the block must not run")


def test_an_empty_output_folder_is_taken(source, tmp_path):
    (tmp_path / "out").mkdir()
    with HfFolderWriter(tmp_path / "out", source=source) as writer:
        writer.copy_from_source(source.tensors)
    assert contents(tmp_path / "out") == contents(source.folder)


def test_an_output_that_was_filled_meanwhile_is_not_overwritten(tmp_path):
    with pytest.raises(OSError):
        with staged_folder(tmp_path / "out") as folder:
            (folder / "ours").write_text("ours")
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "theirs").write_text("theirs")
    assert contents(tmp_path / "out") == {"theirs": b"theirs"} and len(list(tmp_path.iterdir())) == 1


def test_an_output_in_the_source_is_refused(source):
    with pytest.raises(ValueError, match="choose a folder outside it"):
        HfFolderWriter(source.folder / "out", source=source)


def test_a_link_that_leads_out_of_the_source_is_not_copied(own_source, tmp_path):
    (own_source / "notes.txt").symlink_to("/etc/hostname")
    source = Checkpoint(own_source)
    fails(source, tmp_path / "out", lambda writer: writer.copy_from_source(source.tensors), r"notes\.txt: leads out")


def test_a_full_disk_is_noticed_before_writing(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    fails(
        source,
        tmp_path / "out",
        lambda writer: pytest.fail("the block must not run"),
        r"out: needs .* the disk has 0\.0 GB left",
    )


def test_an_unknown_dtype_is_refused(source, tmp_path):
    fails(source, tmp_path / "out", lambda writer: None, "dtype is 'float16'", dtype="float16")
