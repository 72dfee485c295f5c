"""The servers of a run: starting them, asking them for samples, giving them new weights, replacing those that died."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import ray

from glm5_next.launchers.config import RunConfig
from glm5_next.launchers.engines.client import EngineClient
from glm5_next.launchers.engines.clients import client_of
from glm5_next.launchers.engines.command import engine_command
from glm5_next.launchers.engines.fleet import Fleet
from glm5_next.launchers.engines.guests import environment, first_sleep
from glm5_next.launchers.engines.keys import find_key
from glm5_next.launchers.engines.order import Order, Outcome
from glm5_next.launchers.engines.wire import Address, EventLoop
from glm5_next.launchers.failures import WorkerFailed
from glm5_next.launchers.runtime.actors import describe
from glm5_next.launchers.runtime.engine import Completion, Lost
from glm5_next.plugins.config import Glm5NextConfig

SECONDS_BETWEEN_LOOKS = 0.5  # while servers work, the trainer ranks are looked after this often


class Servers:
    """`start` needs a running Ray. Not for use by several threads, except `generate` beside `publish` of older weights."""

    def __init__(
        self, run: RunConfig, model: Glm5NextConfig, run_dir: Path, new_actor: Callable[[str], Any], *, local: bool
    ):
        self.run, self.model, self.run_dir = run, model, run_dir
        self.local = local  # then servers listen on the loopback interface
        self.key = find_key(run.rollout.api_key)
        self.loop = EventLoop()
        self.actors: dict[str, Any] = {}
        self.addresses: dict[str, Address] = {}
        self.unproved: set[str] = set()  # engines that have not been filled with noise and sent everything yet
        self.restarts = 0
        self.colocated = run.rollout.placement == "colocated"
        self.gpus: dict[str, list[str]] = {}  # of colocated servers, by name
        self.started: dict[str, dict[str, str]] = {}  # checksums of what they were started with
        self._new_actor = new_actor

    def start(self) -> None:
        """Starts the servers, or finds those that run already; all answer when this returns."""
        settings = self.run.rollout
        count = len(settings.urls) or settings.num_engines
        names = [f"engine {number}" for number in range(count)]
        if settings.urls:
            for name, url in zip(names, settings.urls, strict=True):
                self.addresses[name] = Address(name, settings.engine, url, self.key)
        else:
            self._start_servers(names)
        self.unproved = set(names)
        self.fleet = Fleet([self._client(name) for name in names], settings)
        self.loop.run(self.fleet.look_after())
        silent = [member.why for member in self.fleet.members.values() if member.state == "gone"]
        if silent:
            raise ValueError(f"rollout.urls: {'; '.join(silent)}")

    @property
    def process_ids(self) -> dict[str, int]:
        """Of the servers that this run started."""
        return dict(zip(self.actors, ray.get([actor.server_id.remote() for actor in self.actors.values()])))

    @property
    def can_sample(self) -> bool:
        return bool(self.fleet.ready)

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        samples_per_prompt: int,
        *,
        max_new_tokens: int,
        seed: int,
        look_after: Callable[[], None],
    ) -> list[list[Completion | Lost]]:
        """`look_after` is called now and then, and raises to give up."""
        work = self.fleet.generate(prompts, samples_per_prompt, max_new_tokens=max_new_tokens, seed=seed)
        return self._wait(self.loop.start(work), look_after)

    def score(self, sequences: Sequence[np.ndarray], look_after: Callable[[], None]) -> list[list[np.ndarray]]:
        scores = self._wait(self.loop.start(self.fleet.score(sequences)), look_after)
        if not scores:
            raise WorkerFailed(f"no engine could score the probes: {self._why()}")
        return scores

    def release(self) -> None:
        """Colocated servers give their memory to the trainer; none samples before the next `publish`."""
        self._end(self.loop.run(self.fleet.put_to_sleep()))

    def publish(self, version: int, send: Callable[[Order], Outcome]) -> int:
        """Sends weights to every engine that answers, until all that are left hold them. Returns the bytes of one copy."""
        out: dict[str, str] = {}  # by this update
        if self.colocated:
            self.release()
        while True:
            self.loop.run(self.fleet.look_after())
            self._replace_dead()
            names = [name for name, member in self.fleet.members.items() if member.state != "gone" and name not in out]
            if not names and not self._started_again(list(out)):
                raise WorkerFailed(f"no engine is left to publish weights version {version} to: {self._why()}")
            if not names:
                out.clear()
                continue
            outcome = send(
                Order(
                    addresses=tuple(self.addresses[name] for name in names),
                    fresh=frozenset(self.unproved.intersection(names)),
                    version=version,
                    run=self.run,
                    folder=self.run_dir / "weights",
                    started=self.started,
                )
            )
            out |= outcome.failed
            self.unproved |= outcome.failed.keys()
            if not outcome.failed:
                self.unproved -= set(names)
                self.fleet.updated(version, out, [*names, *out])
                return outcome.num_bytes
            self.fleet.updated(
                version, dict.fromkeys(names, "its update was given up with that of others") | out, names
            )
            if self.colocated:
                self._end(outcome.failed)

    def status(self) -> str:
        """How far a round of sampling is, and with whom; empty where there is none."""
        return self.fleet.status() if hasattr(self, "fleet") else "servers do not all answer yet"

    def close(self) -> None:
        self.loop.close()

    def _why(self) -> str:
        return "; ".join(member.why for member in self.fleet.members.values())

    def _started_again(self, names: Sequence[str]) -> bool:
        """Whether there are servers again after an update that failed on all; colocated ones were ended and replaced."""
        if self.colocated:
            return any(self.fleet.members[name].state != "gone" for name in names)
        return self._replace(names)

    def _replace_dead(self) -> None:
        self._replace([name for name, member in self.fleet.members.items() if member.state == "gone"])

    def _replace(self, names: Sequence[str]) -> bool:
        """Starts servers of this run again, as long as there may be restarts; whether there was one."""
        left = self.run.rollout.max_restarts - self.restarts
        names = [name for name in names if name in self.actors][:left]
        if not names:
            return False
        self.restarts += len(names)
        try:
            self._start_servers(names)
        except WorkerFailed as error:
            for name in names:
                self.fleet.members[name].why = str(error)
            return left > len(names)
        for name in names:
            self.loop.run(self.fleet.members[name].client.close())
            self.fleet.replace(self._client(name))
            self.unproved.add(name)
        return True

    def _start_servers(self, names: Sequence[str]) -> None:
        settings = self.run.rollout
        words = engine_command(self.run, self.model)
        for name in names:
            if name not in self.actors or not _alive(self.actors[name]):
                self.actors[name] = self._new_actor(name)
        values = {"checkpoint": str(self.run.model.checkpoint), "python": sys.executable}
        values |= {"threads": str(max(1, (os.cpu_count() or 1) // (len(names) + self.run.parallel.ranks)))}
        starts = [
            self.actors[name].start_server.remote(
                words,
                values | {"number": name.split()[-1]},
                self.key,
                self.run_dir / f"{name.replace(' ', '-')}.log",
                self.local,
                environment(settings.engine, self.gpus.get(name, ())) if self.colocated else {},
            )
            for name in names
        ]
        for name, url in zip(names, self._answers(names, starts)):
            self.addresses[name] = Address(name, settings.engine, url, self.key)
        waits = [
            self.actors[name].wait_until.remote(self.addresses[name].url, settings.start_deadline) for name in names
        ]
        self._answers(names, waits)
        if self.colocated:
            self._first_sleep(names)

    def _first_sleep(self, names: Sequence[str]) -> None:
        works = {name: self.loop.start(first_sleep(self._client(name))) for name in names}
        failed = [str(error) for work in works.values() if (error := work.exception()) is not None]
        if failed:
            self._end(names)
            raise WorkerFailed(f"not every colocated server gave its memory to the trainer: {'; '.join(failed)}")
        self.started |= {name: work.result() for name, work in works.items()}

    def _end(self, names: Iterable[str]) -> None:
        """Ends servers whose memory is in no known state; the next update starts them again."""
        self._answers([*names], [self.actors[name].end_server.remote() for name in names])

    def _answers(self, names: Sequence[str], calls: Sequence[Any]) -> list[Any]:
        try:
            return ray.get(list(calls), timeout=2 * self.run.rollout.start_deadline)
        except ray.exceptions.RayError as error:
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            text = str(cause) if isinstance(cause, RuntimeError) else describe(cause)
            raise WorkerFailed(f"{', '.join(names)} failed to start: {text}") from error

    def _client(self, name: str) -> EngineClient:
        return client_of(self.addresses[name], self.run, self.model)

    def _wait(self, work: Future[Any], look_after: Callable[[], None]) -> Any:
        try:
            while True:
                try:
                    return work.result(SECONDS_BETWEEN_LOOKS)
                except TimeoutError:
                    if work.done():
                        raise
                    look_after()
        finally:
            work.cancel()


def _alive(actor: Any) -> bool:
    try:
        ray.get(actor.process_id.remote(), timeout=10.0)
    except ray.exceptions.RayError:
        return False
    return True
