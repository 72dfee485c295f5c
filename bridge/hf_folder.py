"""Writes a Hugging Face checkpoint folder: all of it, or nothing.

Everything goes into a hidden sibling of the output folder, which takes the output's name as the very last step. Shards
are created at full size and every tensor is written at its place, so tensors may come in any order and none is kept.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from glm5_next.bridge.checkpoint import TORCH_DTYPES, Checkpoint, as_bytes
from glm5_next.bridge.name_map import TensorInfo
from glm5_next.bridge.shards import (
    INDEX_FILE,
    ShardPlan,
    ShardWriter,
    Stored,
    plan_shard,
    read_header,
    resolve_inside,
)

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")  # not carried over from the source
FLOAT_DTYPES = ("BF16", "F16", "F32")


class HfFolderWriter:
    """Context manager that writes `out` with the tensors, shards and other files of `source`.

    `dtype` "source" keeps every tensor's dtype (equal tensors give byte-equal shards); "float32" stores all of them as
    F32 and says so in config.json. Leaving the block checks that every tensor was written once and moves the folder to
    `out`; an exception leaves nothing behind. Raises ValueError if `out` exists and is not empty.
    """

    def __init__(self, out: str | Path, *, source: Checkpoint, dtype: Literal["source", "float32"] = "source"):
        if dtype not in ("source", "float32"):
            raise ValueError(f"dtype is {dtype!r}; it must be 'source' or 'float32'")
        self.out, self.source, self.dtype = Path(out), source, dtype
        if self.out.resolve().is_relative_to(source.folder.resolve()):
            raise ValueError(f"{out}: lies in the source checkpoint {source.folder}; choose a folder outside it")
        self._plans = _plan(source, dtype)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._folder = stack.enter_context(staged_folder(self.out))
            check_space(self.out, sum(plan.num_bytes for plan in self._plans))
            self._shards = ShardWriter(self._folder, self._plans)
            stack.push(self._finish)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Writes a tensor of exactly the planned shape and dtype. Raises ValueError for anything else, or twice."""
        planned = self._planned(name)
        wanted = (tuple(planned.shape), TORCH_DTYPES[planned.dtype])
        if (tuple(tensor.shape), tensor.dtype) != wanted:
            given = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{name}: got {given}, the checkpoint stores {wanted[1]} {list(wanted[0])}")
        self._shards.write(name, [as_bytes(tensor.detach().cpu().contiguous())])

    def copy_from_source(self, names: Iterable[str]) -> None:
        """Copies tensors from the source folder in pieces: their bytes, or their values as F32 with dtype "float32"."""
        for name in names:
            before, after = self.source.stored(name).dtype, self._planned(name).dtype
            pieces: Iterable[Any] = self.source.raw_bytes(name)
            if before != after:
                pieces = (_cast(piece, before, after) for piece in pieces)
            self._shards.write(name, pieces)

    def _planned(self, name: str) -> Stored:
        if name not in self._shards.tensors:
            raise ValueError(f"{name}: the source checkpoint {self.source.folder} has no such tensor")
        return self._shards.tensors[name]

    def _finish(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        self._shards.check_complete()
        if self.source.index_metadata is not None:
            tensors = {name: self._shards.tensors[name] for name in self.source.tensors}
            write_index(self._folder, tensors, self.source.index_metadata)
        for name in carried_files(self.source.folder):
            shutil.copyfile(resolve_inside(self.source.folder, name), self._folder / name)
        if self.dtype == "float32":
            write_json(self._folder / "config.json", _as_float32(self.source.raw_config))


def _plan(source: Checkpoint, dtype: str) -> list[ShardPlan]:
    plans = []
    for file, metadata in source.metadata.items():
        tensors = {name: stored for name, stored in source.tensors.items() if stored.file == file}
        if dtype == "source":
            plans.append(ShardPlan(file, read_header(source.folder / file), tensors))
            continue
        if other := sorted(name for name, stored in tensors.items() if stored.dtype not in FLOAT_DTYPES):
            raise ValueError(f"{source.folder}: {other[0]} is {tensors[other[0]].dtype}; it has no float32 form")
        ordered = sorted(tensors.items(), key=lambda item: item[1].begin)
        plans.append(plan_shard(file, {name: TensorInfo("F32", stored.shape) for name, stored in ordered}, metadata))
    return plans


def _cast(piece: bytearray, before: str, after: str) -> memoryview:
    values = torch.frombuffer(piece, dtype=TORCH_DTYPES[before])
    return as_bytes(values.to(TORCH_DTYPES[after]))


def _as_float32(raw_config: dict[str, Any]) -> dict[str, Any]:
    """The config with every dtype key that is there set to float32; nothing else changes."""

    def widen(section: dict[str, Any]) -> dict[str, Any]:
        return {key: "float32" if key in ("dtype", "torch_dtype") else value for key, value in section.items()}

    sections = {key: widen(raw_config[key]) for key in ("text_config", "vision_config") if raw_config.get(key)}
    return widen(raw_config) | sections


def carried_files(folder: Path) -> list[str]:
    """The files of a checkpoint folder that travel with its tensors: everything but weights, hidden files, folders."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if not (path.name.startswith(".") or path.is_dir() or path.name.endswith(WEIGHT_SUFFIXES))
    )


@contextmanager
def staged_folder(out: str | Path) -> Iterator[Path]:
    """A temporary sibling of `out` that becomes `out`, flushed to disk, if the block succeeds, and vanishes if not.

    Raises ValueError before anything is written if `out` exists and is not an empty folder.
    """
    out = Path(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out}: exists and is not an empty folder; choose another output or remove it")
    folder = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    folder.mkdir(parents=True)
    try:
        yield folder
        for path in (*folder.iterdir(), folder):
            _flush(path)
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder)
        raise
    _flush(out.parent)


def check_space(out: Path, num_bytes: int) -> None:
    """Raises ValueError if the disk that `out` is to lie on has less room than that."""
    if (free := shutil.disk_usage(out.parent).free) < num_bytes:
        raise ValueError(f"{out}: needs {num_bytes / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB left")


def write_index(folder: Path, tensors: dict[str, Stored], metadata: dict[str, Any]) -> None:
    """Writes the index; `total_size` (bytes of all tensors) is added to `metadata`, or corrected in it."""
    total = sum(stored.end - stored.begin for stored in tensors.values())
    weight_map = {name: stored.file for name, stored in tensors.items()}
    write_json(folder / INDEX_FILE, {"metadata": metadata | {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON as transformers does: two spaces, keys in the given order, a newline at the end."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
