"""What a tiny model keeps for its backward pass when every operator is one node that keeps its inputs, as kernels do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from glm5_next.plugins import kernels
from glm5_next.plugins.megatron_config import megatron_config
from glm5_next.plugins.packed_row import packed_row
from glm5_next.plugins.spec import build_gpt_model
from glm5_next.plugins.topology import Topology
from tests.support.tiny import VOCAB, Case, start_single_process

OPERATORS = (
    "clamped_swiglu",
    "gated_rms_norm",
    "kda",
    "mhc_merge",
    "mhc_site",
    "rms_norm",
    "short_convolution",
    "sparse_attention",
)
KEEP_OUTPUT = ("kda", "sparse_attention")  # attention kernels keep what they computed, too
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class _OneNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, operator: Callable[..., Any], keep_output: bool, arguments: list, named: dict, *tensors: Tensor):
        given = iter(tensors)
        with torch.no_grad():
            out = operator(*(next(given) if argument is None else argument[0] for argument in arguments), **named)
        ctx.save_for_backward(*tensors, *([out] if keep_output else []))
        return out

    @staticmethod
    def backward(ctx, *gradients):
        raise AssertionError("only the forward pass is measured")


def _node(operator: Callable[..., Any], keep_output: bool) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        places = [None if isinstance(argument, Tensor) else (argument,) for argument in arguments]
        return _OneNode.apply(operator, keep_output, places, named, *tensors)

    return call


@contextmanager
def operators_as_nodes() -> Iterator[None]:
    nodes = {name: _node(getattr(kernels, name), name in KEEP_OUTPUT) for name in OPERATORS}
    with mock.patch.multiple(kernels, **nodes):
        yield


def saved_bytes(case: Case, num_tokens: int, *, recompute: str) -> int:
    """Bytes of all tensors that a forward pass of one row keeps, weights left out; fp32, one rank."""
    start_single_process()
    recomputation = FULL if recompute == "full" else {}
    config = megatron_config(case.config(), Topology(), dtype=torch.float32, on_cpu=True, **recomputation)
    model = build_gpt_model(config).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # alive until counted, so that no address is used twice
        return tensor

    ids = torch.randint(VOCAB, (1, num_tokens))
    row = packed_row(torch.tensor([0, num_tokens], dtype=torch.int32))
    with operators_as_nodes(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, torch.arange(num_tokens)[None], None, packed_seq_params=row)
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights)
