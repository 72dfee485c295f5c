"""What the run asks of one engine, whichever protocol it speaks."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, Protocol

import numpy as np
import torch

from glm5_next.launchers.engines.wire import Address, EngineError, Malformed, Refused, Wire
from glm5_next.launchers.replay_plan import Recording
from glm5_next.launchers.runtime.engine import Completion
from glm5_next.plugins.config import Glm5NextConfig

CONTROL_DEADLINE = 60.0  # seconds for a call that moves no weights and samples nothing
WEIGHTS_DEADLINE = 600.0  # seconds for a call that goes over all weights of a large model once
FLUSH_DEADLINE = 60.0  # seconds in which a cache has to become free
FLUSH_PAUSE = 0.1
OFF_LIMITS = "visual"  # part of the names of tensors that are never trained and never sent
# Every value that reshapes the distribution is named: a server takes its defaults from the checkpoint.
PLAIN_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}


@dataclass(frozen=True)
class Request:
    """One response to sample. `id` is unique in the run."""

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class TensorList:
    """The tensors of one message, in the order in which they are broadcast."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def kinds(self) -> list[torch.dtype]:
        return [getattr(torch, dtype) for dtype in self.dtypes]

    @property
    def sizes(self) -> list[int]:
        """In bytes."""
        return [prod(shape) * kind.itemsize for shape, kind in zip(self.shapes, self.kinds, strict=True)]


@dataclass(frozen=True)
class Meeting:
    """Where trainer and engine ranks meet to exchange weights; the trainer is rank 0, an engine's first is `first_rank`."""

    host: str
    port: int
    world_size: int
    group: str
    backend: str
    unique_id: bytes = b""  # of NCCL, where the ranks meet by it instead of at the address


@dataclass(frozen=True)
class Shared:
    """Another process's way into a flat tensor: where it is (a GPU's UUID, or "cpu" and the rank), and what rebuilds it."""

    device: str
    args: tuple[Any, ...]


Memory = Literal["weights", "kv_cache"]  # what an engine gives back and takes again
ALL_MEMORY: tuple[Memory, ...] = ("kv_cache", "weights")


class EngineClient(Protocol):
    """Every method raises EngineError. Weights change between `open_update` and `close_update` only."""

    name: str
    meets_by_id: bool  # on GPUs; otherwise at an address

    async def healthy(self) -> bool: ...

    async def generate(self, request: Request, deadline: float) -> Completion:
        """Samples at temperature 1; log-probabilities are raw; what the engine chose is there as far as the run wants it."""
        ...

    async def score(self, tokens: Sequence[int], deadline: float) -> np.ndarray:
        """float32 [S - 1] raw log-probabilities of the tokens after the first."""
        ...

    async def cached_tokens(self, tokens: Sequence[int], deadline: float) -> int:
        """How many tokens of this prompt its prefix cache holds; asks for one token after it."""
        ...

    async def abort(self, request_id: str) -> None: ...

    async def world_size(self) -> int:
        """Processes that take part in a weight update."""
        ...

    async def join(self, meeting: Meeting, first_rank: int, deadline: float) -> None: ...

    async def leave(self, meeting: Meeting) -> None: ...

    async def open_update(self) -> None:
        """Stops generation, frees and empties the prefix cache (confirmed), opens a session."""
        ...

    async def receive(self, meeting: Meeting, tensors: TensorList, deadline: float) -> None:
        """Takes part in the broadcast of these tensors and loads them."""
        ...

    async def load_folder(self, folder: str, deadline: float) -> None: ...

    async def release(self, memory: Sequence[Memory]) -> None:
        """Stops generation and gives this memory back, which the engine has; weights and cache are lost with it."""
        ...

    async def take_back(self, memory: Memory) -> None:
        """Takes memory again that it has given back. What is in it is anything."""
        ...

    async def join_shared(self) -> None:
        """Before the first `load_shared`."""
        ...

    async def load_shared(self, tensors: TensorList, shared: Sequence[Shared], deadline: float) -> None:
        """Loads these tensors from flat ones that trainer ranks hold, one for each of the engine's ranks."""
        ...

    async def close_update(self, version: str) -> None:
        """Closes the session under the new version with an empty prefix cache; generation stays stopped."""
        ...

    async def resume(self) -> None: ...

    async def weights_version(self) -> str: ...

    async def checksums(self) -> dict[str, str]:
        """Of every tensor that the engine can report, by its own names, except `OFF_LIMITS`."""
        ...

    async def forget(self) -> None:
        """Overwrites all those tensors with noise, so that one which no update writes is found."""
        ...

    async def close(self) -> None: ...


class HttpClient:
    """What is the same in every protocol over HTTP."""

    meets_by_id = False

    def __init__(self, address: Address, model: Glm5NextConfig, *, stop_tokens: Sequence[int], recording: Recording):
        self.name, self.model, self.stop_tokens, self.recording = address.name, model, list(stop_tokens), recording
        self.wire = Wire(address)

    async def healthy(self) -> bool:
        try:
            await self.wire.get("/health", deadline=CONTROL_DEADLINE)
        except EngineError:
            return False
        return True

    async def close(self) -> None:
        await self.wire.close()


async def until_accepted(attempt: Callable[[], Awaitable[object]], deadline: float = FLUSH_DEADLINE) -> None:
    """Repeats a call that an engine refuses while it is busy; raises the last refusal after the deadline."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + deadline
    while True:
        try:
            await attempt()
            return
        except Refused as refusal:
            if refusal.status != 400 or loop.time() > limit:
                raise
        await asyncio.sleep(FLUSH_PAUSE)


def check_tokens(tokens: Sequence[int], chosen: Sequence[int], logprobs: np.ndarray, where: str) -> None:
    """Raises EngineError unless the log-probabilities are those of the answer's own tokens."""
    if list(tokens) != list(chosen):
        raise EngineError(f"{where}: log-probabilities of other tokens than those of the answer")
    if not tokens or not np.isfinite(logprobs).all() or (logprobs > 1e-6).any():
        raise EngineError(f"{where}: no tokens, or log-probabilities that cannot be")


def version_of(version: Any, spans: Any, where: str) -> int:
    """The one version of the weights that sampled an answer; raises EngineError if there were several or none is known."""
    if spans and len({span["version"] for span in spans}) > 1:
        raise EngineError(f"{where}: sampled by several versions of the weights, {spans}")
    if spans:
        version = spans[0]["version"]
    if not isinstance(version, str) or not version.isdecimal():
        raise Malformed(f"{where}: weights version {version!r} is none of this run's")
    return int(version)
