"""vLLM 0.33's HTTP protocol on a `ModelHost`: the endpoints that a trainer uses, with their oddities.

Requests are turned away (503) while generation is paused. `picks` other than "stock" puts the indexer's choices behind the
experts, as our plugin does.
"""

import base64
import io
from typing import Any

import numpy as np

from glm5_next.launchers.engines.tiny_host import Job, ModelHost
from glm5_next.launchers.engines.tiny_vllm_weights import OK, Answer, VllmWeights
from glm5_next.launchers.runtime.engine import Completion


class VllmProtocol(VllmWeights):
    """`handle` answers one request; a text answer is sent as text, everything else as JSON."""

    open_paths = ("/health",)  # need no key

    def __init__(self, host: ModelHost, *, tp: int = 1, rebuilds: bool = True, picks: str = "stock"):
        super().__init__(host, tp=tp, rebuilds=rebuilds)
        self.picks = picks

    def handle(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> Answer:
        endpoint = getattr(self, "do_" + path.strip("/").replace("/", "_"), None)
        if endpoint is None:
            return 404, {"detail": "Not Found"}
        try:
            return endpoint({**body, **query})
        except (RuntimeError, KeyError, ValueError) as error:
            return 500, {"error": {"message": f"{type(error).__name__}: {error}", "code": 500}}

    def do_health(self, body: dict[str, Any]) -> Answer:
        return OK, ""

    def do_inference_v1_generate(self, body: dict[str, Any]) -> Answer:
        if self.host.paused:
            return 503, {"error": {"message": "generation is paused", "code": 503}}
        sampling = body["sampling_params"]
        job = Job(body.get("request_id", ""), tuple(body["token_ids"]), sampling["max_tokens"], sampling.get("seed", 0))
        self.host.submit(job)
        if job.error:
            return 500, {"error": {"message": job.error, "code": 500}}
        answer: dict[str, Any] = {
            "request_id": job.id,
            "choices": [self._choice(sampling, job)],
            "usage": self._usage(job),
        }
        if "prompt_logprobs" in sampling:
            values = zip(job.prompt[1:], self.host.score(job.prompt).tolist())
            scored: list[Any] = [{str(token): {"logprob": value}} for token, value in values]
            answer["prompt_logprobs"] = [None, *scored]
        return OK, answer

    def do_abort_requests(self, body: dict[str, Any]) -> Answer:
        if not body.get("request_ids"):
            self.host.abort(None)
        for request_id in body.get("request_ids", []):
            self.host.abort(request_id)
        return OK, {"status": "aborted"}

    def do_resume(self, body: dict[str, Any]) -> Answer:
        self.host.resume()
        return OK, {"status": "resumed"}

    def do_is_paused(self, body: dict[str, Any]) -> Answer:
        return OK, {"is_paused": self.host.paused}

    def do_reset_prefix_cache(self, body: dict[str, Any]) -> Answer:
        return OK, {"success": self.host.flush()}

    def _choice(self, sampling: dict[str, Any], job: Job) -> dict[str, Any]:
        completion = job.completion
        if completion is None or job.aborted:
            return {"index": 0, "finish_reason": "abort", "token_ids": [], "routed_experts": None, "logprobs": None}
        tokens = completion.tokens.tolist()
        content = [{"token_id": token, "logprob": value} for token, value in zip(tokens, completion.logprobs.tolist())]
        return {
            "index": 0,
            "finish_reason": completion.finish_reason,
            "token_ids": tokens,
            "logprobs": {"content": content} if "logprobs" in sampling else None,
            "routed_experts": npy_base64(self._rows(completion)),
            "weight_versions": [{"version": self.host.version, "start": 0, "end": len(tokens)}],
        }

    def _rows(self, completion: Completion) -> np.ndarray:
        assert completion.routes is not None and completion.picks is not None
        experts = self.host.all_layers(completion.routes)
        if self.picks == "stock":
            return experts.astype(np.uint16)
        parts = (experts, self.host.pools(completion.picks, self.picks))
        return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1).astype(np.int16)

    def _usage(self, job: Job) -> dict[str, Any]:
        return {"prompt_tokens": len(job.prompt), "prompt_tokens_details": {"cached_tokens": job.cached_tokens}}


def npy_base64(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode()
