"""Which backend an operator gets, and what is refused because it would be something else than was asked for."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from glm5_next.plugins import kernels
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.kernels import naive, registry
from glm5_next.plugins.kernels.registry import AUTO, NAIVE, OPERATORS, Kernels, Late, Place, choose, load
from glm5_next.plugins.linear import headwise, linear_fp32
from glm5_next.plugins.megatron_config import megatron_config
from glm5_next.plugins.topology import Topology
from tests.cpu.test_model_config import RELEASED
from tests.support.tiny import Case, relative_error

MODEL = Glm5NextConfig.from_hf(RELEASED)
HOPPER = Place(MODEL, torch.bfloat16, "cuda", (9, 0))
CPU = Place(MODEL, torch.bfloat16, "cpu", None)
FASTEST = {
    "rms_norm": "triton",
    "mhc_site": "triton",
    "mhc_merge": "triton",
    "short_convolution": "fla",
    "kda": "cudnn",
    "gated_rms_norm": "fla",
    "sparse_attention": "flash_mla",
    "pool_keys": "triton",
    "select_pools": "cudnn",
    "expand_pools": "triton",
    "clamped_swiglu": "triton",
    "token_logprobs": "triton",
}


@pytest.fixture(autouse=True)
def nothing_found_missing(monkeypatch):
    monkeypatch.setattr(registry, "probed", lambda path: None)


@pytest.fixture
def everything_installed(monkeypatch):
    monkeypatch.setattr(registry, "installed", lambda package: True)


def without(monkeypatch, *missing: str) -> None:
    monkeypatch.setattr(registry, "installed", lambda package: package not in missing)


def refusal(operator: str, name: str, place: Place) -> str:
    with pytest.raises(ValueError) as caught:
        choose({operator: name}, place)
    return str(caught.value)


def test_hopper_gets_the_fastest_of_everything(everything_installed):
    assert choose({}, HOPPER) == FASTEST


def test_cpu_has_naive_only(everything_installed):
    assert set(choose({}, CPU).values()) == {NAIVE}
    for operator, backends in OPERATORS.items():
        for backend in backends:
            assert f"operator {operator}: backend {backend.name!r} cannot be used" in refusal(
                operator, backend.name, CPU
            )


def test_missing_package_is_named_with_its_operator_and_what_to_install(monkeypatch):
    for operator, backends in OPERATORS.items():
        for backend in backends:
            for package in backend.packages:
                without(monkeypatch, package)
                message = refusal(operator, backend.name, HOPPER)
                assert f"operator {operator}: backend {backend.name!r}" in message
                assert f"package {package} is not installed; install {registry.DISTRIBUTIONS[package]}" in message


def test_what_a_probe_finds_missing_is_said_and_passed_over_by_auto(everything_installed, monkeypatch):
    monkeypatch.setattr(registry, "probed", {"kda_cudnn:missing": "no headers"}.get)
    assert choose({}, HOPPER)["kda"] == "fla"
    assert "backend 'cudnn' cannot be used: no headers" in refusal("kda", "cudnn", HOPPER)


def test_auto_takes_the_next_that_is_installed(monkeypatch):
    without(monkeypatch, "cudnn")
    chosen = choose({}, HOPPER)
    assert (chosen["kda"], chosen["sparse_attention"], chosen["select_pools"]) == ("fla", "tilelang", "triton")
    without(monkeypatch, "cudnn", "fla", "tilelang", "triton")
    assert set(choose({}, HOPPER).values()) == {NAIVE}


def test_other_gpus_get_the_portable_kernels(everything_installed):
    chosen = choose({}, replace(HOPPER, capability=(8, 0)))
    assert (chosen["kda"], chosen["sparse_attention"], chosen["select_pools"]) == ("fla", "tilelang", "triton")
    assert "compute capability 9.0" in refusal("kda", "cudnn", replace(HOPPER, capability=(10, 0)))


def test_fp32_model_runs_on_naive_operators(everything_installed):
    chosen = choose({}, replace(HOPPER, dtype=torch.float32))
    assert {name for name, backend in chosen.items() if backend != NAIVE} == {"expand_pools", "token_logprobs"}
    assert "computes in bf16, the model is float32" in refusal("kda", "fla", replace(HOPPER, dtype=torch.float32))


def test_sizes_that_a_kernel_lacks_are_refused_by_name_and_passed_over_by_auto(everything_installed):
    tiny = replace(HOPPER, model=Case().config())
    chosen = choose({}, tiny)
    assert (chosen["kda"], chosen["sparse_attention"], chosen["select_pools"]) == ("fla", NAIVE, "triton")
    assert "128 wide, the model's 16" in refusal("kda", "cudnn", tiny)
    assert "512 wide, the model's 32" in refusal("sparse_attention", "flash_mla", tiny)
    assert "16 of 16" in refusal("select_pools", "cudnn", tiny)
    assert "8 " in refusal("sparse_attention", "tilelang", replace(HOPPER, tp=8)) + " "


def test_single_operators_can_be_named_and_the_default_changed(everything_installed):
    chosen = choose({"kda": "fla", "sparse_attention": NAIVE, "mhc_site": AUTO}, HOPPER)
    assert chosen == FASTEST | {"kda": "fla", "sparse_attention": NAIVE}
    assert choose({"kda": "fla"}, HOPPER, NAIVE) == dict.fromkeys(FASTEST, NAIVE) | {"kda": "fla"}


def test_unknown_names_are_refused_with_what_there_is(everything_installed):
    assert "has no backend 'triton'; choose from auto, naive, cudnn, fla" in refusal("kda", "triton", HOPPER)
    assert "there is no operator 'kdaa'; operators: rms_norm, " in refusal("kdaa", "fla", HOPPER)


def test_configuration_carries_the_choice_and_answers_before_anything_is_built():
    def config(**overrides):
        return megatron_config(Case().config(), Topology(), dtype=torch.float32, on_cpu=True, **overrides)

    assert config().chosen_kernels() == dict.fromkeys(OPERATORS, NAIVE)
    with pytest.raises(ValueError, match="operator kda: backend 'fla' cannot be used: it needs a GPU"):
        config(kernel_backends={"kda": "fla"}).chosen_kernels()
    assert config().kernels.chosen == dict.fromkeys(OPERATORS, NAIVE)


def test_naive_operators_are_the_packages_at_the_time_of_the_call(monkeypatch):
    operators = Kernels(choose({}, CPU))
    monkeypatch.setattr(kernels, "kda", lambda *args: "replaced")
    assert operators.kda() == "replaced"
    for name in OPERATORS:
        assert isinstance(getattr(operators, name), Late) and callable(getattr(kernels, name))


def test_choice_survives_copies():
    operators = Kernels(choose({}, CPU))
    for copied in (copy.deepcopy(operators), pickle.loads(pickle.dumps(operators))):
        assert copied.chosen == operators.chosen
        x = torch.randn(3, 8)
        assert torch.equal(copied.rms_norm(x, torch.ones(8), 1e-5), naive.rms_norm(x, torch.ones(8), 1e-5))


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_function_of_the_table_that_needs_triton_alone_is_there(operator):
    for backend in OPERATORS[operator]:
        if backend.packages == ("triton",):
            assert callable(load(operator, backend.name))


def test_headwise_map_is_einsum_and_its_gradient():
    x, weight = torch.randn(5, 3, 7).requires_grad_(), torch.randn(3, 7, 4).requires_grad_()
    got, expected = headwise(x, weight), torch.einsum("tha,hab->thb", x, weight)
    assert got.is_contiguous() and relative_error(got, expected) < 1e-6
    grad = torch.randn(4, 3, 5).permute(2, 1, 0)  # autograd hands over strided gradients
    for a, b in zip(*(torch.autograd.grad(out, (x, weight), grad) for out in (got, expected))):
        assert relative_error(a, b) < 1e-6


def test_fp32_map_of_bf16_operands_loses_nothing():
    x, weight = torch.randn(5, 2, 64).bfloat16(), torch.randn(9, 64).bfloat16()
    got = linear_fp32(x, weight)
    assert got.dtype == torch.float32 and relative_error(got, x.double() @ weight.double().T) < 1e-6
