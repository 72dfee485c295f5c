"""The maths of GRPO: plain functions on rewards and tensors. Needs torch only.

T is the number of tokens of a packed row. Everything that is summed here is divided by the caller, by a count over the
whole step, so a result does not depend on how the step was cut into micro-batches or ranks.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Union

import torch

Rewards = Sequence[Union[float, "Rewards"]]
# A ratio beyond e^20 says that something is broken, not in which direction to go; held there, exp cannot overflow.
MAX_LOG_RATIO = 20.0


def flatten_rewards(rewards: Rewards) -> list[float]:
    """A group's rewards in order, whether flat or nested (several samples per trajectory).

    Raises ValueError for an empty group and for a reward that is not finite.
    """
    flat = list(_leaves(rewards))
    if not flat:
        raise ValueError("a group needs at least one reward")
    wrong = [reward for reward in flat if not math.isfinite(reward)]
    if wrong:
        raise ValueError(f"rewards must be finite, got {wrong[0]}")
    return flat


def has_spread(rewards: Rewards) -> bool:
    """Whether a group teaches anything: False where two or more rewards are all exactly equal.

    Exact equality, no tolerance: a difference of 1e-9 is a difference. A group of one has nothing to be equal to and
    always counts.
    """
    flat = flatten_rewards(rewards)
    return len(flat) == 1 or any(reward != flat[0] for reward in flat)


def group_advantages(rewards: Rewards, *, divide_by_std: bool) -> list[float]:
    """Each reward minus the group's mean, divided by the population standard deviation if asked for; in flat order.

    A group of one has no mean to compare with: its advantage is the reward itself. Equal rewards give exact zeros.
    """
    flat = flatten_rewards(rewards)
    if len(flat) == 1:
        return flat
    if not has_spread(flat):
        return [0.0] * len(flat)
    mean = math.fsum(flat) / len(flat)
    deviations = [reward - mean for reward in flat]
    if not divide_by_std:
        return deviations
    # hypot scales before it squares, so tiny spreads do not underflow to a division by zero
    std = math.hypot(*deviations) / math.sqrt(len(flat))
    return [deviation / std for deviation in deviations]


def trained_mask(mask_T: torch.Tensor, rollout_logprobs_T: torch.Tensor) -> torch.Tensor:
    """The mask without tokens whose rollout log-probability is not finite; its sum is the denominator's share."""
    return mask_T.masked_fill(~rollout_logprobs_T.isfinite(), 0)


def importance_weights(
    old_logprobs_T: torch.Tensor, rollout_logprobs_T: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """Trainer over engine probability, held in [low, high] and detached; 0 where the engine's is not finite."""
    difference_T = old_logprobs_T.detach() - rollout_logprobs_T
    weights_T = difference_T.clamp(max=MAX_LOG_RATIO).exp().clamp(low, high)
    return weights_T.masked_fill(~rollout_logprobs_T.isfinite(), 0)


def policy_loss(
    logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    mask_T: torch.Tensor,
    weights_T: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate with a higher upper clip, summed over masked tokens (not divided), and sums for the log.

    mask_T is 1 for trained tokens (`trained_mask`), weights_T comes from `importance_weights` or is 1. Where nothing is
    trained the loss is a finite 0 that can still be back-propagated: every rank must take part in the backward pass.

    Sums, float64 and detached, over masked tokens: `tokens` (count), `clipped` (tokens whose gradient the clip removed), `ratio`,
    `old_kl` (k3 estimate of KL(old || new)), `importance_weight`.
    """
    keep_T = mask_T > 0
    # masked before exp, so that neither value nor gradient of an untrained token can be NaN
    log_ratio_T = (logprobs_T - old_logprobs_T.detach()).masked_fill(~keep_T, 0)
    advantages_T, weights_T = (x.masked_fill(~keep_T, 0) for x in (advantages_T, weights_T))
    ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    objective_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    loss = -(objective_T * weights_T).sum()
    with torch.no_grad():
        too_high_T = (ratio_T > 1 + clip_high) & (advantages_T > 0)
        too_low_T = (ratio_T < 1 - clip_low) & (advantages_T < 0)
        stats = {
            "tokens": keep_T.double().sum(),
            "clipped": (too_high_T | too_low_T).double().sum(),
            "ratio": ratio_T.masked_fill(~keep_T, 0).double().sum(),
            "old_kl": low_variance_kl(torch.zeros_like(log_ratio_T), log_ratio_T).double().sum(),
            "importance_weight": weights_T.double().sum(),
        }
    return loss, stats


def low_variance_kl(logprobs_T: torch.Tensor, reference_logprobs_T: torch.Tensor) -> torch.Tensor:
    """k3 estimate of KL(policy || reference) per token, from tokens the policy sampled; never negative.

    exp(d) - d - 1 with d = reference - policy; expm1 keeps its digits where d is small.
    """
    difference_T = reference_logprobs_T - logprobs_T
    return torch.expm1(difference_T) - difference_T


def mismatch_stats(
    trainer_logprobs_T: torch.Tensor, rollout_logprobs_T: torch.Tensor, mask_T: torch.Tensor
) -> dict[str, float]:
    """How far trainer and engine are apart on the same tokens: the k3 estimate of KL(engine || trainer), in float64.

    Give it all tokens of a step at once: `p99` (nearest rank) and `max` are not sums. Keys: `mean`, `p99`, `max`,
    `abs_mean` (mean |log-probability difference|), `tokens` (count), `left_out` (masked tokens whose engine
    log-probability is not finite). Without a token all are 0.
    """
    keep_T = trained_mask(mask_T, rollout_logprobs_T) > 0
    trainer_N = trainer_logprobs_T.detach()[keep_T].double()
    rollout_N = rollout_logprobs_T.detach()[keep_T].double()
    count = len(rollout_N)
    left_out = int((mask_T > 0).sum()) - count
    if count == 0:
        return {"mean": 0.0, "p99": 0.0, "max": 0.0, "abs_mean": 0.0, "tokens": 0.0, "left_out": float(left_out)}
    kl_N = low_variance_kl(rollout_N, trainer_N).sort().values
    return {
        "mean": kl_N.mean().item(),
        "p99": kl_N[math.ceil(0.99 * count) - 1].item(),
        "max": kl_N[-1].item(),
        "abs_mean": (trainer_N - rollout_N).abs().mean().item(),
        "tokens": float(count),
        "left_out": float(left_out),
    }


def _leaves(rewards: Rewards) -> Iterator[float]:
    for reward in rewards:
        if isinstance(reward, Sequence):
            yield from _leaves(reward)
        else:
            yield float(reward)
