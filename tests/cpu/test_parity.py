"""Our model on Megatron-Core against transformers', with the same random weights, in fp32 and in fp64."""

import pytest
import torch

from tests.support import tiny
from tests.support.parity import (
    MIN_GAP,
    DoublePrecision,
    check_gradients,
    check_logits,
    check_routes,
    check_selections,
    gradient_errors,
    our_run,
    reference_run,
    run_reference,
    widened,
)
from tests.support.tiny import Case, relative_error

# Name -> model and number of tokens. index_topk is 16, so every length is far past it; DSA layers are 3 and 7.
CASES = {
    "8_layers_3_dense_2_streams": (Case(layers=8, dense_layers=3, streams=2, seed=1), 77),
    "8_layers_3_dense_4_streams": (Case(layers=8, dense_layers=3, streams=4, seed=2), 77),
    "8_layers_small_streams": (Case(layers=8, dense_layers=3, streams=2, small_streams=True, seed=7), 101),
    "5_layers_1_dense": (Case(seed=0), 64),
    "5_layers_1_dense_other_seed": (Case(seed=1), 77),
    "5_layers_small_streams": (Case(small_streams=True, seed=2), 77),
    "0_dense_2_streams": (Case(dense_layers=0, streams=2, seed=2), 77),
    "0_dense_small_streams": (Case(dense_layers=0, small_streams=True, seed=3), 101),
    "large_activations": (Case(mlp_gain=8.0, seed=2), 77),
    "low_clamp": (Case(swiglu_limit=0.5, seed=2), 77),
}
FLOAT64_ERROR = 1e-10


@pytest.fixture(scope="module", params=CASES)
def case_and_length(request):
    return CASES[request.param]


@pytest.fixture(scope="module")
def case(case_and_length):
    return case_and_length[0]


@pytest.fixture(scope="module")
def reference(case_and_length):
    return reference_run(*case_and_length)


@pytest.fixture(scope="module")
def ours(case_and_length):
    return our_run(*case_and_length)


def test_logits_equal_the_reference(ours, reference):
    check_logits(ours, reference)


def test_every_trained_tensor_has_the_reference_gradient_and_no_other_tensor_has_one(ours, reference, case):
    check_gradients(ours, reference, case)


def test_every_query_selects_the_tokens_of_the_reference(ours, reference, case):
    assert ours.selection_gap > MIN_GAP, f"a tie ({ours.selection_gap:.1e}) leaves the choice open: take another seed"
    assert sorted(ours.selections) == [i for i, kind in enumerate(case.config().attention_kinds) if kind == "dsa"]
    check_selections(ours, reference)


def test_every_token_goes_to_the_experts_of_the_reference(ours, reference, case):
    assert ours.route_gap > MIN_GAP, f"a tie ({ours.route_gap:.1e}) leaves the choice open: take another seed"
    assert sorted(ours.routes) == [i for i, kind in enumerate(case.config().mlp_kinds) if kind == "moe"]
    check_routes(ours, reference)


def test_queries_past_index_topk_attend_to_less_than_they_see(ours, case):
    limit = case.config().index_topk + case.config().index_kpool - 1
    for mask in ours.selections.values():
        counts = mask.sum(1)
        assert torch.equal(counts[:limit], torch.arange(1, limit + 1)), "an early query misses a token that it sees"
        assert counts[limit:].max() <= limit


def test_small_streams_are_small_where_the_mapping_is_normalised(reference, case):
    first = reference.stream_mean_square[0]
    if case.small_streams:
        assert 2.5e-6 < first < 1e-5, f"mean square {first:.1e} at the first site"
        assert max(reference.stream_mean_square) < 1e-4, "the streams grow until eps no longer matters"
    else:
        assert first > 0.5, f"mean square {first:.1e} at the first site"


def test_every_weight_is_random_and_none_is_left_at_its_initial_value(case):
    for name, tensor in tiny.reference_model(case).state_dict().items():
        assert tensor.std() > 0 and (tensor != 0).all() and (tensor != 1).all(), f"{name} is not random"


@pytest.mark.parametrize("case", [Case(layers=8, dense_layers=3, seed=3), Case(small_streams=True, streams=2, seed=4)])
def test_in_fp64_nothing_but_rounding_is_left(case):
    model = tiny.reference_model(case)
    ours = widened(tiny.our_model(case, model))
    with DoublePrecision():
        expected, got = run_reference(widened(model), case, 77), our_run(case, 77, ours)
    error = relative_error(got.logits, expected.logits)
    assert got.logits.dtype == torch.float64 and error < FLOAT64_ERROR, f"logits differ by {error:.1e}"
    name, error = max(gradient_errors(got, expected).items(), key=lambda item: item[1])
    assert error < FLOAT64_ERROR, f"gradient of {name} differs by {error:.1e}, bound {FLOAT64_ERROR:.0e}"
