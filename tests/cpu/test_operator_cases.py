"""The problems that GPU backends are judged by: naive passes them in bf16, and no input can be ignored."""

import pytest
import torch

from glm5_next.launchers.operator_cases import (
    PROBLEMS,
    ROUNDING,
    errors,
    poisoned,
    problem,
    reference,
    results,
    row_of,
    worst,
)
from glm5_next.plugins.kernels.registry import NAIVE, OPERATORS, Place, load
from tests.support.tiny import Case

PLACE = Place(Case().config(), torch.bfloat16, "cpu", None)
LENGTHS = (1, 70, 3, 66)


def test_every_operator_has_a_problem():
    assert PROBLEMS.keys() == OPERATORS.keys()


@pytest.mark.parametrize("operator", PROBLEMS)
def test_naive_in_bf16_is_within_rounding_and_no_input_can_be_ignored(operator):
    case = problem(operator, PLACE, row_of(LENGTHS, torch.device("cpu")))
    wanted, naive = reference(case), load(operator, NAIVE)
    name, error, bound = worst(case, errors(case, results(case, naive), wanted))
    # Of two gradients autograd adds both in bf16, where a backend has one sum.
    assert error <= 4 * max(bound, ROUNDING), f"{name}: {error:.1e}, bound {bound:.1e}"
    for name in case.tensors:
        _, error, bound = worst(case, errors(case, results(case.altered(name), naive), wanted))
        assert error > 5 * bound, f"another {name} is not noticed"


@pytest.mark.parametrize("operator", ["short_convolution", "kda"])
def test_other_documents_are_noticed(operator):
    device = torch.device("cpu")
    case, other = (problem(operator, PLACE, row_of(lengths, device)) for lengths in (LENGTHS, (sum(LENGTHS),)))
    _, error, bound = worst(case, errors(case, results(other, load(operator, NAIVE)), reference(case)))
    assert error > 5 * bound


def test_a_missing_value_is_an_error():
    case = problem("rms_norm", PLACE, row_of(LENGTHS, torch.device("cpu")))
    wanted = reference(case)
    got = {name: x.clone() for name, x in wanted.items()}
    got["out"][3, 3] = float("nan")
    name, error, bound = worst(case, errors(case, got, wanted))
    assert name == "out" and not error <= bound


def test_poison_fills_what_was_never_written():
    with poisoned():
        assert torch.empty(1000).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
