"""Hugging Face -> Megatron -> Hugging Face gives the same folder, from a conversion and from a training run."""

import shutil
from pathlib import Path

import pytest

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.bridge.verify import compare
from glm5_next.launchers.run_state import RunState
from glm5_next.launchers.runtime.checkpoint_folder import MARKER, STATE_FILE, Origin
from glm5_next.launchers.runtime.convert import check_conversion, hf_to_megatron, megatron_to_hf
from glm5_next.launchers.runtime.trainer import Trainer
from tests.support.training import batch, on_trainers, samples, settings

STATE = RunState(next_step=1, weights_version=1, prompt_cursor=1, seed=0, prompts_digest="d")


def refusal(function, *args) -> str:
    with pytest.raises(ValueError) as error:
        function(*args)
    return str(error.value)


def there(folder: Path, dtype: str) -> tuple[Path, Path]:
    """A source folder, with MTP layer and vision tower, and its distributed checkpoint."""
    source = write_tiny_checkpoint(folder / "hf", dtype=dtype, experts=4)
    hf_to_megatron(source, folder / "megatron")
    return source, folder / "megatron"


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> tuple[Path, Path]:
    return there(tmp_path_factory.mktemp("convert"), "bfloat16")


def check_there_and_back(source: Path, checkpoint: Path, out: Path) -> None:
    megatron_to_hf(checkpoint, out, None)
    assert compare(source, out).equal, compare(source, out).lines()


def test_there_and_back_is_the_same_folder_bit_by_bit(converted, tmp_path):
    check_there_and_back(*converted, tmp_path / "back")


def test_there_and_back_in_float32_too(tmp_path):
    check_there_and_back(*there(tmp_path, "float32"), tmp_path / "back")


def test_a_checkpoint_says_where_it_came_from_and_that_it_is_whole(converted):
    source, checkpoint = converted
    assert (checkpoint / MARKER).is_file() and not (checkpoint / STATE_FILE).exists()
    assert Origin.load(checkpoint).hf == str(source.resolve())


def test_a_source_that_has_moved_is_named_and_can_be_given(converted, tmp_path):
    source, checkpoint = converted
    orphan = shutil.copytree(checkpoint, tmp_path / "megatron")
    origin = (orphan / "origin.json").read_text().replace(str(source.resolve()), str(tmp_path / "gone"))
    (orphan / "origin.json").write_text(origin)
    assert f"{tmp_path / 'gone'}: no such folder" in refusal(megatron_to_hf, orphan, tmp_path / "back", None)
    assert not (tmp_path / "back").exists()
    megatron_to_hf(orphan, tmp_path / "back", source)
    assert compare(source, tmp_path / "back").equal


def test_a_checkpoint_that_was_not_finished_is_refused(converted, tmp_path):
    unfinished = shutil.copytree(converted[1], tmp_path / "megatron")
    (unfinished / MARKER).unlink()
    assert f"{unfinished}: has no COMPLETE marker" in refusal(megatron_to_hf, unfinished, tmp_path / "back", None)
    assert not (tmp_path / "back").exists()


def test_an_output_that_is_in_use_is_refused_and_left_alone(converted, tmp_path):
    source, checkpoint = converted
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("keep")
    assert f"{tmp_path / 'used'}: exists and is not empty" in refusal(hf_to_megatron, source, tmp_path / "used")
    assert f"{tmp_path / 'used'}: exists and is not" in refusal(megatron_to_hf, checkpoint, tmp_path / "used", None)
    assert [path.name for path in tmp_path.iterdir()] == ["used"]
    assert [path.read_text() for path in (tmp_path / "used").iterdir()] == ["keep"]


def test_a_source_with_a_missing_shard_is_refused_before_anything_is_written(converted, tmp_path):
    broken = shutil.copytree(converted[0], tmp_path / "hf")
    shard = sorted(broken.glob("*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refusal(hf_to_megatron, broken, tmp_path / "megatron")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def train_save_export(trainer: Trainer, update, checkpoint: Path, out: Path) -> None:
    trainer.train(update)
    trainer.save(checkpoint, STATE)
    trainer.export(out)


def test_a_checkpoint_of_a_run_converts_to_what_the_run_itself_exports(tmp_path):
    source = write_tiny_checkpoint(tmp_path / "hf", layers=4, experts=4, vision=False)
    run = settings(source, parallel__ranks=2, parallel__pp=2, parallel__vpp=2)
    checkpoint, exported = tmp_path / "checkpoints" / "step-000001", tmp_path / "export"
    on_trainers(run, train_save_export, batch(run, samples(2)), checkpoint, exported)
    megatron_to_hf(checkpoint, tmp_path / "converted", None)
    difference = compare(exported, tmp_path / "converted")
    assert difference.equal, difference.lines()
    assert not compare(source, exported).tensors_equal, "the run changed nothing, so nothing is tested"


# as the weights that a run starts from


def test_what_was_converted_of_this_source_can_be_started_from(converted):
    source, checkpoint = converted
    check_conversion(checkpoint, Checkpoint(source), "bf16")
    link = checkpoint.parent / "link"
    link.symlink_to(source)  # as prepare leaves it
    check_conversion(checkpoint, Checkpoint(link), "bf16")


def test_another_source_another_precision_a_run_and_half_a_conversion_are_refused(converted, tmp_path):
    source, checkpoint = converted
    mine = Checkpoint(source)
    assert "holds bf16 and model.precision is fp32" in refusal(check_conversion, checkpoint, mine, "fp32")
    other = Checkpoint(write_tiny_checkpoint(tmp_path / "other", dtype="bfloat16", experts=4))
    assert f"was made of {source.resolve()}, model.checkpoint is {other.folder}" in refusal(
        check_conversion, checkpoint, other, "bf16"
    )
    copy = shutil.copytree(checkpoint, tmp_path / "megatron")
    (copy / STATE_FILE).write_text("{}")
    assert "is the checkpoint of a run" in refusal(check_conversion, copy, mine, "bf16")
    (copy / MARKER).unlink()
    assert "not a finished checkpoint" in refusal(check_conversion, copy, mine, "bf16")


def test_a_conversion_from_before_the_source_got_another_config_is_refused(tmp_path):
    source, checkpoint = there(tmp_path, "bfloat16")
    shutil.rmtree(source)
    changed = Checkpoint(write_tiny_checkpoint(source, dtype="bfloat16", experts=8))
    assert "has shape (4," in refusal(check_conversion, checkpoint, changed, "bf16")
