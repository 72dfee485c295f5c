"""Negative controls: each planted fault must make a check of the parity test fail, and by a wide margin."""

from collections.abc import Callable

import pytest
import torch
from megatron.core.transformer.mlp import MLP

from glm5_next.bridge.reference import import_modeling
from glm5_next.plugins import kernels
from glm5_next.plugins.dsa import DsaAttention
from glm5_next.plugins.kernels import naive
from glm5_next.plugins.moe import Glm5NextRouter
from glm5_next.plugins.norm import StreamMeanNorm
from tests.cpu.test_parity import CASES
from tests.support.faults import Fault, edit, planted
from tests.support.parity import (
    MAX_GRADIENT_ERROR,
    MAX_LOGITS_ERROR,
    Run,
    check_gradients,
    check_logits,
    check_routes,
    check_selections,
    gradient_errors,
    our_run,
    reference_run,
)
from tests.support.tiny import relative_error

MARGIN = 50  # times the bound that the undamaged model keeps


def with_reversed_taps(original: Callable) -> Callable:
    return lambda x, weight, documents: original(x, weight.flip(-1), documents)


def with_scale_of_the_latent(original: Callable) -> Callable:
    return lambda q, latent, indices, scale: original(q, latent, indices, latent.shape[-1] ** -0.5)


def without_tail(original: Callable) -> Callable:
    def expand(pools, documents, kpool):
        indices = original(pools, documents, kpool)
        indices[:, 1 - kpool :] = -1
        return indices

    return expand


def with_every_visible_token(original: Callable) -> Callable:
    def expand(pools, documents, kpool):
        token = torch.arange(documents.num_tokens)
        visible = (token >= documents.starts.unsqueeze(1)) & (token <= token.unsqueeze(1))
        return torch.where(visible, token, -1)

    return expand


CLAMP = "if (val := self.config.activation_func_clamp_value) is not None:"
ROUTING = (Glm5NextRouter, "routing")
BIASED = "torch.logit((logits.sigmoid() + self.expert_bias).clamp(1e-6, 1 - 1e-6))"
WRONG_INDEXER = {
    "dense_attention_past_index_topk": Fault(naive, "expand_pools", with_every_visible_token),
    "tail_dropped": Fault(naive, "expand_pools", without_tail),
    "indexer_query_not_normalised": Fault(
        DsaAttention,
        "forward",
        edit("q_compressed, documents)", "self.linear_q_down_proj(hidden_states), documents)"),
    ),
    "relu_after_the_sum_over_heads": Fault(naive, "pool_scores", edit("F.relu(", "(")),
    "pool_position_bias_forgotten": Fault(naive, "pool_keys", edit(" + ape.float()", "")),
    "pool_softmax_over_channels": Fault(naive, "pool_keys", edit("softmax(dim=1)", "softmax(dim=2)")),
    "query_does_not_see_its_own_complete_pool": Fault(
        naive, "select_pools", edit("unsqueeze(1) + 1)", "unsqueeze(1))")
    ),
}
# Name -> the fault and the parity case on which it has to show.
WRONG_LOGITS = {
    "mixing_matrix_not_transposed": (
        Fault(naive, "mhc_merge", edit("mix.transpose(-1, -2) @ split", "mix @ split")),
        "8_layers_3_dense_4_streams",
    ),
    "eps_outside_the_root": (
        Fault(
            naive,
            "mhc_mapping",
            edit(
                "torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)",
                "1 / (x.square().mean(-1, keepdim=True).sqrt() + norm_eps)",
            ),
        ),
        "5_layers_small_streams",
    ),
    "no_factor_2_in_post": (
        Fault(naive, "mhc_mapping", edit("post = 2 * torch.sigmoid", "post = torch.sigmoid")),
        "5_layers_1_dense",
    ),
    "scales_in_another_order": (
        Fault(naive, "mhc_mapping", edit("alpha_pre, alpha_post, alpha_res =", "alpha_post, alpha_pre, alpha_res =")),
        "5_layers_1_dense",
    ),
    "sum_instead_of_mean_of_streams": (
        Fault(StreamMeanNorm, "forward", edit(".mean(-2)", ".sum(-2)")),
        "5_layers_small_streams",
    ),
    "no_clamp": (Fault(MLP, "forward", edit(CLAMP, "if False:")), "large_activations"),
    "gate_clamped_from_below_too": (
        Fault(MLP, "forward", edit("x_glu.clamp(min=None, max=val)", "x_glu.clamp(min=-val, max=val)")),
        "low_clamp",
    ),
    "up_clamped_from_above_only": (
        Fault(MLP, "forward", edit("x_linear.clamp(min=-val, max=val)", "x_linear.clamp(max=val)")),
        "low_clamp",
    ),
    "convolution_taps_reversed": (Fault(naive, "short_convolution", with_reversed_taps), "5_layers_1_dense"),
    "silu_instead_of_sigmoid_on_the_output_gate": (
        Fault(naive, "gated_rms_norm", edit("torch.sigmoid(gate.float())", "F.silu(gate.float())")),
        "5_layers_1_dense",
    ),
    "dt_bias_outside_the_factor": (
        Fault(
            naive,
            "kda_gate",
            edit("unsqueeze(-1) * (gate.float() + bias)", "unsqueeze(-1) * gate.float() + bias"),
        ),
        "5_layers_1_dense",
    ),
    "softplus_instead_of_the_bounded_gate": (
        Fault(naive, "kda_gate", edit("lower_bound * torch.sigmoid(", "-F.softplus(")),
        "5_layers_1_dense",
    ),
    "q_and_k_not_normalised": (
        Fault(naive, "l2_norm", edit(" / torch.sqrt(x32.square().sum(-1, keepdim=True) + 1e-6)", "")),
        "5_layers_1_dense",
    ),
    "beta_without_sigmoid": (
        Fault(kernels, "kda", edit("torch.sigmoid(beta.float())", "beta.float()")),
        "5_layers_1_dense",
    ),
    "attention_scaled_by_the_latent_width": (
        Fault(naive, "sparse_attention", with_scale_of_the_latent),
        "5_layers_1_dense",
    ),
    "combine_weights_from_biased_scores": (
        Fault(*ROUTING, edit("logits,\n        self.topk", f"{BIASED},\n        self.topk")),
        "5_layers_1_dense",
    ),
    "selection_bias_ignored": (
        Fault(*ROUTING, edit("(logits.sigmoid() + self.expert_bias)", "logits.sigmoid()")),
        "5_layers_1_dense",
    ),
    "no_routed_scaling": (
        Fault(*ROUTING, edit("scaling_factor=self.config.moe_router_topk_scaling_factor", "scaling_factor=None")),
        "5_layers_1_dense",
    ),
    **{name: (fault, "5_layers_1_dense_other_seed") for name, fault in WRONG_INDEXER.items()},
}
WRONG_GRADIENTS = {
    "combine_weights_detached": Fault(
        *ROUTING, edit("logits,\n        self.topk", "logits.detach(),\n        self.topk")
    ),
    "post_coefficient_detached": Fault(naive, "mhc_merge", edit("post.unsqueeze(-1)", "post.detach().unsqueeze(-1)")),
    "mixing_matrix_detached": Fault(
        naive, "mhc_merge", edit("mix.transpose(-1, -2)", "mix.detach().transpose(-1, -2)")
    ),
    "decay_detached": Fault(kernels, "kda", edit("v, decay, beta", "v, decay.detach(), beta")),
    "key_side_of_the_latent_detached": Fault(
        naive, "sparse_attention", edit("q_b.float(), selected)", "q_b.float(), selected.detach())")
    ),
}


def run_with(fault: Fault, case: str) -> tuple[Run, Run]:
    with planted(fault):
        return our_run(*CASES[case]), reference_run(*CASES[case])


@pytest.mark.parametrize("name", WRONG_LOGITS)
def test_fault_shows_in_the_logits(name):
    ours, reference = run_with(*WRONG_LOGITS[name])
    error = relative_error(ours.logits, reference.logits)
    assert error > MARGIN * MAX_LOGITS_ERROR, f"{name}: logits differ by {error:.1e} only"
    with pytest.raises(AssertionError, match="logits differ"):
        check_logits(ours, reference)


@pytest.mark.parametrize("name", WRONG_INDEXER)
def test_fault_of_the_indexer_shows_in_the_selections(name):
    ours, reference = run_with(WRONG_INDEXER[name], "5_layers_1_dense_other_seed")
    differing = (ours.selections[3] != reference.selections[3]).any(1).sum().item()
    assert differing >= 8, f"{name}: only {differing} queries select other tokens"
    with pytest.raises(AssertionError, match="select other tokens"):
        check_selections(ours, reference)


@pytest.mark.parametrize("name", WRONG_GRADIENTS)
def test_fault_shows_in_the_gradients_alone(name):
    ours, reference = run_with(WRONG_GRADIENTS[name], "5_layers_1_dense")
    check_logits(ours, reference)
    worst = max(gradient_errors(ours, reference).values())
    assert worst > MARGIN * MAX_GRADIENT_ERROR, f"{name}: gradients differ by {worst:.1e} only"
    with pytest.raises(AssertionError, match="gradient"):
        check_gradients(ours, reference, CASES["5_layers_1_dense"][0])


def test_ignored_selection_bias_shows_in_the_routes():
    ours, reference = run_with(*WRONG_LOGITS["selection_bias_ignored"])
    with pytest.raises(AssertionError, match="routed to other experts"):
        check_routes(ours, reference)


def test_norm_that_rounds_once_differs_from_the_reference_in_bf16():
    hidden = torch.randn(64, 128).bfloat16()
    reference = import_modeling().Glm5NextTextRMSNorm(128, 1e-5).bfloat16()
    torch.nn.init.normal_(reference.weight, 1.0, 0.3)
    expected = reference(hidden)
    assert torch.equal(naive.rms_norm(hidden, reference.weight, 1e-5), expected)
    once = edit("weight * normed.to(x.dtype)", "(weight.float() * normed).to(x.dtype)")(naive.rms_norm)
    wrong = (once(hidden, reference.weight, 1e-5) != expected).float().mean().item()
    assert wrong > 0.1, f"only {wrong:.1%} of the values show the order of rounding"
