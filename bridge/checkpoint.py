"""A Hugging Face checkpoint on disk: opened strictly by its headers, read tensor by tensor.

Opening reads config.json, the index and every shard's header, and no tensor. Reading allocates only what is asked for
and returns tensors that own their memory. Only JSON and safetensors are read: no pickles, no remote code.
"""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from glm5_next.bridge.name_map import LANGUAGE, SCALE_SUFFIX, VISION, TensorInfo, inventory, mtp_tensors
from glm5_next.bridge.shards import (
    INDEX_FILE,
    SHARD_NAME,
    SINGLE_FILE,
    Stored,
    read_json,
    read_tensors,
    resolve_inside,
    shorten,
    transfer,
)
from glm5_next.plugins.config import Glm5NextConfig

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
PIECE_ELEMENTS = 2**22  # elements per piece when a tensor is streamed: at most 32 MiB


class Checkpoint:
    """A checkpoint folder. Holds no open file and no tensor, so it can be sent to other processes.

    Raises ValueError that names the file or tensor if anything about the folder is not as it must be.
    """

    folder: Path
    raw_config: dict[str, Any]
    config: Glm5NextConfig
    tensors: dict[str, Stored]  # in the order of the index
    metadata: dict[str, dict[str, str]]  # of every shard
    index_metadata: dict[str, Any] | None  # None: one model.safetensors without an index

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"{folder}: no such folder; expected a downloaded Hugging Face checkpoint")
        self.raw_config = read_json(resolve_inside(self.folder, "config.json"))
        self.config = Glm5NextConfig.from_hf(self.folder)
        weight_map, self.index_metadata = _read_index(self.folder)
        self.tensors, self.metadata = _read_shards(self.folder, weight_map)

    def stored(self, name: str) -> Stored:
        """Where a tensor lies; raises ValueError for a name that the checkpoint does not have."""
        if name not in self.tensors:
            raise ValueError(f"{self.folder}: has no tensor {name!r}")
        return self.tensors[name]

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, in the dtype of the file."""
        stored = self.stored(name)
        return self.read_rows(name).view(stored.shape)

    def read_rows(
        self,
        name: str,
        start: int = 0,
        stop: int | None = None,
        columns: tuple[int, int] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows `start` up to `stop` (None: to the end), of a matrix if asked only some columns, in the file's dtype.

        Reads only those bytes from disk, straight into `out` if that is given: a contiguous CPU tensor of this dtype
        and size. A scalar is one row.
        """
        stored = self.stored(name)
        shape = stored.shape or (1,)
        stop = shape[0] if stop is None else stop
        width = math.prod(shape[1:])
        first, last = columns or (0, width)
        inside = 0 <= start <= stop <= shape[0] and 0 <= first <= last <= width
        if not inside or (columns is not None and len(shape) != 2):
            where = f" and columns {first}..{last}" if columns else ""
            raise ValueError(f"{name}: rows {start}..{stop}{where} are outside shape {list(stored.shape)}")
        if out is None:
            inner = shape[1:] if columns is None else (last - first,)
            out = torch.empty((stop - start, *inner), dtype=TORCH_DTYPES[stored.dtype])
        self._read_lines(stored, name, start, (first, last), width, out)
        return out

    def _read_lines(
        self, stored: Stored, name: str, start: int, columns: tuple[int, int], width: int, out: torch.Tensor
    ) -> None:
        """Fills `out` line by line; whole rows are one line."""
        memory, size = as_bytes(out), out.element_size()
        line = (columns[1] - columns[0]) * size
        if columns == (0, width):
            line = len(memory)
        at = stored.begin + (start * width + columns[0]) * size
        with self._open(stored) as file:
            for begin in range(0, len(memory), line or 1):
                self._fill(file, memory[begin : begin + line], at, name)
                at += width * size

    def raw_bytes(self, name: str) -> Iterator[memoryview]:
        """A tensor's bytes as they are on disk, in pieces of PIECE_ELEMENTS elements."""
        stored = self.stored(name)
        piece = PIECE_ELEMENTS * TORCH_DTYPES[stored.dtype].itemsize
        with self._open(stored) as file:
            for begin in range(stored.begin, stored.end, piece):
                buffer = as_bytes(torch.empty(min(piece, stored.end - begin), dtype=torch.uint8))
                self._fill(file, buffer, begin, name)
                yield buffer

    def check_inventory(self) -> None:
        """Raises one ValueError that lists every difference from the tensors that config.json calls for."""
        problems = compare_inventory(self.tensors, inventory(self.config))
        if not any(problems.values()):
            return
        lines = [f"  {len(items)} {kind}: {shorten(items)}" for kind, items in problems.items() if items]
        hints = [f"  hint: {hint}" for hint in _hints(self, problems)]
        raise ValueError("\n".join([f"{self.folder}: the tensors do not fit config.json", *lines, *hints]))

    def _open(self, stored: Stored) -> BinaryIO:
        return (self.folder / stored.file).open("rb", buffering=0)

    def _fill(self, file: BinaryIO, view: memoryview, position: int, name: str) -> None:
        where = f"{file.name}: tensor {name!r}"
        transfer(lambda part, at: os.preadv(file.fileno(), [part], at), view, position, where)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, as a flat view of bytes."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def compare_inventory(stored: Mapping[str, Stored], wanted: Mapping[str, TensorInfo]) -> dict[str, list[str]]:
    """Kind of difference -> the tensors that differ, described; all four kinds are present."""
    both = sorted(stored.keys() & wanted.keys())
    return {
        "missing": sorted(wanted.keys() - stored.keys()),
        "unexpected": sorted(stored.keys() - wanted.keys()),
        "of wrong shape": [
            f"{name} is {list(stored[name].shape)}, not {list(wanted[name].shape)}"
            for name in both
            if stored[name].shape != wanted[name].shape
        ],
        "of wrong dtype": [
            f"{name} is {stored[name].dtype}, not {wanted[name].dtype}"
            for name in both
            if stored[name].dtype != wanted[name].dtype
        ],
    }


def _hints(checkpoint: Checkpoint, problems: Mapping[str, list[str]]) -> Iterator[str]:
    config, missing, unexpected = checkpoint.config, set(problems["missing"]), problems["unexpected"]
    mtp = {name for entry in mtp_tensors(config) for name in entry.hf}
    if not config.fp8 and any(name.endswith(SCALE_SUFFIX) for name in unexpected):
        yield "scales of FP8 tensors are there but config.json has no quantization_config"
    if config.fp8 and any(name.endswith(SCALE_SUFFIX) for name in missing):
        yield "config.json has a quantization_config, so every FP8 tensor needs its scales; without them it is noise"
    if mtp and mtp <= missing:
        yield (
            f"num_nextn_predict_layers is {config.num_mtp_layers} but no MTP tensor is there; "
            "set it to 0 in config.json if the checkpoint has none"
        )
    if any(name.startswith(f"{LANGUAGE}layers.{config.num_layers + config.num_mtp_layers}.") for name in unexpected):
        yield "num_hidden_layers or num_nextn_predict_layers in config.json is too small for these tensors"
    if any(name.startswith(VISION) for name in unexpected) and config.vision is None:
        yield "vision tensors are there but config.json has no vision_config"
    if config.vision and not any(name.startswith(VISION) for name in checkpoint.tensors):
        yield "no vision tensor is there; remove vision_config from config.json if the checkpoint is text-only"
    if any(text.endswith("is F32, not BF16") for text in problems["of wrong dtype"]):
        yield (
            "tensors are wider than the release stores them (transformers' save_pretrained does that to the "
            'convolutions and mlp.gate.weight); store them as BF16, or all as F32 with dtype "float32" in config.json'
        )


def _read_index(folder: Path) -> tuple[dict[str, str] | None, dict[str, Any] | None]:
    """Tensor name -> shard, and the index's metadata; both None for a single file without an index."""
    files = {path.name for path in folder.iterdir() if path.name.endswith(".safetensors")}
    if not (folder / INDEX_FILE).exists():
        if files != {SINGLE_FILE}:
            found = f"found {shorten(sorted(files))}" if files else "found no *.safetensors file"
            raise ValueError(f"{folder}: needs {INDEX_FILE} (or {SINGLE_FILE} alone), {found}; download it again")
        return None, None
    path = resolve_inside(folder, INDEX_FILE)
    index = read_json(path)
    weight_map, metadata = index.get("weight_map"), index.get("metadata", {})
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(metadata, dict):
        raise ValueError(f"{path}: needs a non-empty object 'weight_map' (and 'metadata', if any, to be an object)")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not SHARD_NAME.fullmatch(file):
            raise ValueError(f"{path}: {name!r} is said to be in {file!r}, which is no plain *.safetensors file name")
    if stray := sorted(files - set(weight_map.values())):
        raise ValueError(f"{path}: does not name {shorten(stray)}, which is in the folder; remove what is left over")
    return weight_map, metadata


def _read_shards(
    folder: Path, weight_map: dict[str, str] | None
) -> tuple[dict[str, Stored], dict[str, dict[str, str]]]:
    """All tensors, and the metadata of every shard. `weight_map` None: of the single file."""
    tensors: dict[str, Stored] = {}
    metadata = {}
    for file in sorted(set(weight_map.values())) if weight_map else [SINGLE_FILE]:
        found, metadata[file] = read_tensors(resolve_inside(folder, file), file)
        if twice := sorted(found.keys() & tensors.keys()):
            raise ValueError(f"{folder}: in {file} and also in {tensors[twice[0]].file}: {shorten(twice)}")
        tensors.update(found)
    if weight_map is None:
        return tensors, metadata
    wrong = sorted(name for name in tensors.keys() & weight_map.keys() if tensors[name].file != weight_map[name])
    for kind, names in {
        "in the index but in no shard": sorted(weight_map.keys() - tensors.keys()),
        "in a shard but not in the index": sorted(tensors.keys() - weight_map.keys()),
        "in another shard than the index says": wrong,
    }.items():
        if names:
            raise ValueError(f"{folder / INDEX_FILE}: {len(names)} tensors are {kind}: {shorten(names)}")
    return {name: tensors[name] for name in weight_map}, metadata
