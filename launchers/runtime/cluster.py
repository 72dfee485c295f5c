"""Ray, as the driver sees it: where trainer ranks and rollout engines run, and what is said when one of them fails."""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import ray

from glm5_next.launchers.config import RunConfig
from glm5_next.launchers.engines.order import Order, Outcome
from glm5_next.launchers.engines.server_process import EngineServer
from glm5_next.launchers.engines.servers import Servers
from glm5_next.launchers.failures import WorkerFailed
from glm5_next.launchers.replay_plan import Recording
from glm5_next.launchers.runtime.actors import (
    CALL_DEADLINE,
    EngineProcess,
    RemoteSink,
    TrainerRank,
    describe,
    new_actor,
)
from glm5_next.launchers.runtime.engine import Completion, Lost
from glm5_next.launchers.runtime.placement import (
    check_cpus,
    guest_options,
    is_local,
    server_options,
    shared_ranks,
    start_ray,
    trainer_options,
    unused_gpus,
)
from glm5_next.launchers.runtime.reaper import Reaper
from glm5_next.plugins.config import Glm5NextConfig

# What trainers need GPU memory for: colocated servers give theirs back before.
NEEDS_ROOM = frozenset({"train", "score", "probe_replay"})
START_DEADLINE = 300.0  # seconds until every rank and engine has loaded its weights
# A killed rank makes its neighbours fail too, sometimes first: so long is waited for the news that one is dead.
SECONDS_FOR_DEATHS = 3.0


class Cluster:
    """A Ray (a local one, or the one that RAY_ADDRESS names) with the run's trainer ranks and engines; everything that
    was started ends with it.

    Use it as a context manager, in the main thread: Linux ends Ray's processes when the thread that started them ends.
    A rank or engine that dies or raises ends the call in progress, whichever it is, with a WorkerFailed that names it
    (a ValueError stays one); the caller ends the run, and leaving the context ends all processes.
    """

    def __init__(self, run: RunConfig, run_dir: Path, model: Glm5NextConfig):
        self.run, self.run_dir = run, run_dir
        self.version = 0
        self.unused_gpus = 0
        self.trainers: dict[str, Any] = {}
        self.engines: dict[str, Any] = {}
        self.process_ids: dict[str, int] = {}
        self.servers = (
            None
            if run.rollout.engine == "transformers"
            else Servers(run, model, run_dir, self._new_server, local=is_local())
        )
        self.colocated = run.rollout.placement == "colocated"
        self._guests: dict[str, dict[str, Any]] = {}  # Ray options of colocated servers, by name
        self._watches: dict[Any, str] = {}
        self._unanswered: dict[str, tuple[str, ...]] = {}  # what is asked -> who has not answered yet

    def status(self) -> str:
        """Who has not answered what, and how far the servers are; for another thread than the one that waits."""
        parts = [f"no answer to {what} from {', '.join(names)}" for what, names in list(self._unanswered.items())]
        if self.servers is not None and (text := self.servers.status()):
            parts.append(text)
        return "; ".join(parts) or "nothing is waited for"

    def __enter__(self) -> Self:
        self._reaper = Reaper()
        try:
            rollout = self.run.rollout
            start_ray(self.run.parallel.ranks + rollout.num_engines + rollout.max_restarts)
            check_cpus(self.run.parallel.ranks + rollout.num_engines)
            self._start()
            self._reaper.all_started()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.servers is not None:
                self.servers.close()
            ray.shutdown()
        finally:
            self._reaper.close()

    def train(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a method of every trainer rank and returns their answers by rank. Before they compute, colocated servers
        give their memory back."""
        if self.colocated and self.servers is not None and method in NEEDS_ROOM:
            self.servers.release()
        shared = [ray.put(arg) for arg in args]
        calls = {name: actor.call.remote(method, *shared, **kwargs) for name, actor in self.trainers.items()}
        return self._answers(calls, method)

    def publish(self, version: int) -> int:
        """Rank 0 sends the weights to all engines. Returns the bytes of one copy."""
        self.version = version
        if self.servers is not None:
            if self.colocated:
                self.train("make_room")
            num_bytes = self.servers.publish(version, self._send)
            self._reaper.all_started()  # servers that died are started again
            return num_bytes
        sinks = [RemoteSink(engine, number) for number, engine in enumerate(self.engines.values())]
        return max(self.train("publish", sinks, version))

    def generate(
        self, prompts: Sequence[np.ndarray], samples_per_prompt: int, *, max_new_tokens: int, seed: int
    ) -> list[list[Completion | Lost]]:
        """Splits the prompts over the engines; the answers are in the order of the prompts."""
        if self.servers is not None:
            # From another thread it is sampled ahead, while trainers are busy: the next update replaces dead servers.
            if not self.servers.can_sample and threading.current_thread() is threading.main_thread():
                self.publish(self.version)
            return self.servers.generate(
                prompts, samples_per_prompt, max_new_tokens=max_new_tokens, seed=seed, look_after=self._look_after
            )
        count = len(self.engines)
        calls = {
            name: engine.call.remote(
                "generate",
                list(prompts[number::count]),
                samples_per_prompt,
                max_new_tokens=max_new_tokens,
                seed=seed + number,
            )
            for number, (name, engine) in enumerate(self.engines.items())
        }
        shares = self._answers(calls, "generate")
        return [shares[i % count][i // count] for i in range(len(prompts))]

    def score(self, sequences: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Log-probabilities of the same sequences, from every engine."""
        if self.servers is not None:
            return self.servers.score(sequences, self._look_after)
        calls = {name: engine.call.remote("score", list(sequences)) for name, engine in self.engines.items()}
        return self._answers(calls, "score")

    def _start(self) -> None:
        run = self.run
        embedded = run.rollout.num_engines if self.servers is None else 0
        guests = run.rollout.num_engines if self.colocated else embedded
        places = trainer_options(run.parallel.ranks, guests)
        self.unused_gpus = unused_gpus(places)
        hosts = [rank % len(places) for rank in range(embedded)]  # the ranks whose GPUs the embedded engines share
        self.trainers = {f"trainer rank {rank}": new_actor(TrainerRank, **place) for rank, place in enumerate(places)}
        self.engines = {
            f"engine {number}": new_actor(EngineProcess, **guest_options(places[host]))
            for number, host in enumerate(hosts)
        }
        actors = self.trainers | self.engines
        self._watches = {actor.watch.remote(): name for name, actor in actors.items()}
        ids = self._answers({name: actor.process_id.remote() for name, actor in actors.items()}, "start")
        self.process_ids = dict(zip(actors, ids))
        gpus = self._answers({name: actor.gpus.remote() for name, actor in self.trainers.items()}, "start")
        first = next(iter(self.trainers))
        (address,) = self._answers({first: self.trainers[first].open_store.remote()}, "start")
        settings = {
            "precision": run.model.precision,
            "recording": Recording.of(run.replay),
            "batch_size": run.rollout.batch_size,
            "num_threads": max(1, (os.cpu_count() or 1) // len(actors)),
        }
        if self.servers is not None and self.colocated:
            self._start_colocated(self.servers, places, gpus)
        starts = {
            name: actor.start.remote(run, rank, address) for rank, (name, actor) in enumerate(self.trainers.items())
        }
        starts |= {
            name: actor.start.remote(run.model.checkpoint, gpus[host], settings)
            for (name, actor), host in zip(self.engines.items(), hosts)
        }
        if self.servers is not None:
            if not self.colocated:
                self.servers.start()
            self.process_ids |= self.servers.process_ids
        self._answers(starts, "start", deadline=START_DEADLINE)

    def _start_colocated(self, servers: Servers, places: list[dict[str, Any]], gpus: list[list[str]]) -> None:
        """Before the trainers load anything: a server measures the memory that is free."""
        for number in range(self.run.rollout.num_engines):
            ranks = shared_ranks(places, number, self.run.rollout.engine_tp)
            self._guests[f"engine {number}"] = guest_options(places[ranks[0]])
            servers.gpus[f"engine {number}"] = [gpu for rank in ranks for gpu in gpus[rank]]
        servers.start()

    def _new_server(self, name: str) -> Any:
        rollout = self.run.rollout
        if self.colocated:
            return new_actor(EngineServer, **self._guests[name])
        return new_actor(
            EngineServer, **server_options(self.run.parallel.ranks, rollout.num_engines, rollout.engine_tp)
        )

    def _send(self, order: Order) -> Outcome:
        return next(outcome for outcome in self.train("publish_to_servers", order) if outcome is not None)

    def _look_after(self) -> None:
        """Raises if a trainer rank has died."""
        dead, _ = ray.wait(list(self._watches), num_returns=1, timeout=0)
        if dead:
            raise WorkerFailed(f"{self._watches[dead[0]]} died: its process was killed or crashed")

    def _answers(self, calls: Mapping[str, Any], what: str, *, deadline: float = CALL_DEADLINE) -> list[Any]:
        """The results of all calls, in order; the first failure of any process ends the wait."""
        names = {call: name for name, call in calls.items()}
        results: dict[str, Any] = {}
        limit = time.monotonic() + deadline
        while len(results) < len(calls):
            waiting = [call for call, name in names.items() if name not in results]
            self._unanswered[what] = tuple(names[call] for call in waiting)
            left = max(0.0, limit - time.monotonic())
            done, _ = ray.wait([*waiting, *self._watches], num_returns=1, timeout=left)
            if not done:
                late = ", ".join(names[call] for call in waiting)
                raise WorkerFailed(f"{late}: no answer to {what} within {deadline:.0f} seconds")
            try:
                results[names.get(done[0], "")] = ray.get(done[0])
            except ray.exceptions.RayError as error:
                raise self._failure(names.get(done[0], ""), what, error) from error
        self._unanswered.pop(what, None)
        return [results[name] for name in calls]

    def _failure(self, name: str, what: str, error: Exception) -> Exception:
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        if isinstance(cause, ValueError):
            return ValueError(str(cause))
        dead, _ = ray.wait(list(self._watches), num_returns=1, timeout=SECONDS_FOR_DEATHS)
        if dead:
            return WorkerFailed(f"{self._watches[dead[0]]} died during {what}: its process was killed or crashed")
        return WorkerFailed(f"{name} failed in {what}: {describe(cause)}")
