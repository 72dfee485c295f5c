"""Tensors that a trainer has put into a pickle for an engine, read by the small test servers.

A pickle can call anything. This reader knows the exact names that the protocol has and gives each of them a meaning that does
nothing but note its arguments; any other name is refused. What comes out is checked before a file is opened.
"""

import io
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from glm5_next.launchers.engines.client import TensorList
from glm5_next.launchers.engines.weight_group import parts_of

SHARED_FILE = re.compile(rb"/torch_\d+_\d+_\d+")
DTYPES = ("uint8", "bfloat16", "float16", "float32", "float8_e4m3fn")


@dataclass(frozen=True, slots=True)
class Noted:
    """Stands for a function or a class of torch; called, it is a list of its name and its arguments."""

    name: str

    def __call__(self, *args: Any) -> list[Any]:
        return [self.name, *args]


MEANINGS: dict[tuple[str, str], Any] = {
    ("types", "SimpleNamespace"): SimpleNamespace,
    ("torch", "Size"): tuple,
    ("torch", "Tensor"): "Tensor",
    ("torch.storage", "UntypedStorage"): "UntypedStorage",
    **{("torch", name): getattr(torch, name) for name in DTYPES},
    **{
        ("torch.multiprocessing.reductions", name): Noted(name)
        for name in ("rebuild_tensor", "rebuild_typed_storage", "rebuild_storage_filename")
    },
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in MEANINGS:
            raise ValueError(f"refused {module}.{name} in a payload")
        return MEANINGS[module, name]


def bucket_of_sglang(raw: bytes) -> list[tuple[str, Tensor]]:
    """A rank's flattened bucket; raises ValueError for anything else."""
    match _read(raw):
        case {
            "flattened_tensor": [
                "rebuild_tensor",
                "Tensor",
                ["rebuild_typed_storage", ["rebuild_storage_filename", *file], torch.uint8],
                (0, (int(size),), (1,), False),
            ],
            "metadata": list(metadata),
        }:
            return list(parts_of(_opened(file, size), _listed(metadata, size)))
    raise ValueError("no flattened bucket")


def buckets_of_vllm(raw: bytes, tensors: TensorList) -> Iterator[list[tuple[str, Tensor]]]:
    """The packed bucket behind each device's handle; raises ValueError for anything else."""
    handles = _read(raw)
    if not isinstance(handles, dict):
        raise ValueError("no handles by device")
    for file in handles.values():
        yield list(parts_of(_opened(file, sum(tensors.sizes)), tensors))


def _listed(metadata: list[Any], size: int) -> TensorList:
    try:
        tensors = TensorList(
            tuple(item.name for item in metadata),
            tuple(str(item.dtype).removeprefix("torch.") for item in metadata),
            tuple(item.shape for item in metadata),
        )
        places = [(item.start_idx, item.end_idx) for item in metadata]
        ends = [0, *accumulate(tensors.sizes)]
    except (AttributeError, TypeError) as error:
        raise ValueError(f"no flattened bucket ({error})") from None
    if places != list(pairwise(ends)) or ends[-1] != size:
        raise ValueError(f"a bucket of {size} bytes whose tensors are not one after the other")
    return tensors


def _read(raw: bytes) -> Any:
    try:
        return _Reader(io.BytesIO(raw)).load()
    except (pickle.UnpicklingError, EOFError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"no payload ({type(error).__name__}: {error})") from None


def _opened(file: Any, size: int) -> Tensor:
    """The uint8 tensor in a file that another process has put into shared memory."""
    match file:
        case ["UntypedStorage", bytes(manager), bytes(handle), int(there)] if there == size and SHARED_FILE.fullmatch(
            handle
        ):
            storage = reductions.rebuild_storage_filename(torch.UntypedStorage, manager, handle, size)
            return torch.empty(0, dtype=torch.uint8).set_(storage)
    raise ValueError("no file in shared memory, or one of another size")
