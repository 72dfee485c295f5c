"""What runs in a run's Ray processes: one Megatron rank, or one rollout engine."""

import logging
import os
import threading
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist

from glm5_next.launchers.config import RunConfig
from glm5_next.launchers.failures import WorkerFailed
from glm5_next.launchers.network import listening_socket
from glm5_next.launchers.runtime.engine import Bucket
from glm5_next.launchers.runtime.weight_sync import check_digests

Parcel = tuple[str, str, tuple[int, ...], np.ndarray]  # name, dtype, shape, bytes
CALL_DEADLINE = 3600.0  # seconds that one phase of a step may take
STORE_DEADLINE = timedelta(seconds=120)


class Process:
    """What ranks and engines have in common."""

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Never returns. The call fails when the process dies, whatever else it is waiting for."""
        threading.Event().wait()

    def process_id(self) -> int:
        return os.getpid()


class TrainerRank(Process):
    """One process with one Megatron rank in it."""

    def gpus(self) -> list[str]:
        """Those that Ray gave to this rank."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def open_store(self) -> tuple[str, int]:
        """Rank 0 listens, on its node's address only; the port is the system's choice, so two runs never meet."""
        host = ray.util.get_node_ip_address()
        with listening_socket(host) as listener:  # left to itself, a store listens on every interface
            port = listener.getsockname()[1]
            self.store = dist.TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=STORE_DEADLINE,
                master_listen_fd=listener.detach(),
            )
        return host, port

    def start(self, run: RunConfig, rank: int, address: tuple[str, int]) -> None:
        _quiet()
        on_cpu = not self.gpus()  # Ray leaves the GPUs of others in sight
        if on_cpu:
            torch.set_num_threads(1)
            os.environ["TORCHDYNAMO_DISABLE"] = "1"  # nothing is compiled on a CPU; spares the compiler's import (3 s)
            from glm5_next.plugins import cpu_runtime

            cpu_runtime.install()
        from glm5_next.launchers.runtime.trainer import Trainer

        store = self.store if rank == 0 else dist.TCPStore(*address, is_master=False, timeout=STORE_DEADLINE)
        self.trainer = Trainer(run, rank, store, on_cpu=on_cpu)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.trainer, method)(*args, **kwargs)


class EngineProcess(Process):
    """One process with one embedded rollout engine in it."""

    def start(self, checkpoint: Path, gpus: list[str], settings: dict[str, Any]) -> None:
        """`gpus`: those of a trainer rank on the same node; the engine shares the first. []: it runs on the CPU."""
        _quiet()
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[0]
        from glm5_next.launchers.runtime.transformers_engine import TransformersEngine

        self.engine = TransformersEngine(checkpoint, device="cuda" if gpus else "cpu", **settings)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engine, method)(*args, **kwargs)

    def put_weights(self, parcels: list[Parcel]) -> None:
        self.engine.put_weights([unpacked(parcel) for parcel in parcels])


class RemoteSink:
    """An engine in another process, as the trainer's weight sync sees it."""

    def __init__(self, actor: Any, number: int):
        self.actor, self.number = actor, number

    def begin_update(self, version: int) -> None:
        self.version = version
        self._answer(self.actor.call.remote("begin_update", version))

    def put_weights(self, bucket: Bucket) -> None:
        self._answer(self.actor.put_weights.remote([packed(name, tensor) for name, tensor in bucket]))

    def commit_update(self, digests: Mapping[str, str]) -> None:
        held = self._answer(self.actor.call.remote("commit_update"))
        check_digests(digests, held, f"engine {self.number}, weights version {self.version}")

    def _answer(self, call: Any) -> Any:
        try:
            return ray.get(call, timeout=CALL_DEADLINE)
        except ray.exceptions.RayError as error:
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            raise WorkerFailed(f"engine {self.number} failed in a weight update: {describe(cause)}") from error


def new_actor(kind: type[Process], **place: Any) -> Any:
    """A new process, never restarted: a rank that lost its memory cannot join in again."""
    options = {"num_cpus": 1, "max_restarts": 0, "concurrency_groups": {"watch": 1}, **place}
    return ray.remote(**options)(kind).remote()  # type: ignore


def packed(name: str, tensor: torch.Tensor) -> Parcel:
    """A tensor as plain bytes. Megatron has torch write its own module into every pickle of a tensor, and an engine
    that read one would import all of Megatron (3 s)."""
    array = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), array


def unpacked(parcel: Parcel) -> tuple[str, torch.Tensor]:
    """The tensor shares the parcel's memory, which must not be written to."""
    name, dtype, shape, array = parcel
    return name, torch.from_numpy(array).view(getattr(torch, dtype)).view(shape)


def describe(error: BaseException) -> str:
    """Type and text of an error in one line; ours say all in their text."""
    text = " ".join(str(error).split())
    return text if isinstance(error, WorkerFailed) else f"{type(error).__name__}: {text}"


def _quiet() -> None:
    """Megatron and torch say at import which GPU libraries are absent; on a CPU that is no news."""
    warnings.filterwarnings("ignore", category=UserWarning)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
