"""Every tensor in turn: deleted, renamed, doubled, of another shape or dtype. Each is named, and no model is touched."""

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5_next.bridge import load
from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.dist_read import DistCheckpoint
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.runtime.convert import hf_to_megatron, megatron_to_hf
from glm5_next.plugins.chunks import build_chunks
from glm5_next.plugins.megatron_config import megatron_config
from glm5_next.plugins.topology import Topology
from tests.support import tiny

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module", params=[False, True], ids=["bf16", "fp8"])
def folder(request, tmp_path_factory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "hf", layers=4, experts=2, fp8=request.param)


def refusal(function, *args) -> str:
    with pytest.raises(ValueError) as error:
        function(*args)
    return str(error.value)


def damages(name: str, stored) -> dict[str, tuple[dict, str]]:
    """Damage -> what the files then hold in place of the tensor, and what has to be said."""
    shape = (*stored.shape[:-1], stored.shape[-1] + 1)
    dtype = "F16" if stored.dtype != "F16" else "BF16"
    return {
        "deleted": ({}, f"1 missing: {name}"),
        "renamed": ({name + ".": stored}, f"1 unexpected: {name}."),
        "shape": ({name: replace(stored, shape=shape)}, f"1 of wrong shape: {name} is {list(shape)}"),
        "dtype": ({name: replace(stored, dtype=dtype)}, f"1 of wrong dtype: {name} is {dtype}"),
    }


def test_every_tensor_in_turn_is_named_whatever_happened_to_it(folder):
    checkpoint = Checkpoint(folder)
    checkpoint.check_inventory()
    whole = checkpoint.tensors
    for name, stored in whole.items():
        for damage, (instead, message) in damages(name, stored).items():
            checkpoint.tensors = {key: value for key, value in whole.items() if key != name} | instead
            assert message in refusal(checkpoint.check_inventory), (name, damage)


@pytest.mark.parametrize("folder", [True], indirect=True, ids=["fp8"])
def test_every_tensor_in_turn_is_named_when_two_shards_hold_it(folder, tmp_path):
    own = Path(shutil.copytree(folder, tmp_path / "hf"))
    weight_map = json.loads((own / INDEX).read_text())["weight_map"]
    files = sorted(set(weight_map.values()))
    held = {file: load_file(own / file) for file in files}
    for name, home in weight_map.items():
        other = own / files[files.index(home) - 1]
        original = other.read_bytes()
        save_file({**held[other.name], name: held[home][name]}, other)
        assert f"in {max(home, other.name)} and also in {min(home, other.name)}: {name}" in refusal(Checkpoint, own)
        other.write_bytes(original)
    Checkpoint(own).check_inventory()


def test_no_parameter_is_touched_before_everything_is_checked(folder):
    tiny.start_single_process()
    checkpoint = Checkpoint(folder)
    config = megatron_config(checkpoint.config, Topology(), dtype=torch.bfloat16, on_cpu=True, mtp_num_layers=1)
    chunks = build_chunks(config)
    state = [tensor for tensor in chunks[0].state_dict(keep_vars=True).values() if isinstance(tensor, torch.Tensor)]
    for tensor in state:
        tensor.data.fill_(float("nan"))
    whole, last = checkpoint.tensors, list(checkpoint.tensors)[-1]
    with mock.patch.object(load, "read_values", side_effect=load.read_values) as reads:
        for instead, message in damages(last, whole[last]).values():
            checkpoint.tensors = {key: value for key, value in whole.items() if key != last} | instead
            assert message in refusal(load.load_weights, chunks, checkpoint)
        assert not reads.called and all(tensor.isnan().all() for tensor in state)
        checkpoint.tensors = whole
        load.load_weights(chunks, checkpoint)
        assert reads.called and all(tensor.isfinite().all() for tensor in state)


# A distributed checkpoint is not to be trusted either.


class Evil:
    def __init__(self, victim: Path):
        self.victim = victim

    def __reduce__(self):
        return Path.touch, (self.victim,)


@pytest.fixture
def converted(folder, tmp_path) -> Path:
    hf_to_megatron(folder, tmp_path / "megatron")
    return tmp_path / "megatron"


def test_a_pickle_that_calls_anything_is_refused_and_does_not_run(converted, tmp_path):
    pickle.loads(pickle.dumps(Evil(tmp_path / "control")))
    assert (tmp_path / "control").exists(), "the attack is none"
    (converted / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "victim")))
    assert f"{converted / '.metadata'}: is not what torch writes (asks for pathlib" in refusal(
        megatron_to_hf, converted, tmp_path / "back", None
    )
    assert not (tmp_path / "victim").exists() and not (tmp_path / "back").exists()


def tampered(folder: Path, change) -> None:
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def outside(metadata) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = "../secret"


def beyond_the_end(metadata) -> None:
    for place in metadata.storage_data.values():
        place.offset += 10**12


def overlapping(metadata) -> None:
    for place in metadata.storage_data.values():
        place.offset = 0


def absurd(metadata) -> None:
    for tensor in metadata.state_dict_metadata.values():
        if hasattr(tensor, "size"):
            tensor.size = torch.Size([10**9] * len(tensor.size))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (outside, "lies in no file of the folder"),
        (beyond_the_end, "where .metadata says a tensor lies"),
        (overlapping, "__0_0.distcp: no tensor at byte 0"),
        (absurd, "has shape (1000000000, "),
        (lambda metadata: metadata.state_dict_metadata.pop("output_layer.weight"), "has no tensor output_layer.weight"),
    ],
    ids=["outside", "beyond the end", "overlapping", "absurd", "missing"],
)
def test_blocks_that_cannot_be_are_refused_by_name(converted, tmp_path, change, message):
    tampered(converted, change)
    assert message in refusal(megatron_to_hf, converted, tmp_path / "back", None)
    assert not (tmp_path / "back").exists()


def test_what_was_not_tampered_with_is_read(converted, tmp_path):
    tampered(converted, lambda metadata: None)
    assert DistCheckpoint(converted).blocks
    megatron_to_hf(converted, tmp_path / "back", None)
