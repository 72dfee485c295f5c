"""Sizes at which offsets leave 32 bits, and rows as long as the model takes."""

import pytest
import torch
import torch.nn.functional as F

from glm5_next.launchers.gpu_check import released_place
from glm5_next.launchers.operator_cases import ROUNDING, norm, problem, row_of
from glm5_next.plugins.kernels import naive
from glm5_next.plugins.kernels.registry import OPERATORS, load

CUDA = torch.device("cuda")
LAST = 64  # rows that are compared, at the far end
# Rows of each operator's widest tensor, so that it has more than 2^31 elements.
ROWS = {
    "rms_norm": 530_000,
    "mhc_merge": 132_000,
    "mhc_site": 132_000,
    "clamped_swiglu": 530_000,
    "token_logprobs": 14_000,
}


@pytest.mark.parametrize("operator", ROWS)
def test_rows_beyond_2_to_the_31_elements(operator):
    place, count = released_place(), ROWS[operator]
    small = problem(operator, place, row_of((LAST,), CUDA))
    by_row = {name for name, x in small.tensors.items() if len(x) == LAST}
    tensors = {
        name: x.repeat(-(-count // LAST), *[1] * (x.dim() - 1))[-count:] if name in by_row else x
        for name, x in small.tensors.items()
    }
    assert max(x.numel() for x in tensors.values()) > 2**31
    function = load(operator, OPERATORS[operator][0].name)
    with torch.no_grad():
        got, wanted = (small.call(function, each) for each in (tensors, small.tensors))
        got = {name: out[-LAST:].clone() for name, out in got.items()}
    for name, out in wanted.items():
        assert torch.equal(got[name], out), f"{name} differs far into the row"
    leaves = {name: x.detach().requires_grad_(x.is_floating_point() and name in by_row) for name, x in tensors.items()}
    del tensors
    out = next(iter(small.call(function, leaves).values()))
    grad = torch.zeros_like(out)
    grad[-LAST:] = 1
    trained = [x for x in leaves.values() if x.requires_grad]
    grads = torch.autograd.grad(out, trained, grad, allow_unused=True)
    for x, gradient in zip(trained, grads):
        if gradient is not None:
            assert not gradient[: len(x) - LAST].any() and gradient[-LAST:].any() and gradient.isfinite().all()


def test_sparse_attention_over_131072_tokens():
    """All queries are computed; the last ones are compared, and their gradients alone reach the latents."""
    place, tokens = released_place(), 131_072
    case = problem("sparse_attention", place, row_of((tokens,), CUDA))
    q, latent = (case.tensors[name].requires_grad_() for name in ("q", "latent"))
    indices, scale = case.tensors["indices"], place.model.qk_head_dim**-0.5
    out = load("sparse_attention", "flash_mla")(q, latent, indices, scale)
    grad = torch.zeros_like(out)
    grad[-LAST:] = torch.randn_like(grad[-LAST:])
    dq, dlatent = torch.autograd.grad(out, (q, latent), grad)
    wide_q, wide_latent = q.detach()[-LAST:].float().requires_grad_(), latent.detach().float().requires_grad_()
    wanted = naive.sparse_attention(wide_q, wide_latent, indices[-LAST:], scale)
    wanted_dq, wanted_dlatent = torch.autograd.grad(wanted, (wide_q, wide_latent), grad[-LAST:].float())
    assert not dq[:-LAST].any()
    for a, b in ((out[-LAST:], wanted), (dq[-LAST:], wanted_dq), (dlatent, wanted_dlatent)):
        assert norm(a.detach().float() - b.detach()) <= case.roundings * ROUNDING * norm(b.detach())


@pytest.mark.parametrize("heads", [1, 8, 16, 32, 65])
def test_any_number_of_heads_attends(heads):
    place = released_place()
    case = problem("sparse_attention", place, row_of((1, 700), CUDA))
    q = F.pad(case.tensors["q"], (0, 0, 0, 1))[:, :heads].contiguous().requires_grad_()
    latent = case.tensors["latent"].requires_grad_()
    scale = place.model.qk_head_dim**-0.5
    wide = [x.detach().float().requires_grad_() for x in (q, latent)]
    got = load("sparse_attention", "flash_mla")(q, latent, case.tensors["indices"], scale)
    wanted = naive.sparse_attention(*wide, case.tensors["indices"], scale)
    grad = torch.randn_like(got)
    grads = torch.autograd.grad(got, (q, latent), grad), torch.autograd.grad(wanted, wide, grad.float())
    for a, b in ((got.detach(), wanted.detach()), *zip(*grads)):
        assert norm(a.float() - b) <= case.roundings * ROUNDING * norm(b)


def test_indexer_differences_are_ties():
    """Sets are compared in tests of operators; here, at most one in 5000 differs, and only between equal scores."""
    place = released_place()
    row = row_of((8192,), CUDA)
    case = problem("select_pools", place, row)
    scores = naive.pool_scores(*(case.tensors[name].float() for name in ("q", "weights", "pooled")))
    pools = (row.positions + 1) // place.model.index_kpool
    for backend in OPERATORS["select_pools"]:
        (chosen,) = case.call(load("select_pools", backend.name), case.tensors).values()
        unused = chosen < 0
        kept = scores.gather(1, chosen.clamp(min=0).long())
        worst_kept = kept.masked_fill(unused, float("inf")).amin(1)
        rejected = scores.scatter(1, chosen.clamp(min=0).long(), float("-inf"))
        beyond = torch.arange(scores.shape[1], device=CUDA) >= pools[:, None]
        best_rejected = rejected.masked_fill(beyond, float("-inf")).amax(1)
        full = pools > place.model.num_pools_selected
        assert torch.equal((~unused).sum(1), pools.clamp(max=place.model.num_pools_selected))
        gap = (best_rejected - worst_kept)[full] / scores[full].abs().amax(1)
        assert gap.max() <= 1e-5, f"{backend.name}: a pool was left out for one with a lower score"
