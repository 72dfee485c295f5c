"""A vocabulary that is split over ranks gives the log-probabilities, entropies and gradients of a whole one."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from glm5_next.plugins.logprobs import token_logprobs
from tests.support import tiny  # noqa: F401 - installs the CPU runtime
from tests.support.logprob_cases import EXTREMES, VOCAB, expected, labels, logits
from tests.support.ranks import run_ranks

WEIGHT = torch.linspace(-2, 2, 7)


def on_a_share(width: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Per case: log-probabilities, entropies and gradient of this rank's columns of logits padded to `width`."""
    rank, size, results = dist.get_rank(), dist.get_world_size(), {}
    for name in EXTREMES:
        x = logits(name)
        # Padding that would win if it counted.
        share = F.pad(x, (0, width - VOCAB), value=1e3).chunk(size, dim=1)[rank].clone().requires_grad_()
        logprobs, entropy = token_logprobs(share, labels(x), vocab_size=VOCAB, tp_group=dist.group.WORLD)
        (logprobs * WEIGHT).sum().backward()
        results[name] = logprobs.detach(), entropy, share.grad
    return results


# 21 columns: padded to 24 a rank of 4 has 3 columns of padding; to 32 the last of 4 has nothing else.
@pytest.mark.parametrize(("size", "width"), [(1, 21), (2, 22), (4, 24), (4, 32)])
def test_ranks_agree_with_fp64_and_with_each_other(size, width):
    results = run_ranks(on_a_share, size, width, timeout=60)
    for name in EXTREMES:
        x = logits(name)
        theirs = x.double().requires_grad_()
        wanted = expected(theirs, labels(x))
        (wanted[0] * WEIGHT).sum().backward()
        for logprobs, entropy, _ in (result[name] for result in results):
            assert torch.equal(logprobs, results[0][name][0]) and torch.equal(entropy, results[0][name][1])
            torch.testing.assert_close(logprobs.double(), wanted[0].detach(), rtol=1e-6, atol=2e-6)
            torch.testing.assert_close(entropy.double(), wanted[1].detach(), rtol=1e-6, atol=2e-6)
        gradient = torch.cat([result[name][2] for result in results], dim=1)
        torch.testing.assert_close(gradient[:, :VOCAB].double(), theirs.grad, rtol=1e-5, atol=1e-6)
        assert not gradient[:, VOCAB:].any()
