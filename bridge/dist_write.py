"""Writes a Megatron distributed checkpoint (`torch_dist`) file by file, without a model and without a process group.

The format is torch's (torch.distributed.checkpoint): tensors of any key, cut in blocks, one torch.save after the other
in `*.distcp` files, and `.metadata`, which says where each block lies. megatron-core 0.19.2 adds `metadata.json`.
"""

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from glm5_next.bridge.dist_names import Region
from glm5_next.bridge.shards import copy_range
from glm5_next.bridge.torch_file import data_begin

BLOCK_BYTES = 64 * 2**20  # a block is read whole by whoever needs a part of it
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def cut(region: Region, itemsize: int, multiple: int = 1) -> Iterator[Region]:
    """A region in blocks of about BLOCK_BYTES, all but the last with the same number of rows, a multiple of `multiple`."""
    size = math.prod(region.shape) * itemsize
    step = -(-region.num_rows // -(-size // BLOCK_BYTES))
    step = -(-step // multiple) * multiple
    for start in range(0, region.num_rows, step):
        yield region.rows(start, min(start + step, region.num_rows))


@contextmanager
def without_checksums() -> Iterator[None]:
    """torch.save spends more time on checksums that nobody reads than on writing. Process-wide."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def file_name(piece: int) -> str:
    """Megatron names files after the rank that wrote them; ours are numbered by piece."""
    return f"__{piece}_0.distcp"


def write_tensor(file: io.BufferedRandom, block: Tensor) -> tuple[int, int]:
    """Appends a block that fills its storage; returns its place, (offset, length)."""
    assert block.untyped_storage().nbytes() == block.nbytes, "a view would save the memory around it"
    offset = file.tell()
    torch.save(block, file)
    return offset, file.tell() - offset


def write_copy(file: io.BufferedRandom, like: Tensor, source: int, begin: int, what: str) -> tuple[int, int]:
    """Appends a block with the shape and dtype of `like`, whose bytes are those from `begin` on of an open file.

    torch.save leaves room for the values, the kernel copies them: they never pass through this process.
    """
    offset = file.tell()
    with torch.serialization.skip_data():
        torch.save(like, file)
    length = file.tell() - offset
    file.flush()
    at = data_begin(file.fileno(), offset, length)
    copy_range(source, begin, file.fileno(), at, like.nbytes, what)
    return offset, length


def write_object(file: io.BufferedRandom, value: Any) -> tuple[int, int]:
    """Appends what Megatron calls a sharded object; returns its place."""
    offset = file.tell()
    torch.save([value], file)
    return offset, file.tell() - offset


class _Writer(FileSystemWriter):
    """torch's writer, which would also note the name of the folder: it is not the final one."""

    @property
    def checkpoint_id(self) -> str:
        return ""


def write_metadata(folder: Path, keys: Mapping[str, Mapping[str, Any]], save_id: str) -> None:
    """Writes `.metadata` and `metadata.json`.

    `keys`: key -> {"dtype", "size", "blocks": [{"offset", "shape", "place": [file, offset, length]}]}, or of an object
    {"place"}. The same content gives the same bytes.
    """
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    results = []
    for key, content in keys.items():
        if "blocks" not in content:
            state[key] = BytesStorageMetadata()
            results.append(_result(MetadataIndex(key), content["place"]))
            continue
        chunks = [ChunkStorageMetadata(torch.Size(b["offset"]), torch.Size(b["shape"])) for b in content["blocks"]]
        properties = TensorProperties(dtype=DTYPES[content["dtype"]])
        state[key] = TensorStorageMetadata(properties, torch.Size(content["size"]), chunks)
        results += [_result(MetadataIndex(key, block["offset"]), block["place"]) for block in content["blocks"]]
    writer = _Writer(folder)
    writer.save_id = save_id  # torch would draw one
    writer.finish(Metadata(state), [results])
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(backend))


def _result(index: MetadataIndex, place: Sequence[Any]) -> WriteResult:
    return WriteResult(index=index, size_in_bytes=place[2], storage_data=_StorageInfo(*place))
