"""Megatron's offloading optimizer where there is no GPU: what it takes for a GPU's memory and what for the host's is
told apart by a mark on the tensor, everything else is its own code."""

import inspect
from typing import Any

import pytest
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.cpu_offloading import hybrid_optimizer
from torch import Tensor

from glm5_next.launchers.runtime.offload_state import load_masters_of_every_dtype

HOST = "_is_on_the_host"
# (text of megatron-core 0.19.2, what stands there instead)
CHANGES = (
    ("param.detach().clone().cpu().pin_memory()", "_moved(param.detach().clone(), host=True)"),
    ("param.detach().clone().float()", "_moved(param.detach().clone().float(), host=_is_on_host(param))"),
    ("param.is_cuda", "not _is_on_host(param)"),
    ("pin_memory=self.pin_cpu_grads, ", ""),
)


def _moved(tensor: Tensor, *, host: bool) -> Tensor:
    setattr(tensor, HOST, host)
    return tensor


def _is_on_host(tensor: Tensor) -> bool:
    return getattr(tensor, HOST, False)


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of the test, Megatron's offloading optimizer takes the CPU for a GPU with a host beside it."""
    source = inspect.getsource(hybrid_optimizer)
    for before, after in CHANGES:
        assert before in source, f"megatron-core's offloading optimizer has no {before!r} any more"
        source = source.replace(before, after)
    scope: dict[str, Any] = {"_moved": _moved, "_is_on_host": _is_on_host, "__name__": hybrid_optimizer.__name__}
    exec(compile(source, hybrid_optimizer.__file__, "exec"), scope)  # noqa: S102 - the library's own source
    load_masters_of_every_dtype(scope["HybridDeviceOptimizer"])
    for owner in (distrib_optimizer, optimizer):
        monkeypatch.setattr(owner, "HybridDeviceOptimizer", scope["HybridDeviceOptimizer"])
