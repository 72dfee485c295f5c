"""Plans of a step, and the tensors of a packed row."""

import random
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from glm5_next.launchers.packing import covered_rows, pack_row, plan_digest, plan_step
from glm5_next.launchers.types import Sample
from glm5_next.plugins.pick_coding import encode_picks
from tests.support.replay import KPOOL, picks_of, plan_of, pools_of

PAD = 9_999
REPLAY = plan_of(routing="engine")
EVERYTHING = plan_of(routing="engine", indexer="engine", routing_weights="engine")


def sample(name: str, first_token: int, prompt_length: int, response_length: int, *, routes: bool = True) -> Sample:
    """Tokens count up from first_token; routes hold [token, token + 1], log-probabilities -token / 1000."""
    tokens = np.arange(first_token, first_token + prompt_length + response_length, dtype=np.int32)
    return Sample(
        prompt_id="p",
        sample_id=name,
        tokens=tokens,
        prompt_length=prompt_length,
        rollout_logprobs=(-tokens[prompt_length:] / 1000).astype(np.float32),
        reward=None,
        routes=np.stack([tokens[:-1], tokens[:-1] + 1], axis=1)[:, None].astype(np.int16) if routes else None,
        route_weights=np.ones((len(tokens) - 1, 1, 2), dtype=np.float32),
        picks=picks_of(tokens[:-1]),
        finish_reason="stop",
        weights_version=0,
        response_text="",
    )


SAMPLES = [sample("a", 100, 3, 4), sample("b", 200, 1, 1), sample("c", 300, 2, 5)]
ADVANTAGES = {"a": 1.0, "b": -2.0, "c": 0.5}


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_holds_every_sample_once_within_the_budget_and_evenly(seed):
    numbers = random.Random(seed)
    num_replicas, multiple, budget = numbers.randint(1, 4), numbers.randint(1, 4), 100
    lengths = [numbers.randint(1, budget) for _ in range(numbers.randint(1, 60))]
    plan = plan_step(lengths, num_replicas=num_replicas, tokens_per_micro_batch=budget, multiple=multiple)
    assert sorted(index for rows in plan for row in rows for index in row) == list(range(len(lengths)))
    assert len(plan) == num_replicas
    assert len({len(rows) for rows in plan}) == 1 and len(plan[0]) % multiple == 0 and len(plan[0]) > 0
    assert all(sum(lengths[index] for index in row) <= budget for rows in plan for row in rows)
    loads = [sum(lengths[index] for row in rows for index in row) for rows in plan]
    assert max(loads) - min(loads) <= max(lengths)


def test_a_plan_uses_rows_fully_before_it_opens_new_ones():
    assert plan_step([60, 40, 60, 40], num_replicas=1, tokens_per_micro_batch=100, multiple=1) == [[[0, 1], [2, 3]]]


def test_a_plan_is_a_function_of_its_lengths():
    lengths = [5, 9, 5, 5, 9, 1]
    plans = [plan_step(lengths, num_replicas=2, tokens_per_micro_batch=10, multiple=2) for _ in range(2)]
    assert plans[0] == plans[1] and plan_digest(plans[0]) == plan_digest(plans[1])


def test_the_digest_sees_every_difference():
    plans = [[[[0, 1]], [[]]], [[[1, 0]], [[]]], [[[0]], [[1]]], [[[0, 1], []], [[], []]], [[[]], [[0, 1]]]]
    assert len({plan_digest(plan) for plan in plans}) == len(plans)


def test_fewer_samples_than_replicas_leave_empty_micro_batches():
    plan = plan_step([4], num_replicas=3, tokens_per_micro_batch=8, multiple=2)
    assert plan == [[[0], []], [[], []], [[], []]]


def test_a_step_without_samples_is_all_empty():
    assert plan_step([], num_replicas=2, tokens_per_micro_batch=8, multiple=3) == [[[], [], []]] * 2


@pytest.mark.parametrize("length", [0, 9])
def test_a_sample_that_no_row_can_hold_is_named(length):
    with pytest.raises(ValueError, match=f"sample 1 has {length} tokens"):
        plan_step([8, length], num_replicas=1, tokens_per_micro_batch=8, multiple=1)


def assert_rows_belong_together(row) -> None:
    """In every trained or untrained real row, all tensors must speak of the token that input_ids holds."""
    for part in row.sample_slices:
        tokens = row.input_ids[part]
        assert torch.equal(row.labels[part], tokens + 1)
        assert torch.equal(row.routes[part][:, 0].long(), torch.stack([tokens, tokens + 1], dim=1))
        trained = row.loss_mask[part] == 1
        torch.testing.assert_close(row.rollout_logprobs[part][trained], -(tokens[trained] + 1) / 1000)
        assert (row.rollout_logprobs[part][~trained] == 0).all()


def test_tokens_labels_routes_and_logprobs_stay_together():
    row = pack_row(SAMPLES, ADVANTAGES, pad_to=8, pad_token=PAD, replay=REPLAY)
    assert_rows_belong_together(row)
    shifted = pack_row(SAMPLES, ADVANTAGES, pad_to=8, pad_token=PAD, replay=REPLAY)
    shifted.routes.copy_(shifted.routes.roll(1, 0))
    with pytest.raises(AssertionError):
        assert_rows_belong_together(shifted)
    shifted = pack_row(SAMPLES, ADVANTAGES, pad_to=8, pad_token=PAD, replay=REPLAY)
    shifted.rollout_logprobs.copy_(shifted.rollout_logprobs.roll(1, 0))
    with pytest.raises(AssertionError):
        assert_rows_belong_together(shifted)


def test_a_row_is_what_it_looks_like_by_hand():
    row = pack_row(SAMPLES[:2], ADVANTAGES, pad_to=4, pad_token=PAD, replay=REPLAY)
    assert row.input_ids.tolist() == [100, 101, 102, 103, 104, 105, 200, PAD]
    assert row.labels.tolist() == [101, 102, 103, 104, 105, 106, 201, PAD]
    assert row.loss_mask.tolist() == [0, 0, 1, 1, 1, 1, 1, 0]
    assert row.advantages.tolist() == [0, 0, 1, 1, 1, 1, -2, 0]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    assert row.cu_seqlens.tolist() == [0, 6, 7, 8]
    assert row.routes[-1].tolist() == [[-1, -1]]
    assert row.sample_ids == ("a", "b") and row.sample_slices == (slice(0, 6), slice(6, 7))
    assert row.loss_mask.sum() == sum(s.num_response_tokens for s in SAMPLES[:2])


def test_tensors_of_a_row_have_the_promised_types_and_one_length():
    scores = {sample.sample_id: np.ones(len(sample.tokens) - 1, dtype=np.float32) for sample in SAMPLES}
    row = pack_row(
        SAMPLES, ADVANTAGES, pad_to=8, pad_token=PAD, replay=EVERYTHING, old_logprobs=scores, reference_logprobs=scores
    )
    types = {
        field.name: getattr(row, field.name).dtype
        for field in fields(row)
        if isinstance(getattr(row, field.name), torch.Tensor)
    }
    assert types == {
        "input_ids": torch.int64,
        "labels": torch.int64,
        "loss_mask": torch.float32,
        "rollout_logprobs": torch.float32,
        "advantages": torch.float32,
        "cu_seqlens": torch.int32,
        "position_ids": torch.int64,
        "old_logprobs": torch.float32,
        "reference_logprobs": torch.float32,
        "routes": torch.int16,
        "route_weights": torch.float32,
    }
    assert {len(getattr(row, name)) for name in types if name != "cu_seqlens"} == {16}


def test_scores_go_where_their_labels_go():
    scores = {sample.sample_id: sample.tokens[1:].astype(np.float32) for sample in SAMPLES}
    row = pack_row(SAMPLES, ADVANTAGES, pad_to=8, pad_token=PAD, old_logprobs=scores)
    assert row.reference_logprobs is None
    for where in row.sample_slices:
        assert row.old_logprobs[where].tolist() == row.labels[where].tolist()
    assert row.old_logprobs[row.sample_slices[-1].stop :].tolist() == [0, 0, 0]


def test_a_sample_without_its_score_is_named():
    with pytest.raises(ValueError, match=SAMPLES[0].sample_id):
        pack_row(SAMPLES, ADVANTAGES, pad_to=8, pad_token=PAD, reference_logprobs={})


def test_a_full_row_has_no_padding_document():
    row = pack_row(SAMPLES, ADVANTAGES, pad_to=13, pad_token=PAD)
    assert row.cu_seqlens.tolist() == [0, 6, 7, 13] and PAD not in row.input_ids


def test_an_empty_micro_batch_is_padding_with_nothing_to_train():
    row = pack_row([], {}, pad_to=4, pad_token=PAD)
    assert row.input_ids.tolist() == [PAD] * 4 and row.cu_seqlens.tolist() == [0, 4]
    assert row.loss_mask.sum() == 0 and row.routes is None and row.sample_ids == () and row.sample_slices == ()
    row = pack_row([], {}, pad_to=4, pad_token=PAD, replay=plan_of(moe_layers=(1, 2, 5)))
    assert row.routes.shape == (4, 3, 2) and (row.routes == -1).all()


def test_a_row_does_not_share_memory_with_its_samples():
    one = sample("a", 100, 3, 4)
    pack_row([one], ADVANTAGES, pad_to=1, pad_token=PAD, replay=REPLAY).routes.fill_(0)
    assert one.routes[0, 0, 0] == 100


def test_a_sample_without_advantage_or_routes_is_named():
    with pytest.raises(ValueError, match="sample 'a': has no advantage"):
        pack_row(SAMPLES, {}, pad_to=4, pad_token=PAD)
    bare = sample("c", 300, 2, 5, routes=False)
    with pytest.raises(ValueError, match="sample 'c': routes of all layers are missing"):
        pack_row([SAMPLES[0], bare], ADVANTAGES, pad_to=4, pad_token=PAD, replay=REPLAY)
    with pytest.raises(ValueError, match="sample 'a': picks of all layers are missing"):
        pack_row([replace(SAMPLES[0], picks=None)], ADVANTAGES, pad_to=4, pad_token=PAD, replay=EVERYTHING)
    row = pack_row([bare], ADVANTAGES, pad_to=4, pad_token=PAD)
    assert row.routes is row.route_weights is row.picks is None


def test_every_document_keeps_its_picks_and_padding_has_none():
    row = pack_row(SAMPLES, ADVANTAGES, pad_to=8, pad_token=PAD, replay=EVERYTHING)
    ends = row.cu_seqlens.tolist()
    assert [record.num_tokens for record in row.picks] == [end - start for start, end in pairwise(ends)]
    for sample_, record in zip(SAMPLES, row.picks):
        assert np.array_equal(record.decode(3), sample_.picks.decode(3))
    assert pack_row([], {}, pad_to=40, pad_token=PAD, replay=EVERYTHING).picks[0].holes.sum() == 40 - 19


@pytest.mark.parametrize("stream", ["routes", "picks"])
@pytest.mark.parametrize("hole", [0, 20, 22, 23, 27, 29])
def test_a_response_token_without_a_record_and_those_after_it_leave_the_loss(stream, hole):
    """24 prompt tokens: row 23 predicts the first of 7 response tokens."""
    whole = sample("a", 100, 24, 7)
    if stream == "routes":
        routes = whole.routes.copy()
        routes[hole] = -1
        holed = replace(whole, routes=routes)
    else:
        pools = pools_of(whole.tokens[:-1], 3)[:, None]
        pools[hole] = -1
        holed = replace(whole, picks=encode_picks(pools, layers=(3,), kpool=KPOOL, name="a"))
    row = pack_row([holed], ADVANTAGES, pad_to=1, pad_token=PAD, replay=EVERYTHING)
    trained = [number for number in range(23, 30) if number < hole or hole < 23]
    assert row.loss_mask.nonzero().flatten().tolist() == trained
    assert covered_rows(holed, EVERYTHING.recording) == (hole if hole >= 23 else 30)
    assert row.rollout_logprobs[:23].abs().sum() == 0 and (row.rollout_logprobs[trained] != 0).all()
    assert row.rollout_logprobs.count_nonzero() == row.advantages.count_nonzero() == len(trained)
    bare = pack_row([holed], ADVANTAGES, pad_to=1, pad_token=PAD)
    assert bare.loss_mask.sum() == 7, "a run that replays nothing trains on every response token"
