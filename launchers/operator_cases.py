"""One problem per operator at a model's sizes: random inputs, how the operator is called on them, and how far rounding
may take a backend from the fp32 definition. The self-check, the GPU tests and the benchmark all read it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.documents import Documents
from glm5_next.plugins.kernels import naive
from glm5_next.plugins.kernels.registry import NAIVE, Place, load

ROUNDING = 2.0**-9  # largest relative error of one rounding to bf16
EXACT = 1e-4  # of fp32 sums over tokens or 16384 channels in another order, through 20 Sinkhorn steps
CANCELLATION = 2
# Of the operators that choose: the share of queries whose sets may differ, each by a tie within `TIE` of the scores.
UNEQUAL_SETS, TIE = 2e-4, 1e-5

Call = Callable[[Callable[..., Any], Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Problem:
    """`call(function, tensors)` returns the named outputs; floating-point `tensors` are differentiated if `trains`.

    `roundings`: how many times a value is rounded to bf16 between the definition's inputs and a backend's results.
    `cancelling`: results that are small differences of such values. `exact`: outputs that are fp32 from end to end.
    `sets`: outputs whose rows are sets of indices. `silent`: gradients that are zero by definition, so that only
    rounding is left of them.
    """

    operator: str
    tensors: dict[str, Tensor]
    call: Call
    roundings: float = 1.0
    trains: bool = True
    cancelling: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    sets: bool = False
    silent: tuple[str, ...] = ()

    def bound(self, name: str) -> float:
        """Largest relative root-mean-square error of a result."""
        if self.sets:
            return UNEQUAL_SETS
        if name in self.exact:
            return EXACT
        return self.roundings * ROUNDING * (CANCELLATION if name in self.cancelling else 1)

    def widened(self) -> "Problem":
        """The same numbers in fp32."""
        wide = {name: x.float() if x.is_floating_point() else x for name, x in self.tensors.items()}
        return replace(self, tensors=wide)

    def altered(self, name: str) -> "Problem":
        """One input moved by a row (a scalar doubled): an operator that ignores it gives itself away."""
        x = self.tensors[name]
        return replace(self, tensors=self.tensors | {name: x.roll(1, 0) if len(x) > 1 else 2 * x})


def results(problem: Problem, function: Callable[..., Any]) -> dict[str, Tensor]:
    """Outputs by name, and the gradient "d" + input of a fixed random weighting of them."""
    leaves = {name: x.detach().requires_grad_(_trains(problem, x)) for name, x in problem.tensors.items()}
    with torch.set_grad_enabled(problem.trains):
        outputs = dict(problem.call(function, leaves))
    trained = {name: x for name, x in leaves.items() if x.requires_grad}
    if trained:
        differentiable = [out for out in outputs.values() if out.requires_grad]
        grads = torch.autograd.grad(differentiable, list(trained.values()), [_weighting(out) for out in differentiable])
        outputs |= {f"d{name}": grad for name, grad in zip(trained, grads)}
    return {name: out.detach() for name, out in outputs.items()}


def _trains(problem: Problem, x: Tensor) -> bool:
    return problem.trains and x.is_floating_point()


def _weighting(out: Tensor) -> Tensor:
    """The same for both precisions: bf16 numbers from a seed of its own."""
    generator = torch.Generator(out.device).manual_seed(out.numel() % 2**31)
    return torch.randn(out.shape, generator=generator, device=out.device).bfloat16().to(out.dtype)


def reference(problem: Problem) -> dict[str, Tensor]:
    """What the naive operator makes of the same numbers in fp32."""
    return results(problem.widened(), load(problem.operator, NAIVE))


def errors(problem: Problem, got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """By result: relative root-mean-square error (a NaN stays one), or the share of rows whose sets differ."""
    error = _set_error if problem.sets else _error
    return {name: error(got[name], wanted[name]) for name in wanted if name not in problem.silent}


def worst(problem: Problem, found: Mapping[str, float]) -> tuple[str, float, float]:
    """Name, error and bound of the result that is nearest to its bound, or farthest beyond it."""
    name = max(found, key=lambda name: (found[name] != found[name], found[name] / problem.bound(name)))
    return name, found[name], problem.bound(name)


def _error(got: Tensor, wanted: Tensor) -> float:
    if got.shape != wanted.shape:
        return float("inf")
    difference = norm(got.float() - wanted.float())
    return (difference / norm(wanted.float()).clamp_min(1e-30)).item()


def norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64)


def _set_error(got: Tensor, wanted: Tensor) -> float:
    width = max(got.shape[1], wanted.shape[1])
    a, b = (torch.nn.functional.pad(x, (0, width - x.shape[1]), value=-1).sort(-1).values for x in (got, wanted))
    return (a != b).any(-1).double().mean().item() if len(a) else 0.0


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, memory that was allocated and never written holds NaN, so that whoever reads it is found out."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class Numbers:
    """Random tensors from one seed, on one device."""

    def __init__(self, device: torch.device, seed: int):
        self.device, self.generator = device, torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (scale * torch.randn(shape, generator=self.generator, device=self.device)).to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def whole(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=self.generator, device=self.device)


def row_of(lengths: tuple[int, ...], device: torch.device) -> Documents:
    ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return Documents(ends.to(device), lengths)


def problem(operator: str, place: Place, documents: Documents, *, seed: int = 0) -> Problem:
    """Inputs of the sizes that a rank of `place` sees, for the documents of one packed row."""
    return PROBLEMS[operator](place.model, place.tp, documents, Numbers(documents.device, seed))


def _rms_norm(model: Glm5NextConfig, tp: int, row: Documents, make: Numbers) -> Problem:
    tensors = {
        "x": make.normal(row.num_tokens, model.hidden_size),
        "weight": (1 + make.normal(model.hidden_size, scale=0.3, dtype=torch.float32)).bfloat16(),
    }
    call = lambda f, t: {"out": f(t["x"], t["weight"], model.norm_eps)}
    return Problem("rms_norm", tensors, call, roundings=2)


def _mhc_site(model: Glm5NextConfig, tp: int, row: Documents, make: Numbers) -> Problem:
    n, width = model.num_streams, model.num_streams * model.hidden_size
    fp32 = torch.float32
    tensors = {
        "streams": make.normal(row.num_tokens, width),
        "weight": make.normal(n * (n + 2), width, scale=width**-0.5, dtype=fp32),
        "bias": make.normal(n * (n + 2), dtype=fp32),
        **{name: make.normal(1, dtype=fp32) for name in ("pre", "post", "res")},
    }

    def call(f: Callable[..., Any], t: Mapping[str, Tensor]) -> dict[str, Tensor]:
        collapsed, post, mix = f(
            t["streams"],
            t["weight"],
            t["bias"],
            (t["pre"], t["post"], t["res"]),
            num_streams=n,
            norm_eps=model.norm_eps,
            hc_eps=model.hc_eps,
            iterations=model.sinkhorn_iterations,
        )
        return {"collapsed": collapsed, "post": post, "mix": mix}

    return Problem("mhc_site", tensors, call, roundings=2, exact=("post", "mix", "dweight", "dbias"))


def _mhc_merge(model: Glm5NextConfig, tp: int, row: Documents, make: Numbers) -> Problem:
    n, tokens, hidden = model.num_streams, row.num_tokens, model.hidden_size
    tensors = {
        "streams": make.normal(tokens, n * hidden),
        "output": make.normal(tokens, hidden),
        "post": make.uniform(tokens, n),
        "mix": make.uniform(tokens, n, n),
    }
    call = lambda f, t: {"out": f(t["streams"], t["output"], t["post"], t["mix"])}
    return Problem("mhc_merge", tensors, call, exact=("dpost", "dmix"))


def _short_convolution(model: Glm5NextConfig, tp: int, row: Documents, make: Numbers) -> Problem:
    """Of k, as the model has it: the second third of wider rows."""
    width = model.kda_width // tp
    tensors = {
        "qkv": make.normal(row.num_tokens, 3 * width),
        "weight": make.normal(width, model.kda_conv_width, scale=0.5, dtype=torch.float32),
    }
    call = lambda f, t: {"out": f(t["qkv"].split(width, dim=-1)[1], t["weight"], row)}
    return Problem("short_convolution", tensors, call)


def _kda(model: Glm5NextConfig, tp: int, row: Documents, make: Numbers) -> Problem:
    """Decays as the model starts with. Rounded products of the chunk cancel in the gate's gradient, more so for strong
    decays (tests/gpu has those)."""
    heads, width = model.kda_num_heads // tp, model.kda_head_dim
    tensors = {name: make.normal(row.num_tokens, heads, width) for name in ("q", "k", "v", "gate")}
    tensors |= {
        "A_log": make.normal(heads, scale=0.3, dtype=torch.float32),
        "dt_bias": make.normal(heads * width, scale=1.3, dtype=torch.float32) - 4.6,
        "beta": make.normal(row.num_tokens, heads),
    }
    call = lambda f, t: {"out": f(*t.values(), row, lower_bound=model.kda_gate_lower_bound)}
    of_gate = ("dgate", "dA_log", "ddt_bias")
    # The decay of a document's first token meets an empty state.
    silent = of_gate if max(row.lengths) == 1 else ()
    return Problem("kda", tensors, call, roundings=6, cancelling=of_gate, silent=silent)


def _gated_rms_norm(model: Glm5NextConfig, tp: int, row: Documents, make: Numbers) -> Problem:
    shape = (row.num_tokens, model.kda_num_heads // tp, model.kda_head_dim)
    tensors = {
        "x": make.normal(*shape),
        "gate": make.normal(*shape),
        "weight": (1 + make.normal(model.kda_head_dim, scale=0.3, dtype=torch.float32)).bfloat16(),
    }
    call = lambda f, t: {"out": f(t["x"], t["gate"], t["weight"], model.norm_eps)}
    return Problem("gated_rms_norm", tensors, call, roundings=2)


def random_pools(model: Glm5NextConfig, row: Documents, make: Numbers) -> Tensor:
    """A selection as an indexer could make it: int32 `[T, pools selected]`."""
    num_pools = len(row.pool_starts(model.index_kpool))
    if num_pools == 0:
        return torch.full((row.num_tokens, model.num_pools_selected), -1, dtype=torch.int32, device=row.device)
    queries = torch.arange(row.num_tokens, device=row.device)
    chosen = [
        naive.select_pools(make.uniform(len(part), num_pools), part, row, model.index_kpool, model.num_pools_selected)
        for part in queries.split(8192)
    ]
    return torch.cat(chosen)


def _sparse_attention(model: Glm5NextConfig, tp: int, row: Documents, make: Numbers) -> Problem:
    """Unused slots lie between used ones."""
    indices = naive.expand_pools(random_pools(model, row, make), row, model.index_kpool)
    heads, width = model.num_attention_heads // tp, model.kv_lora_rank
    tensors = {
        "q": make.normal(row.num_tokens, heads, width),
        "latent": make.normal(row.num_tokens, width),
        "indices": indices,
    }
    call = lambda f, t: {"out": f(t["q"], t["latent"], t["indices"], model.qk_head_dim**-0.5)}
    # Of one key the weight is 1, whatever the query.
    silent = ("dq",) if max(row.lengths) == 1 else ()
    return Problem("sparse_attention", tensors, call, roundings=2, silent=silent)


def _pool_keys(model: Glm5NextConfig, tp: int, row: Documents, make: Numbers) -> Problem:
    width = model.index_head_dim
    tensors = {
        "both": make.normal(row.num_tokens, 2 * width, dtype=torch.float32),
        "ape": make.normal(model.index_kpool, width, scale=0.7),
    }
    call = lambda f, t: {"out": f(*t["both"].chunk(2, dim=1), t["ape"], row)}
    return Problem("pool_keys", tensors, call, trains=False, exact=("out",))


def _select_pools(model: Glm5NextConfig, tp: int, row: Documents, make: Numbers) -> Problem:
    heads, width = model.index_num_heads, model.index_head_dim
    tensors = {
        "q": make.normal(row.num_tokens, heads, width),
        "weights": make.normal(row.num_tokens, heads, dtype=torch.float32),
        "pooled": make.normal(len(row.pool_starts(model.index_kpool)), width),
    }

    def call(f: Callable[..., Any], t: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sizes = {"kpool": model.index_kpool, "num_selected": model.num_pools_selected}
        return {"pools": f(t["q"], t["weights"], t["pooled"], 0, row, **sizes)}

    return Problem("select_pools", tensors, call, trains=False, sets=True)


def _expand_pools(model: Glm5NextConfig, tp: int, row: Documents, make: Numbers) -> Problem:
    tensors = {"pools": random_pools(model, row, make)}
    call = lambda f, t: {"tokens": f(t["pools"], row, model.index_kpool)}
    return Problem("expand_pools", tensors, call, trains=False, sets=True)


def _clamped_swiglu(model: Glm5NextConfig, tp: int, row: Documents, make: Numbers) -> Problem:
    """Of routed experts: with a combine weight per row, and values beyond the clamp."""
    tensors = {
        "gate_up": make.normal(row.num_tokens, 2 * model.moe_ffn_hidden_size, scale=model.swiglu_limit / 2),
        "weights": make.uniform(row.num_tokens),
    }
    call = lambda f, t: {"out": f(t["gate_up"], model.swiglu_limit, t["weights"])}
    return Problem("clamped_swiglu", tensors, call, exact=("dweights",))


def _token_logprobs(model: Glm5NextConfig, tp: int, row: Documents, make: Numbers) -> Problem:
    tensors = {
        "logits": make.normal(row.num_tokens, model.vocab_size, scale=3.0),
        "labels": make.whole(model.vocab_size, row.num_tokens),
    }
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)

    def call(f: Callable[..., Any], t: Mapping[str, Tensor]) -> dict[str, Tensor]:
        logprobs, entropy = f(t["logits"], t["labels"], vocab_size=model.vocab_size, tp_group=alone)
        return {"logprobs": logprobs, "entropy": entropy}

    return Problem("token_logprobs", tensors, call, exact=("logprobs", "entropy"))


PROBLEMS: dict[str, Callable[[Glm5NextConfig, int, Documents, Numbers], Problem]] = {
    "rms_norm": _rms_norm,
    "mhc_site": _mhc_site,
    "mhc_merge": _mhc_merge,
    "short_convolution": _short_convolution,
    "kda": _kda,
    "gated_rms_norm": _gated_rms_norm,
    "sparse_attention": _sparse_attention,
    "pool_keys": _pool_keys,
    "select_pools": _select_pools,
    "expand_pools": _expand_pools,
    "clamped_swiglu": _clamped_swiglu,
    "token_logprobs": _token_logprobs,
}
