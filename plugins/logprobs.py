"""Log-probabilities of given tokens and the entropy of their distributions, from vocabulary-parallel logits."""

import torch.distributed as dist
from torch import Tensor

from glm5_next.plugins.kernels.registry import AUTO, NAIVE, installed, load


def token_logprobs(
    logits: Tensor, labels: Tensor, *, vocab_size: int, tp_group: dist.ProcessGroup, backend: str = AUTO
) -> tuple[Tensor, Tensor]:
    """logits `[T, V / tp]` of this TP rank, labels `[T]` -> fp32 log-probabilities `[T]` and entropies `[T]`.

    Columns at or beyond `vocab_size` (padding of the embedding) take no part. Only the log-probabilities carry a
    gradient. `backend` is "auto", "naive" or "triton", which keeps no fp32 copy of the logits at any time.
    """
    if backend == AUTO:
        backend = "triton" if logits.is_cuda and installed("triton") else NAIVE
    return load("token_logprobs", backend)(logits, labels, vocab_size=vocab_size, tp_group=tp_group)
