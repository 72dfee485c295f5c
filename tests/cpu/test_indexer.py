"""The k-pool indexer: which tokens a query of a DSA layer attends to."""

from unittest import mock

import pytest
import torch
from torch import Tensor

from glm5_next.bridge.reference import import_modeling
from glm5_next.plugins import indexer as indexer_module
from glm5_next.plugins.documents import Documents
from glm5_next.plugins.kernels import naive
from tests.support.parity import MIN_GAP, as_mask, models, recorded
from tests.support.tiny import Case, our_model, relative_error

CASE = Case()
DSA_LAYER = 3
CONFIG = CASE.config()
LIMIT = CONFIG.index_topk + CONFIG.index_kpool - 1  # tokens up to which every visible token is selected
KPOOL, NUM_SELECTED = CONFIG.index_kpool, CONFIG.num_pools_selected


def row_of(*lengths: int) -> Documents:
    return Documents.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32), sum(lengths))


@pytest.fixture(scope="module")
def reference():
    indexer = models(CASE)[0].model.language_model.layers[DSA_LAYER].self_attn.indexer
    assert isinstance(indexer, import_modeling().Glm5NextTextIndexer)
    return indexer


@pytest.fixture(scope="module")
def indexer():
    return models(CASE)[1].decoder.layers[DSA_LAYER].self_attention.core_attention.indexer


def inputs(length: int) -> tuple[Tensor, Tensor]:
    """Attention input `[1, s, h]` and normalised query latent `[1, s, q_lora_rank]`."""
    return torch.randn(1, length, CONFIG.hidden_size), torch.randn(1, length, CONFIG.q_lora_rank)


def selected(indexer, hidden: Tensor, query: Tensor, documents: Documents) -> Tensor:
    """bool `[T, T]`: the tokens that our indexer selects."""
    pools = indexer(hidden.transpose(0, 1), query.transpose(0, 1), documents)
    return as_mask(naive.expand_pools(pools, documents, KPOOL), documents.num_tokens)


@pytest.mark.parametrize("length", range(1, 41))
def test_selection_is_the_reference_set_at_every_length(reference, indexer, length):
    hidden, query = inputs(length)
    theirs = reference(hidden, query, torch.ones(1, length, dtype=torch.bool), None)[0]
    with recorded(models(CASE)[1]) as record:
        ours = selected(indexer, hidden, query, row_of(length))
    assert min(record.selection_gaps, default=1.0) > MIN_GAP, "a tie leaves the choice open: take another seed"
    assert torch.equal(ours, as_mask(theirs, length))


def test_everything_visible_is_selected_up_to_the_limit_and_not_beyond(indexer):
    hidden, query = inputs(60)
    counts = selected(indexer, hidden, query, row_of(60)).sum(1)
    assert torch.equal(counts[:LIMIT], torch.arange(1, LIMIT + 1))
    assert (counts[LIMIT:] < torch.arange(LIMIT + 1, 61)).all()


def test_rows_have_the_fixed_width_and_minus_one_in_unused_slots(indexer):
    hidden, query = inputs(9)
    documents = row_of(9)
    pools = indexer(hidden.transpose(0, 1), query.transpose(0, 1), documents)
    indices = naive.expand_pools(pools, documents, KPOOL)
    assert pools.shape == (9, NUM_SELECTED) and pools.dtype == torch.int32
    assert indices.shape == (9, LIMIT) and indices.dtype == torch.int32
    assert (indices >= 0).sum(1).tolist() == list(range(1, 10))
    assert indices.min() == -1 and indices.max() == 8


def test_own_complete_pool_is_only_a_candidate_and_the_tail_is_always_taken(indexer):
    hidden, query = inputs(400)
    mask = selected(indexer, hidden, query, row_of(400))
    position = torch.arange(400)
    own = mask[position, position]
    complete = (position + 1) % KPOOL == 0
    assert own[~complete].all(), "a token of an incomplete pool does not attend to itself"
    lost = ~own[complete & (position > LIMIT)]
    assert lost.any() and not lost.all(), "the query's own complete pool should win here and lose there"
    tail = mask[398]
    assert tail[396:399].all()


def test_documents_of_a_row_select_as_they_do_alone(indexer):
    lengths = (3, 30, 1, 41, 4)
    hidden, query = inputs(sum(lengths))
    packed = selected(indexer, hidden, query, row_of(*lengths))
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = selected(indexer, hidden[:, part], query[:, part], row_of(length))
        assert torch.equal(packed[part, part], alone)
        assert packed[part].sum() == alone.sum(), "a query selects tokens of another document"
        start += length


@pytest.mark.parametrize("distinct", [1, 3], ids=["all_pools_equal", "three_kinds_of_pools"])
def test_where_scores_tie_the_selected_scores_are_the_reference_ones(reference, indexer, distinct):
    """Which of equal pools is taken is nobody's promise; how good the taken ones are is."""
    num_pools = 12
    blocks = torch.randn(distinct, KPOOL, CONFIG.hidden_size)[torch.arange(num_pools) % distinct]
    hidden, query = blocks.flatten(0, 1)[None], inputs(num_pools * KPOOL)[1]
    length = num_pools * KPOOL
    with mock.patch.object(naive, "select_pools", wraps=naive.select_pools) as select:
        ours = selected(indexer, hidden, query, row_of(length))
    theirs = as_mask(reference(hidden, query, torch.ones(1, length, dtype=torch.bool), None)[0], length)
    scores = select.call_args.args[0].repeat_interleave(KPOOL, dim=1)  # of every token's pool
    spread = (scores[-1].max() - scores[-1].min()) / scores[-1].abs().max()
    assert (spread < 1e-5) == (distinct == 1), f"the scores spread over {spread:.1e}"
    assert torch.equal(ours.sum(1), theirs.sum(1))
    assert torch.equal(ours.tril(), ours), "a query selects a token that it does not see"
    for query_scores, ours_row, theirs_row in zip(scores, ours, theirs):
        taken, expected = query_scores[ours_row].sort().values, query_scores[theirs_row].sort().values
        assert relative_error(taken, expected) < 1e-5


def test_pool_key_is_a_softmax_over_members_for_every_channel_separately():
    keys, gate, ape = torch.randn(11, 5), torch.randn(11, 5), torch.randn(KPOOL, 5)
    got = naive.pool_keys(keys, gate, ape, row_of(4, 7))
    for pool, start in enumerate((0, 4)):  # the second document's last three tokens are no pool
        for channel in range(5):
            logits = gate[start : start + KPOOL, channel].double() + ape[:, channel].double()
            weights = logits.exp() / logits.exp().sum()
            expected = (weights * keys[start : start + KPOOL, channel].double()).sum()
            assert got[pool, channel].item() == pytest.approx(expected.item(), rel=1e-5)
    assert got.shape == (2, 5)


def test_score_is_the_weighted_sum_over_heads_of_clipped_products():
    q, weights, pooled = torch.randn(6, 3, 8), torch.randn(6, 3), torch.randn(2, 8)
    got = naive.pool_scores(q, weights, pooled)
    for t in range(6):
        for pool in range(2):
            products = (q[t].double() @ pooled[pool].double()) * 8**-0.5
            expected = (weights[t].double() * 3**-0.5 * products.clamp(min=0)).sum()
            assert got[t, pool].item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)


def test_row_without_a_complete_pool_selects_its_tail(indexer):
    hidden, query = inputs(3)
    assert torch.equal(selected(indexer, hidden, query, row_of(3)), torch.ones(3, 3, dtype=torch.bool).tril())
    assert torch.equal(selected(indexer, hidden, query, row_of(1, 2)).sum(1), torch.tensor([1, 1, 2]))


def test_indexer_is_frozen_and_cuts_the_gradient(indexer):
    assert [name for name, parameter in indexer.named_parameters() if parameter.requires_grad] == []
    hidden, query = (x.requires_grad_() for x in inputs(20))
    pools = indexer(hidden.transpose(0, 1), query.transpose(0, 1), row_of(20))
    assert not pools.requires_grad


def scoring(indexer, hidden: Tensor, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, head weights and pooled keys that the indexer scores."""
    with mock.patch.object(naive, "pool_scores", wraps=naive.pool_scores) as score:
        indexer(hidden.transpose(0, 1), query.transpose(0, 1), row_of(hidden.shape[1]))
    return score.call_args.args


def test_bf16_model_projects_in_fp32_and_rounds_queries_and_pooled_keys_once():
    model = our_model(CASE, models(CASE)[0])  # of its own, because it is cast
    indexer = model.decoder.layers[DSA_LAYER].self_attention.core_attention.indexer.bfloat16()
    hidden, query = (x.bfloat16() for x in inputs(60))
    q, weights, pooled = scoring(indexer, hidden, query)
    wide_q, wide_weights, wide_pooled = scoring(indexer.float(), hidden.float(), query.float())
    assert torch.equal(q, wide_q.bfloat16()) and torch.equal(pooled, wide_pooled.bfloat16())
    assert weights.dtype == torch.float32 and torch.equal(weights, wide_weights)
    assert naive.pool_scores(q, weights, pooled).dtype == torch.float32


@pytest.mark.parametrize("size", [1, 7, 64])
def test_queries_are_scored_in_chunks_with_the_same_result(indexer, size, monkeypatch):
    hidden, query = inputs(75)
    whole = selected(indexer, hidden, query, row_of(23, 52))
    monkeypatch.setattr(indexer_module, "MAX_QUERIES", size)
    with mock.patch.object(naive, "pool_scores", wraps=naive.pool_scores) as score:
        assert torch.equal(selected(indexer, hidden, query, row_of(23, 52)), whole)
    assert score.call_count == -(-75 // size)


def test_nothing_is_scored_where_every_visible_pool_is_kept(indexer):
    longest = KPOOL * (NUM_SELECTED + 1) - 1
    hidden, query = inputs(2 * longest)
    with mock.patch.object(naive, "pool_scores", wraps=naive.pool_scores) as score:
        short = selected(indexer, hidden, query, row_of(longest, longest))
        assert score.call_count == 0
        selected(indexer, hidden, query, row_of(longest + 1, longest - 1))
        assert score.call_count == 1
    block = torch.ones(longest, longest, dtype=torch.bool).tril()
    assert torch.equal(short, torch.block_diag(block, block).bool())


def test_selection_keeps_the_best_visible_pools_of_the_own_document():
    """The whole rule on hand-made scores: two documents of three and two pools, two pools kept."""
    scores = torch.tensor([[5.0, 4.0, 3.0, 9.0, 8.0]]).expand(20, 5)
    got = naive.select_pools(scores, torch.arange(20), row_of(12, 8), 4, 2)
    none, first, both = [-1, -1], [0, -1], [0, 1]
    assert got.tolist() == [none] * 3 + [first] * 4 + [both] * 5 + [none] * 3 + [first] * 4 + [both]


def test_selection_of_some_queries_is_that_of_all_queries():
    """What a sequence-parallel rank does: it scores its own tokens only."""
    scores, documents = torch.randn(50, 11), row_of(20, 30)
    everything = naive.select_pools(scores, torch.arange(50), documents, 4, 3)
    some = torch.arange(13, 37)
    assert torch.equal(naive.select_pools(scores[some], some, documents, 4, 3), everything[some])
