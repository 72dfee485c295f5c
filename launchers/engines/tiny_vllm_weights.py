"""What vLLM 0.33 does with weights and their memory, on a `ModelHost`.

A name that no tensor has fails the update; finishing an update does not empty the prefix cache; and each KDA layer computes
with a merged convolution that it caches at its first forward pass and that no update refreshes
(`models/glm5next/common/kda.py`), unless `rebuilds` (as our plugin does). Generation goes on once all memory is back.
"""

import base64
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5_next.launchers.engines.client import Meeting, TensorList
from glm5_next.launchers.engines.tiny_host import MEMORY, ModelHost
from glm5_next.launchers.engines.tiny_payload import buckets_of_vllm
from glm5_next.launchers.engines.weight_group import EngineEnd, group_name

Answer = tuple[int, Any]
Items = list[tuple[str, Tensor]]
OK = 200


class VllmWeights:
    """The endpoints `do_...` of `VllmProtocol` that weights go through."""

    group_timeout = timedelta(seconds=600)

    def __init__(self, host: ModelHost, *, tp: int = 1, rebuilds: bool = True):
        self.host, self.tp, self.rebuilds = host, tp, rebuilds
        self.updating = False
        self.ends: list[EngineEnd] = []
        self.merged = MergedConvolutions(host.engine.model)

    def do_pause(self, body: dict[str, Any]) -> Answer:
        self.host.pause()
        self.host.abort(None)
        self.host.wait_until_idle()
        if body.get("clear_cache", "true") == "true":
            self.host.flush()
        return OK, {"status": "paused"}

    def do_get_world_size(self, body: dict[str, Any]) -> Answer:
        return OK, {"world_size": self.tp}

    def do_init_weight_transfer_engine(self, body: dict[str, Any]) -> Answer:
        info = body["init_info"]
        if "master_address" not in info:  # handles of shared memory need no meeting
            return OK, {"message": "Weight transfer initialized"}
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
        items, *others = self._shared(info, tensors) if "ipc_handles_pickled" in info else self._broadcast(tensors)
        if len(others) != self.tp - 1:
            raise ValueError(f"{len(others) + 1} handles for {self.tp} ranks")
        assert all(torch.equal(one[1], other[1]) for rank in others for one, other in zip(items, rank, strict=True))
        unknown = self.host.load(items)
        if unknown:
            raise KeyError(unknown[0])
        return OK, {"message": "Weights updated"}

    def do_sleep(self, body: dict[str, Any]) -> Answer:
        self.do_pause({"mode": body.get("mode", "abort")})
        if int(body.get("level", 1)) > 0 and "weights" not in self.host.released:  # else it sleeps already
            self.host.release(MEMORY)
        return OK, {"status": "sleeping", "level": int(body.get("level", 1))}

    def do_wake_up(self, body: dict[str, Any]) -> Answer:
        """A tag that does not sleep makes the call do nothing; it is answered all the same."""
        tags = {body["tags"]} if "tags" in body else set(self.host.released)
        if tags <= self.host.released:
            self.host.released -= tags
        if not self.host.released:
            self.host.resume()
        return OK, {"status": "sleeping" if self.host.released else "awake", "tags": sorted(tags)}

    def do_is_sleeping(self, body: dict[str, Any]) -> Answer:
        return OK, {"is_sleeping": bool(self.host.released)}

    def do_finish_weight_update(self, body: dict[str, Any]) -> Answer:
        if not self.updating:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.host.check_memory("weights")
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

    def _shared(self, info: dict[str, Any], tensors: TensorList) -> list[Items]:
        if info["tensor_sizes"] != tensors.sizes:
            raise ValueError("tensor_sizes are not those of the tensors")
        return list(buckets_of_vllm(base64.b64decode(info["ipc_handles_pickled"]), tensors))

    def _broadcast(self, tensors: TensorList) -> list[Items]:
        with ThreadPoolExecutor(self.tp) as ranks:
            return list(ranks.map(lambda end: list(end.received(tensors)), self.ends))

    def _written(self) -> None:
        if self.rebuilds:
            self.merged.rebuild()


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
