"""Every backend against the naive operator in fp32, at the released model's sizes: outputs and gradients."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from triton.runtime.autotuner import Autotuner

from glm5_next.launchers.gpu_check import released_place
from glm5_next.launchers.operator_cases import Problem, errors, poisoned, problem, reference, results, row_of, worst
from glm5_next.plugins.kernels.registry import OPERATORS, load

ROWS = [(1,), (63,), (64,), (65,), (2048,), (2051,), (2052,), (8192,), (1, 63, 700, 2052, 64, 65, 3)]
BACKENDS = [(operator, backend.name) for operator, backends in OPERATORS.items() for backend in backends]
# What is summed by atomic additions, in an order that differs from run to run.
ATOMIC = {("sparse_attention", "flash_mla"): {"dlatent"}, ("sparse_attention", "tilelang"): {"dlatent"}}
ALTERED_ROW = (1, 63, 2700)  # the last document has more pools than are kept


@lru_cache(maxsize=1)
def solved(operator: str, lengths: tuple[int, ...]) -> tuple[Problem, dict]:
    case = problem(operator, released_place(), row_of(lengths, torch.device("cuda")))
    return case, reference(case)


def run(case: Problem, backend: str) -> dict[str, torch.Tensor]:
    with poisoned():
        return results(case, load(case.operator, backend))


@pytest.mark.parametrize("lengths", ROWS, ids=str)
@pytest.mark.parametrize(("operator", "backend"), BACKENDS)
def test_results_are_within_rounding(operator, backend, lengths, record_property):
    case, wanted = solved(operator, lengths)
    found = errors(case, run(case, backend), wanted)
    name, error, bound = worst(case, found)
    record_property("errors", {name: f"{error:.1e}" for name, error in found.items()})
    print(f"{operator} {backend} {lengths}: " + " ".join(f"{name}={error:.1e}" for name, error in found.items()))
    assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}"


@pytest.mark.parametrize(("operator", "backend"), BACKENDS)
def test_no_input_is_ignored(operator, backend):
    case, wanted = solved(operator, ALTERED_ROW)
    for name in case.tensors:
        _, error, bound = worst(case, errors(case, run(case.altered(name), backend), wanted))
        assert error > 5 * bound, f"another {name} is not noticed"


@pytest.mark.parametrize(("operator", "backend"), BACKENDS)
def test_documents_are_kept_apart(operator, backend):
    if operator not in ("short_convolution", "kda"):
        return  # the others get their documents as data, which the test above alters
    case, wanted = solved(operator, ALTERED_ROW)
    joined = problem(operator, released_place(), row_of((sum(ALTERED_ROW),), torch.device("cuda")))
    _, error, bound = worst(case, errors(case, run(joined, backend), wanted))
    assert error > 5 * bound


@pytest.mark.parametrize(("operator", "backend"), BACKENDS)
def test_a_second_run_has_the_same_bits(operator, backend):
    case, _ = solved(operator, ROWS[-1])
    first, second = run(case, backend), run(case, backend)
    different = {name for name in first if not torch.equal(first[name], second[name])}
    assert different <= ATOMIC.get((operator, backend), set()), f"{different} differ between two runs"


def test_fla_kernels_are_not_tuned(monkeypatch):
    """Each has a configuration on file: new sizes neither wait for tuning nor get another one on another rank."""
    tuned = []
    monkeypatch.setattr(Autotuner, "_bench", lambda self, *args, **kwargs: tuned.append(self.fn) or [1.0, 1.0, 1.0])
    place = replace(released_place(), tp=16)
    for operator in ("short_convolution", "kda", "gated_rms_norm"):
        case = problem(operator, place, row_of((5, 300), torch.device("cuda")))
        results(case, load(operator, "fla"))
    assert not tuned


@pytest.mark.parametrize(("backend", "bounds"), [("fla", (0.01, 0.01)), ("cudnn", (0.03, 0.15))])
def test_gradient_of_strong_decays(backend, bounds):
    """A mean decay of e^-2.5 a token, half of what the gate allows: what cancellation leaves of the gate's gradient."""
    case = problem("kda", released_place(), row_of((2048,), torch.device("cuda")))
    case.tensors["dt_bias"] += 4.6
    got, wanted = run(case, backend), reference(case)
    found = errors(case, got, wanted)
    print(f"{backend}: " + " ".join(f"{name}={error:.1e}" for name, error in found.items()))
    assert found.pop("dgate") <= bounds[0] and found.pop("ddt_bias") <= bounds[1] and found.pop("dA_log") <= bounds[1]
    assert max(found.values()) <= case.bound("out")
    slope = (got["dgate"].double() * wanted["dgate"]).sum() / wanted["dgate"].double().square().sum()
    assert slope.item() == pytest.approx(1, abs=1e-3), "the gradient is biased"
