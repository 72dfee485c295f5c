"""Writes a Hugging Face checkpoint folder: all of it, or nothing.

Everything goes into a hidden sibling of the output folder, which takes the output's name as the very last step. Shards
are created at full size and every tensor is written at its place, so tensors may come in any order and none is kept.
"""

import json
import math
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from glm5_next.bridge.checkpoint import TORCH_DTYPES, Checkpoint, as_bytes
from glm5_next.bridge.name_map import FP8_BLOCK, inventory
from glm5_next.bridge.pieces import flush
from glm5_next.bridge.shards import (
    INDEX_FILE,
    ShardPlan,
    ShardWriter,
    Stored,
    create_shards,
    plan_shard,
    read_header,
    resolve_inside,
)
from glm5_next.bridge.values import STAGING_BYTES, read_values
from glm5_next.plugins.config import Glm5NextConfig

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")  # not carried over from the source


ExportDtype = Literal["source", "bfloat16", "float32"]


class HfFolderWriter:
    """Context manager that writes `out` with the tensors, shards and other files of `source`.

    `dtype` "source" keeps every tensor's dtype (equal tensors give byte-equal shards); "bfloat16" and "float32" store
    an FP8 checkpoint without scales, or a checkpoint in the other precision, and say so in config.json. Leaving the
    block checks that every tensor was written once and moves the folder to `out`; an exception leaves nothing behind.
    Raises ValueError if `out` exists and is not empty.
    """

    def __init__(self, out: str | Path, *, source: Checkpoint, dtype: ExportDtype = "source"):
        self.out, self.source, self.dtype = Path(out), source, dtype
        check_outside(self.out, source)
        self._plans = plan_folder(source, dtype)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.folder = stack.enter_context(staged_folder(self.out))
            check_space(self.out, sum(plan.num_bytes for plan in self._plans))
            create_shards(self.folder, self._plans)
            self.shards = ShardWriter(self.folder, self._plans)
            stack.push(self._finish)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Writes a tensor of exactly the planned shape and dtype. Raises ValueError for anything else, or twice."""
        add_tensor(self.shards, name, tensor)

    def copy_from_source(self, names: Iterable[str]) -> None:
        """Copies tensors from the source folder in pieces, into the dtype that is written."""
        for name in names:
            copy_tensor(self.shards, name, self.source)

    def _finish(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.shards.check_complete()
            finish_folder(self.folder, self.source, self._plans, self.dtype)


def check_outside(out: Path, source: Checkpoint) -> None:
    """Raises ValueError for an output inside the source."""
    if out.resolve().is_relative_to(source.folder.resolve()):
        raise ValueError(f"{out}: lies in the source checkpoint {source.folder}; choose a folder outside it")


def add_tensor(shards: ShardWriter, name: str, tensor: torch.Tensor) -> None:
    """Writes a whole tensor of exactly the planned shape and dtype. Raises ValueError for anything else, or twice."""
    planned = _planned(shards, name)
    wanted = (tuple(planned.shape), TORCH_DTYPES[planned.dtype])
    if (tuple(tensor.shape), tensor.dtype) != wanted:
        given = f"{tensor.dtype} {list(tensor.shape)}"
        raise ValueError(f"{name}: got {given}, the checkpoint stores {wanted[1]} {list(wanted[0])}")
    shards.write(name, [as_bytes(tensor.detach().cpu().contiguous())])


def copy_tensor(shards: ShardWriter, name: str, source: Checkpoint, source_name: str | None = None) -> None:
    """Copies a tensor in pieces: its bytes, or its values where another dtype is planned."""
    source_name = source_name or name
    planned, stored = _planned(shards, name), source.stored(source_name)
    if planned.dtype == stored.dtype:
        shards.copy(name, [(source.folder / stored.file, stored.begin, stored.end - stored.begin)])
    else:
        shards.write(name, (as_bytes(piece) for piece in _values(source, source_name, TORCH_DTYPES[planned.dtype])))


def _values(source: Checkpoint, name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    shape = source.stored(name).shape
    step = max(FP8_BLOCK, STAGING_BYTES // (max(math.prod(shape[1:]), 1) * dtype.itemsize) // FP8_BLOCK * FP8_BLOCK)
    for row in range(0, shape[0], step):
        out = torch.empty((min(step, shape[0] - row), *shape[1:]), dtype=dtype)
        read_values(source, name, out, row=row)
        yield out


def _planned(shards: ShardWriter, name: str) -> Stored:
    if name not in shards.tensors:
        raise ValueError(f"{name}: the checkpoint that is written has no such tensor")
    return shards.tensors[name]


def stored_as(config: Glm5NextConfig, dtype: ExportDtype) -> Glm5NextConfig:
    """The config of a checkpoint that is written with this dtype."""
    if dtype not in ("source", "bfloat16", "float32"):
        raise ValueError(f"dtype is {dtype!r}; it must be 'source', 'bfloat16' or 'float32'")
    return config if dtype == "source" else replace(config, dtype=dtype, fp8=False)


def plan_folder(source: Checkpoint, dtype: ExportDtype) -> list[ShardPlan]:
    """The shards of `source`, their tensors in the same order, in the dtypes that are asked for."""
    config = stored_as(source.config, dtype)
    files: dict[str, dict[str, Stored]] = {file: {} for file in source.metadata}
    for name, stored in source.tensors.items():
        files[stored.file][name] = stored
    if dtype == "source":
        return [ShardPlan(file, read_header(source.folder / file), tensors) for file, tensors in files.items()]
    source.check_inventory()
    wanted, plans = inventory(config), []
    for file, tensors in files.items():
        ordered = sorted((name for name in tensors if name in wanted), key=lambda name: tensors[name].begin)
        if ordered:  # a shard of nothing but scales vanishes with them
            plans.append(plan_shard(file, {name: wanted[name] for name in ordered}, source.metadata[file]))
    return plans


def finish_folder(folder: Path, source: Checkpoint, plans: Iterable[ShardPlan], dtype: ExportDtype) -> None:
    """Adds index, config and the source's other files to written shards."""
    stored = {name: place for plan in plans for name, place in plan.tensors.items()}
    if source.index_metadata is not None:
        write_index(folder, {name: stored[name] for name in source.tensors if name in stored}, source.index_metadata)
    for name in carried_files(source.folder):
        shutil.copyfile(resolve_inside(source.folder, name), folder / name)
    if dtype != "source":
        write_json(folder / "config.json", _config_with_dtype(source.raw_config, dtype))


def _config_with_dtype(raw_config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The config with every dtype key that is there set to `dtype` and no quantisation; nothing else changes."""

    def changed(section: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in section.items() if key != "quantization_config"}
        return {key: dtype if key in ("dtype", "torch_dtype") else value for key, value in kept.items()}

    sections = {key: changed(raw_config[key]) for key in ("text_config", "vision_config") if raw_config.get(key)}
    return changed(raw_config) | sections


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
            flush(path)
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder)
        raise
    flush(out.parent)


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
