"""Ray: where trainer ranks and rollout engines run. The only file that knows it."""

import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import ray

from glm5_next.launchers.config import RunConfig
from glm5_next.launchers.runtime.engine import Bucket, Completion

START_DEADLINE = 300.0  # seconds until every rank and engine has loaded its weights
CALL_DEADLINE = 3600.0  # seconds that one phase of a step may take
STORE_DEADLINE = timedelta(seconds=120)
OBJECT_STORE_BYTES = 512 * 2**20


@ray.remote(num_cpus=1, max_restarts=0)
class TrainerRank:
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
            from glm5_next.plugins import cpu_runtime

            cpu_runtime.install()
        from glm5_next.launchers.runtime.trainer import Trainer

        store = self.store if rank == 0 else dist.TCPStore(*address, is_master=False, timeout=STORE_DEADLINE)
        self.trainer = Trainer(run, rank, store, on_cpu=on_cpu)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.trainer, method)(*args, **kwargs)


@ray.remote(num_cpus=1, max_restarts=0)
class EngineProcess:
    """One process with one embedded rollout engine in it."""

    def start(self, checkpoint: Path, settings: dict[str, Any]) -> None:
        _quiet()
        from glm5_next.launchers.runtime.transformers_engine import TransformersEngine

        self.engine = TransformersEngine(checkpoint, **settings)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engine, method)(*args, **kwargs)


class RemoteSink:
    """An engine in another process, as the trainer's weight sync sees it."""

    def __init__(self, actor: Any):
        self.actor = actor

    def begin_update(self, version: int) -> None:
        self._call("begin_update", version)

    def put_weights(self, bucket: Bucket) -> None:
        self._call("put_weights", bucket)

    def commit_update(self) -> dict[str, str]:
        return self._call("commit_update")

    def _call(self, *args: Any) -> Any:
        return ray.get(self.actor.call.remote(*args), timeout=CALL_DEADLINE)


class Cluster:
    """A local Ray with the run's trainer ranks and engines; everything it started ends with it.

    Use it as a context manager. An actor that dies or raises ends the call in progress with a RuntimeError that names
    it; the caller ends the run, and leaving the context ends all processes.
    """

    def __init__(self, run: RunConfig):
        self.run = run
        self.trainers: list[Any] = []
        self.engines: list[Any] = []

    def __enter__(self) -> Self:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(
            address="local",
            num_cpus=self.run.parallel.ranks + self.run.rollout.num_engines,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ray.shutdown()

    def train(self, method: str, *args: Any, deadline: float = CALL_DEADLINE, **kwargs: Any) -> list[Any]:
        """Calls a method of every trainer rank and returns their answers by rank."""
        shared = [ray.put(arg) for arg in args]
        calls = [actor.call.remote(method, *shared, **kwargs) for actor in self.trainers]
        return _gather(calls, "trainer rank", method, deadline)

    def publish(self, version: int) -> int:
        """Rank 0 sends the weights to all engines. Returns the bytes of one copy."""
        sinks = [RemoteSink(engine) for engine in self.engines]
        return max(self.train("publish", sinks, version))

    def generate(
        self, prompts: Sequence[np.ndarray], samples_per_prompt: int, *, max_new_tokens: int, seed: int
    ) -> list[list[Completion]]:
        """Splits the prompts over the engines; the answers are in the order of the prompts."""
        count = len(self.engines)
        calls = [
            engine.call.remote(
                "generate",
                list(prompts[number::count]),
                samples_per_prompt,
                max_new_tokens=max_new_tokens,
                seed=seed + number,
            )
            for number, engine in enumerate(self.engines)
        ]
        shares = _gather(calls, "engine", "generate", CALL_DEADLINE)
        return [shares[i % count][i // count] for i in range(len(prompts))]

    def score(self, sequences: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Log-probabilities of the same sequences, from every engine."""
        calls = [engine.call.remote("score", list(sequences)) for engine in self.engines]
        return _gather(calls, "engine", "score", CALL_DEADLINE)

    def _start(self) -> None:
        run = self.run
        environment = {"env_vars": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}}
        self.trainers = [
            TrainerRank.options(runtime_env=environment).remote()  # type: ignore[attr-defined]
            for _ in range(run.parallel.ranks)
        ]
        self.engines = [
            EngineProcess.options(runtime_env=environment).remote()  # type: ignore[attr-defined]
            for _ in range(run.rollout.num_engines)
        ]
        address = _gather([self.trainers[0].open_store.remote()], "trainer rank", "open_store", START_DEADLINE)[0]
        settings = {
            "precision": run.model.precision,
            "record_routes": run.replay.routing == "engine",
            "batch_size": run.rollout.batch_size,
            "num_threads": max(1, (os.cpu_count() or 1) // run.rollout.num_engines),
        }
        trainers = [actor.start.remote(run, rank, address) for rank, actor in enumerate(self.trainers)]
        engines = [actor.start.remote(run.model.checkpoint, settings) for actor in self.engines]
        _gather(trainers, "trainer rank", "start", START_DEADLINE)
        _gather(engines, "engine", "start", START_DEADLINE)


def _gather(calls: Sequence[Any], who: str, what: str, deadline: float) -> list[Any]:
    """The results of all calls; the first that fails ends the wait, whatever the others are waiting for."""
    results: dict[int, Any] = {}
    waiting = {call: number for number, call in enumerate(calls)}
    while waiting:
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=deadline)
        if not done:
            raise RuntimeError(f"{who} {sorted(waiting.values())}: {what} took longer than {deadline:.0f} seconds")
        number = waiting.pop(done[0])
        try:
            results[number] = ray.get(done[0])
        except ray.exceptions.RayTaskError as error:
            cause = error.as_instanceof_cause()
            if isinstance(cause, ValueError):
                raise ValueError(str(error.cause)) from None
            raise RuntimeError(f"{who} {number} failed in {what}:\n{error}") from None
        except ray.exceptions.RayActorError as error:
            raise RuntimeError(f"{who} {number} died in {what}: {_first_line(error)}") from None
    return [results[number] for number in range(len(calls))]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _quiet() -> None:
    """Megatron and torch say at import which GPU libraries are absent; on a CPU that is no news."""
    import warnings

    warnings.filterwarnings("ignore", category=UserWarning)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
