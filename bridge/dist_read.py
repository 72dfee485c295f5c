"""Reads a Megatron distributed checkpoint (`torch_dist`) by ranges of rows, without a model and without a process group.

Blocks may be cut in any way: by our conversion, or by the ranks of a training run. `.metadata` is a pickle, so only the
classes that torch writes into it are let in; blocks are read as the bytes that they are.
"""

import io
import math
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from glm5_next.bridge.checkpoint import as_bytes
from glm5_next.bridge.dist_names import Region
from glm5_next.bridge.shards import transfer
from glm5_next.bridge.torch_file import FilePart, data_begin

METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "bfloat16", "float32", "float64", "float16", "int64", "int32", "uint8", "bool", "device"},
    "pathlib": {"PosixPath", "Path"},
    "collections": {"OrderedDict"},
}
PADDED_KEYS = ("embedding.word_embeddings.weight", "output_layer.weight")  # to a multiple of the saving TP size


@dataclass(frozen=True)
class SavedBlock:
    """A block of a tensor: place in the tensor, and the bytes begin.. of a file that hold it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: Path
    begin: int
    length: int


class DistCheckpoint:
    """The tensors of a distributed checkpoint. Raises ValueError naming file or key for whatever does not fit."""

    def __init__(self, folder: Path):
        self.folder = folder
        metadata = _read_metadata(folder / ".metadata")
        self.dtypes: dict[str, torch.dtype] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.blocks: dict[str, list[SavedBlock]] = {}
        for key, tensor in metadata.state_dict_metadata.items():
            if isinstance(tensor, TensorStorageMetadata):
                self.dtypes[key], self.shapes[key] = tensor.properties.dtype, tuple(tensor.size)
                self.blocks[key] = [
                    self._block(metadata.storage_data, key, tuple(c.offsets), tuple(c.sizes)) for c in tensor.chunks
                ]

    def _block(self, storage: Any, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> SavedBlock:
        place = storage.get(MetadataIndex(key, torch.Size(offset)))
        if place is None or Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"{self.folder / '.metadata'}: {key} at {offset} lies in no file of the folder")
        return SavedBlock(offset, shape, self.folder / place.relative_path, place.offset, place.length)

    def check(self, region: Region) -> None:
        """Raises ValueError unless the tensor is there in the shape that the model has."""
        held = self.shapes.get(region.key)
        if held is None:
            raise ValueError(f"{self.folder}: has no tensor {region.key} (for {region.hf})")
        is_padded = region.key in PADDED_KEYS and held[0] >= region.whole[0] and held[1:] == region.whole[1:]
        if held != region.whole and not is_padded:
            raise ValueError(f"{self.folder}: {region.key} has shape {held}, the model {region.whole}")

    def read(self, region: Region, out: Tensor) -> None:
        """Fills `out` (contiguous, CPU, as many elements as the region) from every block that the region touches."""
        target, found = out.view(region.shape), 0
        for block in self.blocks[region.key]:
            box = _overlap(region, block)
            if box is not None:
                start, size = box
                found += math.prod(size)
                part = target[tuple(slice(b - o, b - o + n) for b, o, n in zip(start, region.offset, size))]
                _read_box(block, self.dtypes[region.key], [b - o for b, o in zip(start, block.offset)], size, part)
        self._check_found(region, found)

    def spans(self, region: Region) -> list[tuple[Path, int, int]] | None:
        """The region as (file, begin, bytes) in order, if every block holds whole rows of it; None if not."""
        dtype, dim = self.dtypes[region.key], region.row_dim
        row_bytes, found, spans = math.prod(region.inner_shape) * dtype.itemsize, 0, []
        for block in sorted(self.blocks[region.key], key=lambda block: block.offset):
            box = _overlap(region, block)
            if box is None:
                continue
            start, size = box
            if block.shape[dim + 1 :] != region.inner_shape:
                return None
            found += math.prod(size)
            row = math.prod(block.shape[dim : dim + 1]) * sum(b - o for b, o in zip(start[:dim], block.offset))
            row += start[dim] - block.offset[dim]
            spans.append((block.file, _rows_begin(block, dtype) + row * row_bytes, size[dim] * row_bytes))
        self._check_found(region, found)
        return spans

    def _check_found(self, region: Region, found: int) -> None:
        wanted = math.prod(region.shape)
        if found != wanted:
            raise ValueError(f"{self.folder}: {region.key}: {found} of {wanted} values of {region.hf} are there")


def _rows_begin(block: SavedBlock, dtype: torch.dtype) -> int:
    with block.file.open("rb", buffering=0) as file:
        return _values_begin(file.fileno(), block, dtype)


def _overlap(region: Region, block: SavedBlock) -> tuple[list[int], list[int]] | None:
    """Start and size of what two boxes have in common."""
    start = [max(a, b) for a, b in zip(region.offset, block.offset)]
    stop = [
        min(a + n, b + m) for a, n, b, m in zip(region.offset, region.shape, block.offset, block.shape, strict=True)
    ]
    size = [b - a for a, b in zip(start, stop)]
    return (start, size) if min(size, default=1) > 0 else None


def _read_box(block: SavedBlock, dtype: torch.dtype, start: Sequence[int], size: Sequence[int], out: Tensor) -> None:
    """Reads a box of a block into `out`, run by run of bytes that lie together."""
    direct = out.dtype == dtype and out.is_contiguous()
    box = out if direct else torch.empty(tuple(size), dtype=dtype)
    memory, at = as_bytes(box.view(-1)), 0
    with block.file.open("rb", buffering=0) as file:
        begin = _values_begin(file.fileno(), block, dtype)
        for offset, length in _runs(block.shape, start, size):
            run = memory[at : at + length * dtype.itemsize]
            position = begin + offset * dtype.itemsize
            transfer(lambda part, at: os.preadv(file.fileno(), [part], at), run, position, str(block.file))
            at += len(run)
    if not direct:
        out.copy_(box)


def _runs(shape: Sequence[int], start: Sequence[int], size: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(offset, length) in elements of the contiguous runs of a box, in order."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    whole = len(shape)  # dimensions from here on are taken whole
    while whole and size[whole - 1] == shape[whole - 1]:
        whole -= 1
    last = max(whole - 1, 0)
    length = math.prod(size[last:])
    for index in product(*(range(a, a + n) for a, n in zip(start[:last], size[:last]))):
        yield sum(i * stride for i, stride in zip((*index, *start[last:]), strides)), length


def _values_begin(file: int, block: SavedBlock, dtype: torch.dtype) -> int:
    """Where a block's values begin; checks that they are its values, row by row, and nothing else."""
    if not 0 <= block.begin <= block.begin + block.length <= os.fstat(file).st_size:
        raise ValueError(
            f"{block.file}: ends before byte {block.begin + block.length}, where .metadata says a tensor lies"
        )
    try:
        with torch.serialization.skip_data():
            part = io.BufferedReader(FilePart(file, block.begin, block.length))
            tensor = torch.load(part, map_location="cpu", weights_only=True)
        begin = data_begin(file, block.begin, block.length)
    except (RuntimeError, pickle.UnpicklingError, ValueError, EOFError) as error:
        raise ValueError(f"{block.file}: no tensor at byte {block.begin} ({error})") from None
    is_plain = isinstance(tensor, Tensor) and tensor.is_contiguous() and tensor.storage_offset() == 0
    if not is_plain or tensor.dtype != dtype or tuple(tensor.shape) != block.shape:
        raise ValueError(f"{block.file}: what lies at byte {block.begin} is not the {dtype} tensor {block.shape}")
    if begin + tensor.nbytes > block.begin + block.length:
        raise ValueError(f"{block.file}: the tensor at byte {block.begin} is longer than its place")
    return begin


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"asks for {module}.{name}")
        return super().find_class(module, name)


def _read_metadata(path: Path) -> Metadata:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; {path.parent} is no Megatron distributed checkpoint")
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError) as error:
        raise ValueError(f"{path}: is not what torch writes ({error}); refused") from None
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path}: holds a {type(metadata).__name__}, not the metadata of a checkpoint; refused")
    return metadata
