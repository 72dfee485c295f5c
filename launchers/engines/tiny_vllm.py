"""vLLM 0.33's HTTP protocol on a `ModelHost`: the endpoints that a trainer uses, with their oddities.

Requests are turned away (503) while generation is paused; a name that no tensor has fails the update; finishing an update
does not empty the prefix cache; and each KDA layer computes with a merged convolution that it caches at its first forward
pass and that no update refreshes (`models/glm5next/common/kda.py`), unless `rebuilds` (as our plugin does).
"""

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glm5_next.launchers.engines.client import Meeting, TensorList
from glm5_next.launchers.engines.tiny_host import Job, ModelHost
from glm5_next.launchers.engines.weight_group import EngineEnd, group_name

Answer = tuple[int, Any]
OK = 200


class VllmProtocol:
    """`handle` answers one request; a text answer is sent as text, everything else as JSON."""

    group_timeout = timedelta(seconds=600)
    open_paths = ("/health",)  # need no key

    def __init__(self, host: ModelHost, *, tp: int = 1, rebuilds: bool = True):
        self.host, self.tp, self.rebuilds = host, tp, rebuilds
        self.updating = False
        self.ends: list[EngineEnd] = []
        self.merged = MergedConvolutions(host.engine.model)

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

    def do_pause(self, body: dict[str, Any]) -> Answer:
        self.host.pause()
        self.host.abort(None)
        self.host.wait_until_idle()
        if body.get("clear_cache", "true") == "true":
            self.host.flush()
        return OK, {"status": "paused"}

    def do_resume(self, body: dict[str, Any]) -> Answer:
        self.host.resume()
        return OK, {"status": "resumed"}

    def do_is_paused(self, body: dict[str, Any]) -> Answer:
        return OK, {"is_paused": self.host.paused}

    def do_reset_prefix_cache(self, body: dict[str, Any]) -> Answer:
        return OK, {"success": self.host.flush()}

    def do_get_world_size(self, body: dict[str, Any]) -> Answer:
        return OK, {"world_size": self.tp}

    def do_init_weight_transfer_engine(self, body: dict[str, Any]) -> Answer:
        info = body["init_info"]
        meeting = Meeting(
            info["master_address"], info["master_port"], info["world_size"], group_name(info["master_port"]), "gloo"
        )
        with ThreadPoolExecutor(self.tp) as ranks:
            first = info["rank_offset"]
            self.ends = list(
                ranks.map(lambda rank: EngineEnd(meeting, first + rank, self.group_timeout), range(self.tp))
            )
        return OK, {"message": "Weight transfer initialized"}

    def do_shutdown_weight_transfer_engine(self, body: dict[str, Any]) -> Answer:
        self.ends = []
        return OK, {"message": "Weight transfer shut down"}

    def do_start_weight_update(self, body: dict[str, Any]) -> Answer:
        if self.updating:
            raise RuntimeError("start_weight_update called while a weight update is already in progress")
        self.updating = True
        return OK, {"message": "Weight update started"}

    def do_update_weights(self, body: dict[str, Any]) -> Answer:
        if not self.updating:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        info = body["update_info"]
        tensors = TensorList(tuple(info["names"]), tuple(info["dtype_names"]), tuple(map(tuple, info["shapes"])))
        with ThreadPoolExecutor(self.tp) as ranks:
            items, *_ = ranks.map(lambda end: list(end.received(tensors)), self.ends)
        unknown = self.host.load(items)
        if unknown:
            raise KeyError(unknown[0])
        return OK, {"message": "Weights updated"}

    def do_finish_weight_update(self, body: dict[str, Any]) -> Answer:
        if not self.updating:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.updating = False
        self._written()
        if body.get("weight_version") is not None:
            self.host.version = body["weight_version"]
        return OK, {"message": "Weight update finished"}

    def do_collective_rpc(self, body: dict[str, Any]) -> Answer:
        if body["method"] != "reload_weights":
            raise ValueError(f"no method {body['method']}")
        self.host.load_folder(Path(body["kwargs"]["weights_path"]))
        self._written()
        return OK, {"results": [None] * self.tp}

    def do_weight_info(self, body: dict[str, Any]) -> Answer:
        return OK, {"weight_version": self.host.version}

    def do_weight_checker(self, body: dict[str, Any]) -> Answer:
        if body["action"] == "reset":
            self.host.forget()
            return OK, {"status": "reset"}
        return OK, {"checksums": self.host.checksums()}

    def _written(self) -> None:
        if self.rebuilds:
            self.merged.rebuild()

    def _choice(self, sampling: dict[str, Any], job: Job) -> dict[str, Any]:
        completion = job.completion
        if completion is None or job.aborted:
            return {"index": 0, "finish_reason": "abort", "token_ids": [], "routed_experts": None, "logprobs": None}
        tokens = completion.tokens.tolist()
        content = [{"token_id": token, "logprob": value} for token, value in zip(tokens, completion.logprobs.tolist())]
        assert completion.routes is not None
        return {
            "index": 0,
            "finish_reason": completion.finish_reason,
            "token_ids": tokens,
            "logprobs": {"content": content} if "logprobs" in sampling else None,
            "routed_experts": npy_base64(self.host.all_layers(completion.routes).astype(np.uint16)),
            "weight_versions": [{"version": self.host.version, "start": 0, "end": len(tokens)}],
        }

    def _usage(self, job: Job) -> dict[str, Any]:
        return {"prompt_tokens": len(job.prompt), "prompt_tokens_details": {"cached_tokens": job.cached_tokens}}


class MergedConvolutions:
    """The convolution that every KDA layer computes with: what its weight was at the first forward pass."""

    def __init__(self, model: torch.nn.Module):
        self.cached: dict[torch.nn.Module, torch.Tensor] = {}
        self.loaded: dict[torch.nn.Module, torch.Tensor] = {}
        self.hooks: list[Any] = []
        for layer in (module for module in model.modules() if hasattr(module, "conv1d")):
            self.hooks += [
                layer.register_forward_pre_hook(lambda module, args: self._swap_in(module.conv1d)),
                layer.register_forward_hook(lambda module, args, out: self._swap_out(module.conv1d)),
            ]

    def remove(self) -> None:
        """The model computes with its own weights again."""
        for hook in self.hooks:
            hook.remove()

    @torch.no_grad()
    def rebuild(self) -> None:
        for module, weight in self.cached.items():
            weight.copy_(module.weight)  # type: ignore[arg-type]

    def _swap_in(self, module: Any) -> None:
        self.cached.setdefault(module, module.weight.data.clone())
        self.loaded[module] = module.weight.data
        module.weight.data = self.cached[module]

    def _swap_out(self, module: Any) -> None:
        module.weight.data = self.loaded.pop(module)


def npy_base64(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode()
