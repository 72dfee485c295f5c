"""Every Triton kernel of ours, interpreted on the CPU, against the naive operator: outputs and gradients."""

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from glm5_next.plugins import kernels
from glm5_next.plugins.documents import Documents
from glm5_next.plugins.kernels import (
    indexer_triton,
    kda_triton,
    logprobs_triton,
    mhc_triton,
    naive,
    norm_triton,
    swiglu_triton,
)
from tests.support.logprob_cases import EXTREMES, VOCAB, expected, labels, logits
from tests.support.tiny import relative_error, start_single_process

# The interpreter truncates to bf16 but rounds to fp16, so fp16 stands for the dtype of the activations.
HALF = 2**-11  # one rounding of values that both sides compute in fp32
EXACT = 1e-6


def row_of(*lengths: int) -> Documents:
    return Documents.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32), sum(lengths))


def half(*shape: int) -> Tensor:
    return torch.randn(shape).half().requires_grad_()


def wide(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().float().requires_grad_(x.requires_grad) for x in tensors]


def assert_same(got, expected, inputs: list[Tensor], wide_inputs: list[Tensor], bound: float = HALF) -> None:
    """Outputs, and the gradients of a random weighting of them, within `bound` of the fp32 ones."""
    got, expected = (out if isinstance(out, tuple) else (out,) for out in (got, expected))
    weights = [torch.randn(out.shape).half().float() for out in expected]  # outputs in half precision round no gradient
    for number, (a, b) in enumerate(zip(got, expected)):
        assert a.shape == b.shape
        assert relative_error(a, b) <= bound, f"output {number}: {relative_error(a, b):.1e} > {bound:.1e}"
    grads = [
        torch.autograd.grad(sum((out * w).sum() for out, w in zip(outs, weights)), ins)
        for outs, ins in ((got, inputs), (expected, wide_inputs))
    ]
    for number, (a, b, x) in enumerate(zip(*grads, inputs)):
        assert a.dtype == x.dtype and a.isfinite().all()
        assert relative_error(a, b) <= bound, f"gradient {number}: {relative_error(a, b):.1e} > {bound:.1e}"


@pytest.mark.parametrize("shape", [(5, 1, 64), (3, 24), (1, 2100), (41, 16), (0, 16)], ids=str)
def test_rms_norm(shape, monkeypatch):
    monkeypatch.setattr(norm_triton, "BACKWARD_PROGRAMS", 5)
    x, weight = half(*shape), (1 + 0.3 * torch.randn(shape[-1])).half().requires_grad_()
    got = norm_triton.rms_norm(x, weight, 1e-5)
    assert torch.equal(got, naive.rms_norm(x, weight, 1e-5)), "the two roundings are in another place"
    if x.numel():
        # Two roundings on our side, of which the fp32 one has none.
        wide_inputs = wide(x, weight)
        assert_same(got, naive.rms_norm(*wide_inputs, 1e-5), [x, weight], wide_inputs, 2 * HALF)


@pytest.mark.parametrize("width", [8, 96, 2500])
@pytest.mark.parametrize("weighted", [False, True])
def test_clamped_swiglu(width, weighted):
    x = (4 * torch.randn(6, 2 * width)).half().requires_grad_()
    weights = [torch.rand(6).requires_grad_()] if weighted else []
    wide_inputs = wide(x, *weights)
    got = swiglu_triton.clamped_swiglu(x, 2.0, *weights)
    assert_same(got, naive.clamped_swiglu(wide_inputs[0], 2.0, *wide_inputs[1:]), [x, *weights], wide_inputs)


@pytest.mark.parametrize(
    ("gate", "up"), [(2.0, 1.0), (2.1, 1.0), (-9.0, 1.0), (1.0, 2.0), (1.0, 2.1), (1.0, -2.0), (1.0, -2.1)]
)
def test_clamp_passes_gradients_up_to_its_bound_and_none_beyond(gate, up):
    x = torch.tensor([[gate, up]]).requires_grad_()
    ours, theirs = (f(x, 2.0) for f in (swiglu_triton.clamped_swiglu, naive.clamped_swiglu))
    got, expected = (torch.autograd.grad(out.sum(), x)[0] for out in (ours, theirs))
    assert torch.equal(got == 0, expected == 0) and relative_error(got, expected) < EXACT


@pytest.mark.parametrize("lengths", [(4,), (3, 1, 2), (3, 30, 1, 41, 4)], ids=str)
@pytest.mark.parametrize("kpool", [2, 4])
def test_pool_keys_of_halves_of_one_tensor(lengths, kpool):
    documents, ape = row_of(*lengths), torch.randn(kpool, 16).half()
    keys, gate = torch.randn(sum(lengths), 32).chunk(2, dim=1)
    got, expected = (f(keys, gate, ape, documents) for f in (indexer_triton.pool_keys, naive.pool_keys))
    assert got.shape == expected.shape and got.dtype == torch.float32
    assert not expected.numel() or relative_error(got, expected) < EXACT


@pytest.mark.parametrize("lengths", [(3,), (130,), (3, 70, 1, 41, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_select_pools_of_every_chunk_of_queries(lengths, dtype):
    documents, tokens = row_of(*lengths), sum(lengths)
    q, weights = torch.randn(tokens, 4, 16).to(dtype), torch.randn(tokens, 4)
    pooled = torch.randn(len(documents.pool_starts(4)), 16).to(dtype)
    for first in range(0, tokens, 50):
        rows = slice(first, first + 50)
        got, expected = (
            f(q[rows], weights[rows], pooled, first, documents, kpool=4, num_selected=5)
            for f in (indexer_triton.select_pools, kernels.select_pools)
        )
        assert got.dtype == torch.int32 and got.shape == expected.shape
        assert torch.equal(got.sort(-1).values, expected.sort(-1).values)
        assert not ((got[:, 1:] >= 0) & (got[:, :-1] < 0)).any(), "an unused slot before a used one"


@pytest.mark.parametrize("lengths", [(1,), (130,), (3, 70, 1, 41, 4)], ids=str)
@pytest.mark.parametrize("selected", [2, 5])
def test_expand_pools_has_the_same_tokens_with_the_used_slots_first(lengths, selected):
    documents = row_of(*lengths)
    visible = (documents.positions + 1) // 4
    pools = torch.full((sum(lengths), selected), -1, dtype=torch.int32)
    for token, count in enumerate(visible.tolist()):
        chosen = torch.randperm(count)[:selected]
        pools[token, : len(chosen)] = chosen.int()
    got, expected = (f(pools, documents, 4) for f in (indexer_triton.expand_pools, naive.expand_pools))
    assert got.dtype == torch.int32 and got.shape == (sum(lengths), 128)
    padded = torch.nn.functional.pad(expected, (0, 128 - expected.shape[1]), value=-1)
    assert torch.equal(got.sort(-1).values, padded.sort(-1).values)
    used = (got >= 0).sum(1, keepdim=True)
    assert torch.equal(got >= 0, torch.arange(128) < used), "an unused slot before a used one"


@pytest.mark.parametrize("name", EXTREMES)
def test_token_logprobs(name):
    start_single_process()
    options = {"vocab_size": VOCAB, "tp_group": parallel_state.get_tensor_model_parallel_group()}
    x = logits(name)
    padded = torch.nn.functional.pad(x, (0, 5), value=1e3).requires_grad_()
    got = logprobs_triton.token_logprobs(padded, labels(x), **options)
    for a, b in zip(got, expected(x, labels(x))):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=2e-6)
    weight, wide_x = torch.linspace(-2, 2, len(x)), x.double().requires_grad_()
    (got[0] * weight).sum().backward()
    (expected(wide_x, labels(x))[0] * weight).sum().backward()
    torch.testing.assert_close(padded.grad[:, :VOCAB].double(), wide_x.grad, rtol=1e-5, atol=1e-6)
    assert not padded.grad[:, VOCAB:].any() and not got[1].requires_grad


@pytest.mark.parametrize("tokens", [1, 37, 70])
def test_activation_of_kda_inputs(tokens):
    heads, width = 3, 16
    q, k, gate, beta = (
        half(tokens, heads, width),
        half(tokens, heads, width),
        half(tokens, heads, width),
        half(tokens, heads),
    )
    A_log, dt_bias = (0.7 * torch.randn(n) for n in (heads, heads * width))
    inputs = [q, k, gate, beta, A_log.requires_grad_(), dt_bias.requires_grad_()]
    wide_inputs = wide(*inputs)

    def defined(q, k, gate, beta, A_log, dt_bias):
        decay = naive.kda_gate(gate, A_log, dt_bias, -5.0)
        return naive.l2_norm(q), naive.l2_norm(k), decay, torch.sigmoid(beta)

    got = kda_triton.activate(*inputs, -5.0)
    assert [x.dtype for x in got] == [q.dtype, k.dtype, torch.float32, torch.float32]
    # The norms' gradients are taken from the rounded result, which costs them one more rounding.
    assert_same(got, defined(*wide_inputs), inputs, wide_inputs, 2 * HALF)


def test_used_slots_end_at_the_last_used_one():
    indices = torch.tensor([[-1, -1, -1], [5, -1, -1], [-1, 2, -1], [1, 2, 0]], dtype=torch.int32)
    assert indexer_triton.used_slots(indices).tolist() == [0, 1, 2, 3]


class Rank:
    """One of two TP ranks that take turns: what a collective needs of the other is what it gave the time before."""

    def __init__(self, rank: int):
        self.number, self.given, self.received = rank, [], []

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return 2

    def all_reduce(self, x, group, op) -> None:
        self.given.append(x.clone())
        if len(self.given) <= len(self.received):
            other = self.received[len(self.given) - 1]
            x.copy_(torch.maximum(x, other) if op == torch.distributed.ReduceOp.MAX else x + other)


@pytest.mark.parametrize("vocab", [8, 20, 25])
def test_token_logprobs_of_two_ranks(vocab, monkeypatch):
    """13 columns each; with 8 the second rank has padding alone."""
    x = torch.nn.functional.pad(4 * torch.randn(6, vocab), (0, 26 - vocab), value=50.0)
    labels = torch.arange(6) * (vocab - 1) // 5
    ranks, grads, out = [Rank(0), Rank(1)], [None, None], [None, None]
    for _ in range(3):
        for rank in ranks:
            rank.received, rank.given = ranks[1 - rank.number].given, []
            monkeypatch.setattr(logprobs_triton, "all_reduce", rank.all_reduce)
            share = x[:, 13 * rank.number :][:, :13].clone().requires_grad_()
            out[rank.number] = logprobs_triton.token_logprobs(share, labels, vocab_size=vocab, tp_group=rank)
            grads[rank.number] = torch.autograd.grad(out[rank.number][0].sum(), share)[0]
    wide = x[:, :vocab].double().requires_grad_()
    wanted = expected(wide, labels)
    for values in out:
        for a, b in zip(values, wanted):
            torch.testing.assert_close(a.double(), b.detach(), rtol=1e-6, atol=2e-6)
    got = torch.cat(grads, dim=1)
    torch.testing.assert_close(
        got[:, :vocab].double(), torch.autograd.grad(wanted[0].sum(), wide)[0], rtol=1e-5, atol=1e-6
    )
    assert not got[:, vocab:].any()


def site_inputs(tokens: int, streams: int, width: int, scale: float) -> list[Tensor]:
    outputs = streams * (streams + 2)
    return [
        (scale * torch.randn(tokens, 1, streams * width)).half().requires_grad_(),
        (0.3 * torch.randn(outputs, streams * width)).requires_grad_(),
        torch.randn(outputs).requires_grad_(),
        *(x.requires_grad_() for x in torch.randn(3).split(1)),
    ]


def site(function, streams: int, x: Tensor, weight: Tensor, bias: Tensor, *scales: Tensor) -> tuple[Tensor, ...]:
    settings = {"num_streams": streams, "norm_eps": 1e-5, "hc_eps": 1e-6, "iterations": 20}
    return function(x, weight, bias, scales, **settings)


@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize(("tokens", "width", "scale"), [(33, 48, 1.0), (5, 16, 2e-3)])
def test_mhc_site(streams, tokens, width, scale):
    """Small streams show the place of eps. Coefficients have bounds of their own, so that they cannot hide."""
    inputs = site_inputs(tokens, streams, width, scale)
    wide_inputs = wide(*inputs)
    got, expected = site(mhc_triton.mhc_site, streams, *inputs), site(kernels.mhc_site, streams, *wide_inputs)
    for a, b in zip(got[1:], expected[1:]):
        assert a.dtype == torch.float32 and (a - b).abs().max() < 2e-5
    assert_same(got, expected, inputs, wide_inputs)


@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize(("tokens", "width"), [(5, 48), (9, 512)])
def test_mhc_merge(streams, tokens, width):
    x, y = half(tokens, 1, streams * width), half(tokens, 1, width)
    post, mix = (
        torch.rand(tokens, 1, streams).requires_grad_(),
        torch.rand(tokens, 1, streams, streams).requires_grad_(),
    )
    wide_inputs = wide(x, y, post, mix)
    got, expected = mhc_triton.mhc_merge(x, y, post, mix), naive.mhc_merge(*wide_inputs)
    assert_same(got, expected, [x, y, post, mix], wide_inputs)


def test_interpreter_still_needs_help_with_numpy():
    with pytest.raises(TypeError):
        int(np.array([3]))
