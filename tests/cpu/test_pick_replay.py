"""Sparse attention reads the pools of the record, of its own document and nothing else, and the indexer fills holes."""

import numpy as np
import pytest
import torch
from torch import Tensor

from glm5_next.plugins.documents import Documents
from glm5_next.plugins.kernels import expand_pools
from glm5_next.plugins.packed_row import packed_row
from glm5_next.plugins.pick_coding import encode_picks, no_picks
from glm5_next.plugins.replay import OwnRecord, PickReplay, check_reads
from tests.support import tiny
from tests.support.mtp import CASE as MTP_CASE
from tests.support.mtp import reference_with_mtp
from tests.support.parity import logits_of, models
from tests.support.replay import KPOOL, SELECTED, picks_of, pools_of
from tests.support.tiny import Case, relative_error

CPU = torch.device("cpu")
LENGTHS = (41, 30, 57)
LAYER = 3
DOCUMENTS = [np.random.default_rng(length).integers(0, 90, length) for length in LENGTHS]
BOUNDS = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
CASE = Case(seed=5)


def never() -> Tensor:
    raise AssertionError("the indexer ran although every token has a record")


def replay_of(documents=DOCUMENTS, passes: int = 1) -> PickReplay:
    return PickReplay([picks_of(tokens) for tokens in documents], CPU, passes=passes)


def test_picks_of_packed_samples_are_keys_of_their_own_document():
    pools = replay_of().choose(LAYER, never)
    rows = expand_pools(pools, Documents.from_cu_seqlens(BOUNDS, sum(LENGTHS)), KPOOL)
    start = 0
    for tokens in DOCUMENTS:
        expected = pools_of(tokens, LAYER)
        for position in range(len(tokens)):
            full = [KPOOL * pool + member for pool in expected[position] if pool >= 0 for member in range(KPOOL)]
            tail = range((position + 1) // KPOOL * KPOOL, position + 1)
            found = sorted(row - start for row in rows[start + position].tolist() if row >= 0)
            assert found == sorted([*full, *tail]) and max(found) <= position and min(found) >= 0
        start += len(tokens)


def test_a_whole_model_attends_where_the_record_says_and_differently_from_live():
    model, ids = models(CASE)[1], torch.from_numpy(np.concatenate(DOCUMENTS))[None]
    with torch.no_grad():
        live = logits_of(model, ids, packed_row(BOUNDS))
        row = packed_row(BOUNDS, picks=replay_of())
        moved = logits_of(model, ids, row)
        own = OwnRecord()
        same = logits_of(model, ids, packed_row(BOUNDS, picks=own))
        own.close([LAYER], "test")
        again = logits_of(model, ids, packed_row(BOUNDS, picks=own))
    assert relative_error(moved, live) > 1e-3 and row.picks.reads == {LAYER: 1}
    assert torch.equal(same, live) and torch.equal(again, live) and own.reads == {LAYER: 1}
    pools = torch.from_numpy(np.concatenate([pools_of(tokens, LAYER) for tokens in DOCUMENTS]))
    indexer = model.decoder.layers[LAYER].self_attention.core_attention.indexer
    hook = indexer.register_forward_hook(lambda *_: pools)
    with torch.no_grad():
        by_hand = logits_of(model, ids, packed_row(BOUNDS))
    hook.remove()
    assert relative_error(moved, by_hand) < 1e-6


def test_holes_and_padding_are_filled_by_the_indexer_and_nothing_else_is():
    tokens = DOCUMENTS[0]
    pools = pools_of(tokens, LAYER)[:, None]
    pools[25] = -1
    record = encode_picks(pools, layers=(LAYER,), kpool=KPOOL, name="holed")
    padding = no_picks(24, (LAYER,), SELECTED, KPOOL)
    live = torch.full((len(tokens) + 24, SELECTED), 77, dtype=torch.int32)
    chosen = PickReplay([record, padding], CPU, passes=1).choose(LAYER, lambda: live)
    assert (chosen == 77).all(1).nonzero().flatten().tolist() == [25, *range(len(tokens) + 19, len(tokens) + 24)]


def test_a_layer_is_decoded_once_for_all_passes_and_forgotten_after_the_last():
    replay = replay_of(passes=2)
    first = replay.choose(LAYER, never)
    assert replay.choose(LAYER, never) is first and not replay._decoded


def test_a_layer_without_a_record_is_refused():
    with pytest.raises(ValueError, match=r"layer 7 asks for replayed pools, but the record has only layers \(3,\)"):
        replay_of().choose(7, never)


def test_reads_that_are_not_as_planned_name_the_layer():
    replay = replay_of(passes=2)
    replay.choose(LAYER, never)
    with pytest.raises(RuntimeError, match=r"micro-batch 4, picks: .*\(found, planned\): {3: \(1, 2\)}"):
        check_reads(replay, [LAYER], 2, "micro-batch 4, picks")
    replay.choose(LAYER, never)
    assert check_reads(replay, [LAYER], 2, "micro-batch 4, picks") == 2
    with pytest.raises(RuntimeError, match=r"{3: \(2, 0\), 5: \(0, 2\)}"):
        check_reads(replay, [5], 2, "another stage")


def test_an_own_record_is_complete_and_made_once():
    own = OwnRecord()
    own.choose(LAYER, lambda: torch.zeros(1))
    with pytest.raises(RuntimeError, match="layer 3 chose twice"):
        own.choose(LAYER, lambda: torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"layers \[3\] recorded their choice, planned \[3, 7\]"):
        own.close([3, 7], "row 0")


def test_the_multi_token_prediction_layer_reads_no_record():
    """It has a router, an indexer and the number of a trunk layer."""
    model = tiny.our_model(MTP_CASE, reference_with_mtp(MTP_CASE), mtp_num_layers=1)
    (layer,) = model.mtp.layers
    ran: list[str] = []
    for name, module in (("router", layer.mtp_model_layer.mlp.router), ("indexer", layer.mtp_model_layer)):
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    routes, picks = OwnRecord(), OwnRecord()
    row = packed_row(torch.tensor([0, 40], dtype=torch.int32), routes, picks)
    with torch.no_grad():
        model(tiny.tokens(40), torch.arange(40)[None], None, packed_seq_params=row)
    kinds = MTP_CASE.config()
    assert ran == ["router", "indexer"]
    assert sorted(routes.chosen) == [i for i, kind in enumerate(kinds.mlp_kinds) if kind == "moe"]
    assert sorted(picks.chosen) == [i for i, kind in enumerate(kinds.attention_kinds) if kind == "dsa"]
