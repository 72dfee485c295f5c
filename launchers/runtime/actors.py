"""What runs in a run's Ray processes: one Megatron rank, or one rollout engine."""

import logging
import os
import threading
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray

from glm5_next.launchers.config import RunConfig
from glm5_next.launchers.failures import WorkerFailed
from glm5_next.launchers.runtime.engine import Bucket

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

    def open_store(self) -> tuple[str, int]:
        """Rank 0 listens; the port is the system's choice, so two runs never meet."""
        import torch.distributed as dist

        host = ray.util.get_node_ip_address()
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=STORE_DEADLINE)
        return host, self.store.port

    def start(self, run: RunConfig, rank: int, address: tuple[str, int]) -> None:
        _quiet()
        import torch
        import torch.distributed as dist

        on_cpu = not torch.cuda.is_available()
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

    def start(self, checkpoint: Path, settings: dict[str, Any]) -> None:
        _quiet()
        from glm5_next.launchers.runtime.transformers_engine import TransformersEngine

        self.engine = TransformersEngine(checkpoint, **settings)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engine, method)(*args, **kwargs)


class RemoteSink:
    """An engine in another process, as the trainer's weight sync sees it."""

    def __init__(self, actor: Any, number: int):
        self.actor, self.number = actor, number

    def begin_update(self, version: int) -> None:
        self._call("begin_update", version)

    def put_weights(self, bucket: Bucket) -> None:
        self._call("put_weights", bucket)

    def commit_update(self) -> dict[str, str]:
        return self._call("commit_update")

    def _call(self, method: str, *args: Any) -> Any:
        try:
            return ray.get(self.actor.call.remote(method, *args), timeout=CALL_DEADLINE)
        except ray.exceptions.RayError as error:
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            raise WorkerFailed(f"engine {self.number} failed in {method}: {describe(cause)}") from error


def describe(error: BaseException) -> str:
    """Type and text of an error in one line; ours say all in their text."""
    text = " ".join(str(error).split())
    return text if isinstance(error, WorkerFailed) else f"{type(error).__name__}: {text}"


def _quiet() -> None:
    """Megatron and torch say at import which GPU libraries are absent; on a CPU that is no news."""
    warnings.filterwarnings("ignore", category=UserWarning)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
