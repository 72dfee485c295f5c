"""Hugging Face folder -> Megatron distributed checkpoint that any layout of ranks can load."""

import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from glm5_next.bridge.checkpoint import TORCH_DTYPES, Checkpoint
from glm5_next.bridge.conversion import Buffers, Options, Report, convert, in_pieces, input_files, largest_group
from glm5_next.bridge.dist_names import COMMON_STATE, Region, extra_state, regions
from glm5_next.bridge.dist_write import (
    DTYPES,
    cut,
    file_name,
    without_checksums,
    write_copy,
    write_metadata,
    write_object,
    write_tensor,
)
from glm5_next.bridge.name_map import model_tensors, passed_through
from glm5_next.bridge.pieces import Progress, Work, flush
from glm5_next.bridge.values import STAGING_BYTES, read_values
from glm5_next.plugins.config import Glm5NextConfig


@dataclass(frozen=True)
class Block:
    """One torch.save: rows of an HF tensor, or (`region` None) an object that Megatron asks for."""

    key: str
    dtype: str = ""
    region: Region | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.region.shape) * DTYPES[self.dtype].itemsize if self.region else 0


def to_megatron(
    checkpoint: Checkpoint, out: Path, *, precision: str, complete: Callable[[Path], None], options: Options
) -> Report:
    """Writes every tensor that a model can hold, multi-token-prediction layers included, as a distributed checkpoint.

    `precision`: dtype of the parameters that are not fp32 by contract, as "bfloat16" or "float32". `complete` is called
    with the folder before it takes its name. Holds one block of at most 64 MiB per thread, whatever the model's size.
    Raises ValueError before anything is written if the checkpoint does not fit its config.
    """
    checkpoint.check_inventory()
    config = checkpoint.config
    pieces = in_pieces(_blocks(config, precision), lambda block: block.num_bytes)
    settings = {
        "conversion": "Hugging Face to Megatron",
        "source": str(checkpoint.folder.resolve()),
        "precision": precision,
        "pieces": len(pieces),
    }
    work = Work(out, inputs=input_files(checkpoint), settings=settings)
    buffers = Buffers()

    def do(number: int, progress: Progress) -> dict[str, Any]:
        return _write_piece(checkpoint, work.folder, number, pieces[number], buffers, progress)

    def finish(folder: Path) -> None:
        keys = _merged(work.records(len(pieces)))
        write_metadata(folder, keys, save_id=_digest(work.manifest))
        complete(folder)

    with without_checksums():
        return convert(
            work,
            lambda folder: None,
            [sum(block.num_bytes for block in piece) for piece in pieces],
            do,
            finish,
            options,
            per_worker=_per_worker(pieces),
            shared=2 * STAGING_BYTES,
            group_bytes=largest_group(
                (block.region.hf, block.num_bytes) for piece in pieces for block in piece if block.region
            ),
            passed_through=passed_through(config, mtp=True),
        )


def _blocks(config: Glm5NextConfig, precision: str) -> Iterator[Block]:
    """Everything that is written, in model order."""
    yield Block(COMMON_STATE)
    for entry in model_tensors(config, mtp=True):
        dtype = "float32" if entry.row.fp32_in_model else precision
        if state := extra_state(entry, config):
            yield Block(state)
        for region in regions(entry, config):
            for part in cut(region, DTYPES[dtype].itemsize):
                yield Block(part.key, dtype, part)


def _per_worker(pieces: list[list[Block]]) -> int:
    """A thread's block, what FP8 values and casts pass through, and the operations on a strip of it."""
    return max(block.num_bytes for piece in pieces for block in piece) + 2 * STAGING_BYTES


def _write_piece(
    checkpoint: Checkpoint, folder: Path, number: int, piece: list[Block], buffers: Buffers, progress: Progress
) -> dict[str, Any]:
    """Writes one file; returns its part of what `write_metadata` needs."""
    name = file_name(number)
    record: dict[str, Any] = {}
    temporary = folder / f".{name}.tmp"
    with temporary.open("w+b") as file:
        for block in piece:
            region = block.region
            if region is None:
                place = write_object(file, {} if block.key == COMMON_STATE else None)
                record[block.key] = {"place": [name, *place]}
                continue
            content = record.setdefault(block.key, {"dtype": block.dtype, "size": region.whole, "blocks": []})
            place = _write_block(checkpoint, file, region, buffers.take(region.shape, DTYPES[block.dtype]))
            content["blocks"].append({"offset": region.offset, "shape": region.shape, "place": [name, *place]})
            progress(block.num_bytes)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / name)
    flush(folder)
    return record


def _write_block(checkpoint: Checkpoint, file: io.BufferedRandom, region: Region, block: Tensor) -> tuple[int, int]:
    """Appends a region to a file, by way of `block` only if its values change."""
    stored = checkpoint.stored(region.hf)
    if TORCH_DTYPES[stored.dtype] != block.dtype:
        read_values(checkpoint, region.hf, block.view(region.num_rows, *region.inner_shape), row=region.row)
        return write_tensor(file, block)
    row_bytes = math.prod(region.inner_shape) * block.itemsize
    path = checkpoint.folder / stored.file
    with path.open("rb", buffering=0) as source:
        begin = stored.begin + region.row * row_bytes
        return write_copy(file, block, source.fileno(), begin, f"{path}: tensor {region.hf!r}")


def _merged(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A key's blocks may lie in several pieces."""
    keys: dict[str, dict[str, Any]] = {}
    for record in records:
        for key, content in record.items():
            if key in keys:
                keys[key]["blocks"] += content["blocks"]
            else:
                keys[key] = content
    return keys


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
