"""vLLM's `--middleware`: its own check of the key leaves out every path that changes weights or stops generation.

(`entrypoints/serve/middleware/authenticate.py` in 0.33.0 guards /v1, /v2, /inference and /cohere.)
"""

import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

OPEN_PATHS = ("/health",)


class RequireKey:
    """Answers 401 to every HTTP request without the key, which is in the environment (VLLM_API_KEY)."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self.app = app
        self.key = os.environ.get("VLLM_API_KEY", "")
        if not self.key:
            raise ValueError("VLLM_API_KEY is not set; the server would take weights from anybody")

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1").removeprefix("Bearer ")
            if not secrets.compare_digest(given.encode(), self.key.encode()):
                await send(
                    {"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]}
                )
                await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
                return
        await self.app(scope, receive, send)
