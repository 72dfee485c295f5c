"""Token log-probabilities and entropies from vocabulary-parallel logits, in plain torch."""

import torch
import torch.distributed as dist
from torch import Tensor


def token_logprobs(
    logits: Tensor, labels: Tensor, *, vocab_size: int, tp_group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """logits `[T, V / tp]` of this TP rank, labels `[T]` -> fp32 log-probabilities `[T]` and entropies `[T]`.

    Columns at or beyond `vocab_size` (padding of the embedding) take no part. Only the log-probabilities carry a
    gradient. The softmax is recomputed in backward, so no fp32 copy of the logits is kept.
    """
    return _TokenLogprobs.apply(logits, labels, vocab_size, tp_group)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, vocab_size: int, tp_group: dist.ProcessGroup):
        first = tp_group.rank() * logits.shape[1]
        x = _real_columns(logits, vocab_size - first)
        peak = x.max(dim=-1).values
        all_reduce(peak, tp_group, dist.ReduceOp.MAX)
        exp = (x - peak.unsqueeze(-1)).exp()
        here = (labels >= first) & (labels < first + logits.shape[1])
        local = (labels - first).where(here, 0)
        target = x.gather(-1, local.unsqueeze(-1)).squeeze(-1).where(here, 0.0)
        # One collective for the three sums: partition function, expected logit, the target's logit.
        expected = (exp * (x - peak.unsqueeze(-1)).clamp(min=torch.finfo(x.dtype).min)).sum(-1)
        sums = torch.stack([exp.sum(-1), expected, target])
        all_reduce(sums, tp_group, dist.ReduceOp.SUM)
        log_z = sums[0].log()
        entropy = log_z - sums[1] / sums[0]
        ctx.save_for_backward(logits, local, here, peak, log_z)  # their sum would lose log_z next to a large peak
        ctx.num_columns = vocab_size - first
        ctx.mark_non_differentiable(entropy)
        return sums[2] - peak - log_z, entropy

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor):
        logits, local, here, peak, log_z = ctx.saved_tensors
        x = _real_columns(logits, ctx.num_columns)
        softmax = (x - peak.unsqueeze(-1)).sub_(log_z.unsqueeze(-1)).exp_()
        out = softmax.mul_(-grad.unsqueeze(-1))
        out.scatter_add_(-1, local.unsqueeze(-1), (grad * here).unsqueeze(-1))
        return out.to(logits.dtype), None, None, None


def _real_columns(logits: Tensor, num_columns: int) -> Tensor:
    """fp32 logits with -inf in the padding."""
    x = logits.float()
    if num_columns < x.shape[-1]:
        x = x.masked_fill(torch.arange(x.shape[-1], device=x.device) >= num_columns, float("-inf"))
    return x


def all_reduce(x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType) -> None:
    if group.size() > 1:
        dist.all_reduce(x, op=op, group=group)
