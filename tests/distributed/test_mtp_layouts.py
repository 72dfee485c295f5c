"""The multi-token-prediction layer in every kind of layout: weights in and out with the same bits, gradients of one process.

The checkpoint that goes in and out is FP8 with blocks that end early and that tensor parallelism cuts.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.export import export_weights
from glm5_next.bridge.load import load_weights
from glm5_next.bridge.local_tensors import unwrapped
from glm5_next.bridge.name_map import model_tensors, mtp_tensors, on_disk
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.runtime.convert import hf_to_megatron
from glm5_next.launchers.runtime.optimizer_state import METADATA
from glm5_next.plugins.chunks import build_chunks, wrap_ddp
from glm5_next.plugins.megatron_config import megatron_config
from glm5_next.plugins.topology import Topology
from tests.distributed.test_bridge_layouts import described, held, start
from tests.support.ranks import run_ranks
from tests.support.tiny import relative_error, tokens

SIZES = {"layers": 4, "dense_layers": 1, "experts": 2, "vision": False}
LAYOUTS = {
    "tp2_ep2": Topology(world_size=2, tp=2, ep=2),
    "pp2": Topology(world_size=2, pp=2),
    "pp2_vpp2": Topology(world_size=2, pp=2, vpp=2),
    "tp2_pp2": Topology(world_size=4, tp=2, pp=2),
}


def built(checkpoint: Checkpoint, topology: Topology, dtype: torch.dtype, *, mtp: bool = True) -> list[torch.nn.Module]:
    start(topology)
    extra = {"mtp_num_layers": 1 if mtp else None, "perform_initialization": False}
    config = megatron_config(checkpoint.config, topology, dtype=dtype, on_cpu=True, **extra)
    chunks = build_chunks(config)
    for _, tensor in held(chunks):
        tensor.data.fill_(float("nan"))
    load_weights(chunks, checkpoint)
    return chunks


def exported(folder: Path, topology: Topology, mtp: bool) -> list[Any]:
    checkpoint = Checkpoint(folder)
    chunks = built(checkpoint, topology, torch.bfloat16, mtp=mtp)
    return [described(*item) for item in export_weights(chunks, checkpoint.config)]


@pytest.fixture(scope="module")
def fp8(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fp8") / "hf"
    return write_tiny_checkpoint(folder, fp8=True, hidden=192, expert_width=160, dense_width=288, q_lora=144, **SIZES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_fp8_checkpoint_with_its_mtp_layer_comes_out_bit_by_bit(fp8, layout):
    checkpoint = Checkpoint(fp8)
    config = checkpoint.config
    names = [name for entry in model_tensors(config, mtp=True) for name in on_disk(entry, config)]
    expected = [described(name, checkpoint.read(name)) for name in names]
    assert any(name.endswith("layers.4.self_attn.o_proj.weight_scale_inv") for name in names)
    topology = LAYOUTS[layout]
    for found in run_ranks(exported, topology.world_size, fp8, topology, True, timeout=90):
        assert found == expected


def test_a_model_without_the_layer_exports_everything_else(fp8):
    config = Checkpoint(fp8).config
    mtp = {name for entry in mtp_tensors(config) for name in on_disk(entry, config)}
    (found,) = run_ranks(exported, 1, fp8, Topology(), False, timeout=90)
    assert {name for name, *_ in found} == Checkpoint(fp8).tensors.keys() - mtp


def not_as_loaded(folder: Path, converted: Path, topology: Topology) -> list[str]:
    """Tensors of the rank that Megatron reads from a converted checkpoint otherwise than the bridge from the source."""
    chunks = built(Checkpoint(folder), topology, torch.bfloat16)
    expected = [tensor.clone() for _, tensor in held(chunks)]
    for _, tensor in held(chunks):
        tensor.data.fill_(float("nan"))
    tree = {f"model{i}": unwrapped(chunk).sharded_state_dict(metadata=METADATA) for i, chunk in enumerate(chunks)}
    loaded = dist_checkpointing.load(tree, str(converted))
    for index, chunk in enumerate(chunks):
        unwrapped(chunk).load_state_dict(loaded[f"model{index}"], strict=True)
    found = held(chunks)
    return [name for (name, tensor), wanted in zip(found, expected, strict=True) if not torch.equal(tensor, wanted)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_loads_a_converted_checkpoint_as_the_bridge_loads_its_source(fp8, tmp_path, layout):
    hf_to_megatron(fp8, tmp_path / "megatron")
    topology = LAYOUTS[layout]
    for wrong in run_ranks(not_as_loaded, topology.world_size, fp8, tmp_path / "megatron", topology, timeout=90):
        assert not wrong


def test_megatron_loads_another_checkpoint_otherwise(fp8, tmp_path):
    sizes = {"hidden": 192, "expert_width": 160, "dense_width": 288, "q_lora": 144}
    other = write_tiny_checkpoint(tmp_path / "hf", seed=1, fp8=True, **sizes, **SIZES)
    hf_to_megatron(other, tmp_path / "megatron")
    (wrong,) = run_ranks(not_as_loaded, 1, fp8, tmp_path / "megatron", Topology(), timeout=90)
    assert len(wrong) > 90


def gradients(folder: Path, topology: Topology) -> dict[str, Tensor]:
    """Of both losses on three rows, as whole HF tensors: the export of a model that holds gradients as its weights."""
    checkpoint = Checkpoint(folder)
    chunks = built(checkpoint, topology, torch.float32)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = chunks[0].config
    wrapped = wrap_ddp(chunks, config, distributed_optimizer=False)
    rows = [tokens(40, seed) for seed in range(4)]
    iterators = [iter(rows) for _ in wrapped]

    def forward_step(rows, chunk):
        ids = next(rows)
        out = chunk(ids, torch.arange(40)[None], None, labels=ids.roll(-1, 1))
        return out, lambda losses: (losses.sum(), torch.tensor(losses.numel()), {})

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=list(wrapped),
        num_microbatches=len(rows),
        seq_length=40,
        micro_batch_size=1,
    )
    for chunk in wrapped:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter))
    return {name: tensor.clone() for name, tensor in export_weights(chunks, checkpoint.config)}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("fp32") / "hf", dtype="float32", **SIZES)
    return folder, run_ranks(gradients, 1, folder, Topology(), timeout=90)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_one_process(one_process, layout):
    folder, expected = one_process
    topology = LAYOUTS[layout]
    trained = [name for name, gradient in expected.items() if gradient.any()]
    assert sum(".layers.4." in name for name in trained) > 15
    for found in run_ranks(gradients, topology.world_size, folder, topology, timeout=120):
        errors = {name: relative_error(found[name], expected[name]) for name in trained}
        assert max(errors.values()) < 1e-4, max(errors.items(), key=lambda item: item[1])
