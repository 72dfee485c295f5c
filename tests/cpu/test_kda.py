"""Kimi delta attention: the recurrence against its definition, the chunked form against the recurrence."""

import numpy as np
import pytest
import torch
from torch import Tensor

from glm5_next.plugins.documents import Documents
from glm5_next.plugins.kernels import kda, naive
from tests.support.faults import edit
from tests.support.tiny import relative_error

HEADS, KEY, VALUE = 2, 16, 12
LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 130)
MAX_ERROR = 1e-5
NAMES = ("q", "k", "v", "g", "beta")


def row_of(*lengths: int) -> Documents:
    return Documents.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32), sum(lengths))


def inputs(num_tokens: int, *, weakest: float = 0.0, strongest: float = -5.0) -> list[Tensor]:
    """q, k, v, g, beta as the operators take them; decays are spread between the two bounds."""
    q, k = (naive.l2_norm(torch.randn(num_tokens, HEADS, KEY)) for _ in range(2))
    v = torch.randn(num_tokens, HEADS, VALUE)
    g = weakest + (strongest - weakest) * torch.rand(num_tokens, HEADS, KEY) ** 3
    beta = torch.rand(num_tokens, HEADS)
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


def defined(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """S_t = (I - beta k k^T) Diag(e^g) S_(t-1) + beta k v^T and o_t = S_t^T q_t / sqrt(K), in fp64, head by head."""
    q, k, v, g, beta = (x.detach().double().numpy() for x in (q, k, v, g, beta))
    out = np.zeros(v.shape)
    for start, end in zip(np.cumsum((0, *lengths)), np.cumsum(lengths)):
        for head in range(q.shape[1]):
            state = np.zeros((k.shape[2], v.shape[2]))
            for t in range(start, end):
                key, write = k[t, head], beta[t, head]
                forget = np.eye(len(key)) - write * np.outer(key, key)
                state = forget @ np.diag(np.exp(g[t, head])) @ state + write * np.outer(key, v[t, head])
                out[t, head] = state.T @ q[t, head] / np.sqrt(len(key))
    return torch.from_numpy(out)


def assert_close(got: Tensor, expected: Tensor, what: str, bound: float = MAX_ERROR) -> None:
    assert got.isfinite().all(), f"{what} is not finite"
    if not expected.any():  # the decay of a document's first token meets an empty state
        assert got.abs().max() < 1e-7, f"{what}: {got.abs().max():.1e}, expected zeros"
        return
    error = relative_error(got, expected)
    assert error <= bound, f"{what}: relative error {error:.1e}, bound {bound:.0e}"


def assert_same_function(
    tensors: list[Tensor], documents: Documents, chunk: int, decay_bound: float = MAX_ERROR
) -> None:
    """kda_chunked and kda_recurrent: outputs and the gradients of all five inputs."""
    recurrent, chunked = (
        naive.kda_recurrent(*tensors, documents),
        naive.kda_chunked(*tensors, documents, chunk=chunk),
    )
    assert_close(chunked, recurrent, "output")
    weight = torch.randn_like(recurrent)
    expected, got = (torch.autograd.grad((out * weight).sum(), tensors) for out in (recurrent, chunked))
    for name, a, b in zip(NAMES, got, expected):
        assert_close(a, b, f"gradient of {name}", decay_bound if name == "g" else MAX_ERROR)


@pytest.mark.parametrize("lengths", [(130,), (1,), (5, 1, 64, 17, 3)], ids=str)
def test_recurrence_is_the_definition(lengths):
    tensors = inputs(sum(lengths))
    assert_close(naive.kda_recurrent(*tensors, row_of(*lengths)), defined(*tensors, lengths), "output", 1e-6)


@pytest.mark.parametrize("chunk", [1, 8, 16])
@pytest.mark.parametrize("length", LENGTHS)
def test_chunked_form_equals_the_recurrence_at_every_length(length, chunk):
    assert_same_function(inputs(length), row_of(length), chunk)


@pytest.mark.parametrize("chunk", [1, 8, 16])
def test_chunked_form_equals_the_recurrence_for_all_lengths_in_one_row(chunk):
    lengths = LENGTHS[::2] + LENGTHS[1::2]
    assert_same_function(inputs(sum(lengths)), row_of(*lengths), chunk)


def test_chunked_form_equals_the_recurrence_over_2048_tokens():
    assert_same_function(inputs(2048, strongest=-1.0), row_of(2048), 16)


@pytest.mark.parametrize(("weakest", "strongest"), [(-5.0, -5.0), (0.0, 0.0), (-1e-4, -1e-4), (0.0, -5.0)])
def test_chunked_form_holds_at_both_ends_of_the_decay(weakest, strongest):
    # Where every channel forgets all but e^-5, the gradient of the decay is what is left when numbers 150 times as
    # large cancel.
    decay_bound = 1e-4 if weakest == -5.0 else MAX_ERROR
    assert_same_function(inputs(73, weakest=weakest, strongest=strongest), row_of(70, 3), 16, decay_bound)


@pytest.mark.parametrize("A_log", [-10.0, 10.0])
@pytest.mark.parametrize("dt_bias", [-10.0, 10.0])
def test_extreme_gates_stay_finite_and_inside_the_bound(A_log, dt_bias):
    raw = [torch.randn(40, HEADS, size) for size in (KEY, KEY, VALUE, KEY)]
    tensors = [*raw, torch.full((HEADS,), A_log), torch.full((HEADS * KEY,), dt_bias), torch.randn(40, HEADS)]
    tensors = [x.requires_grad_() for x in tensors]
    decay = naive.kda_gate(*tensors[3:6], -5.0)
    assert decay.isfinite().all() and decay.min() >= -5.0 and decay.max() <= 0.0
    out = kda(*tensors, row_of(33, 7), lower_bound=-5.0)
    assert out.isfinite().all()
    for gradient in torch.autograd.grad(out.sum(), tensors):
        assert gradient.isfinite().all()


def test_gate_has_the_bias_inside_and_the_bound_outside():
    gate, A_log, dt_bias = torch.randn(6, HEADS, KEY), torch.randn(HEADS), torch.randn(HEADS * KEY)
    got = naive.kda_gate(gate, A_log, dt_bias, -5.0)
    for head in range(HEADS):
        for channel in range(KEY):
            x = gate[:, head, channel].double() + dt_bias[head * KEY + channel].double()
            expected = -5.0 / (1.0 + torch.exp(-torch.exp(A_log[head].double()) * x))
            assert_close(got[:, head, channel], expected, f"head {head} channel {channel}", 1e-6)


@pytest.mark.parametrize(("x", "decay"), [(0.0, -2.5), (3.0, -4.7629), (-3.0, -0.2371)])
def test_gate_has_these_values_where_decay_rate_is_one(x, decay):
    got = naive.kda_gate(torch.full((1, 1, 1), x), torch.zeros(1), torch.zeros(1), -5.0)
    assert got.item() == pytest.approx(decay, abs=1e-4)


def test_last_tap_meets_the_current_token_and_nothing_comes_before_a_document():
    x, weight = torch.randn(7, 3), torch.randn(3, 4)
    got = naive.short_convolution(x, weight, row_of(5, 2))
    for start, end in ((0, 5), (5, 7)):
        for t in range(start, end):
            z = sum(weight[:, 3 - back] * x[t - back] for back in range(4) if t - back >= start)
            assert_close(got[t], z * torch.sigmoid(z), f"token {t}", 1e-6)


def test_q_and_k_are_normalised_with_eps_inside_the_root():
    x = torch.randn(4, 2, KEY) * 1e-3
    expected = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert_close(naive.l2_norm(x), expected, "normalised", 1e-6)


def test_output_norm_is_fp32_to_the_end_and_gated_by_a_sigmoid():
    x, gate, weight = torch.randn(5, 2, 8), torch.randn(5, 2, 8).bfloat16(), torch.rand(8) + 0.5
    wide = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = wide * weight.double() / (1 + torch.exp(-gate.double()))
    got = naive.gated_rms_norm(x, gate, weight, 1e-5)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected.float().bfloat16())


def test_beta_is_not_rounded_to_the_dtype_of_its_logits():
    raw = [torch.randn(9, HEADS, size).bfloat16() for size in (KEY, KEY, VALUE, KEY)]
    A_log, dt_bias, beta = torch.randn(HEADS), torch.randn(HEADS * KEY), torch.randn(9, HEADS).bfloat16()
    documents = row_of(9)
    got = kda(*raw, A_log, dt_bias, beta, documents, lower_bound=-5.0)
    q, k = (naive.l2_norm(x) for x in raw[:2])
    g = naive.kda_gate(raw[3], A_log, dt_bias, -5.0)
    wide = naive.kda_recurrent(q, k, raw[2], g, torch.sigmoid(beta.double()), documents)
    assert got.dtype == torch.bfloat16
    assert_close(got, wide, "output", 2**-8)
    assert (got != wide.bfloat16()).float().mean() < 0.02, "more than rounding at the end separates the two"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tril(-1)", "tril(-2)"),
        ("state = keep_c * state", "state = state"),
        ("within = (q_in @ k_out.transpose(-1, -2)).tril()", "within = (q_in @ k_out.transpose(-1, -2)).tril(-1)"),
        ("- k_seen_c @ state", ""),
    ],
    ids=["last_token_not_recalled", "state_does_not_decay", "own_token_unread", "no_delta_across_chunks"],
)
def test_fault_in_the_chunked_form_shows(old, new):
    tensors, documents = inputs(50, strongest=-1.0), row_of(50)
    wrong = edit(old, new)(naive.kda_chunked)(*tensors, documents)
    assert relative_error(wrong, naive.kda_recurrent(*tensors, documents)) > 50 * MAX_ERROR
