"""Logits that log-probabilities are tested on, and what fp64 says of them."""

import torch
from torch import Tensor

ROWS, VOCAB = 7, 21
# Name -> factor or values of the logits.
EXTREMES = {
    "ordinary": lambda x: 3 * x,
    "tiny": lambda x: 1e-20 * x,
    "all equal": lambda x: torch.full_like(x, 5.0),
    "certain": lambda x: x + 1e4 * (x == x.max(-1, keepdim=True).values),
    "as large as fp32 goes": lambda x: x.sign() * 1e38,
    "far below zero": lambda x: x - 1e5,
    "some impossible": lambda x: x.masked_fill((x < -0.5) & (torch.arange(VOCAB) != 3), float("-inf")),
}


def logits(name: str = "ordinary") -> Tensor:
    return EXTREMES[name](torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(5)))


def labels(x: Tensor) -> Tensor:
    """Labels that have a probability, among them the first and the last column where these have one."""
    possible = x > float("-inf")
    wanted = torch.arange(len(x)) * (VOCAB - 1) // (len(x) - 1)
    return torch.where(possible.gather(1, wanted[:, None])[:, 0], wanted, 3)


def expected(x: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies in fp64."""
    logprobs = x.double().log_softmax(-1)
    entropy = -torch.special.xlogy(logprobs.exp(), logprobs.exp()).sum(-1)
    return logprobs.gather(1, of[:, None])[:, 0], entropy
