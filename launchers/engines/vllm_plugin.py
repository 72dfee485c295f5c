"""What is loaded into vLLM 0.33 through its `vllm.general_plugins` entry point (see pyproject.toml).

KDA layers compute with a q|k|v convolution that they merge at their first forward pass and cache
(`vllm/models/glm5next/common/kda.py:558`), and no weight update refreshes it: an open bug. Every way in which a worker
takes weights is followed by a rebuild, in place, because captured CUDA graphs hold the tensor's address. What the indexer
chooses is not handed over either: see `vllm_picks`.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from glm5_next.launchers.engines import vllm_picks

VERSION = "0.33."
TAKES_WEIGHTS = ("finish_weight_update", "reload_weights")  # methods of vllm.v1.worker.gpu_worker.Worker


def register() -> None:
    """Called by vLLM in each of its processes, perhaps more than once. Raises RuntimeError for another vLLM."""
    import vllm
    from vllm.distributed.aux_output_connector import worker
    from vllm.v1.worker.gpu_worker import Worker

    if not vllm.__version__.startswith(VERSION):
        raise RuntimeError(
            f"glm5-next's plugin is for vLLM {VERSION}x, this is {vllm.__version__}; "
            "check whether KDA layers still cache a merged convolution, and how its rows of experts are recorded"
        )
    patch(Worker)
    vllm_picks.patch(worker)


def patch(worker: type) -> None:
    for name in TAKES_WEIGHTS:
        method = getattr(worker, name)
        if not hasattr(method, "rebuilds"):
            setattr(worker, name, _with_rebuild(method))


def rebuild_merged_convolutions(modules: Iterable[torch.nn.Module]) -> int:
    """Makes every cached q|k|v convolution that of the weights as they are now. Returns how many there are."""
    count = 0
    for module in modules:
        merged: Any = getattr(module, "_merged_conv_weight", None)
        if merged is not None:
            parts: list[Any] = [getattr(module, f"{part}_conv1d").weight for part in "qkv"]
            with torch.no_grad():
                torch.cat([part.view(part.size(0), part.size(2)) for part in parts], out=merged)
            count += 1
    return count


def _with_rebuild(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def and_rebuild(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = method(self, *args, **kwargs)
        rebuild_merged_convolutions(self.model_runner.get_model().modules())
        return answer

    and_rebuild.rebuilds = True  # type: ignore[attr-defined]
    return and_rebuild
