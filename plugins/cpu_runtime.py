"""Megatron-Core 0.19.2 on a CPU: the only file that knows where it reaches for CUDA.

`install()` is called explicitly, once per process, before a model is built; a run that uses a GPU never calls it.
Everything that is replaced is in `REPLACEMENTS`, by name, with the reason; `tests/cpu/test_cpu_runtime.py` compares
that list with what really changed. Packages for GPUs (`HIDDEN`) look absent afterwards. The maths is untouched: only
devices, streams, type names and, where gloo refuses tensors of unequal size, the way two collectives are carried out.
"""

import contextlib
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Replacement:
    """`target` is 'module:attribute.path'; `make` gets the original and returns what takes its place."""

    target: str
    make: Callable[[Any], Any]
    why: str


class _NoStream:
    """Stands for CUDA streams and events: everything on a CPU has already happened."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> "_NoStream":
        return self

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None: ...


_THE_STREAM = _NoStream()


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda original: lambda *args, **kwargs: value


def _on_cpu(device: Any) -> Any:
    """'cuda', 'cuda:0' and torch.device('cuda') mean the CPU; anything else is left alone."""
    named = isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"
    return CPU if named else device


def _factory(original: Callable) -> Callable:
    @functools.wraps(original)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return original(*args, **kwargs)

    return create


def _tensor_to(original: Callable) -> Callable:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return original(self, *(_on_cpu(arg) for arg in args), **kwargs)

    return to


def _tensor_type(original: Callable) -> Callable:
    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    return type_


def _same_tensor(original: Callable) -> Callable:
    return lambda self, *args, **kwargs: self


def _to_numpy_on_cpu(original: Callable) -> Callable:
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return move


def _uneven_all_gather(original: Callable) -> Callable:
    def gather(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False):
        if output_split_sizes is None or group.size() == 1:
            return original(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes)])

    return gather


def _uneven_reduce_scatter(original: Callable) -> Callable:
    def scatter(input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False):
        if input_split_sizes is None or group.size() == 1:
            return original(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone()
        dist.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].clone()

    return scatter


_RANDOM = "megatron.core.tensor_parallel.random"
_NO_RNG = torch.zeros(0, dtype=torch.uint8)
REPLACEMENTS = (
    Replacement("torch.cuda:is_available", _constant(False), "a GPU may be there and belong to another process"),
    Replacement("torch.cuda:current_device", _constant(CPU), "parameters and buffers are created on it"),
    Replacement("torch.cuda:synchronize", _constant(None), "called by schedules and checkpoints"),
    Replacement("torch.cuda:Stream", lambda original: _NoStream, "created by the MoE dispatcher and DDP"),
    Replacement("torch.cuda:Event", lambda original: _NoStream, "created by the MoE dispatcher"),
    Replacement("torch.cuda:current_stream", _constant(_THE_STREAM), "asked for by the MoE dispatcher and DDP"),
    Replacement("torch.cuda:stream", _constant(contextlib.nullcontext()), "entered by the MoE dispatcher and DDP"),
    Replacement("torch.cuda:manual_seed", _constant(None), "the model has no dropout; CPU seeds are separate"),
    Replacement("torch.cuda:get_rng_state", _constant(_NO_RNG), "tracked around sequence-parallel regions"),
    Replacement(f"{_RANDOM}:_get_cuda_rng_state", _constant(_NO_RNG), "saved by recomputation"),
    Replacement(f"{_RANDOM}:_set_cuda_rng_state", _constant(None), "restored by recomputation"),
    *(
        Replacement(f"torch:{name}", _factory, "called with device='cuda' by schedules, clipping and optimizers")
        for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like")
    ),
    Replacement("torch:Tensor.cuda", _same_tensor, "called by optimizers and distributed checkpoints"),
    Replacement("torch.nn:Module.cuda", _same_tensor, "called by bridges when a model is built"),
    Replacement("torch:Tensor.to", _tensor_to, "called with 'cuda' by distributed checkpoints"),
    Replacement("torch:Tensor.type", _tensor_type, "optimizers and clipping compare it with 'torch.cuda.FloatTensor'"),
    Replacement(
        "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
        _to_numpy_on_cpu,
        "all-to-all split sizes have to be numpy; Megatron converts them only on their way from a GPU",
    ),
    Replacement(
        "megatron.core.tensor_parallel.mappings:_gather_along_first_dim",
        _uneven_all_gather,
        "gloo refuses all_gather of unequal tensors (expert tensor parallelism)",
    ),
    Replacement(
        "megatron.core.tensor_parallel.mappings:_reduce_scatter_along_first_dim",
        _uneven_reduce_scatter,
        "gloo refuses reduce_scatter of unequal tensors (expert tensor parallelism)",
    ),
)

# What Megatron uses wherever it can be imported, and what then computes on GPUs only (or takes 15 s to import).
HIDDEN = ("apex", "causal_conv1d", "fla", "flash_attn", "flash_mla", "mamba_ssm", "transformer_engine")

_installed: dict[str, Any] = {}


def is_installed() -> bool:
    return bool(_installed)


def install() -> None:
    """Makes Megatron-Core run on the CPU in this process, also where packages for GPUs are installed. Safe to call
    twice; there is no way back.

    Raises RuntimeError if this process already uses a GPU, or if Megatron may already hold functions of a GPU package.
    """
    if _installed:
        return
    if torch.cuda.is_initialized():
        raise RuntimeError("cpu_runtime.install() in a process that already uses a GPU; start a fresh process")
    loaded = [package for package in HIDDEN if sys.modules.get(package) is not None]
    if loaded:
        raise RuntimeError(f"cpu_runtime.install() after {loaded[0]} was imported; call it before Megatron is imported")
    sys.modules.update(dict.fromkeys(HIDDEN))  # type: ignore[arg-type]
    # torch remembers at its first use which factories a `with torch.device("meta")` block redirects; that has to be the
    # real ones, not those put in their place below.
    _device_constructors()
    torch.compiler.set_stance("force_eager")  # Megatron compiles small functions: 10 s a process and a C++ compiler
    with _quiet_import():
        for replacement in REPLACEMENTS:
            owner, name = _resolve(replacement.target)
            original = getattr(owner, name)
            _installed[replacement.target] = original
            setattr(owner, name, replacement.make(original))


def _resolve(target: str) -> tuple[Any, str]:
    module, path = target.split(":")
    *owners, name = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), name


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """Megatron warns at import about each GPU library that is absent, which is the point here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
