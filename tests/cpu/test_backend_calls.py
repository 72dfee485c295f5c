"""What our GPU backends hand to other packages' kernels, and what they make of the answers: with stand-ins for the packages
that insist on the documented contract and compute with the naive operators."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from glm5_next.plugins import kernels
from glm5_next.plugins.documents import Documents
from glm5_next.plugins.kernels import naive
from tests.support.tiny import relative_error

C, SCALE = 512, 1 / 16
LENGTHS = [(1,), (70,), (3, 41, 1, 30, 4)]


def row_of(*lengths: int) -> Documents:
    return Documents.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32), sum(lengths))


def kept(indices: Tensor, lengths: Tensor) -> Tensor:
    """Of each row the first `lengths` slots, as the kernels read them."""
    return indices.masked_fill(torch.arange(indices.shape[1]) >= lengths[:, None], -1)


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, topk_length=None, use_legacy=False):
    assert use_legacy and q.is_contiguous() and kv.is_contiguous() and indices.is_contiguous()
    assert q.shape[1] % 64 == 0 and indices.shape[2] % 128 == 0 and kv.shape[1:] == (1, d_v) and d_v == q.shape[2]
    assert indices.dtype == topk_length.dtype == torch.int32
    out = naive.sparse_attention(q, kv[:, 0], kept(indices[:, 0], topk_length), sm_scale)
    return out, None, q.new_zeros(q.shape[:2], dtype=torch.float32)


def sparse_attention_backward_wrapper(q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale, topk_length):
    assert all(x.is_contiguous() for x in (q, kv, out, dout, lse, topk_idxs)) and attn_sink.eq(float("-inf")).all()
    assert out.shape == dout.shape == q.shape and attn_sink.shape == (q.shape[1],)
    with torch.enable_grad():
        q, kv = q.detach().requires_grad_(), kv.detach().requires_grad_()
        again = naive.sparse_attention(q, kv, kept(topk_idxs, topk_length), softmax_scale)
    dq, dkv = torch.autograd.grad(again, (q, kv), dout)
    return {"dq": dq, "dkv": dkv}


def indexer_forward_wrapper(
    q, k, w, *, ratio, sm_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q_causal_offsets
):
    assert q.is_contiguous() and w.is_contiguous() and w.dtype == torch.float32 and k.shape[1] == 1
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == q_causal_offsets.dtype == torch.int32
    scores = torch.full((len(q), max_seqlen_k), float("-inf"))
    for i in range(len(cu_seqlens_q) - 1):
        rows, keys = slice(*cu_seqlens_q[i : i + 2].tolist()), k[slice(*cu_seqlens_k[i : i + 2].tolist()), 0]
        products = torch.einsum("tie,pe->tip", q[rows].float(), keys.float()) * sm_scale
        values = torch.einsum("ti,tip->tp", w[rows], products.relu())
        position = q_causal_offsets[i] + torch.arange(len(values))
        visible = torch.arange(len(keys)) < (position[:, None] + 1) // ratio
        scores[rows, : len(keys)] = values.masked_fill(~visible, float("-inf"))
    return {"scores": scores}


def indexer_top_k_wrapper(scores, seq_lens, top_k, next_n, return_val, deterministic):
    assert next_n == 1 and not return_val and deterministic and seq_lens.dtype == torch.int32
    assert scores.shape[1] >= top_k and seq_lens.max() <= scores.shape[1]
    out = torch.full((len(scores), top_k), -1, dtype=torch.int32)
    for row, count, chosen in zip(scores, seq_lens.tolist(), out):
        best = row[:count].topk(min(count, top_k)).indices.sort().values
        chosen[: len(best)] = best.int()
    return {"indices": out}


@pytest.fixture
def stand_ins(monkeypatch):
    """Imports one of our backends on top of the stand-ins."""
    cudnn, flash_mla = ModuleType("cudnn"), ModuleType("flash_mla")
    cudnn.DSA = SimpleNamespace(
        sparse_attention_backward_wrapper=sparse_attention_backward_wrapper,
        indexer_forward_wrapper=indexer_forward_wrapper,
        indexer_top_k_wrapper=indexer_top_k_wrapper,
    )
    flash_mla.flash_mla_sparse_fwd = flash_mla_sparse_fwd
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    monkeypatch.setitem(sys.modules, "flash_mla", flash_mla)

    def load(name: str) -> ModuleType:
        name = f"glm5_next.plugins.kernels.{name}"
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
        return module

    return load


def selection(tokens: int, width: int) -> Tensor:
    """Causal, in random slots; some rows are empty, some have used slots up to the last."""
    indices = torch.full((tokens, width), -1, dtype=torch.int32)
    for query in range(tokens):
        visible = torch.randperm(query + 1)[: width - query % 3]
        slots = torch.randperm(width)[: len(visible)]
        indices[query, slots] = visible.int() if query % 7 != 5 else -1
    return indices


@pytest.mark.parametrize("heads", [1, 32, 64, 65])
@pytest.mark.parametrize("width", [7, 128, 131])
def test_flash_mla_gets_padded_heads_and_slots(stand_ins, heads, width, monkeypatch):
    module = stand_ins("dsa_flash_mla")
    monkeypatch.setattr(module, "MAX_QUERIES", 13)
    q, latent = torch.randn(30, heads, C).requires_grad_(), torch.randn(30, C).requires_grad_()
    indices = selection(30, width)
    got, expected = (f(q, latent, indices, SCALE) for f in (module.sparse_attention, naive.sparse_attention))
    assert got.shape == expected.shape and relative_error(got, expected) < 1e-6
    weight = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad((out * weight).sum(), (q, latent)) for out in (got, expected))):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("chunk", [1, 17, 1000])
def test_cudnn_indexer_selects_the_same_pools_for_every_chunk_of_queries(stand_ins, lengths, chunk):
    module, documents, tokens = stand_ins("indexer_cudnn"), row_of(*lengths), sum(lengths)
    q, weights, pooled = (
        torch.randn(tokens, 16, 128),
        torch.randn(tokens, 16),
        torch.randn(len(documents.pool_starts(4)), 128),
    )
    for first in range(0, tokens, chunk):
        rows = slice(first, first + chunk)
        got, expected = (
            f(q[rows], weights[rows], pooled, first, documents, kpool=4, num_selected=3)
            for f in (module.select_pools, kernels.select_pools)
        )
        assert got.dtype == torch.int32 and torch.equal(got.sort(-1).values, expected.sort(-1).values)


PLANS: dict = {}


def delta_rule(q, k, v, g, beta, cu_seqlens, scale, *, initial_state, output_final_state, plan_name):
    assert plan_name == "kda_hopper_cuda" and output_final_state and scale == q.shape[-1] ** -0.5
    assert g.dtype == beta.dtype == torch.float32 and not initial_state.any()
    assert len(initial_state) == len(cu_seqlens) - 1 <= 2
    PLANS[q.shape] = None
    documents = Documents.from_cu_seqlens(cu_seqlens, len(q))
    return naive.kda_chunked(q, k, v, g, beta, documents).to(v.dtype), initial_state, None


def delta_rule_backward(dO, q, k, v, g, beta, cu_seqlens, scale, *, initial_state, d_final_state, plan_name):
    assert not initial_state.any() and not d_final_state.any()
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v, g, beta)]
        out = naive.kda_chunked(*inputs, Documents.from_cu_seqlens(cu_seqlens, len(q)))
    return (*torch.autograd.grad(out, inputs, dO), None, None, None)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_cudnn_delta_rule_takes_rows_of_many_documents_in_parts(lengths, monkeypatch):
    for name in ("cudnn", "cudnn.linear_attention", "cudnn.linear_attention.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    plans = SimpleNamespace(fprop_cache=PLANS, bprop_cache={})
    monkeypatch.setattr(sys.modules["cudnn.linear_attention.ops"], "kda", plans, raising=False)
    ops = SimpleNamespace(kimi_delta_attention_fwd=delta_rule, kimi_delta_attention_bwd=delta_rule_backward)
    monkeypatch.setattr(torch.ops, "cudnn", ops, raising=False)
    module = importlib.import_module("glm5_next.plugins.kernels.kda_cudnn")
    monkeypatch.setattr(module, "MAX_DOCUMENTS", 2)
    monkeypatch.setattr(module, "MAX_PLANS", 2)
    documents, tokens = row_of(*lengths), sum(lengths)
    inputs = [torch.randn(tokens, 2, 16) for _ in range(4)]
    inputs += [0.5 * torch.randn(2), 0.5 * torch.randn(32), torch.randn(tokens, 2)]
    inputs = [x.requires_grad_() for x in inputs]
    got, expected = (f(*inputs, documents, lower_bound=-5.0) for f in (module.kda, kernels.kda))
    assert relative_error(got, expected) < 1e-5
    weight = torch.randn_like(expected)
    grads = [torch.autograd.grad((out * weight).sum(), inputs) for out in (got, expected)]
    for number, (a, b) in enumerate(zip(*grads)):
        # The decay of a document's first token meets an empty state: of its gradient there is rounding alone.
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-7, f"gradient {number}"
    assert len(PLANS) <= 2, "plans pile up"
