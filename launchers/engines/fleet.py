"""The servers of a run seen as one rollout engine: who gets which request, what is given up when, and who is out.

An engine is `ready` (it holds the current weights), `quarantined` (an update failed on it, or it answered with an old
prefix cache, or it sleeps: it gets no request until a whole update has succeeded) or `gone` (it does not answer; the run
starts its own servers again). A request that fails goes to another engine while the sample's deadline allows.
"""

import asyncio
import logging
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from glm5_next.launchers.config_rollout import RolloutSection
from glm5_next.launchers.engines.client import ALL_MEMORY, EngineClient, Request
from glm5_next.launchers.engines.wire import EngineError, Late, Malformed, Unreachable
from glm5_next.launchers.run_state import step_seed
from glm5_next.launchers.runtime.engine import Completion, Lost

ATTEMPTS = 3
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Member:
    """One engine of the fleet."""

    client: EngineClient
    state: Literal["ready", "quarantined", "gone"] = "quarantined"  # until its first update
    in_flight: int = 0
    proved: bool = True  # False from an update until its first answer has shown an empty prefix cache
    why: str = "not updated yet"
    asleep: bool = False  # its memory is the trainer's (rollout.placement = "colocated")


class Fleet:
    """The servers of a run: who gets which request, and who is left out. All methods run in one event loop."""

    def __init__(self, clients: Iterable[EngineClient], settings: RolloutSection):
        self.settings = settings
        self.members = {client.name: self._member_of(client) for client in clients}
        self.version = 0
        self.finished = self.asked = 0  # requests of the current call, for who watches
        self.tokens = 0
        self._calls = 0
        self._started, self._ended = 0.0, True
        self._changed = asyncio.Condition()  # of the current call: it belongs to an event loop

    @property
    def ready(self) -> list[Member]:
        return [member for member in self.members.values() if member.state == "ready"]

    def updated(self, version: int, failed: Mapping[str, str], names: Iterable[str]) -> None:
        """After an update of the named engines: those that did not fail hold `version`."""
        self.version = version
        for name in names:
            member = self.members[name]
            member.state, member.why = ("quarantined", failed[name]) if name in failed else ("ready", "")
            member.proved = name in failed
            member.asleep = member.asleep and name in failed

    def status(self) -> str:
        """The round in progress: samples, rates, time left, and who has how many requests; empty between rounds."""
        if self.finished >= self.asked or self._ended:
            return ""
        seconds = max(time.monotonic() - self._started, 1e-9)
        rate = self.finished / seconds
        left = f"{(self.asked - self.finished) / rate:.0f} seconds left" if rate else "none yet"
        busy = ", ".join(f"{name} ({member.in_flight})" for name, member in self.members.items() if member.in_flight)
        return (
            f"{self.finished} of {self.asked} samples, {rate:.1f} rollouts/s, {self.tokens / seconds:.0f} tokens/s, {left}; "
            f"waiting for {busy or 'an engine'}"
        )

    def replace(self, client: EngineClient) -> None:
        """A server that was started again has lost its weights."""
        self.members[client.name] = self._member_of(client)

    async def put_to_sleep(self) -> list[str]:
        """Engines that are awake give their memory back; returns those that are out because they did not."""
        members = [member for member in self.members.values() if member.state != "gone" and not member.asleep]
        failed = await asyncio.gather(*(self._asleep(member) for member in members))
        return [name for name in failed if name is not None]

    async def generate(
        self, prompts: Sequence[np.ndarray], samples_per_prompt: int, *, max_new_tokens: int, seed: int
    ) -> list[list[Completion | Lost]]:
        """All samples that came in time; `Lost` for the others. Nothing is left running, here or on an engine."""
        self._calls += 1
        self._changed = asyncio.Condition()
        requests = [
            Request(
                id=f"{self._calls}-{seed}-{number}.{copy}",
                prompt=tuple(prompt.tolist()),
                max_new_tokens=max_new_tokens,
                seed=step_seed(seed, number, f"sample/{copy}"),
            )
            for number, prompt in enumerate(prompts)
            for copy in range(samples_per_prompt)
        ]
        self.asked, self.finished, self.tokens = len(requests), 0, 0
        self._started, self._ended = time.monotonic(), False
        tasks = [asyncio.create_task(self._sample(request)) for request in requests]
        try:
            _, late = await asyncio.wait(tasks, timeout=self.settings.step_deadline)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._ended = True
        answers: list[Completion | Lost] = [Lost("step deadline") if task in late else task.result() for task in tasks]
        return [answers[i : i + samples_per_prompt] for i in range(0, len(answers), samples_per_prompt)]

    async def score(self, sequences: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """From every ready engine, in their order; one that cannot is out of the fleet."""
        members = self.ready
        scores = await asyncio.gather(*(self._scored(member, sequences) for member in members))
        return [score for score in scores if score is not None]

    async def look_after(self) -> None:
        """Marks engines that do not answer."""
        members = [member for member in self.members.values() if member.state != "gone"]
        for member, healthy in zip(members, await asyncio.gather(*(m.client.healthy() for m in members)), strict=True):
            if not healthy:
                self._out(member, "gone", f"{member.client.name} does not answer")

    def _member_of(self, client: EngineClient) -> Member:
        return Member(client, asleep=self.settings.placement == "colocated")

    async def _asleep(self, member: Member) -> str | None:
        try:
            await member.client.release(ALL_MEMORY)
        except EngineError as error:
            self._out(member, "gone", str(error))
            return member.client.name
        member.state, member.why, member.asleep = "quarantined", "it gave its memory to the trainer", True
        return None

    async def _scored(self, member: Member, sequences: Sequence[np.ndarray]) -> list[np.ndarray] | None:
        deadline = self.settings.request_deadline
        try:
            if not member.proved:
                cached = await member.client.cached_tokens(sequences[0].tolist(), deadline)
                if cached:
                    raise Malformed(
                        f"{member.client.name}: {cached} tokens came from the prefix cache, which had just been emptied: "
                        "it answers from older weights"
                    )
                member.proved = True
            return [await member.client.score(tokens.tolist(), deadline) for tokens in sequences]
        except EngineError as error:
            self._out(member, "gone" if isinstance(error, Unreachable) else "quarantined", str(error))
            return None

    async def _sample(self, request: Request) -> Completion | Lost:
        """One sample from whichever engine answers first among up to `ATTEMPTS` tried in turn."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + self.settings.sample_deadline
        lost, tried = Lost("no engine"), set[str]()
        for _ in range(ATTEMPTS):
            member = await self._member(limit, tried)
            if member is None:
                return lost if loop.time() < limit else Lost("sample deadline")
            tried.add(member.client.name)
            try:
                deadline = min(self.settings.request_deadline, limit - loop.time())
                completion = await self._asked(member, request, deadline)
                self.finished += 1
                self.tokens += len(completion.tokens)
                return completion
            except EngineError as error:
                logger.info("%s", error)
                lost = await self._blamed(member, error)
            finally:
                await self._release(member)
        return lost

    async def _asked(self, member: Member, request: Request, deadline: float) -> Completion:
        """The engine's answer; a request that is given up is aborted there, too."""
        try:
            completion = await member.client.generate(request, deadline)
        except (Late, asyncio.CancelledError):
            await asyncio.shield(asyncio.create_task(self._abort(member, request)))
            raise
        if completion.weights_version not in (None, self.version):
            raise Malformed(
                f"{member.client.name}: sampled by weights version {completion.weights_version}, not {self.version}"
            )
        return completion

    async def _abort(self, member: Member, request: Request) -> None:
        try:
            await member.client.abort(request.id)
        except EngineError as error:
            logger.info("%s", error)

    async def _blamed(self, member: Member, error: EngineError) -> Lost:
        """The reason to count, after an engine that is dead has been taken out."""
        if isinstance(error, Unreachable):
            if not await member.client.healthy():
                self._out(member, "gone", str(error))
            return Lost("engine died", str(error))
        if isinstance(error, Late):
            return Lost("request deadline", str(error))
        return Lost("bad answer" if isinstance(error, Malformed) else "refused or aborted", str(error))

    async def _member(self, limit: float, tried: Container[str]) -> Member | None:
        """The ready engine with the fewest requests, once it has room, if possible one that was not tried.

        None if there is none, or no time left.
        """
        loop = asyncio.get_running_loop()
        async with self._changed:
            while self.ready and loop.time() < limit:
                member = min(self.ready, key=lambda member: (member.client.name in tried, member.in_flight))
                if member.in_flight < self.settings.batch_size:
                    member.in_flight += 1
                    return member
                try:
                    async with asyncio.timeout_at(limit):
                        await self._changed.wait()
                except TimeoutError:
                    return None
        return None

    async def _release(self, member: Member) -> None:
        member.in_flight -= 1
        async with self._changed:
            self._changed.notify_all()

    def _out(self, member: Member, state: Literal["quarantined", "gone"], why: str) -> None:
        logger.warning("%s is %s: %s", member.client.name, state, why)
        member.state, member.why = state, why
