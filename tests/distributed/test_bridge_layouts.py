"""A checkpoint goes into every layout of ranks and comes out with the same bits; each rank holds what it should."""

import hashlib
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from glm5_next.bridge import export, load, local_tensors
from glm5_next.bridge.checkpoint import TORCH_DTYPES, Checkpoint
from glm5_next.bridge.name_map import model_tensors
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.plugins.chunks import build_chunks
from glm5_next.plugins.megatron_config import megatron_config
from glm5_next.plugins.topology import Topology
from tests.support import tiny  # noqa: F401 - installs the CPU runtime
from tests.support.encoded import GLOBAL_LAYER, decode, write_encoded_checkpoint
from tests.support.faults import Fault, edit, planted
from tests.support.ranks import run_ranks

TP2 = Topology(world_size=2, tp=2)
EP2 = Topology(world_size=2, ep=2)
# Name -> layers of the model and layout; 5 and 9 layers fill no number of stages evenly.
LAYOUTS = {
    "one": (5, Topology()),
    "tp2": (5, TP2),
    "tp4": (5, Topology(world_size=4, tp=4)),
    "pp2": (5, Topology(world_size=2, pp=2)),
    "pp4": (5, Topology(world_size=4, pp=4)),
    "pp4_deeper": (9, Topology(world_size=4, pp=4)),
    "pp2_vpp2": (9, Topology(world_size=2, pp=2, vpp=2)),
    "ep2": (5, EP2),
    "ep4": (5, Topology(world_size=4, ep=4)),
    "etp2": (5, Topology(world_size=2, etp=2)),
    "tp2_pp2": (5, Topology(world_size=4, tp=2, pp=2)),
    "tp2_ep2": (5, Topology(world_size=2, tp=2, ep=2)),
    "pp2_ep2": (9, Topology(world_size=4, pp=2, ep=2)),
}
Folders = tuple[Path, ...]
# Parameters that TP ranks share out: end of the name -> dimension, and HF tensors that are fused in it.
SPLIT = {
    "embedding.word_embeddings.weight": (0, 1),
    "output_layer.weight": (0, 1),
    "self_attention.in_proj.weight": (0, 3),
    "self_attention.conv1d.weight": (0, 3),
    "self_attention.f_b_proj.weight": (0, 1),
    "self_attention.g_b_proj.weight": (0, 1),
    "self_attention.beta_proj.weight": (0, 1),
    "self_attention.A_log": (0, 1),
    "self_attention.dt_bias": (0, 1),
    "self_attention.out_proj.weight": (-1, 1),
    "self_attention.linear_q_up_proj.weight": (0, 1),
    "self_attention.linear_kv_up_proj.weight": (0, 1),
    "self_attention.linear_proj.weight": (-1, 1),
    "linear_fc1.weight": (0, 2),
    "linear_fc2.weight": (-1, 1),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[int, Folders]:
    """By number of layers: a bf16 checkpoint of random values, and an fp32 one of encoded values."""
    folders = {}
    for layers in (5, 9):
        folder = tmp_path_factory.mktemp("hf")
        sizes = {"layers": layers, "dense_layers": 2, "experts": 4 if layers == 9 else 8, "mtp": False, "vision": False}
        plain = write_tiny_checkpoint(folder / "random", **sizes)
        wide = Checkpoint(write_tiny_checkpoint(folder / "float32", dtype="float32", **sizes))
        folders[layers] = (plain, write_encoded_checkpoint(folder / "encoded", wide))
    return folders


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def described(name: str, tensor: Tensor) -> tuple[str, torch.dtype, tuple[int, ...], str]:
    return name, tensor.dtype, tuple(tensor.shape), digest(tensor)


def stored_tensors(checkpoint: Checkpoint, *, mtp: bool = False) -> list:
    """What an export has to yield, in order."""
    names = [name for entry in model_tensors(checkpoint.config, mtp=mtp) for name in entry.hf]
    return [described(name, checkpoint.read(name)) for name in names]


def start(topology: Topology) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        virtual_pipeline_model_parallel_size=topology.vpp,
        expert_model_parallel_size=topology.ep,
        expert_tensor_parallel_size=topology.etp,
    )


def poisoned_chunks(checkpoint: Checkpoint, topology: Topology) -> list[torch.nn.Module]:
    """This rank's chunks with NaN in every parameter and buffer."""
    dtype = TORCH_DTYPES[{"bfloat16": "BF16", "float32": "F32"}[checkpoint.config.dtype]]
    config = megatron_config(checkpoint.config, topology, dtype=dtype, on_cpu=True, perform_initialization=False)
    chunks = build_chunks(config)
    for _, tensor in held(chunks):
        tensor.data.fill_(float("nan"))
    return chunks


def held(chunks: list[torch.nn.Module]) -> list[tuple[str, Tensor]]:
    """Everything that Megatron would save, as live tensors: parameters and persistent buffers, under local names."""
    return [
        (f"{number}.{name}", tensor)
        for number, chunk in enumerate(chunks)
        for name, tensor in chunk.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    ]


def load_and_export(folder: Path, topology: Topology) -> dict:
    """Of this rank: tensors left unwritten or written twice, and what it exports."""
    checkpoint = Checkpoint(folder)
    chunks = poisoned_chunks(checkpoint, topology)
    with mock.patch.object(load, "_fill", side_effect=load._fill) as fill:
        load.load_weights(chunks, checkpoint)
    written = Counter(id(call.args[0].tensor) for call in fill.call_args_list)
    wrong = [name for name, tensor in held(chunks) if written[id(tensor)] != 1 or not tensor.isfinite().all()]
    misplaced = misplaced_tensors(chunks, topology, checkpoint) if folder.name == "encoded" else []
    exported = [described(*item) for item in export.export_weights(chunks, checkpoint.config)]
    return {"wrong": wrong, "misplaced": misplaced, "exported": exported}


def misplaced_tensors(chunks: list[torch.nn.Module], topology: Topology, checkpoint: Checkpoint) -> list[str]:
    """Tensors of an encoded checkpoint whose values are not those that this rank, by its number, has to hold.

    Independent of the bridge: layers from the stages, experts and shares from Megatron's order of ranks (TP fastest,
    then EP, then DP, then PP).
    """
    rank, world = dist.get_rank(), topology.world_size
    stages = topology.layers_per_stage(checkpoint.config.num_layers)
    experts_here = checkpoint.config.num_experts // topology.ep
    first_expert = rank // topology.etp % topology.ep * experts_here
    wrong = []
    for name, tensor in held(chunks):
        number, *words = name.split(".")
        digits = decode(tensor)
        layer, expert = GLOBAL_LAYER, 0
        if "layers" in words:
            stage = int(number) * topology.pp + rank // (world // topology.pp)
            layer = stages[stage][int(words[words.index("layers") + 1])]
        if "local_experts" in words:
            expert = first_expert + int(words[words.index("local_experts") + 1])
        size = topology.etp if "local_experts" in words else topology.tp
        right = bool((digits["layer"] == layer).all() and (digits["expert"] == expert).all())
        if not (right and _share_is(tensor, digits, name, rank % size, size)):
            wrong.append(name)
    return wrong


def _share_is(tensor: Tensor, digits: dict[str, Tensor], name: str, rank: int, size: int) -> bool:
    """Rows (or columns) `rank` of `size` of every HF tensor that is fused here, one HF tensor after the other."""
    dim, parts = next((split for end, split in SPLIT.items() if name.endswith(end)), (None, 1))
    if dim is None:
        return bool(digits["row"].flatten()[0] == name.endswith("alpha_post") + 2 * name.endswith("alpha_res"))
    share = tensor.shape[dim] // parts
    expected = torch.arange(rank * share, (rank + 1) * share)
    along, across = ("row", "column") if dim == 0 else ("column", "row")
    for part, values in enumerate(tensor.chunk(parts, dim)):
        found = decode(values)
        line = found[along].movedim(dim, 0).flatten(1)[:, 0] if tensor.ndim > 1 else found[along]
        if not torch.equal(line, expected) or (found["part"] != part).any():
            return False
        if tensor.ndim > 1 and found[across].movedim(dim, -1).flatten()[0] != 0:
            return False
    return True


def in_layout(folders: Folders, topology: Topology, fault: Fault | None = None) -> list[dict]:
    start(topology)
    with nullcontext() if fault is None else planted(fault):
        return [load_and_export(folder, topology) for folder in folders]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_comes_out_of_every_layout_bit_by_bit(sources, layout):
    layers, topology = LAYOUTS[layout]
    expected = [stored_tensors(Checkpoint(folder)) for folder in sources[layers]]
    for rank, results in enumerate(run_ranks(in_layout, topology.world_size, sources[layers], topology, timeout=60)):
        for result, tensors in zip(results, expected, strict=True):
            assert not result["wrong"], f"rank {rank}: not written exactly once: {result['wrong'][:5]}"
            assert not result["misplaced"], f"rank {rank}: holds another rank's part of {result['misplaced'][:5]}"
            assert result["exported"] == tensors, f"rank {rank}: {first_difference(result['exported'], tensors)}"


def first_difference(found: list, expected: list) -> str:
    pair = next(((a, b) for a, b in zip(found, expected) if a != b), (len(found), len(expected)))
    return f"exported {pair[0]}, the source has {pair[1]}"


# Faults that must show, and where.


def read_contiguously(original):
    """A rank's share of the fused tensor in one piece, instead of its share of every part."""

    def fill(local, shares, checkpoint):
        row, whole = local.entry.row, torch.cat([checkpoint.read(name) for name in local.entry.hf])
        if row.split is None or len(local.entry.hf) == 1:
            return original(local, shares, checkpoint)
        rank, size, _ = local_tensors.tensor_split(local.entry)
        return local.tensor.data.copy_(whole.chunk(size, row.split)[rank])

    return fill


def leave_out_the_selection_bias(original):
    return lambda local, *rest: None if local.name.endswith("router.expert_bias") else original(local, *rest)


def rotate_experts(original):
    """Experts of a rank take each other's places, on the way in and on the way out."""
    number = "int(words[position])"
    return edit(number, f"({number} + 1) % len(expert_range(config))")(original)


def test_fused_tensors_that_are_split_in_one_piece_show(sources):
    encoded = sources[5][1:]
    fault = Fault(load, "_fill", read_contiguously)
    for (result,) in run_ranks(in_layout, 2, encoded, TP2, fault, timeout=60):
        assert {name.split(".", 4)[-1] for name in result["misplaced"]} >= {
            "self_attention.in_proj.weight",
            "self_attention.conv1d.weight",
            "mlp.linear_fc1.weight",
        }
        assert result["exported"] != stored_tensors(Checkpoint(encoded[0]))


def test_experts_in_each_others_places_show_where_they_are_held_though_the_export_is_right(sources):
    encoded = sources[5][1:]
    fault = Fault(local_tensors, "_global_name", rotate_experts)
    for (result,) in run_ranks(in_layout, 2, encoded, EP2, fault, timeout=60):
        assert result["misplaced"] and all(".experts.local_experts." in name for name in result["misplaced"])
        assert result["exported"] == stored_tensors(Checkpoint(encoded[0]))


def test_a_buffer_that_is_not_written_shows(sources):
    fault = Fault(load, "_fill", leave_out_the_selection_bias)
    ((result,),) = run_ranks(in_layout, 1, sources[5][:1], Topology(), fault, timeout=60)
    assert result["wrong"] and all(name.endswith("router.expert_bias") for name in result["wrong"])


def names_of_refusals(folder: Path) -> list[str]:
    """What load and export say of a model with a buffer that no row of the table knows."""
    start(Topology())
    checkpoint = Checkpoint(folder)
    chunks = poisoned_chunks(checkpoint, Topology())
    load.load_weights(chunks, checkpoint)
    local_tensors.unwrapped(chunks[0]).decoder.layers[1].register_buffer("routing_table", torch.ones(3))
    messages = []
    for attempt in (
        lambda: load.load_weights(chunks, checkpoint),
        lambda: list(export.export_weights(chunks, checkpoint.config)),
    ):
        with pytest.raises(ValueError) as caught:
            attempt()
        messages.append(str(caught.value))
    return messages


def test_a_persistent_buffer_without_a_row_is_refused_by_load_and_by_export(sources):
    for message in run_ranks(names_of_refusals, 1, sources[5][0], timeout=60)[0]:
        assert message == "decoder.layers.1.routing_table: this parameter has no row in bridge/name_map.py"


# A vocabulary that tensor parallelism does not divide.


def padding_and_export(folder: Path, topology: Topology) -> tuple[dict[str, Tensor], list]:
    """The rows of this rank's embedding and head beyond its share of the vocabulary, and the export."""
    start(topology)
    checkpoint = Checkpoint(folder)
    chunks = poisoned_chunks(checkpoint, topology)
    load.load_weights(chunks, checkpoint)
    padding = {}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        weight = local_tensors.unwrapped(chunks[0]).get_parameter(name)
        first = dist.get_rank() * len(weight)
        padding[name] = weight.detach()[max(0, checkpoint.config.vocab_size - first) :].clone()
    return padding, [described(*item) for item in export.export_weights(chunks, checkpoint.config)]


@pytest.mark.parametrize(("tp", "vocab", "padding"), [(2, 121, [0, 1]), (4, 121, [0, 0, 0, 3]), (4, 122, [0, 0, 0, 2])])
def test_a_vocabulary_that_does_not_divide_is_padded_with_zeros_and_cut_on_export(tmp_path, tp, vocab, padding):
    folder = write_tiny_checkpoint(tmp_path / "hf", vocab=vocab, layers=1, mtp=False, vision=False)
    expected = stored_tensors(Checkpoint(folder))
    results = run_ranks(padding_and_export, tp, folder, Topology(world_size=tp, tp=tp), timeout=60)
    for (rows, exported), count in zip(results, padding, strict=True):
        assert {name: len(weight) for name, weight in rows.items()} == dict.fromkeys(rows, count)
        assert not any(weight.any() for weight in rows.values())
        assert exported == expected
