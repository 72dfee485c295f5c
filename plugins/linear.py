"""Linear maps that Megatron has no module for."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5_next.plugins.megatron_config import Glm5NextTransformerConfig


class ReplicatedLinear(torch.nn.Module):
    """`y = x W^T` on this rank's own tokens; with sequence parallelism the gradient of W is summed over TP ranks."""

    def __init__(self, input_size: int, output_size: int, config: Glm5NextTransformerConfig):
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype, device=config.device)
        )
        if config.perform_initialization:
            config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """`x W^T` in fp32, `[..., in]` and `[out, in]` -> `[..., out]`.

    Products of bf16 numbers are exact in fp32, so a GPU's bf16 units with fp32 sums give what fp32 copies would give.
    """
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
        return torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32).unflatten(0, x.shape[:-1])
    return F.linear(x.float(), weight.float())


def headwise(x: Tensor, weight: Tensor) -> Tensor:
    """Every head by its own matrix: `[T, H, A]` and `[H, A, B]` -> contiguous `[T, H, B]`."""
    return _Headwise.apply(x, weight)


class _Headwise(torch.autograd.Function):
    """einsum would return a transposed view, which every attention kernel copies; results are written in place here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _per_head(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return _per_head(grad, weight.transpose(1, 2)), torch.bmm(x.permute(1, 2, 0), grad.transpose(0, 1))


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], x.shape[1], weight.shape[2])
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out
