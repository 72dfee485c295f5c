"""Does a topology hold the whole model, each piece in its place? Every rank is built, on the meta device, in one process.

No weight and no GPU is needed: torch's fake process group pretends to any world size. What is counted comes from the
built modules; what is compared with comes from the name table.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch.testing._internal.distributed.fake_pg import FakeStore

from glm5_next.bridge.local_tensors import LocalTensor, local_tensors, tensor_split
from glm5_next.bridge.name_map import TensorInfo, inventory, text_tensors, trained_names
from glm5_next.bridge.transforms import part_range
from glm5_next.plugins.chunks import build_chunks
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.megatron_config import megatron_config
from glm5_next.plugins.topology import Topology

MAX_PROBLEMS = 20

# (HF name, start, stop along the split dimension); 0, 0 for a tensor that is not split.
Piece = tuple[str, int, int]


@dataclass(frozen=True)
class RankReport:
    """What one rank holds. `fp32_parameters` are kept in fp32 in a bf16 run; indexers are frozen."""

    rank: int
    tp: int
    pp: int
    ep: int
    layers: tuple[int, ...]
    parameters: int
    expert_parameters: int
    fp32_parameters: int
    frozen_parameters: int

    @property
    def weight_bytes(self) -> int:
        """Of a bf16 run."""
        return 2 * self.parameters + 2 * self.fp32_parameters


@dataclass
class AuditReport:
    """`tensors` and `parameters` of the whole checkpoint: built ones counted from the modules, the rest passed through."""

    ranks: list[RankReport] = field(default_factory=list)
    built_tensors: int = 0
    built_parameters: int = 0
    passed_tensors: int = 0
    passed_parameters: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> int:
        return self.built_tensors + self.passed_tensors

    @property
    def parameters(self) -> int:
        return self.built_parameters + self.passed_parameters


def audit(config: Glm5NextConfig, topology: Topology) -> Iterator[AuditReport]:
    """Yields the growing report after every rank and, last, with the coverage checked.

    Needs `cpu_runtime.install()` and no process group. `problems` is empty if the union of all ranks covers every
    trained tensor exactly once per replica, with the right slices, and nothing else.
    """
    report, pieces, wanted = AuditReport(), Counter[Piece](), inventory(config)
    counted: set[Piece] = set()
    for rank in range(topology.world_size):
        with _rank_tensors(config, topology, rank) as (tensors, layers):
            for local in tensors.values():
                _take(local, wanted, pieces, counted, report)
            report.ranks.append(_report(rank, tensors, layers))
        yield report
    held = {name for name, _, _ in pieces}
    report.built_tensors = len(held)
    passed = wanted.keys() - trained_names(config)
    report.passed_tensors = len(passed)
    report.passed_parameters = sum(math.prod(wanted[name].shape) for name in passed)
    _check_coverage(config, topology, wanted, pieces, report)
    yield report


@contextmanager
def _rank_tensors(
    config: Glm5NextConfig, topology: Topology, rank: int
) -> Iterator[tuple[dict[str, LocalTensor], tuple[int, ...]]]:
    dist.init_process_group("fake", rank=rank, world_size=topology.world_size, store=FakeStore())
    try:
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=topology.tp,
            pipeline_model_parallel_size=topology.pp,
            virtual_pipeline_model_parallel_size=topology.vpp,
            expert_model_parallel_size=topology.ep,
            expert_tensor_parallel_size=topology.etp,
            create_gloo_process_groups=False,
        )
        settings = megatron_config(
            config, topology, dtype=torch.bfloat16, on_cpu=True, perform_initialization=False, bf16=False
        )
        with torch.device("meta"):
            chunks = build_chunks(settings)
        tensors = local_tensors(chunks, config)
        layers = sorted({local.entry.layer for local in tensors.values() if local.entry.layer is not None})
        yield tensors, tuple(layers)
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def _take(
    local: LocalTensor,
    wanted: dict[str, TensorInfo],
    pieces: Counter[Piece],
    counted: set[Piece],
    report: AuditReport,
) -> None:
    """Counts a tensor's pieces, and its parameters where no rank before has held them."""
    row, names = local.entry.row, local.entry.hf
    shapes = [list(wanted[name].shape) for name in names]
    ranges = [(0, 0)] * len(names)
    if row.split is not None:
        rank, size, _ = tensor_split(local.entry)
        ranges = [part_range(row, shape[row.split], rank, size) for shape in shapes]
        for shape, (start, stop) in zip(shapes, ranges):
            shape[row.split] = stop - start
    rows = sum(shape[0] for shape in shapes) // len(local.entry.megatron)
    if list(local.tensor.shape) != [rows, *shapes[0][1:]] and local.entry.layer is not None:
        report.problems.append(
            f"{local.name} has shape {tuple(local.tensor.shape)}; its slice of the checkpoint has "
            f"{(rows, *shapes[0][1:])}"
        )
    if (local.name, *ranges[0]) not in counted:
        counted.add((local.name, *ranges[0]))
        report.built_parameters += min(local.tensor.numel(), rows * math.prod(shapes[0][1:]))  # without padding
    if local.index == 0:
        pieces.update((name, *range_) for name, range_ in zip(names, ranges))


def _report(rank: int, tensors: dict[str, LocalTensor], layers: tuple[int, ...]) -> RankReport:
    def count(wanted) -> int:
        return sum(local.tensor.numel() for local in tensors.values() if wanted(local))

    return RankReport(
        rank=rank,
        tp=mpu.get_tensor_model_parallel_rank(),
        pp=mpu.get_pipeline_model_parallel_rank(),
        ep=mpu.get_expert_model_parallel_rank(),
        layers=layers,
        parameters=count(lambda local: True),
        expert_parameters=count(lambda local: local.entry.row.is_expert),
        fp32_parameters=count(lambda local: local.entry.row.fp32_in_model),
        frozen_parameters=count(lambda local: not local.tensor.requires_grad),
    )


def _check_coverage(
    config: Glm5NextConfig,
    topology: Topology,
    wanted: dict[str, TensorInfo],
    pieces: Counter[Piece],
    report: AuditReport,
) -> None:
    """Every trained tensor once per replica, cut without gap or overlap."""
    names = trained_names(config)
    by_name: dict[str, list[tuple[int, int, int]]] = {}
    for (name, start, stop), count in pieces.items():
        by_name.setdefault(name, []).append((start, stop, count))
    problems = [f"{name}: no rank holds it" for name in sorted(names - by_name.keys())]
    problems += [f"{name}: is held but not trained" for name in sorted(by_name.keys() - names)]
    for entry in text_tensors(config):
        size = topology.etp if entry.row.is_expert else topology.tp
        replicas = topology.world_size // topology.pp // (size * (topology.ep if entry.row.is_expert else 1))
        for name in entry.hf:
            split = entry.row.split
            expected = {(0, 0): replicas * size}
            if split is not None:
                length = wanted[name].shape[split]
                expected = {part_range(entry.row, length, rank, size): replicas for rank in range(size)}
            found = {(start, stop): count for start, stop, count in by_name.get(name, [])}
            if found != expected and found:
                problems.append(f"{name}: ranks hold the slices {found}, expected {expected}")
    report.problems += problems[:MAX_PROBLEMS]
    if len(problems) > MAX_PROBLEMS:
        report.problems.append(f"and {len(problems) - MAX_PROBLEMS} more")
