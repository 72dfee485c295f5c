"""Megatron distributed checkpoint, a converted one or a run's -> Hugging Face folder."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glm5_next.bridge.checkpoint import TORCH_DTYPES, Checkpoint, as_bytes
from glm5_next.bridge.conversion import Buffers, Options, Report, convert, in_pieces, input_files, largest_group
from glm5_next.bridge.dist_names import Region, regions
from glm5_next.bridge.dist_read import DistCheckpoint
from glm5_next.bridge.dist_write import BLOCK_BYTES, cut
from glm5_next.bridge.fp8 import quantize
from glm5_next.bridge.hf_folder import (
    ExportDtype,
    check_outside,
    copy_tensor,
    create_shards,
    finish_folder,
    plan_folder,
    stored_as,
)
from glm5_next.bridge.name_map import FP8_BLOCK, mtp_tensors, on_disk, passed_through, text_tensors
from glm5_next.bridge.pieces import Progress, Work, flush, identity
from glm5_next.bridge.shards import ShardPlan, ShardWriter, Stored
from glm5_next.bridge.values import STAGING_BYTES


@dataclass(frozen=True)
class Unit:
    """What is written at once: a tensor and, of an FP8 one, its scales. Without regions it is copied from the source."""

    names: tuple[str, ...]
    files: frozenset[str]
    num_bytes: int
    regions: tuple[Region, ...] = ()


def to_hf(
    dist: DistCheckpoint, source: Checkpoint, out: Path, *, dtype: ExportDtype = "source", options: Options
) -> Report:
    """Writes the weights of a distributed checkpoint with the shards, config and other files of `source`.

    Vision tower, and multi-token-prediction layer if the checkpoint has none, are copied from `source`. Holds one block
    of about 64 MiB per thread and what it becomes. Raises ValueError before anything is written if a tensor is missing
    or has another shape.
    """
    source.check_inventory()
    check_outside(out, source)
    has_mtp = _check(dist, source)
    plans = plan_folder(source, dtype)
    units = _units(dist, source, plans, dtype, has_mtp)
    pieces = in_pieces(units, lambda unit: unit.num_bytes)
    settings = {
        "conversion": "Megatron to Hugging Face",
        "checkpoint": str(dist.folder.resolve()),
        "source": str(source.folder.resolve()),
        "dtype": dtype,
        "pieces": len(pieces),
    }
    work = Work(out, inputs={**_checkpoint_files(dist), **input_files(source)}, settings=settings)
    shards, buffers = ShardWriter(work.folder, plans), Buffers()

    def do(number: int, progress: Progress) -> dict[str, Any]:
        for unit in pieces[number]:
            _write(unit, shards, dist, source, buffers)
            progress(unit.num_bytes)
        for file in sorted(frozenset[str]().union(*(unit.files for unit in pieces[number]))):
            flush(work.folder / file)
        return {}

    return convert(
        work,
        lambda folder: create_shards(folder, plans),
        [sum(unit.num_bytes for unit in piece) for piece in pieces],
        do,
        lambda folder: finish_folder(folder, source, plans, dtype),
        options,
        per_worker=_per_worker(units),
        shared=2 * STAGING_BYTES,
        group_bytes=largest_group((unit.names[0], unit.num_bytes) for unit in units),
        passed_through=passed_through(source.config, mtp=has_mtp),
    )


def _check(dist: DistCheckpoint, source: Checkpoint) -> bool:
    """Whether the checkpoint has the multi-token-prediction layers; everything it has to have is there."""
    config = source.config
    mtp = [region for entry in mtp_tensors(config) for region in regions(entry, config)]
    has_mtp = any(region.key in dist.shapes for region in mtp)
    for entry in text_tensors(config):
        for region in regions(entry, config):
            dist.check(region)
    for region in mtp if has_mtp else ():
        dist.check(region)
    return has_mtp


def _units(
    dist: DistCheckpoint, source: Checkpoint, plans: Sequence[ShardPlan], dtype: ExportDtype, has_mtp: bool
) -> list[Unit]:
    """Everything that is written, in the order of the files."""
    config, target = source.config, stored_as(source.config, dtype)
    places: dict[str, Stored] = {name: stored for plan in plans for name, stored in plan.tensors.items()}
    units: list[Unit] = []
    taken: set[str] = set()

    def unit(names: Sequence[str], from_: Sequence[Region] = ()) -> Unit:
        stored = [places[name] for name in names]
        taken.update(names)
        size = sum(place.end - place.begin for place in stored)
        return Unit(tuple(names), frozenset(place.file for place in stored), size, tuple(from_))

    for entry in (*text_tensors(config), *(mtp_tensors(config) if has_mtp else ())):
        disk, found = list(on_disk(entry, target)), list(regions(entry, config))
        for name in entry.hf:
            names = [stored for stored in disk if stored.startswith(name)]
            units.append(unit(names, [region for region in found if region.hf == name]))
    units += [unit([name]) for name in places if name not in taken]
    return sorted(units, key=lambda unit: (places[unit.names[0]].file, places[unit.names[0]].begin))


def _write(unit: Unit, shards: ShardWriter, dist: DistCheckpoint, source: Checkpoint, buffers: Buffers) -> None:
    if not unit.regions:
        for name in unit.names:
            copy_tensor(shards, name, source)
    elif not _copy(unit, shards, dist):
        _write_values(unit, shards, dist, buffers)


def _copy(unit: Unit, shards: ShardWriter, dist: DistCheckpoint) -> bool:
    """Copies a tensor's bytes between the files; False if its dtype changes or TP ranks have cut its rows."""
    dtype = TORCH_DTYPES[shards.tensors[unit.names[0]].dtype]
    if any(dist.dtypes[region.key] != dtype for region in unit.regions):
        return False
    spans = [dist.spans(region) for region in unit.regions]
    if any(span is None for span in spans):
        return False
    shards.copy(unit.names[0], [part for span in spans for part in span or ()])
    return True


def _write_values(unit: Unit, shards: ShardWriter, dist: DistCheckpoint, buffers: Buffers) -> None:
    name, *scale_name = unit.names
    scales: list[torch.Tensor] = []

    def blocks() -> Iterator[memoryview]:
        for region in unit.regions:
            held = dist.dtypes[region.key]
            wanted = held if scale_name else TORCH_DTYPES[shards.tensors[name].dtype]
            for part in cut(region, wanted.itemsize, FP8_BLOCK if scale_name else 1):
                values = buffers.take((part.num_rows, *part.inner_shape), wanted)
                dist.read(part, values)
                if scale_name:
                    values, scale = quantize(values, name)
                    scales.append(scale)
                yield as_bytes(values)

    shards.write(name, blocks())
    for stored in scale_name:
        shards.write(stored, [as_bytes(torch.cat(scales))])


def _per_worker(units: Sequence[Unit]) -> int:
    """A thread's block as it is read, the same as it is written, and the operations between."""
    rows = max(
        (
            math.prod(region.shape) // region.num_rows * FP8_BLOCK * 4
            for unit in units
            if len(unit.names) > 1
            for region in unit.regions
        ),
        default=0,
    )
    largest = min(BLOCK_BYTES, max(4 * unit.num_bytes for unit in units)) + rows
    return 2 * largest + 2 * STAGING_BYTES


def _checkpoint_files(dist: DistCheckpoint) -> dict[str, Any]:
    files = [dist.folder / ".metadata", *sorted(dist.folder.glob("*.distcp"))]
    return {f"{dist.folder.name}/{path.name}": identity(path) for path in files}
