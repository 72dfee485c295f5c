"""SGLang 0.5.23 as a rollout engine. Facts of the protocol: `entrypoints/http_server.py`, `managers/io_struct.py`."""

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
from glm5_next.launchers.engines.payload import picks_from_raw, routes_from_int32
from glm5_next.launchers.engines.shared_bucket import sglang_payload
from glm5_next.launchers.engines.wire import EngineError, Malformed, Refused, field_of
from glm5_next.launchers.runtime.engine import Completion
from glm5_next.launchers.types import Void

SAMPLING = PLAIN_SAMPLING | {"top_k": -1, "skip_special_tokens": False}
SELECTED = {"selector": "target"}  # not the draft model, which nothing trains


class SGLangClient(HttpClient):
    """See `EngineClient`."""

    async def generate(self, request: Request, deadline: float) -> Completion:
        sampling = SAMPLING | {
            "max_new_tokens": request.max_new_tokens,
            "stop_token_ids": self.stop_tokens,
            "sampling_seed": request.seed,
        }
        body = {
            "rid": request.id,
            "input_ids": list(request.prompt),
            "sampling_params": sampling,
            "return_logprob": True,
            "return_routed_experts": self.recording.routes,
            "return_indexer_topk": self.recording.picks,
        }
        answer = await self.wire.post("/generate", body, deadline=deadline)
        where = f"{self.name}: /generate {request.id}"
        return await asyncio.to_thread(self._completion, answer, len(request.prompt), where)

    async def score(self, tokens: Sequence[int], deadline: float) -> np.ndarray:
        body = {
            "input_ids": list(tokens),
            "sampling_params": SAMPLING | {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self.wire.post("/generate", body, deadline=deadline)
        where = f"{self.name}: /generate (score)"
        meta = field_of(answer, "meta_info", Mapping, where)
        chosen, logprobs = _pairs(field_of(meta, "input_token_logprobs", list, where)[1:], where)
        check_tokens(tokens[1:], chosen, logprobs, where)
        return logprobs

    async def cached_tokens(self, tokens: Sequence[int], deadline: float) -> int:
        body = {"input_ids": list(tokens), "sampling_params": SAMPLING | {"max_new_tokens": 1}}
        answer = await self.wire.post("/generate", body, deadline=deadline)
        where = f"{self.name}: /generate (cached tokens)"
        return field_of(field_of(answer, "meta_info", Mapping, where), "cached_tokens", int, where)

    async def abort(self, request_id: str) -> None:
        await self.wire.post("/abort_request", {"rid": request_id}, deadline=CONTROL_DEADLINE)

    async def world_size(self) -> int:
        info = await self.wire.get("/server_info", deadline=CONTROL_DEADLINE)
        where = f"{self.name}: /server_info"
        sizes = {key: field_of(info, key, int, where) for key in ("tp_size", "pp_size", "dp_size")}
        if sizes["pp_size"] * sizes["dp_size"] > 1:
            raise Refused(f"{where}: pp_size and dp_size must be 1 for weight updates, they are {sizes}", 400)
        return sizes["tp_size"]

    async def join(self, meeting: Meeting, first_rank: int, deadline: float) -> None:
        body = {
            "master_address": meeting.host,
            "master_port": meeting.port,
            "rank_offset": first_rank,
            "world_size": meeting.world_size,
            "group_name": meeting.group,
            "backend": meeting.backend,
        }
        await self._acknowledged("/init_weights_update_group", body, deadline)

    async def leave(self, meeting: Meeting) -> None:
        await self._acknowledged("/destroy_weights_update_group", {"group_name": meeting.group}, CONTROL_DEADLINE)

    async def open_update(self) -> None:
        await self._stop()
        try:
            await self._acknowledged("/begin_weight_update", SELECTED, WEIGHTS_DEADLINE)
        except Refused:  # an update that failed has left its session open
            await self._acknowledged("/end_weight_update", {}, WEIGHTS_DEADLINE)
            await self._acknowledged("/begin_weight_update", SELECTED, WEIGHTS_DEADLINE)

    async def receive(self, meeting: Meeting, tensors: TensorList, deadline: float) -> None:
        body = {
            "names": tensors.names,
            "dtypes": tensors.dtypes,
            "shapes": tensors.shapes,
            "group_name": meeting.group,
            "load_format": "flattened_bucket",
            "flush_cache": False,  # once, at the end, and confirmed
            **SELECTED,
        }
        await self._acknowledged("/update_weights_from_distributed", body, deadline)

    async def load_folder(self, folder: str, deadline: float) -> None:
        body = {"model_path": folder, "flush_cache": False, "abort_all_requests": False}
        await self._acknowledged("/update_weights_from_disk", body, deadline)

    async def release(self, memory: Sequence[Memory]) -> None:
        await self._stop()  # a server that is not idle ends itself when it is asked
        await self.wire.post("/release_memory_occupation", {"tags": list(memory)}, deadline=WEIGHTS_DEADLINE)

    async def take_back(self, memory: Memory) -> None:
        await self.wire.post("/resume_memory_occupation", {"tags": [memory]}, deadline=WEIGHTS_DEADLINE)

    async def join_shared(self) -> None:
        """Nothing has to be said before."""

    async def load_shared(self, tensors: TensorList, shared: Sequence[Shared], deadline: float) -> None:
        body = {
            "serialized_named_tensors": [base64.b64encode(sglang_payload(one, tensors)).decode() for one in shared],
            "load_format": "flattened_bucket",
            "flush_cache": False,
            **SELECTED,
        }
        await self._acknowledged("/update_weights_from_tensor", body, deadline)

    async def close_update(self, version: str) -> None:
        await self._acknowledged("/end_weight_update", {}, WEIGHTS_DEADLINE)
        body = {"new_version": version, "abort_all_requests": False}
        await self._acknowledged("/update_weight_version", body, CONTROL_DEADLINE)
        await self._flush()

    async def resume(self) -> None:
        await self.wire.post("/continue_generation", {}, deadline=CONTROL_DEADLINE)

    async def weights_version(self) -> str:
        info = await self.wire.get("/model_info", deadline=CONTROL_DEADLINE)
        return field_of(info, "weight_version", str, f"{self.name}: /model_info")

    async def checksums(self) -> dict[str, str]:
        answer = await self._acknowledged("/weights_checker", self._check("checksum"), WEIGHTS_DEADLINE)
        where = f"{self.name}: /weights_checker"
        ranks = field_of(answer, "ranks", list, where)
        return {
            f"rank {number}: {name}": checksum
            for number, rank in enumerate(ranks)
            for name, checksum in field_of(rank, "checksums", Mapping, where).items()
        }

    async def forget(self) -> None:
        await self._acknowledged("/weights_checker", self._check("reset_tensors"), WEIGHTS_DEADLINE)

    async def _stop(self) -> None:
        await self.wire.post("/pause_generation", {"mode": "abort"}, deadline=CONTROL_DEADLINE)
        await self._flush()

    async def _flush(self) -> None:
        """Confirmed: the server refuses with 400 while a request holds pages."""
        await until_accepted(lambda: self.wire.post("/flush_cache", deadline=CONTROL_DEADLINE))

    async def _acknowledged(self, path: str, body: Mapping[str, Any], deadline: float) -> Any:
        answer = await self.wire.post(path, body, deadline=deadline)
        if field_of(answer, "success", bool, f"{self.name}: {path}") is not True:
            raise Refused(f"{self.name}: {path}: {answer.get('message')}", 400)
        return answer

    def _check(self, action: str) -> dict[str, Any]:
        return {"action": action, "skip_tensor_list": [OFF_LIMITS], **SELECTED}

    def _completion(self, answer: Any, prompt_length: int, where: str) -> Completion:
        meta = field_of(answer, "meta_info", Mapping, where)
        finish = field_of(field_of(meta, "finish_reason", Mapping, where), "type", str, where)
        if finish not in ("stop", "length"):
            raise EngineError(f"{where}: aborted by the engine ({finish})")
        # Retracted: old log-probabilities come back with the experts of the second computation.
        void: Void | None = "retracted" if meta.get("num_retractions") else None
        tokens = field_of(answer, "output_ids", list, where)
        chosen, logprobs = _pairs(field_of(meta, "output_token_logprobs", list, where), where)
        check_tokens(tokens, chosen, logprobs, where)
        rows, routes, picks = prompt_length + len(tokens) - 1, None, None
        if self.recording.routes and void is None:
            routes = routes_from_int32(field_of(meta, "routed_experts", str, where), rows, self.model, where)
        if self.recording.picks and void is None:
            picks = picks_from_raw(field_of(meta, "indexer_topk", str, where), rows, self.model, where)
        return Completion(
            tokens=np.array(tokens, dtype=np.int32),
            logprobs=logprobs,
            routes=routes,
            picks=picks,
            void=void,
            finish_reason="stop" if finish == "stop" else "length",
            weights_version=version_of(meta.get("weight_version"), meta.get("weight_versions"), where),
        )


def _pairs(entries: list[Any], where: str) -> tuple[list[int], np.ndarray]:
    """Tokens and log-probabilities from a list of [log-probability, token, text]."""
    try:
        return [int(entry[1]) for entry in entries], np.array([float(entry[0]) for entry in entries], dtype=np.float32)
    except (TypeError, ValueError, IndexError):
        raise Malformed(f"{where}: log-probabilities are not [value, token, text]") from None
