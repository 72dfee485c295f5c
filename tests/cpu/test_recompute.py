"""Recomputation changes no bit, and every module that is named really runs twice."""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from glm5_next.plugins import kernels
from glm5_next.plugins.megatron_config import RECOMPUTE_MODULES
from glm5_next.plugins.packed_row import packed_row
from tests.support import tiny
from tests.support.tiny import Case

CASE = Case(layers=5, seed=2)
IDS = tiny.tokens(67, seed=3)
BOUNDS = torch.tensor([0, 21, 22, 67], dtype=torch.int32)
LAYERS, KDA, DSA, DENSE, MOE = 5, 4, 1, 1, 4
SITES = 2 * LAYERS
# What each name of selective recomputation covers: operators and modules, and how often they run in a plain step.
COVERS = {
    "mhc": {"mhc_site": SITES, "mhc_merge": SITES},
    "core_attn": {"short_convolution": 3 * KDA, "kda": KDA, "gated_rms_norm": KDA, "sparse_attention": DSA},
    "mlp": {"MLP": DENSE},
    "moe": {"Glm5NextRouter": MOE, "SequentialMLP": MOE, "SharedExpertMLP": MOE},
    "shared_experts": {"SharedExpertMLP": MOE},
}
OPERATORS = ("mhc_site", "mhc_merge", "short_convolution", "kda", "gated_rms_norm", "sparse_attention")
MODULES = ("Glm5NextRouter", "SequentialMLP", "SharedExpertMLP", "HyperTransformerLayer")
FULL = {
    "uniform": ({"recompute_method": "uniform", "recompute_num_layers": 1}, LAYERS),
    "uniform_in_pairs": ({"recompute_method": "uniform", "recompute_num_layers": 2}, LAYERS),
    "block": ({"recompute_method": "block", "recompute_num_layers": 3}, 3),
}
Step = tuple[Tensor, dict[str, Tensor], Counter]


@pytest.fixture(scope="module")
def reference():
    return tiny.reference_model(CASE)


def step(reference, **recompute) -> Step:
    """Logits, gradients, and how often everything that can be recomputed ran."""
    count: Counter[str] = Counter()

    def counting(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args, **kwargs):
            count[name] += 1
            return operator(*args, **kwargs)

        return call

    model = tiny.our_model(CASE, reference, **recompute).train()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in MODULES or name.endswith("layers.0.mlp"):
            module.register_forward_pre_hook(lambda *_, kind=kind: count.update([kind]))
    operators = {name: counting(name, getattr(kernels, name)) for name in OPERATORS}
    with mock.patch.multiple(kernels, **operators):
        logits = model(IDS, torch.arange(IDS.shape[1])[None], None, packed_seq_params=packed_row(BOUNDS))[0]
        F.cross_entropy(logits[:-1], IDS[0, 1:]).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients, count


@pytest.fixture(scope="module")
def plain(reference) -> Step:
    return step(reference)


def assert_same_bits(got: Step, expected: Step) -> None:
    assert torch.equal(got[0], expected[0])
    assert got[1].keys() == expected[1].keys()
    assert not [name for name, gradient in expected[1].items() if not torch.equal(got[1][name], gradient)]


def test_without_recomputation_everything_runs_once(plain):
    once = {name: times for covered in COVERS.values() for name, times in covered.items()}
    assert plain[2] == {**once, "HyperTransformerLayer": LAYERS}


@pytest.mark.parametrize("module", RECOMPUTE_MODULES)
def test_a_named_module_runs_twice_and_changes_no_bit(reference, plain, module):
    got = step(reference, recompute_granularity="selective", recompute_modules=[module])
    assert_same_bits(got, plain)
    assert got[2] == plain[2] + Counter(COVERS[module])


def test_all_named_modules_together(reference, plain):
    got = step(reference, recompute_granularity="selective", recompute_modules=list(RECOMPUTE_MODULES))
    assert_same_bits(got, plain)
    assert all(got[2][name] >= 2 * times for covered in COVERS.values() for name, times in covered.items())


@pytest.mark.parametrize("name", FULL)
def test_full_recomputation_runs_whole_layers_twice_and_changes_no_bit(reference, plain, name):
    method, layers = FULL[name]
    got = step(reference, recompute_granularity="full", **method)
    assert_same_bits(got, plain)
    assert got[2]["HyperTransformerLayer"] == LAYERS + layers
    assert got[2]["mhc_site"] == SITES + 2 * layers


def test_what_our_layers_do_not_recompute_is_refused(reference):
    for module in ("layernorm", "mla_up_proj", "moe_act"):
        with pytest.raises(ValueError, match=module):
            tiny.our_model(CASE, reference, recompute_granularity="selective", recompute_modules=[module])
