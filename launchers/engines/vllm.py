"""vLLM 0.33 as a rollout engine, started with VLLM_SERVER_DEV_MODE=1. Facts of the protocol: `entrypoints/rl/online`,
`entrypoints/scale_out/token_in_token_out`, `distributed/weight_transfer`."""

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from glm5_next.launchers.engines.client import (
    CONTROL_DEADLINE,
    OFF_LIMITS,
    PLAIN_SAMPLING,
    WEIGHTS_DEADLINE,
    HttpClient,
    Meeting,
    Memory,
    Request,
    Shared,
    TensorList,
    check_tokens,
    until_accepted,
    version_of,
)
from glm5_next.launchers.engines.payload import routes_and_picks_from_npy, routes_from_npy
from glm5_next.launchers.engines.shared_bucket import vllm_payload
from glm5_next.launchers.engines.wire import EngineError, Malformed, Refused, field_of
from glm5_next.launchers.runtime.engine import Completion

SAMPLING = PLAIN_SAMPLING | {"top_k": 0, "detokenize": False}
ONE_MESSAGE = 2**40  # bytes; above every bucket, so that each is one broadcast


class VllmClient(HttpClient):
    """See `EngineClient`."""

    meets_by_id = True

    async def generate(self, request: Request, deadline: float) -> Completion:
        sampling = {
            "max_tokens": request.max_new_tokens,
            "stop_token_ids": self.stop_tokens,
            "seed": request.seed,
            "logprobs": 0,  # of the sampled token alone
        }
        answer = await self._ask(request.prompt, sampling, deadline, request_id=request.id)
        where = f"{self.name}: /inference/v1/generate {request.id}"
        (choice,) = field_of(answer, "choices", list, where) or [None]
        return await asyncio.to_thread(self._completion, choice, len(request.prompt), where)

    async def score(self, tokens: Sequence[int], deadline: float) -> np.ndarray:
        answer = await self._ask(tokens, {"max_tokens": 1, "prompt_logprobs": 0}, deadline)
        where = f"{self.name}: /inference/v1/generate (score)"
        entries = field_of(answer, "prompt_logprobs", list, where)[1:]
        try:
            values = [float(entry[str(token)]["logprob"]) for entry, token in zip(entries, tokens[1:], strict=True)]
        except (KeyError, TypeError, ValueError):
            raise Malformed(f"{where}: log-probabilities are not those of the prompt's tokens") from None
        return np.array(values, dtype=np.float32)

    async def cached_tokens(self, tokens: Sequence[int], deadline: float) -> int:
        answer = await self._ask(tokens, {"max_tokens": 1}, deadline)
        where = f"{self.name}: /inference/v1/generate (cached tokens)"
        usage = field_of(answer, "usage", Mapping, where)
        return field_of(field_of(usage, "prompt_tokens_details", Mapping, where), "cached_tokens", int, where)

    async def abort(self, request_id: str) -> None:
        await self.wire.post("/abort_requests", {"request_ids": [request_id]}, deadline=CONTROL_DEADLINE)

    async def world_size(self) -> int:
        answer = await self.wire.get("/get_world_size", deadline=CONTROL_DEADLINE)
        return field_of(answer, "world_size", int, f"{self.name}: /get_world_size")

    async def join(self, meeting: Meeting, first_rank: int, deadline: float) -> None:
        place = {"master_address": meeting.host, "master_port": meeting.port}
        by_id = {"nccl_unique_id_b64": base64.b64encode(meeting.unique_id).decode()}
        init_info = {
            **(by_id if meeting.unique_id else place),
            "rank_offset": first_rank,
            "world_size": meeting.world_size,
            "packed": True,
            "packed_buffer_size_bytes": ONE_MESSAGE,
        }
        await self.wire.post("/init_weight_transfer_engine", {"init_info": init_info}, deadline=deadline)

    async def leave(self, meeting: Meeting) -> None:
        await self.wire.post("/shutdown_weight_transfer_engine", {}, deadline=CONTROL_DEADLINE)

    async def open_update(self) -> None:
        await self._stop()
        try:
            await self.wire.post("/start_weight_update", {}, deadline=WEIGHTS_DEADLINE)
        except Refused:  # an update that failed has left its session open
            await self.wire.post("/finish_weight_update", {}, deadline=WEIGHTS_DEADLINE)
            await self.wire.post("/start_weight_update", {}, deadline=WEIGHTS_DEADLINE)

    async def receive(self, meeting: Meeting, tensors: TensorList, deadline: float) -> None:
        update_info = {"names": tensors.names, "dtype_names": tensors.dtypes, "shapes": tensors.shapes}
        await self.wire.post("/update_weights", {"update_info": update_info}, deadline=deadline)

    async def load_folder(self, folder: str, deadline: float) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await self.wire.post("/collective_rpc", body, deadline=deadline)

    async def release(self, memory: Sequence[Memory]) -> None:
        """All of it, whatever is named: the engine knows what it has given back already."""
        await self._stop()
        await self.wire.post("/sleep", deadline=WEIGHTS_DEADLINE, level=2, mode="abort")

    async def take_back(self, memory: Memory) -> None:
        answer = await self.wire.post("/wake_up", deadline=WEIGHTS_DEADLINE, tags=memory)
        where = f"{self.name}: /wake_up {memory}"
        if memory == "kv_cache" and field_of(answer, "status", str, where) != "awake":  # an error has no other sign
            raise Refused(f"{where}: the engine still sleeps", 400)

    async def join_shared(self) -> None:
        await self.wire.post("/init_weight_transfer_engine", {"init_info": {"packed": True}}, deadline=CONTROL_DEADLINE)

    async def load_shared(self, tensors: TensorList, shared: Sequence[Shared], deadline: float) -> None:
        update_info = {
            "names": tensors.names,
            "dtype_names": tensors.dtypes,
            "shapes": tensors.shapes,
            "tensor_sizes": tensors.sizes,
            "ipc_handles_pickled": base64.b64encode(vllm_payload(shared)).decode(),
        }
        await self.wire.post("/update_weights", {"update_info": update_info}, deadline=deadline)

    async def close_update(self, version: str) -> None:
        await self.wire.post("/finish_weight_update", {"weight_version": version}, deadline=WEIGHTS_DEADLINE)
        await self._flush()  # finishing does not

    async def resume(self) -> None:
        await self.wire.post("/resume", {}, deadline=CONTROL_DEADLINE)

    async def weights_version(self) -> str:
        answer = await self.wire.get("/weight_info", deadline=CONTROL_DEADLINE)
        return field_of(answer, "weight_version", str, f"{self.name}: /weight_info")

    async def checksums(self) -> dict[str, str]:
        answer = await self.wire.post("/weight_checker", {"action": "checksum"}, deadline=WEIGHTS_DEADLINE)
        checksums = field_of(answer, "checksums", Mapping, f"{self.name}: /weight_checker")
        return {name: checksum for name, checksum in checksums.items() if OFF_LIMITS not in name}

    async def forget(self) -> None:
        await self.wire.post("/weight_checker", {"action": "reset"}, deadline=WEIGHTS_DEADLINE)

    async def _stop(self) -> None:
        await self.wire.post("/pause", deadline=CONTROL_DEADLINE, mode="abort", clear_cache="true")
        await self._flush()

    async def _flush(self) -> None:
        """Confirmed: the server says so if blocks are still held."""

        async def attempt() -> None:
            answer = await self.wire.post("/reset_prefix_cache", deadline=CONTROL_DEADLINE)
            if field_of(answer, "success", bool, f"{self.name}: /reset_prefix_cache") is not True:
                raise Refused(f"{self.name}: /reset_prefix_cache: blocks are still held", 400)

        await until_accepted(attempt)

    async def _ask(self, tokens: Sequence[int], sampling: dict[str, Any], deadline: float, **fields: Any) -> Any:
        body = {"token_ids": list(tokens), "sampling_params": SAMPLING | sampling, **fields}
        return await self.wire.post("/inference/v1/generate", body, deadline=deadline)

    def _completion(self, choice: Any, prompt_length: int, where: str) -> Completion:
        finish = field_of(choice, "finish_reason", str, where)
        if finish not in ("stop", "length"):
            raise EngineError(f"{where}: aborted by the engine ({finish})")
        tokens = field_of(choice, "token_ids", list, where)
        content = field_of(field_of(choice, "logprobs", Mapping, where), "content", list, where)
        chosen = [field_of(entry, "token_id", int, where) for entry in content]
        logprobs = np.array([field_of(entry, "logprob", (int, float), where) for entry in content], dtype=np.float32)
        check_tokens(tokens, chosen, logprobs, where)
        rows, routes, picks = prompt_length + len(tokens) - 1, None, None
        if self.recording.picks:
            payload = field_of(choice, "routed_experts", str, where)
            routes, picks = routes_and_picks_from_npy(payload, rows, self.model, where)
        elif self.recording.routes:
            routes = routes_from_npy(field_of(choice, "routed_experts", str, where), rows, self.model, where)
        spans = choice.get("weight_versions")
        return Completion(
            tokens=np.array(tokens, dtype=np.int32),
            logprobs=logprobs,
            routes=routes if self.recording.routes else None,
            picks=picks,
            finish_reason="stop" if finish == "stop" else "length",
            weights_version=version_of(None, spans, where) if spans else None,
        )
