"""Sparse latent attention: absorbed queries over selected latents."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from glm5_next.plugins.kernels.naive import sparse_attention
from tests.support.faults import edit
from tests.support.parity import logits_of, models
from tests.support.tiny import Case, relative_error, tokens

HEADS, KEY, VALUE, LATENT = 3, 8, 10, 16
SCALE = KEY**-0.5
MAX_ERROR = 1e-6


def selection(num_queries: int, num_keys: int, width: int) -> Tensor:
    """Causal, different for every query, in random order, with -1 in the slots that are left."""
    indices = torch.full((num_queries, width), -1, dtype=torch.int32)
    for query in range(num_queries):
        visible = torch.randperm(min(query + 1, num_keys))[: width - 2]
        slots = torch.randperm(width)[: len(visible)]
        indices[query, slots] = visible.int()
    return indices


def expanded(q: Tensor, latent: Tensor, key_up: Tensor, value_up: Tensor, indices: Tensor) -> Tensor:
    """Keys and values of every head spelt out: `[T, H, VALUE]`."""
    keys = torch.einsum("sc,hkc->hsk", latent, key_up)
    values = torch.einsum("sc,hvc->hsv", latent, value_up)
    out = []
    for t, row in enumerate(indices):
        chosen = row[row >= 0].long()
        scores = torch.einsum("hk,hsk->hs", q[t], keys[:, chosen]) * SCALE
        out.append(torch.einsum("hs,hsv->hv", scores.softmax(-1), values[:, chosen]))
    return torch.stack(out)


def absorbed(q: Tensor, latent: Tensor, key_up: Tensor, value_up: Tensor, indices: Tensor) -> Tensor:
    out = sparse_attention(torch.einsum("thk,hkc->thc", q, key_up), latent, indices, SCALE)
    return torch.einsum("thc,hvc->thv", out, value_up)


def inputs(num_tokens: int = 20, width: int = 9) -> tuple[Tensor, ...]:
    tensors = (
        torch.randn(num_tokens, HEADS, KEY),
        torch.randn(num_tokens, LATENT),
        torch.randn(HEADS, KEY, LATENT) * LATENT**-0.5,
        torch.randn(HEADS, VALUE, LATENT) * LATENT**-0.5,
    )
    return (*(x.requires_grad_() for x in tensors), selection(num_tokens, num_tokens, width))


def assert_close(got: Tensor, expected: Tensor, what: str) -> None:
    error = relative_error(got, expected)
    assert error <= MAX_ERROR, f"{what}: relative error {error:.1e}, bound {MAX_ERROR:.0e}"


def test_absorbed_form_equals_expanded_keys_and_values():
    tensors = inputs()
    got, expected = absorbed(*tensors), expanded(*tensors)
    assert_close(got, expected, "output")
    weight = torch.randn_like(got)
    pairs = zip(*(torch.autograd.grad((out * weight).sum(), tensors[:4]) for out in (got, expected)))
    for name, (a, b) in zip(("q", "latent", "key_up", "value_up"), pairs):
        assert_close(a, b, f"gradient of {name}")


def test_unused_slots_take_no_part_wherever_they_are():
    q, latent, indices = torch.randn(6, HEADS, LATENT), torch.randn(6, LATENT), selection(6, 6, 5)
    full = sparse_attention(q, latent, indices, SCALE)
    padded = F.pad(indices, (3, 4), value=-1)[:, torch.randperm(12)]
    assert_close(sparse_attention(q, latent, padded, SCALE), full, "output")


def test_unused_slots_send_no_gradient_to_token_zero():
    q, latent = torch.randn(4, HEADS, LATENT), torch.randn(4, LATENT, requires_grad=True)
    indices = torch.tensor([[-1, 1], [1, -1], [2, 1], [-1, 3]])
    sparse_attention(q, latent, indices, SCALE).square().sum().backward()
    assert not latent.grad[0].any() and latent.grad[1:].any(1).all()


def test_row_without_any_index_gives_zeros_and_no_gradient():
    q, latent = torch.randn(3, HEADS, LATENT, requires_grad=True), torch.randn(3, LATENT, requires_grad=True)
    indices = torch.tensor([[0, -1], [-1, -1], [1, 2]])
    out = sparse_attention(q, latent, indices, SCALE)
    assert not out[1].any()
    out.square().sum().backward()
    assert not q.grad[1].any()
    assert q.grad.isfinite().all() and latent.grad.isfinite().all() and latent.grad.any(1).all()


@pytest.mark.parametrize("block", [1, 3, 7, 20, 64])
def test_block_size_changes_nothing(block):
    tensors = inputs()
    q, latent = torch.randn(20, HEADS, LATENT, requires_grad=True), tensors[1]
    whole = sparse_attention(q, latent, tensors[4], SCALE, block=512)
    parts = sparse_attention(q, latent, tensors[4], SCALE, block=block)
    assert torch.equal(parts, whole)
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), (q, latent)) for out in (parts, whole))):
        assert_close(a, b, "gradient")


def test_softmax_is_fp32_for_bf16_inputs():
    q, latent, indices = torch.randn(20, HEADS, LATENT), torch.randn(20, LATENT), selection(20, 20, 9)
    got = sparse_attention(q.bfloat16(), latent.bfloat16(), indices, SCALE)
    wide = sparse_attention(q.bfloat16().float(), latent.bfloat16().float(), indices, SCALE)
    assert got.dtype == torch.bfloat16 and torch.equal(got, wide.bfloat16())


def test_order_of_the_indices_does_not_matter():
    q, latent, indices = torch.randn(6, HEADS, LATENT), torch.randn(6, LATENT), selection(6, 6, 5)
    assert_close(
        sparse_attention(q, latent, indices.flip(1), SCALE), sparse_attention(q, latent, indices, SCALE), "out"
    )


def test_future_tokens_change_nothing_before_them():
    """Through the whole model: a sequence cut short has the logits of its beginning."""
    model, ids = models(Case())[1], tokens(70, seed=3)
    with torch.no_grad():
        whole, beginning = logits_of(model, ids), logits_of(model, ids[:, :51])
    assert relative_error(whole[:51], beginning) <= 1e-5


def test_value_taken_from_the_wrong_place_shows():
    tensors = inputs()
    wrong = edit('"thw,twc->thc", weights, selected', '"thw,twc->thc", weights, selected.flip(1)')(sparse_attention)
    q = torch.einsum("thk,hkc->thc", tensors[0], tensors[2])
    out = torch.einsum("thc,hvc->thv", wrong(q, tensors[1], tensors[4], SCALE), tensors[3])
    assert relative_error(out, expanded(*tensors)) > 50 * MAX_ERROR
