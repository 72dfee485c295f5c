"""Token log-probabilities and entropies in one pass over the logits: no copy of them in fp32 at any time."""

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from glm5_next.plugins.kernels.logprobs import all_reduce

BLOCK = 4096


def token_logprobs(
    logits: Tensor, labels: Tensor, *, vocab_size: int, tp_group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """`kernels.logprobs.token_logprobs`."""
    return _TokenLogprobs.apply(logits, labels, vocab_size, tp_group)


@triton.jit
def _statistics(logits, labels, peaks, sums, tokens, first, columns, V: tl.constexpr, BLOCK: tl.constexpr):
    """Of each token: the largest logit, and sum e^(x - peak), sum (x - peak) e^(x - peak), and its label's logit."""
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * V
    peak, total, expected = -3e38, 0.0, 0.0
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(at + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(x, 0))
        keep = tl.exp(peak - higher)
        weight = tl.exp(x - higher)
        shift = tl.where(total > 0, (peak - higher) * total, 0.0)
        expected = keep * (expected + shift) + tl.sum(tl.where(weight > 0, weight * (x - higher), 0.0), 0)
        total = keep * total + tl.sum(weight, 0)
        peak = higher
    label = tl.load(labels + row) - first
    here = (label >= 0) & (label < V)
    tl.store(peaks + row, peak)
    tl.store(sums + row, total)
    tl.store(sums + tokens + row, expected)
    tl.store(sums + 2 * tokens + row, tl.load(at + label, mask=here, other=0.0).to(tl.float32))


@triton.jit
def _gradient(logits, labels, peaks, log_z, grad, out, first, columns, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < columns
    g = tl.load(grad + row)
    x = tl.load(logits + row * V + column, mask=real, other=0.0).to(tl.float32)
    softmax = tl.exp((x - tl.load(peaks + row)) - tl.load(log_z + row))
    value = tl.where(column == tl.load(labels + row) - first, g, 0.0) - g * softmax
    tl.store(out + row * V + column, tl.where(real, value, 0.0).to(out.dtype.element_ty), mask=column < V)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, tp_group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        logits, labels = logits.contiguous(), labels.contiguous()
        tokens, columns = logits.shape
        first = tp_group.rank() * columns
        local_peak = logits.new_empty(tokens, dtype=torch.float32)
        sums = logits.new_empty(3, tokens, dtype=torch.float32)
        ctx.first, ctx.columns = first, min(vocab_size - first, columns)
        if tokens:
            _statistics[(tokens,)](
                logits, labels, local_peak, sums, tokens, first, ctx.columns, columns, BLOCK, num_warps=8
            )
        peak = local_peak.clone()
        all_reduce(peak, tp_group, dist.ReduceOp.MAX)
        lower = (local_peak - peak).clamp(min=-1e4)  # a rank that holds padding alone has no peak
        sums[1] = torch.exp(lower) * (sums[1] + lower * sums[0])
        sums[0] *= torch.exp(lower)
        all_reduce(sums, tp_group, dist.ReduceOp.SUM)
        log_z = sums[0].log()
        entropy = log_z - sums[1] / sums[0]
        ctx.save_for_backward(logits, labels, peak, log_z)
        ctx.mark_non_differentiable(entropy)
        return sums[2] - peak - log_z, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        logits, labels, peak, log_z = ctx.saved_tensors
        tokens, columns = logits.shape
        out = torch.empty_like(logits)
        if tokens:
            _gradient[(tokens, triton.cdiv(columns, BLOCK))](
                logits, labels, peak, log_z, grad.contiguous(), out, ctx.first, ctx.columns, columns, BLOCK, num_warps=8
            )
        return out, None, None, None
