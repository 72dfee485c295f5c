"""Hyper-connections against the equations of the model description, written out once more in fp64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from glm5_next.bridge.reference import import_modeling
from glm5_next.plugins.kernels import naive
from tests.support.faults import edit
from tests.support.tiny import Case, relative_error

WIDTH = 24
NORM_EPS, HC_EPS, ITERATIONS = 1e-5, 1e-6, 20
SCALES = (1e-4, 1e-2, 1.0)
MAX_ERROR = 1e-5  # absolute: all coefficients are of order one


def weights(streams: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """fn, base and the three scales; strong enough for the mixing matrix to be far from symmetric."""
    outputs = streams * (streams + 2)
    return torch.randn(outputs, streams * WIDTH) * 0.3, torch.randn(outputs), torch.randn(3).split(1)


def mapping(x: Tensor, fn: Tensor, base: Tensor, scales: tuple[Tensor, ...], streams: int, **changes):
    given = {"num_streams": streams, "norm_eps": NORM_EPS, "hc_eps": HC_EPS, "iterations": ITERATIONS}
    return naive.mhc_mapping(x, fn, base, scales, **(given | changes))


def derived(x: Tensor, fn: Tensor, base: Tensor, scales: tuple[Tensor, ...], streams: int):
    """Section 4 of the description, token by token and entry by entry: pre, post, M."""
    x, fn, base = (tensor.double().numpy() for tensor in (x, fn, base))
    s_pre, s_post, s_res = (float(scale) for scale in scales)
    n = streams
    pre, post, mix = (np.zeros((len(x), *shape)) for shape in ((n,), (n,), (n, n)))
    for t, row in enumerate(x):
        r = (np.mean(row**2) + NORM_EPS) ** -0.5
        z = np.array([sum(w * r * v for w, v in zip(line, row)) for line in fn])
        for j in range(n):
            pre[t, j] = 1 / (1 + np.exp(-(s_pre * z[j] + base[j]))) + HC_EPS
            post[t, j] = 2 / (1 + np.exp(-(s_post * z[n + j] + base[n + j])))
        logits = np.array(
            [[s_res * z[2 * n + j * n + k] + base[2 * n + j * n + k] for k in range(n)] for j in range(n)]
        )
        m = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True) + HC_EPS
        m = m / (m.sum(axis=0, keepdims=True) + HC_EPS)
        for _ in range(19):
            m = m / (m.sum(axis=1, keepdims=True) + HC_EPS)
            m = m / (m.sum(axis=0, keepdims=True) + HC_EPS)
        mix[t] = m
    return tuple(torch.from_numpy(a) for a in (pre, post, mix))


def largest_difference(got, expected) -> float:
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(got, expected))


@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize("scale", SCALES)
def test_coefficients_are_those_of_the_equations(scale, streams):
    x, given = torch.randn(12, streams * WIDTH) * scale, weights(streams)
    error = largest_difference(mapping(x, *given, streams), derived(x, *given, streams))
    assert error < MAX_ERROR, f"coefficients differ by {error:.1e}, bound {MAX_ERROR:.0e}"


@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize("scale", SCALES)
def test_coefficients_and_block_input_are_those_of_the_reference(scale, streams):
    config = import_modeling().Glm5NextTextConfig(**{**Case(streams=streams).text_config(), "hidden_size": WIDTH})
    theirs = import_modeling().Glm5NextTextHyperConnection(config)
    fn, base, scales = weights(streams)
    theirs.fn.data, theirs.base.data, theirs.scale.data = fn, base, torch.cat(scales)
    x = torch.randn(1, 12, streams * WIDTH) * scale
    with torch.no_grad():
        post, mix, collapsed = theirs(x.unflatten(-1, (streams, WIDTH)))
    pre, *ours = mapping(x, fn, base, scales, streams)
    error = largest_difference(ours, (post, mix))
    assert error < MAX_ERROR, f"coefficients differ by {error:.1e}, bound {MAX_ERROR:.0e}"
    assert relative_error(naive.mhc_collapse(x, pre), collapsed) < 1e-6


@pytest.mark.parametrize("scale", SCALES)
def test_columns_of_the_mixing_matrix_sum_to_one_and_rows_are_left_as_they_are(scale):
    fn, base, scales = weights(4)
    _, _, mix = mapping(torch.randn(50, 4 * WIDTH) * scale, fn, 3 * base, scales, 4)
    assert (mix.sum(-2) - 1).abs().max() < 1e-5
    assert (mix.sum(-1) - 1).abs().max() > 1e-4, "the rows were normalised last"
    assert (mix > 0).all()


@pytest.mark.parametrize("iterations", [19, 21])
def test_another_number_of_iterations_shows(iterations):
    x, given = torch.randn(12, 4 * WIDTH), weights(4)
    expected = derived(x, *given, 4)[2:]
    exact = largest_difference(mapping(x, *given, 4)[2:], expected)
    wrong = largest_difference(mapping(x, *given, 4, iterations=iterations)[2:], expected)
    assert wrong > 1e-7 and wrong > 10 * exact, f"{iterations} iterations differ by {wrong:.1e}, 20 by {exact:.1e}"


@pytest.mark.parametrize(
    ("old", "new", "scale"),
    [
        ("torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)", "1 / (x.square().mean(-1, keepdim=True).sqrt() + norm_eps)", 1e-4),
        ("torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)", "torch.rsqrt(x.square().mean(-1, keepdim=True) + hc_eps)", 1e-4),
        ("torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)", "torch.rsqrt(x.square().sum(-1, keepdim=True) + norm_eps)", 1.0),
        ("post = 2 * torch", "post = torch", 1.0),
        ("alpha_pre, alpha_post, alpha_res =", "alpha_res, alpha_post, alpha_pre =", 1.0),
        (".softmax(-1)", ".softmax(-2)", 1.0),
    ],
    ids=["eps_outside_the_root", "another_eps", "sum_of_squares", "no_factor_2", "order_of_scales", "softmax_over_columns"],
)  # fmt: skip
def test_fault_in_the_mapping_shows(old, new, scale):
    x, given = torch.randn(12, 4 * WIDTH) * scale, weights(4)
    wrong = edit(old, new)(naive.mhc_mapping)
    got = wrong(x, *given, num_streams=4, norm_eps=NORM_EPS, hc_eps=HC_EPS, iterations=ITERATIONS)
    error = largest_difference(got, derived(x, *given, 4))
    assert error > 50 * MAX_ERROR, f"coefficients differ by {error:.1e} only"


@pytest.mark.parametrize("place", ["pre = torch.sigmoid(alpha_pre * z_pre + b_pre)", ".softmax(-1)"])
def test_small_eps_is_added_where_the_equations_add_it(place):
    """Too small to see at its real size, so it is made large on both sides of the comparison."""
    x, (fn, base, scales) = torch.randn(12, 4 * WIDTH), weights(4)
    right = mapping(x, fn, base, scales, 4, hc_eps=0.1)
    wrong = edit(place + " + hc_eps", place)(naive.mhc_mapping)
    got = wrong(x, fn, base, scales, num_streams=4, norm_eps=NORM_EPS, hc_eps=0.1, iterations=ITERATIONS)
    assert largest_difference(got, right) > 1e-3


def test_new_stream_k_takes_its_share_of_old_stream_j_from_row_j_and_column_k():
    streams, output = torch.randn(5, 3 * WIDTH), torch.randn(5, WIDTH)
    post, mix = torch.rand(5, 3), torch.rand(5, 3, 3)
    got = naive.mhc_merge(streams, output, post, mix).view(5, 3, WIDTH)
    old = streams.view(5, 3, WIDTH).double()
    for k in range(3):
        expected = post[:, k, None].double() * output.double()
        for j in range(3):
            expected = expected + mix[:, j, k, None].double() * old[:, j]
        assert relative_error(got[:, k], expected) < 1e-6


def test_block_input_is_the_weighted_sum_of_the_streams():
    streams, pre = torch.randn(5, 3 * WIDTH), torch.rand(5, 3)
    expected = sum(pre[:, j, None].double() * streams.view(5, 3, WIDTH)[:, j].double() for j in range(3))
    assert relative_error(naive.mhc_collapse(streams, pre), expected) < 1e-6


def test_bf16_streams_are_mixed_in_fp32_and_rounded_once():
    streams, output = torch.randn(40, 4 * WIDTH).bfloat16(), torch.randn(40, WIDTH).bfloat16()
    pre, post, mix = mapping(streams, *weights(4), 4)
    assert {pre.dtype, post.dtype, mix.dtype} == {torch.float32}
    for got, wide in (
        (naive.mhc_collapse(streams, pre), naive.mhc_collapse(streams.float(), pre)),
        (naive.mhc_merge(streams, output, post, mix), naive.mhc_merge(streams.float(), output.float(), post, mix)),
    ):
        assert got.dtype == torch.bfloat16 and torch.equal(got, wide.bfloat16())
