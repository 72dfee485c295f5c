"""One forward and backward pass of a tiny model, on transformers' side and on ours, and what the two must agree in."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor
from torch.overrides import TorchFunctionMode

from glm5_next.bridge.local_tensors import local_tensors
from glm5_next.bridge.name_map import trained_names
from glm5_next.bridge.reference import _views, import_modeling
from glm5_next.bridge.transforms import unshard
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.kernels import naive
from glm5_next.plugins.moe import Glm5NextRouter
from tests.support import tiny
from tests.support.tiny import Case, relative_error

MAX_LOGITS_ERROR = 1e-5
MAX_GRADIENT_ERROR = 1e-4
MIN_GAP = 1e-6  # between the last chosen score and the first rejected one, over the largest score of the row


@dataclass(frozen=True)
class Run:
    """What one side computed for one row of T tokens.

    logits `[T, vocab]`; gradients by HF tensor name; selections: DSA layer -> bool `[T, T]`, True where the query (dim
    0) attends to the token; routes: MoE layer -> bool `[T, experts]`. Of the reference only: stream_mean_square, of the
    streams that enter each site. Of ours only: selection_gap and route_gap, the smallest relative distance between a
    chosen and a rejected score.
    """

    logits: Tensor
    gradients: dict[str, Tensor]
    selections: dict[int, Tensor]
    routes: dict[int, Tensor]
    stream_mean_square: tuple[float, ...] = ()
    selection_gap: float = float("nan")
    route_gap: float = float("nan")


def models(case: Case) -> tuple[Any, torch.nn.Module]:
    """transformers' model and ours with the same weights; shared by all tests of the process, so never written to."""
    tiny.start_single_process()
    return _models(case, id(parallel_state.get_tensor_model_parallel_group()))


@cache
def _models(case: Case, group: int) -> tuple[Any, torch.nn.Module]:
    """Ours lives as long as the process group it was built for, which other tests end."""
    reference = tiny.reference_model(case)
    return reference, tiny.our_model(case, reference)


@cache
def reference_run(case: Case, length: int) -> Run:
    return run_reference(models(case)[0], case, length)


def run_reference(model: Any, case: Case, length: int) -> Run:
    modeling = import_modeling()
    selections, routes, mean_squares = {}, {}, []
    with contextlib.ExitStack() as hooks:
        for number, layer in enumerate(model.model.language_model.layers):

            def note(module, args, out, number=number):
                if isinstance(module, modeling.Glm5NextTextIndexer):
                    selections[number] = as_mask(out[0], length)
                elif isinstance(module, modeling.Glm5NextTextTopkRouter):
                    routes[number] = torch.zeros(length, module.num_experts, dtype=torch.bool).scatter(1, out[2], True)
                elif isinstance(module, modeling.Glm5NextTextHyperConnection):
                    mean_squares.append(args[0].square().mean().item())

            for module in layer.modules():
                hooks.callback(module.register_forward_hook(note).remove)
        logits = model(input_ids=tiny.tokens(length, case.seed)).logits[0]
    gradients = {}
    model.zero_grad(set_to_none=True)
    next_token_loss(logits, case).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients.update(_views(name, parameter.grad))
    model.zero_grad(set_to_none=True)
    return Run(logits.detach(), gradients, selections, routes, stream_mean_square=tuple(mean_squares))


def our_run(case: Case, length: int, model: torch.nn.Module | None = None) -> Run:
    """Of the shared model of the case unless another is given."""
    model = models(case)[1] if model is None else model
    with recorded(model) as record:
        logits = logits_of(model, tiny.tokens(length, case.seed))
    model.zero_grad(set_to_none=True)
    next_token_loss(logits, case).backward()
    gradients = hf_gradients(model, case.config())
    model.zero_grad(set_to_none=True)
    return Run(
        logits.detach(),
        gradients,
        {layer: as_mask(indices, length) for layer, indices in record.indices.items()},
        record.routes,
        selection_gap=min(record.selection_gaps, default=float("inf")),
        route_gap=min(record.route_gaps, default=float("inf")),
    )


def logits_of(model: torch.nn.Module, ids: Tensor, row: Any = None) -> Tensor:
    """`[1, T]` token ids -> `[T, vocab]`."""
    return model(ids, torch.arange(ids.shape[1])[None], None, packed_seq_params=row)[0]


def next_token_loss(logits: Tensor, case: Case) -> Tensor:
    ids = tiny.tokens(logits.shape[0], case.seed)[0]
    return F.cross_entropy(logits[:-1], ids[1:])


def hf_gradients(model: torch.nn.Module, config: Glm5NextConfig) -> dict[str, Tensor]:
    """The gradients of all HF tensors whose parameters have one (the three alphas are one HF tensor, `scale`)."""
    parts: dict[tuple[str, ...], dict[int, Tensor | None]] = {}
    rows = {}
    for local in local_tensors([model], config).values():
        rows[local.entry.hf] = local.entry.row
        parts.setdefault(local.entry.hf, {})[local.index] = local.tensor.grad
    gradients: dict[str, Tensor] = {}
    for names, found in parts.items():
        pieces = [found[index] for index in sorted(found)]
        if not any(piece is None for piece in pieces):
            gradients.update(zip(names, unshard([torch.cat(pieces)], rows[names]), strict=True))
    return gradients


@dataclass
class Record:
    indices: dict[int, Tensor]
    routes: dict[int, Tensor]
    selection_gaps: list[float]
    route_gaps: list[float]


@contextlib.contextmanager
def recorded(model: torch.nn.Module) -> Iterator[Record]:
    """Notes what the indexers and routers of our model choose, and how clearly, while the context is open."""
    record = Record({}, {}, [], [])
    select_pools = naive.select_pools

    def select_and_note(scores, queries, documents, kpool, num_selected):
        visible = (documents.positions[queries] + 1) // kpool
        first = documents.first_pools(kpool)[queries]
        for row, start, count in zip(scores, first.tolist(), visible.tolist()):
            if count > num_selected:
                record.selection_gaps.append(_gap(row[start : start + count], num_selected))
        return select_pools(scores, queries, documents, kpool, num_selected)

    def note_indices(layer: int):
        def note(module, args, pools):
            record.indices[layer] = naive.expand_pools(pools, args[2], module.model.index_kpool)

        return note

    def note_routes(layer: int):
        def note(module, args, out):
            record.routes[layer] = out[1]
            scores = (module.gating(args[0]).sigmoid() + module.expert_bias).flatten(0, -2)
            record.route_gaps.extend(_gap(row, module.topk) for row in scores)

        return note

    with contextlib.ExitStack() as undo:
        undo.enter_context(mock.patch.object(naive, "select_pools", select_and_note))
        for layer in model.decoder.layers:
            number = layer.layer_number - 1
            for module in layer.modules():
                if isinstance(module, Glm5NextRouter):
                    undo.callback(module.register_forward_hook(note_routes(number)).remove)
                elif type(module).__name__ == "KPoolIndexer":
                    undo.callback(module.register_forward_hook(note_indices(number)).remove)
        yield record


@torch.no_grad()
def _gap(scores: Tensor, chosen: int) -> float:
    best = scores.double().sort(descending=True).values
    return ((best[chosen - 1] - best[chosen]) / best.abs().max()).item()


class DoublePrecision(TorchFunctionMode):
    """Inside, whatever asks for float32 gets float64: both sides' fp32 islands disappear and only the maths is left."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.float:
            return args[0].double()
        wider = {torch.float32: torch.float64}
        kwargs = {key: wider.get(value, value) if _is_dtype(value) else value for key, value in (kwargs or {}).items()}
        return func(*(wider.get(arg, arg) if _is_dtype(arg) else arg for arg in args), **kwargs)

    def __enter__(self):
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error):
        torch.set_default_dtype(torch.float32)
        return super().__exit__(*error)


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def widened(model: torch.nn.Module) -> torch.nn.Module:
    """The model with float64 parameters and buffers, those that refuse `.double()` included."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.double()
    return model


def as_mask(indices: Tensor, num_tokens: int) -> Tensor:
    """`[T, W]` token indices (-1: unused) -> bool `[T, num_tokens]`; fails if a row names a token twice."""
    used = indices >= 0
    mask = torch.zeros(len(indices), num_tokens + 1, dtype=torch.bool)
    mask.scatter_(1, indices.long().masked_fill(~used, num_tokens), True)
    mask = mask[:, :num_tokens]
    assert torch.equal(mask.sum(1), used.sum(1)), "a query selects the same token twice"
    return mask


def check_logits(ours: Run, reference: Run) -> None:
    error = relative_error(ours.logits, reference.logits)
    assert error <= MAX_LOGITS_ERROR, f"logits differ by {error:.1e}, bound {MAX_LOGITS_ERROR:.0e}"


def gradient_errors(ours: Run, reference: Run) -> dict[str, float]:
    """Of the tensors that have a gradient on both sides."""
    both = ours.gradients.keys() & reference.gradients.keys()
    return {name: relative_error(ours.gradients[name], reference.gradients[name]) for name in both}


def check_gradients(ours: Run, reference: Run, case: Case) -> None:
    """Every tensor that is trained has a gradient on both sides and nothing else has one; all agree."""
    trained = trained_names(case.config())
    frozen = {name for name in trained if ".indexer." in name}
    num_dsa = case.config().attention_kinds.count("dsa")
    assert len(frozen) == 7 * num_dsa, f"{len(frozen)} indexer tensors in {num_dsa} DSA layers"
    frozen |= {name for name in trained if name.endswith("e_score_correction_bias")}
    for side, run in {"ours": ours, "the reference": reference}.items():
        missing, extra = trained - frozen - set(run.gradients), set(run.gradients) - (trained - frozen)
        assert not missing and not extra, f"{side}: no gradient for {missing}, unexpected gradients for {extra}"
    silent = {name for name, gradient in reference.gradients.items() if not gradient.any()}
    assert not silent, f"the reference's gradient is zero, so nothing is compared: {silent}"
    for name, error in gradient_errors(ours, reference).items():
        assert error <= MAX_GRADIENT_ERROR, f"gradient of {name} differs by {error:.1e}, bound {MAX_GRADIENT_ERROR:.0e}"


def check_selections(ours: Run, reference: Run) -> None:
    assert ours.selections.keys() == reference.selections.keys()
    for layer, mask in ours.selections.items():
        differing = (mask != reference.selections[layer]).any(1).nonzero().flatten().tolist()
        assert not differing, f"layer {layer}: queries {differing} select other tokens than the reference"


def check_routes(ours: Run, reference: Run) -> None:
    assert ours.routes.keys() == reference.routes.keys()
    for layer, routes in ours.routes.items():
        differing = (routes != reference.routes[layer]).any(1).nonzero().flatten().tolist()
        assert not differing, f"layer {layer}: tokens {differing} are routed to other experts than in the reference"
