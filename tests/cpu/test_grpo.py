"""Laws of the GRPO maths, on a CPU and without a model."""

import math

import pytest
import torch

from glm5_next.launchers.grpo import (
    flatten_rewards,
    group_advantages,
    has_spread,
    importance_weights,
    low_variance_kl,
    mismatch_stats,
    policy_loss,
    trained_mask,
)

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def row(num_tokens: int = 64, seed: int = 0, spread: float = 0.3):
    """(logprobs that need a gradient, old logprobs, advantages, mask, weights) of a random row."""
    random = torch.Generator().manual_seed(seed)
    old = -torch.rand(num_tokens, generator=random) - 0.1
    logprobs = (old + spread * torch.randn(num_tokens, generator=random)).requires_grad_()
    advantages = torch.randn(num_tokens, generator=random)
    mask = (torch.rand(num_tokens, generator=random) < 0.7).float()
    weights = 0.5 + torch.rand(num_tokens, generator=random)
    return logprobs, old, advantages, mask, weights


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ([1.0], True),
        ([0.0], True),
        ([[1.0]], True),
        ([1.0, 1.0], False),
        ([0.1, 0.1, 0.1], False),
        ([0.0, 1e-9], True),
        ([1.0, 1.0 + 1e-9], True),
        ([[0.0, 0.0], [0.0]], False),
        ([[0.0, 0.0], [1.0]], True),
        ([0.0, 1.0], True),
    ],
)
def test_a_group_is_kept_or_dropped_and_its_advantages_are_finite(rewards, kept):
    assert has_spread(rewards) is kept
    for divide_by_std in (True, False):
        advantages = group_advantages(rewards, divide_by_std=divide_by_std)
        assert len(advantages) == len(flatten_rewards(rewards))
        assert all(math.isfinite(advantage) for advantage in advantages)
        assert kept or advantages == [0.0] * len(advantages)


def test_advantages_are_centred_and_scaled_by_the_population_std():
    assert group_advantages([0.0, 0.0, 1.0, 1.0], divide_by_std=True) == [-1.0, -1.0, 1.0, 1.0]
    assert group_advantages([0.0, 0.0, 1.0, 1.0], divide_by_std=False) == [-0.5, -0.5, 0.5, 0.5]


def test_a_group_of_one_keeps_its_reward_as_advantage():
    assert group_advantages([0.25], divide_by_std=True) == [0.25]


def test_a_spread_too_small_to_square_still_gives_unit_advantages():
    assert group_advantages([0.0, 1e-200], divide_by_std=True) == pytest.approx([-1.0, 1.0])


@pytest.mark.parametrize("rewards", [[], [[]], [1.0, float("nan")], [float("inf")]])
def test_rewards_that_cannot_be_compared_are_refused(rewards):
    with pytest.raises(ValueError, match="reward"):
        has_spread(rewards)


def test_two_halves_sum_to_the_whole_in_loss_gradient_and_statistics():
    whole = row()
    loss, stats = policy_loss(*whole, **CLIP)
    loss.backward()
    halves = [[x.detach()[part] for x in whole] for part in (slice(0, 25), slice(25, None))]
    gradients, sums = [], {name: 0.0 for name in stats}
    total = 0.0
    for half in halves:
        half[0].requires_grad_()
        half_loss, half_stats = policy_loss(*half, **CLIP)
        half_loss.backward()
        gradients.append(half[0].grad)
        total += half_loss.item()
        sums = {name: sums[name] + half_stats[name].item() for name in stats}
    assert total == pytest.approx(loss.item(), rel=1e-5)
    assert torch.equal(torch.cat(gradients), whole[0].grad)
    assert sums == pytest.approx({name: value.item() for name, value in stats.items()}, rel=1e-6)
    assert sums["tokens"] == whole[3].sum().item() and 0 < sums["clipped"] < sums["tokens"]


def test_on_policy_the_gradient_is_minus_advantage_times_mask():
    _, old, advantages, mask, _ = row()
    logprobs = old.clone().requires_grad_()
    loss, stats = policy_loss(logprobs, old, advantages, mask, torch.ones_like(old), **CLIP)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, -advantages * mask)
    assert loss.item() == pytest.approx(-(advantages * mask).sum().item(), rel=1e-5)
    assert stats["clipped"] == 0 and stats["old_kl"] == 0 and stats["ratio"] == mask.sum()


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.29, 1.0, True),
        (1.27, 1.0, False),
        (1.29, -1.0, False),
        (0.79, -1.0, True),
        (0.81, -1.0, False),
        (0.79, 1.0, False),
    ],
)
def test_the_clip_stops_the_gradient_on_its_own_side_only(ratio, advantage, clipped):
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    one, zero = torch.ones(1), torch.zeros(1)
    loss, stats = policy_loss(logprobs, zero, torch.tensor([advantage]), one, one, **CLIP)
    loss.backward()
    assert (logprobs.grad.item() == 0) is clipped
    assert stats["clipped"].item() == clipped


def test_weights_scale_the_gradient_and_get_none():
    logprobs, old, advantages, mask, weights = row(spread=0.01)
    weights.requires_grad_()
    policy_loss(logprobs, old, advantages, mask, 2 * weights.detach(), **CLIP)[0].backward()
    doubled = logprobs.grad.clone()
    logprobs.grad = None
    policy_loss(logprobs, old, advantages, mask, weights.detach(), **CLIP)[0].backward()
    torch.testing.assert_close(doubled, 2 * logprobs.grad)


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_a_micro_batch_with_no_trained_token_gives_a_zero_that_back_propagates(num_tokens):
    logprobs, old, advantages, mask, weights = row(num_tokens)
    loss, stats = policy_loss(logprobs, old, advantages, torch.zeros_like(mask), weights, **CLIP)
    loss.backward()
    assert loss.item() == 0 and torch.equal(logprobs.grad, torch.zeros(num_tokens))
    assert all(value == 0 for value in stats.values())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_token_without_a_finite_rollout_logprob_leaves_mask_denominator_and_gradient(value):
    logprobs, old, advantages, mask, _ = row(8)
    mask.fill_(1)
    rollout = old.clone()
    rollout[3] = value
    mask = trained_mask(mask, rollout)
    assert mask.tolist() == [1, 1, 1, 0, 1, 1, 1, 1]
    weights = importance_weights(old, rollout, 0.5, 2.0)
    loss, stats = policy_loss(logprobs, old, advantages, mask, weights, **CLIP)
    loss.backward()
    assert stats["tokens"] == 7
    assert math.isfinite(loss.item()) and logprobs.grad.isfinite().all() and logprobs.grad[3] == 0


def test_nonsense_in_untrained_tokens_does_not_leak():
    logprobs, old, advantages, mask, weights = row(6, spread=0.01)
    mask = torch.tensor([1.0, 1, 1, 0, 1, 1])
    expected, _ = policy_loss(logprobs, old, advantages, mask, weights, **CLIP)
    for tensor in (old, advantages, weights):
        tensor[3] = float("nan")
    loss, stats = policy_loss(logprobs, old, advantages, mask, weights, **CLIP)
    loss.backward()
    assert loss.item() == expected.item() and logprobs.grad.isfinite().all()
    assert all(value.isfinite() for value in stats.values())
    assert policy_loss(logprobs, old, advantages, torch.ones(6), weights, **CLIP)[0].isnan()  # it would have


def test_a_ratio_that_would_overflow_stays_finite():
    logprobs = torch.tensor([0.0, 0.0], requires_grad=True)
    loss, _ = policy_loss(
        logprobs, torch.tensor([-500.0, 500.0]), torch.tensor([1.0, 0.0]), torch.ones(2), torch.ones(2), **CLIP
    )
    loss.backward()
    assert loss.item() == pytest.approx(-1.28) and logprobs.grad.tolist() == [0.0, 0.0]


def test_importance_weights_are_clamped_and_detached():
    old = torch.tensor([0.0, 0.0, 0.0, 0.0], requires_grad=True)
    rollout = torch.tensor([0.0, math.log(4), -math.log(4), -math.log(1.5)])
    weights = importance_weights(old, rollout, 0.5, 2.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.5, 2.0, 1.5]))
    assert not weights.requires_grad


def test_the_low_variance_kl_is_never_negative_and_averages_to_the_kl():
    policy, reference = (torch.randn(50, generator=torch.Generator().manual_seed(seed)).double() for seed in (0, 1))
    policy, reference = policy.log_softmax(0), reference.log_softmax(0)
    per_token = low_variance_kl(policy, reference)
    assert (per_token >= 0).all() and low_variance_kl(policy, policy).abs().max() == 0
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * per_token).sum(), exact)
    swapped = (policy.exp() * low_variance_kl(reference, policy)).sum()
    assert abs(swapped - exact) > 0.01


def test_the_low_variance_kl_keeps_small_differences_in_float32():
    difference = torch.tensor([1e-3])
    assert low_variance_kl(difference, torch.zeros(1)).item() == pytest.approx(5e-7, rel=1e-2)


def test_mismatch_statistics_of_a_hand_made_row():
    rollout = torch.zeros(201)
    trainer = torch.zeros(201)
    trainer[10], trainer[20], trainer[30] = 0.1, -0.2, 0.3
    trainer[200] = 5.0
    mask = torch.ones(201)
    mask[200] = 0
    stats = mismatch_stats(trainer, rollout, mask)
    k3 = [math.exp(d) - d - 1 for d in (0.1, -0.2, 0.3)]
    assert stats["mean"] == pytest.approx(sum(k3) / 200, rel=1e-5)
    assert stats["max"] == pytest.approx(k3[2], rel=1e-5)
    assert stats["p99"] == pytest.approx(k3[0], rel=1e-5)  # rank 198 of 200
    assert stats["abs_mean"] == pytest.approx(0.6 / 200, rel=1e-5)
    assert (stats["tokens"], stats["left_out"]) == (200, 0)
    rollout[10] = float("-inf")
    stats = mismatch_stats(trainer, rollout, mask)
    assert (stats["tokens"], stats["left_out"]) == (199, 1) and stats["max"] == pytest.approx(k3[2], rel=1e-5)


def test_mismatch_statistics_of_nothing_are_zero():
    stats = mismatch_stats(torch.zeros(3), torch.zeros(3), torch.zeros(3))
    assert stats == dict.fromkeys(stats, 0.0)


def test_a_trainer_logprob_that_is_not_finite_shows_in_the_statistics():
    stats = mismatch_stats(torch.tensor([0.0, float("nan")]), torch.zeros(2), torch.ones(2))
    assert math.isnan(stats["mean"]) and math.isnan(stats["max"])
