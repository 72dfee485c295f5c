"""Which implementation of each operator a model runs on: the one table, and the choice made from it.

Naming a backend that this machine, precision or model cannot have is an error. "auto" takes the first of an operator's
list that fits; all of them compute the same function, and `Kernels.chosen` says which were taken.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from glm5_next.plugins.config import Glm5NextConfig

AUTO, NAIVE = "auto", "naive"
HERE = "glm5_next.plugins.kernels"

# What to install for an importable name.
DISTRIBUTIONS = {
    "cudnn": "nvidia-cudnn-frontend[cutedsl]==1.32.0",
    "cutlass": "nvidia-cudnn-frontend[cutedsl]==1.32.0",
    "fla": "flash-linear-attention>=0.6.0",
    "flash_mla": "sgl-flash-mla==1.0.0",
    "tilelang": "tilelang==0.1.15",
    "transformer_engine": "transformer-engine[pytorch,core_cu13]>=2.20",
    "triton": "triton, which comes with torch on Linux",
}


@dataclass(frozen=True)
class Backend:
    """One implementation: `function` is "module:name", imported when a model is built on it.

    `packages` must be importable; `limits` says why a model's sizes do not fit, and the function named by `probe` why
    this machine does not (None: they do). All but naive need a GPU, and bf16 activations unless `any_dtype`; `hopper`
    ones compute capability 9.0.
    """

    name: str
    function: str
    packages: tuple[str, ...] = ()
    hopper: bool = False
    any_dtype: bool = False
    limits: Callable[[Glm5NextConfig, int], str | None] = field(default=lambda model, tp: None)
    probe: str | None = None

    def refusal(self, place: "Place") -> str | None:
        """Why it cannot be used there, or None."""
        if place.device_type != "cuda":
            return f"it needs a GPU, the model is on the {place.device_type}"
        missing = [name for name in self.packages if not installed(name)]
        if missing:
            return f"package {missing[0]} is not installed; install {DISTRIBUTIONS[missing[0]]}"
        if self.hopper and place.capability != (9, 0):
            return f"it needs a Hopper GPU (compute capability 9.0), this one has {place.capability}"
        if not self.any_dtype and place.dtype is not torch.bfloat16:
            return f"it computes in bf16, the model is {str(place.dtype).removeprefix('torch.')}"
        return self.limits(place.model, place.tp) or (self.probe and probed(self.probe))


@dataclass(frozen=True)
class Place:
    """Where a model lives and what it is: all that the choice depends on."""

    model: Glm5NextConfig
    dtype: torch.dtype
    device_type: str
    capability: tuple[int, int] | None
    tp: int = 1


class Late:
    """A naive operator, looked up in the package at every call: tests put faults there and must reach every caller."""

    def __init__(self, operator: str):
        self.operator = operator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(HERE), self.operator)(*args, **kwargs)


class Kernels:
    """The operators of one model, by attribute: `kernels.kda(...)`. `chosen` is {operator: backend name}."""

    def __init__(self, chosen: Mapping[str, str]):
        self.chosen = dict(chosen)
        for operator, name in chosen.items():
            setattr(self, operator, load(operator, name))

    if TYPE_CHECKING:

        def __getattr__(self, operator: str) -> Callable[..., Any]: ...


def choose(requested: Mapping[str, str], place: Place, default: str = AUTO) -> dict[str, str]:
    """{operator: backend name} for a model, in the order of the table.

    requested: {operator: backend name or "auto"}; operators that are not in it get `default`. Raises ValueError for an
    unknown operator or backend, and for one asked for by name that cannot be used, naming the package or the reason.
    """
    unknown = sorted(set(requested) - set(OPERATORS))
    if unknown:
        raise ValueError(f"kernel_backends: there is no operator {unknown[0]!r}; operators: {', '.join(OPERATORS)}")
    return {name: _choose_one(name, requested.get(name, default), place) for name in OPERATORS}


def _choose_one(operator: str, requested: str, place: Place) -> str:
    if requested == AUTO:
        return next((backend.name for backend in OPERATORS[operator] if backend.refusal(place) is None), NAIVE)
    if requested != NAIVE:
        refusal = backend_of(operator, requested).refusal(place)
        if refusal:
            raise ValueError(f"operator {operator}: backend {requested!r} cannot be used: {refusal}")
    return requested


def backend_of(operator: str, name: str) -> Backend:
    """The table's entry; ValueError if there is none."""
    for backend in OPERATORS[operator]:
        if backend.name == name:
            return backend
    names = ", ".join([AUTO, NAIVE, *(backend.name for backend in OPERATORS[operator])])
    raise ValueError(f"operator {operator} has no backend {name!r}; choose from {names}")


def load(operator: str, name: str) -> Callable[..., Any]:
    """The function behind a backend's name."""
    if name == NAIVE:
        return Late(operator)
    return _import(backend_of(operator, name).function)


def _import(path: str) -> Callable[..., Any]:
    module, _, function = path.partition(":")
    return getattr(importlib.import_module(f"{HERE}.{module}"), function)


@cache
def installed(package: str) -> bool:
    return find_spec(package) is not None


@cache
def probed(path: str) -> str | None:
    return _import(path)()


def _power_of_two(size: int) -> bool:
    return size > 0 and size & (size - 1) == 0


def _triton_kda(model: Glm5NextConfig, tp: int) -> str | None:
    sizes_fit = _power_of_two(model.kda_head_dim) and 16 <= model.kda_head_dim <= 256
    return None if sizes_fit else f"KDA heads of width {model.kda_head_dim} are no power of two from 16 to 256"


def _cudnn_kda(model: Glm5NextConfig, tp: int) -> str | None:
    return None if model.kda_head_dim == 128 else f"its KDA heads are 128 wide, the model's {model.kda_head_dim}"


def _latent_512(model: Glm5NextConfig, tp: int) -> str | None:
    return None if model.kv_lora_rank == 512 else f"its latents are 512 wide, the model's {model.kv_lora_rank}"


def _tilelang(model: Glm5NextConfig, tp: int) -> str | None:
    heads = model.num_attention_heads // tp
    if not _power_of_two(heads) or heads < 16:
        return f"it takes 16, 32, 64, ... heads on a rank, this model has {heads}"
    return _latent_512(model, tp)


def _pool_width(model: Glm5NextConfig, tp: int) -> str | None:
    if _power_of_two(model.index_kpool) and _power_of_two(model.index_head_dim):
        return None
    return f"pool size {model.index_kpool} and index_head_dim {model.index_head_dim} must be powers of two"


def _triton_scores(model: Glm5NextConfig, tp: int) -> str | None:
    width = model.index_head_dim
    return None if _power_of_two(width) and width >= 16 else f"index_head_dim {width} is no power of two from 16 on"


def _cudnn_scores(model: Glm5NextConfig, tp: int) -> str | None:
    if model.index_head_dim != 128 or model.index_num_heads not in (16, 32, 64):
        return f"it scores 16, 32 or 64 heads of width 128, not {model.index_num_heads} of {model.index_head_dim}"
    return None


def _streams(model: Glm5NextConfig, tp: int) -> str | None:
    if model.num_streams in (2, 4) and model.hidden_size % 16 == 0:
        return None
    return f"it mixes 2 or 4 streams of a multiple of 16 channels, not {model.num_streams} of {model.hidden_size}"


# Per operator, best first; naive needs no entry.
OPERATORS: dict[str, tuple[Backend, ...]] = {
    "rms_norm": (Backend("triton", "norm_triton:rms_norm", ("triton",)),),
    "mhc_site": (Backend("triton", "mhc_triton:mhc_site", ("triton",), limits=_streams),),
    "mhc_merge": (Backend("triton", "mhc_triton:mhc_merge", ("triton",), limits=_streams),),
    "short_convolution": (Backend("fla", "kda_fla:short_convolution", ("fla",)),),
    "kda": (
        Backend(
            "cudnn", "kda_cudnn:kda", ("cudnn", "triton"), hopper=True, limits=_cudnn_kda, probe="kda_cudnn:missing"
        ),
        Backend("fla", "kda_fla:kda", ("fla",), limits=_triton_kda),
    ),
    "gated_rms_norm": (Backend("fla", "kda_fla:gated_rms_norm", ("fla",)),),
    "sparse_attention": (
        Backend(
            "flash_mla",
            "dsa_flash_mla:sparse_attention",
            ("flash_mla", "cudnn", "cutlass", "triton"),
            hopper=True,
            limits=_latent_512,
        ),
        Backend("tilelang", "dsa_tilelang:sparse_attention", ("tilelang",), limits=_tilelang),
    ),
    "pool_keys": (Backend("triton", "indexer_triton:pool_keys", ("triton",), limits=_pool_width),),
    "select_pools": (
        Backend("cudnn", "indexer_cudnn:select_pools", ("cudnn", "cutlass"), hopper=True, limits=_cudnn_scores),
        Backend("triton", "indexer_triton:select_pools", ("triton",), limits=_triton_scores),
    ),
    "expand_pools": (Backend("triton", "indexer_triton:expand_pools", ("triton",), any_dtype=True),),
    "clamped_swiglu": (Backend("triton", "swiglu_triton:clamped_swiglu", ("triton",)),),
    "token_logprobs": (Backend("triton", "logprobs_triton:token_logprobs", ("triton",), any_dtype=True),),
}
