"""SGLang 0.5.23's HTTP protocol on a `ModelHost`: the endpoints that a trainer uses, with their oddities.

Names that no tensor has are skipped without a word; so are q_a_proj and kv_a_proj_with_mqa of a layer unless they come in
one call; unknown fields of a request are ignored, unknown sampling parameters refused; a flush is refused while busy.
"""

import base64
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5_next.launchers.engines.client import Meeting, TensorList
from glm5_next.launchers.engines.tiny_host import Job, ModelHost
from glm5_next.launchers.engines.weight_group import EngineEnd

Answer = tuple[int, Any]
OK, BAD_REQUEST = 200, 400
SAMPLING_PARAMETERS = frozenset(
    (
        *(
            "max_new_tokens",
            "min_new_tokens",
            "stop",
            "stop_token_ids",
            "stop_regex",
            "ignore_eos",
            "no_stop_trim",
            "n",
        ),
        *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "sampling_seed", "custom_params"),
        *("skip_special_tokens", "spaces_between_special_tokens", "stream_interval"),
    )
)
FUSED = ("q_a_proj.", "kv_a_proj_with_mqa.")
GROUP_TIMEOUT = timedelta(seconds=600)


class SGLangProtocol:
    """`handle` answers one request; a text answer is sent as text, everything else as JSON."""

    group_timeout = GROUP_TIMEOUT
    open_paths = ("/health", "/ready", "/metrics")  # need no key

    def __init__(self, host: ModelHost, *, tp: int = 1):
        self.host, self.tp = host, tp
        self.session = False
        self.groups: dict[str, list[EngineEnd]] = {}

    def handle(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> Answer:
        name = "do_" + path.strip("/").replace("/", "_")
        if path == "/health_generate":
            name = "do_health"
        endpoint = getattr(self, name, None)
        return endpoint(body) if endpoint else (404, {"detail": "Not Found"})

    def do_health(self, body: dict[str, Any]) -> Answer:
        return OK, ""

    def do_server_info(self, body: dict[str, Any]) -> Answer:
        return OK, {"tp_size": self.tp, "pp_size": 1, "dp_size": 1, "version": "0.5.23"}

    def do_model_info(self, body: dict[str, Any]) -> Answer:
        return OK, {"model_path": str(self.host.checkpoint.folder), "weight_version": self.host.version}

    def do_generate(self, body: dict[str, Any]) -> Answer:
        sampling = body.get("sampling_params", {})
        for key in sampling.keys() - SAMPLING_PARAMETERS:
            return BAD_REQUEST, {"error": f"unknown field `{key}`"}
        tokens = body.get("input_ids")
        if not tokens:
            return BAD_REQUEST, {"error": {"message": "Either text, input_ids or input_embeds should be provided."}}
        job = Job(
            body.get("rid", ""), tuple(tokens), sampling.get("max_new_tokens", 128), sampling.get("sampling_seed", 0)
        )
        if job.max_new_tokens == 0:
            return OK, self._score(body, job)
        return self._response(body, self.host.submit(job))

    def do_abort_request(self, body: dict[str, Any]) -> Answer:
        self.host.abort(None if body.get("abort_all") else body.get("rid", ""))
        return OK, ""

    def do_flush_cache(self, body: dict[str, Any]) -> Answer:
        if self.host.flush():
            return OK, "Cache flushed.\n"
        return BAD_REQUEST, "Flush cache failed.\n"

    def do_pause_generation(self, body: dict[str, Any]) -> Answer:
        self.host.pause()
        if body.get("mode", "abort") == "abort":
            self.host.abort(None)
        self.host.wait_until_idle()
        return OK, {"message": "Generation paused successfully.", "status": "ok"}

    def do_continue_generation(self, body: dict[str, Any]) -> Answer:
        self.host.resume()
        return OK, {"message": "Generation continued successfully.", "status": "ok"}

    def do_init_weights_update_group(self, body: dict[str, Any]) -> Answer:
        meeting = Meeting(
            body["master_address"], body["master_port"], body["world_size"], body["group_name"], body["backend"]
        )
        try:
            self.groups[meeting.group] = self._ends(meeting, body["rank_offset"])
        except (RuntimeError, ValueError) as error:
            return _done(False, f"Failed to initialize custom process group: {error}.")
        return _done(True, "Succeeded to initialize custom process group.")

    def do_destroy_weights_update_group(self, body: dict[str, Any]) -> Answer:
        if self.groups.pop(body["group_name"], None) is None:
            return _done(False, "The group to be destroyed does not exist.")
        return _done(True, "Succeeded to destroy custom process group.")

    def do_begin_weight_update(self, body: dict[str, Any]) -> Answer:
        if self.session:
            return _done(False, "a weight-update session is already open; call end_weight_update() first")
        self.session = True
        return _done(True, "Success")

    def do_end_weight_update(self, body: dict[str, Any]) -> Answer:
        if not self.session:
            return _done(False, "no weight-update session is open; call begin_weight_update() first")
        self.session = False
        return _done(True, "Success")

    def do_update_weights_from_distributed(self, body: dict[str, Any]) -> Answer:
        if not self.session:
            return _done(
                False, "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )
        tensors = TensorList(tuple(body["names"]), tuple(body["dtypes"]), tuple(map(tuple, body["shapes"])))
        try:
            with ThreadPoolExecutor(self.tp) as ranks:
                items, *others = ranks.map(lambda end: list(end.received(tensors)), self.groups[body["group_name"]])
        except (RuntimeError, KeyError) as error:
            return _done(False, f"Failed to receive weights: {error}")
        assert all(torch.equal(one[1], other[1]) for rank in others for one, other in zip(items, rank, strict=True))
        self.host.load(_whole_pairs(items))
        return self._updated(body, "Succeeded to update parameter online.")

    def do_update_weights_from_disk(self, body: dict[str, Any]) -> Answer:
        try:
            self.host.load_folder(Path(body["model_path"]))
        except ValueError as error:
            return _done(False, f"Failed to update weights: {error}.")
        return self._updated(body, "Succeeded to update model weights.")

    def do_update_weight_version(self, body: dict[str, Any]) -> Answer:
        if body.get("abort_all_requests", True):
            self.host.abort(None)
        self.host.version = body["new_version"]
        return OK, {"success": True, "message": "", "new_version": body["new_version"]}

    def do_weights_checker(self, body: dict[str, Any]) -> Answer:
        action, skip = body.get("action", "checksum"), body.get("skip_tensor_list") or ()
        if action == "reset_tensors":
            self.host.forget(skip)
            return _done(True, "Success")
        if action == "checksum":
            ranks = [{"checksums": self.host.checksums(skip)}]
            return OK, {"success": True, "message": "Success", "ranks": ranks}
        return _done(False, f"Unsupported action={action!r}")

    def _ends(self, meeting: Meeting, first_rank: int) -> list[EngineEnd]:
        """One for each tensor-parallel rank."""
        with ThreadPoolExecutor(self.tp) as ranks:
            return list(
                ranks.map(lambda rank: EngineEnd(meeting, first_rank + rank, self.group_timeout), range(self.tp))
            )

    def _updated(self, body: dict[str, Any], message: str) -> Answer:
        if body.get("weight_version") is not None:
            self.host.version = body["weight_version"]
        if body.get("flush_cache", True) and not self.host.flush():
            return _done(
                False, "Weights were updated, but the cache was not flushed because requests are still running"
            )
        return _done(True, message)

    def _score(self, body: dict[str, Any], job: Job) -> dict[str, Any]:
        start = max(0, body.get("logprob_start_len", -1))
        values = self.host.score(job.prompt).tolist()
        pairs = [[None, job.prompt[start], None]]
        pairs += [[value, token, None] for value, token in list(zip(values, job.prompt[1:]))[start:]]
        return {"text": "", "output_ids": [], "meta_info": self._meta(job) | {"input_token_logprobs": pairs}}

    def _response(self, body: dict[str, Any], job: Job) -> Answer:
        if job.error:
            return 500, {"error": {"message": job.error}}
        completion, meta = job.completion, self._meta(job)
        if completion is None or job.aborted:
            reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            return OK, {"text": "", "output_ids": [], "meta_info": meta | {"finish_reason": reason}}
        tokens = completion.tokens.tolist()
        meta["completion_tokens"] = len(tokens)
        meta["finish_reason"] = (
            {"type": "stop", "matched": tokens[-1]}
            if completion.finish_reason == "stop"
            else {"type": "length", "length": len(tokens)}
        )
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[p, t, None] for p, t in zip(completion.logprobs.tolist(), tokens)]
        if body.get("return_routed_experts") and completion.routes is not None:
            rows = self.host.all_layers(completion.routes)[body.get("routed_experts_start_len", 0) :]
            meta["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
        return OK, {"text": "", "output_ids": tokens, "meta_info": meta}

    def _meta(self, job: Job) -> dict[str, Any]:
        return {
            "id": job.id,
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": len(job.prompt),
            "completion_tokens": 0,
            "cached_tokens": job.cached_tokens,
            "weight_version": self.host.version,
            "num_retractions": 0,
        }


def _whole_pairs(items: list[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """Without halves of the fused projection whose other half did not come in the same call."""
    names = {name for name, _ in items}
    for name, tensor in items:
        here, other = FUSED if FUSED[0] in name else FUSED[::-1]
        if here not in name or name.replace(here, other) in names:
            yield name, tensor


def _done(success: bool, message: str) -> Answer:
    return OK if success else BAD_REQUEST, {"success": success, "message": message}
