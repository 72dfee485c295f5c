"""The indexer's choices survive coding, cutting and joining, take few bytes, and nothing else passes for a choice."""

import pickle
from itertools import pairwise

import numpy as np
import pytest

from glm5_next.plugins.pick_coding import CHUNK, encode_picks, joined, most_bytes, visible_pools

LAYERS = (3, 7)
KPOOL, SELECTED = 4, 4
LENGTH = 3 * CHUNK + 57


def picks(length: int = LENGTH, selected: int = SELECTED, *, first: int = 0, layers: int = 2, seed: int = 0):
    """Random choices in random order, int32 `[length, layers, selected]`."""
    generator = np.random.default_rng(seed)
    pools = np.full((length, layers, selected), -1, dtype=np.int32)
    for row, count in enumerate(visible_pools(first, length, KPOOL)):
        for layer in range(layers):
            chosen = generator.permutation(count)[:selected]
            pools[row, layer, : len(chosen)] = chosen
    return pools


def coded(pools: np.ndarray, **changes):
    return encode_picks(pools, **{"layers": LAYERS, "kpool": KPOOL, "name": "sample 's'", **changes})


def as_sets(rows: np.ndarray) -> list[set[int]]:
    return [set(row.tolist()) - {-1} for row in rows]


def assert_same(record, pools: np.ndarray) -> None:
    assert record.num_tokens == len(pools)
    for index, layer in enumerate(record.layers):
        assert as_sets(record.decode(layer)) == as_sets(pools[:, index])


def test_what_is_decoded_is_what_was_chosen_layer_by_layer():
    pools = picks()
    record = pickle.loads(pickle.dumps(coded(pools)))
    assert_same(record, pools)
    assert as_sets(record.decode(3)) != as_sets(record.decode(7)), "the layers should differ"
    assert record.decode(3).dtype == np.int32 and not record.holes.any()


def test_gaps_of_any_size_survive():
    pools = np.array([[[0, 254, 255, 1000]], [[255, 510, 766, 1999]]])
    assert coded(pools, layers=(3,), first=7999).decode(3).tolist() == pools[:, 0].tolist()


@pytest.mark.parametrize("length", [0, 1, 19, 20, CHUNK, CHUNK + 1, 2 * CHUNK + 30, LENGTH])
def test_a_cut_record_is_the_record_of_the_cut_sample(length):
    pools = picks()
    pools[CHUNK + 3, 0] = -1
    cut = coded(pools).cut(length)
    assert_same(cut, pools[:length])
    assert np.array_equal(cut.holes, coded(pools).holes[:length])


def test_a_record_cannot_be_cut_to_more_than_it_has():
    with pytest.raises(ValueError, match="of 10 tokens cannot be cut to 11"):
        coded(picks(10)).cut(11)


def test_pieces_of_chunked_prefill_join_and_a_gap_between_them_is_refused():
    pools = picks()
    bounds = [0, 100, 101, 256, LENGTH]
    pieces = [coded(pools[start:end], first=start) for start, end in pairwise(bounds)]
    assert_same(joined(pieces), pools)
    assert_same(joined(pieces).cut(200), pools[:200])
    with pytest.raises(ValueError, match="starts at token 101 does not continue one that ends at 100"):
        joined([pieces[0], pieces[2]])


def test_a_token_without_a_record_is_a_hole_and_not_pool_0():
    pools = picks()
    pools[CHUNK + 5, 1] = pools[2, 0] = -1
    record = coded(pools)
    assert np.argwhere(record.holes).tolist() == [[CHUNK + 5, 1]], "token 2 sees no pool and has no choice to record"
    assert record.decode(7)[CHUNK + 5].tolist() == [-1] * SELECTED
    assert_same(record, pools)


def test_tokens_that_see_no_more_pools_than_they_keep_cost_nothing():
    short = coded(picks(19))
    assert all(data == b"" for chunk in short.chunks for data in chunk.data)
    assert_same(short, picks(19))


@pytest.mark.parametrize(("context", "share"), [(4096, 1 / 12), (32768, 1 / 4)])
def test_random_choices_at_the_released_sizes_take_a_fraction_of_raw_ids(context, share):
    """Uniformly random choices are the hardest to code; the bound that a run prints holds for them."""
    length, selected = 2 * CHUNK, 512
    pools = picks(length, selected, first=context - length, layers=1)
    record = coded(pools, layers=(3,), first=context - length)
    assert record.num_bytes < share * length * selected * 4
    assert record.num_bytes < most_bytes(context, 1, selected, KPOOL) - most_bytes(context - length, 1, selected, KPOOL)
    assert_same(record, pools)


def spoiled(change) -> np.ndarray:
    pools = picks()
    change(pools)
    return pools


def put(token: int, value: list[int]):
    return lambda pools: pools.__setitem__((token, 1), value)


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        (np.zeros((LENGTH, 2, SELECTED), dtype=np.int32), r"token 0, layer 3: .*\[0, 0, 0, 0\].* picked twice"),
        (spoiled(put(99, [1, 2, 3, 3])), "token 99, layer 7: .*picked twice"),
        (spoiled(put(99, [1, 2, 3, 25])), "token 99, layer 7: .*25 pools are visible.* not visible yet"),
        (spoiled(put(99, [1, 2, 3, -1])), "token 99, layer 7: .*too few"),
        (spoiled(put(10, [0, -1, -1, -1])), "token 10, layer 7: .*too few"),
        (picks().astype(np.float32), "are float32, expected integers"),
        (picks().tolist(), "are list, expected integers"),
        (picks(layers=3), r"have shape .*, expected \[tokens, 2 sparse-attention layers"),
    ],
)
def test_anything_but_distinct_visible_pools_is_refused_with_token_layer_and_cause(pools, message):
    with pytest.raises(ValueError, match=f"sample 's': .*{message}"):
        coded(pools)
