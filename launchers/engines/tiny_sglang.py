"""SGLang 0.5.23's HTTP protocol on a `ModelHost`: the endpoints that a trainer uses, with their oddities.

Unknown fields of a request are ignored, unknown sampling parameters refused; a flush is refused while busy. Picks of the
indexer are zeros unless `picks` says what our plugin would send.
"""

import base64
from typing import Any

import numpy as np

from glm5_next.launchers.engines.tiny_host import Job, ModelHost
from glm5_next.launchers.engines.tiny_sglang_weights import BAD_REQUEST, OK, Answer, SGLangWeights
from glm5_next.launchers.runtime.engine import Completion
from glm5_next.plugins.pick_coding import first_choice

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


class SGLangProtocol(SGLangWeights):
    """`handle` answers one request; a text answer is sent as text, everything else as JSON."""

    open_paths = ("/health", "/ready", "/metrics")  # need no key

    def __init__(self, host: ModelHost, *, tp: int = 1, picks: str = "stock"):
        super().__init__(host, tp=tp)
        self.picks = picks

    def handle(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> Answer:
        name = "do_" + path.strip("/").replace("/", "_")
        if path == "/health_generate":
            name = "do_health"
        endpoint = getattr(self, name, None)
        if endpoint is None:
            return 404, {"detail": "Not Found"}
        try:
            return endpoint(body)
        except RuntimeError as error:  # a real server would end here
            return 500, {"error": {"message": str(error)}}

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
        if body.get("return_indexer_topk"):
            meta["indexer_topk"] = base64.b64encode(self._indexer_topk(completion).tobytes()).decode()
        return OK, {"text": "", "output_ids": tokens, "meta_info": meta}

    def _indexer_topk(self, completion: Completion) -> np.ndarray:
        picks, config = completion.picks, self.host.config
        assert picks is not None
        if self.picks == "stock":  # what no pooled indexer has written to
            return np.zeros((picks.num_tokens, config.num_layers, config.index_topk), dtype=np.int32)
        return self.host.pools(picks, self.picks)[first_choice(picks.kpool, picks.num_selected) :]

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
