"""One engine's HTTP connection: every call has a deadline, and everything that can go wrong has a name."""

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import httpx2

MAX_ERROR_TEXT = 300


class EngineError(RuntimeError):
    """An engine did not do what it was asked. The text names the engine and the request, and holds no key."""


class Unreachable(EngineError):
    """No connection, or it broke before the answer was there: the engine may be dead."""


class Late(EngineError):
    """No answer before the deadline."""


class Refused(EngineError):
    """An answer with an error status (4xx or 5xx)."""

    def __init__(self, text: str, status: int):
        super().__init__(text)
        self.status = status


class Malformed(EngineError):
    """An answer that the protocol does not allow, or one without what was asked for."""


@dataclass(frozen=True)
class Address:
    """Where an engine listens. The key is in no text that is made of it."""

    name: str
    protocol: str  # "sglang" or "vllm"
    url: str
    key: str = field(repr=False)


class Wire:
    """Calls of one engine, for use in one event loop."""

    def __init__(self, address: Address):
        self.name = address.name
        self._client = httpx2.AsyncClient(
            base_url=address.url,
            headers={"Authorization": f"Bearer {address.key}"},
            timeout=None,  # each call has one deadline for all of it
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # a proxy of the environment is for the internet
        )

    async def post(self, path: str, body: Any = None, *, deadline: float, **params: Any) -> Any:
        """JSON in, JSON out (None for an empty answer); raises EngineError."""
        return await self._call("POST", path, deadline, json=body, params=params)

    async def get(self, path: str, *, deadline: float) -> Any:
        return await self._call("GET", path, deadline)

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(self, method: str, path: str, deadline: float, **request: Any) -> Any:
        what = f"{self.name}: {path}"
        try:
            async with asyncio.timeout(deadline):
                response = await self._client.request(method, path, **request)
        except TimeoutError:
            raise Late(f"{what}: no answer within {deadline:g} seconds") from None
        except httpx2.TransportError as error:
            raise Unreachable(f"{what}: {type(error).__name__} {error}") from None
        if response.status_code >= 400:
            text = " ".join(response.text.split())[:MAX_ERROR_TEXT]
            raise Refused(f"{what}: status {response.status_code}: {text}", response.status_code)
        if "json" not in response.headers.get("content-type", ""):
            return None
        try:
            return response.json()
        except ValueError:
            raise Malformed(f"{what}: the answer is not valid JSON") from None


class EventLoop:
    """An asyncio loop in a thread of its own, for callers that are not asynchronous."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="engine calls", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.start(work).result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)


def field_of(answer: Any, key: str, kind: type | tuple[type, ...], where: str) -> Any:
    """`answer[key]` of a JSON object; raises Malformed unless it is there and of the type."""
    value = answer.get(key) if isinstance(answer, Mapping) else None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise Malformed(f"{where}: {key!r} is {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:80]
