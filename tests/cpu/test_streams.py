"""Conversion, export, saved folder and weight sync give the same tensors, in the order and form that servers need."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glm5_next.bridge.checkpoint import TORCH_DTYPES, Checkpoint
from glm5_next.bridge.export import export_weights, save_hf_folder
from glm5_next.bridge.load import load_weights
from glm5_next.bridge.name_map import model_tensors, on_disk, together
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.runtime import weight_sync
from glm5_next.launchers.runtime.convert import hf_to_megatron, megatron_to_hf
from glm5_next.plugins.chunks import build_chunks
from glm5_next.plugins.megatron_config import megatron_config
from glm5_next.plugins.topology import Topology
from tests.cpu.test_weight_sync import DictSink
from tests.support import tiny

LAYER = "model.language_model.layers."
# What one call has to bring, by names inside a layer; the scales belong to their tensors.
FUSED = [
    ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    ["self_attn.q_conv1d.weight", "self_attn.k_conv1d.weight", "self_attn.v_conv1d.weight"],
    ["self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"],
    ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    ["mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"],
    ["mlp.experts.1.gate_proj.weight", "mlp.experts.1.up_proj.weight"],
]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("source") / "hf"
    return Checkpoint(write_tiny_checkpoint(folder, layers=4, experts=2, fp8=True, expert_width=160))


@pytest.fixture(scope="module")
def model(source) -> torch.nn.Module:
    tiny.start_single_process()
    config = megatron_config(source.config, Topology(), dtype=torch.bfloat16, on_cpu=True, mtp_num_layers=1)
    (chunk,) = build_chunks(config)
    load_weights([chunk], source)
    return chunk


def stream(model: torch.nn.Module, source: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    return export_weights([model], source.config)


def bits(tensor: Tensor) -> tuple:
    return tensor.dtype, tuple(tensor.shape), tensor.view(-1).view(torch.uint8).numpy().tobytes()


def of_folder(folder: Path, names: list[str]) -> dict[str, tuple]:
    checkpoint = Checkpoint(folder)
    return {name: bits(checkpoint.read(name)) for name in names}


def test_all_ways_out_give_the_same_tensors(source, model, tmp_path):
    expected = {name: bits(tensor) for name, tensor in stream(model, source)}
    names = list(expected)
    assert set(names) == {n for entry in model_tensors(source.config, mtp=True) for n in on_disk(entry, source.config)}
    assert expected == of_folder(source.folder, names)
    save_hf_folder(stream(model, source), source, tmp_path / "saved")
    hf_to_megatron(source.folder, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "converted", None)
    sink = DictSink()
    weight_sync.publish(stream(model, source), [sink], 1)
    assert expected == of_folder(tmp_path / "saved", names) == of_folder(tmp_path / "converted", names)
    assert expected == {name: bits(tensor) for name, tensor in sink.held.items()}


def test_a_changed_parameter_leaves_by_every_way(source, model, tmp_path):
    """The control: what is compared above does come from the model."""
    parameter = dict(model.named_parameters())["module.decoder.layers.0.self_attention.out_norm.weight"]
    before = parameter.data.clone()
    try:
        parameter.data += 1
        name = f"{LAYER}0.self_attn.o_norm.weight"
        save_hf_folder(stream(model, source), source, tmp_path / "saved")
        changed = {n for n, tensor in stream(model, source) if bits(tensor) != bits(source.read(n))}
        assert changed == {name} and not torch.equal(Checkpoint(tmp_path / "saved").read(name), source.read(name))
    finally:
        parameter.data.copy_(before)


def test_every_tensor_is_contiguous_and_of_the_files_dtype(source, model):
    for name, tensor in stream(model, source):
        assert tensor.is_contiguous() and tensor.dtype == TORCH_DTYPES[source.tensors[name].dtype], name


def test_what_servers_fuse_comes_in_one_run_and_one_bucket(source, model, monkeypatch):
    monkeypatch.setattr(weight_sync, "BUCKET_BYTES", 1)
    sink = DictSink()
    weight_sync.publish(stream(model, source), [sink], 1)
    names = [name for bucket in sink.buckets for name, _ in bucket]
    keys = [key for key, _ in groupby(names, key=together)]
    assert len(keys) == len(set(keys)), "a group is torn apart"
    of = {name: number for number, bucket in enumerate(sink.buckets) for name, _ in bucket}
    found = 0
    for fused in FUSED:
        for layer in range(5):
            present = [f"{LAYER}{layer}.{name}" for name in fused if f"{LAYER}{layer}.{name}" in of]
            assert len(present) in (0, len(fused)), present
            assert len({of[name] for name in present}) <= 1, present
            found += bool(present)
    assert found == 3 + 3 + 2 + 1 + 4 + 4
    scaled = [name for name in of if name.endswith("_scale_inv")]
    assert scaled and all(of[name] == of[name.removesuffix("_scale_inv")] for name in scaled)


def test_a_bf16_stream_of_an_fp8_checkpoint_has_no_scales(source, model):
    plain = dict(export_weights([model], source.config, "bfloat16"))
    assert not any(name.endswith("_scale_inv") or tensor.dtype == torch.float8_e4m3fn for name, tensor in plain.items())
    assert len(plain) == sum(not name.endswith("_scale_inv") for name, _ in stream(model, source))
