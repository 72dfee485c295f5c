"""A bucket in a trainer rank's memory, open to the engine rank on the same device, without a copy on the way.

On a GPU the way in is a CUDA IPC handle, on a CPU a file in shared memory; both are torch's own
(`torch.multiprocessing.reductions`). Engines want it as a pickle: it is written here, and nothing here reads one.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

from glm5_next.launchers.engines.client import Shared, TensorList
from glm5_next.launchers.engines.weight_group import flattened
from glm5_next.launchers.runtime.engine import Bucket

DEVICE_INDEX = 6  # of the device among the arguments of `rebuild_cuda_tensor`


@dataclass(frozen=True)
class _Rebuilt:
    """Pickled as a call of `build`, so that whoever reads it gets what that returns."""

    build: Callable[..., Any]
    args: tuple[Any, ...]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.build, self.args


def share(flat: Tensor) -> Shared:
    """The way into a flat uint8 tensor for one reader; the tensor has to stay alive until it has read."""
    if flat.is_cuda:
        torch.cuda.current_stream(flat.device).synchronize()
        _, args = reductions.reduce_tensor(flat)
        return Shared(str(torch.cuda.get_device_properties(flat.device).uuid), args)
    torch.multiprocessing.set_sharing_strategy("file_system")  # descriptors pass between relatives only
    _, args = reductions.reduce_storage(flat.untyped_storage())
    return Shared(f"cpu {dist.get_rank()}", args)


def sglang_payload(shared: Shared, tensors: TensorList) -> bytes:
    """One rank's entry of `update_weights_from_tensor` with load_format "flattened_bucket".

    Every name in it is one that the reader of SGLang 0.5.23 (`srt/utils/common.py`) lets through. A GPU is named by its
    UUID: an index means another device in another process (`srt/utils/patch_torch.py`).
    """
    metadata, start = [], 0
    for name, kind, shape, size in zip(tensors.names, tensors.kinds, tensors.shapes, tensors.sizes, strict=True):
        place = {"start_idx": start, "end_idx": start + size, "numel": size}
        metadata.append(SimpleNamespace(name=name, shape=torch.Size(shape), dtype=kind, **place))
        start += size
    return pickle.dumps({"flattened_tensor": _flat_tensor(shared, start), "metadata": metadata})


def vllm_payload(shared: Sequence[Shared]) -> bytes:
    """`ipc_handles_pickled` of a packed update: every rank's handle under its device."""
    return pickle.dumps({one.device: one.args for one in shared})


class Offers:
    """All trainer ranks together offer one bucket after the other; `go_on` and `share` are collective over them."""

    def __init__(self, device: torch.device):
        self.device = device
        self._held: Tensor | None = None  # what engines may still be reading

    def go_on(self, going: bool = True) -> bool:
        """What rank 0 says; by then every reader of the bucket before has read it."""
        said = [going]
        dist.broadcast_object_list(said, src=0)
        return said[0]

    def share(self, bucket: Bucket) -> list[Shared]:
        """By trainer rank: the way into its copy of the bucket."""
        self.close()
        self._held = flattened(bucket, self.device)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, share(self._held))
        return everyone

    def close(self) -> None:
        """Lets go of the last bucket: its memory is free once its reader has let go, too, which torch is asked to see to."""
        self._held = None
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()


def _flat_tensor(shared: Shared, size: int) -> _Rebuilt:
    if shared.device.startswith("cpu"):
        storage = _Rebuilt(reductions.rebuild_storage_filename, shared.args)
        typed = _Rebuilt(reductions.rebuild_typed_storage, (storage, torch.uint8))
        return _Rebuilt(reductions.rebuild_tensor, (Tensor, typed, (0, torch.Size((size,)), (1,), False)))
    args = *shared.args[:DEVICE_INDEX], shared.device, *shared.args[DEVICE_INDEX + 1 :]
    return _Rebuilt(reductions.rebuild_cuda_tensor, args)
