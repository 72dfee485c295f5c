"""Log-probabilities and entropies equal fp64's log_softmax, in value and in gradient, whatever the logits."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor

from glm5_next.plugins.logprobs import token_logprobs
from tests.support import tiny
from tests.support.logprob_cases import EXTREMES, VOCAB, expected, labels, logits


def ours(x: Tensor, of: Tensor, vocab_size: int = VOCAB) -> tuple[Tensor, Tensor]:
    tiny.start_single_process()
    group = parallel_state.get_tensor_model_parallel_group()
    return token_logprobs(x, of, vocab_size=vocab_size, tp_group=group)


@pytest.mark.parametrize("name", EXTREMES)
def test_values_are_those_of_log_softmax_in_fp64(name):
    x = logits(name)
    logprobs, entropy = ours(x, labels(x))
    for got, wanted in zip((logprobs, entropy), expected(x, labels(x))):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("name", EXTREMES)
def test_gradients_are_those_of_log_softmax_in_fp64(name):
    x, weight = logits(name), torch.linspace(-2, 2, 7)
    mine, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    (ours(mine, labels(x))[0] * weight).sum().backward()
    (expected(theirs, labels(x))[0] * weight).sum().backward()
    torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)


def test_a_gradient_per_token_matches_finite_differences():
    x = logits().requires_grad_()
    ours(x, labels(x))[0][2].backward()
    step = torch.zeros_like(x)
    step[2, 4] = 1e-3
    with torch.no_grad():
        slope = (ours(x + step, labels(x))[0] - ours(x - step, labels(x))[0])[2] / 2e-3
    assert x.grad[2, 4].item() == pytest.approx(slope.item(), abs=1e-4)
    assert x.grad[0].abs().max() == 0


def test_entropy_carries_no_gradient():
    x = logits().requires_grad_()
    logprobs, entropy = ours(x, labels(x))
    assert logprobs.requires_grad and not entropy.requires_grad


@pytest.mark.parametrize("padding", [1, 11])
def test_columns_of_padding_take_no_part(padding):
    x = logits()
    # Larger than any logit: the padding would win if it counted.
    padded = F.pad(x, (0, padding), value=1e3).requires_grad_()
    for got, wanted in zip(ours(padded, labels(x)), ours(x, labels(x))):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
    ours(padded, labels(x))[0].sum().backward()
    assert not padded.grad[:, VOCAB:].any() and padded.grad[:, :VOCAB].any()
    counted, _ = ours(padded.detach(), labels(x), vocab_size=VOCAB + padding)
    assert not torch.allclose(counted, ours(x, labels(x))[0], atol=1.0)


def test_bf16_logits_are_computed_in_fp32_and_get_bf16_gradients():
    x = logits().bfloat16().requires_grad_()
    logprobs, entropy = ours(x, labels(x))
    for got, wanted in zip((logprobs, entropy), expected(x.detach(), labels(x))):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=2e-6)
    logprobs.sum().backward()
    wide = x.detach().float().requires_grad_()
    ours(wide, labels(x))[0].sum().backward()
    assert x.grad.dtype == torch.bfloat16 and torch.equal(x.grad, wide.grad.bfloat16())


def test_logits_stay_as_they_are():
    x = logits()
    before = x.clone()
    y = x.clone().requires_grad_()
    ours(y, labels(x))[0].sum().backward()
    assert torch.equal(y.detach(), before)
