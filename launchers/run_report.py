"""What a run says about itself when it ends. Needs no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glm5_next.launchers.metrics import PHASES, read_metrics


def results(metrics: Path) -> list[str]:
    """Rewards and times of the steps in `metrics.jsonl`, a line each."""
    records = read_metrics(metrics)
    rewards = [record["reward_mean"] for record in records[-5:]]
    heldout = [record["heldout_reward"] for record in records if record.get("heldout_reward") is not None]
    lines = []
    if rewards:
        lines.append(f"mean reward of the last {len(rewards)} steps: {sum(rewards) / len(rewards):.3f}")
    if heldout:
        lines.append(
            f"held-out reward: {records[0].get('heldout_reward_start', float('nan')):.3f} -> {heldout[-1]:.3f}"
        )
    if len(records) > 1:  # kernels are compiled in the first
        lines.append(f"mean seconds of a step after the first: {phase_times(records[1:])}")
    return lines


def phase_times(records: Sequence[Mapping[str, Any]]) -> str:
    """Means over steps; a phase that a step does not have takes no time."""
    means = {
        name: sum(record.get(name) or 0.0 for record in records) / len(records) for name in (*PHASES, "seconds_step")
    }
    return ", ".join(f"{name.removeprefix('seconds_')} {mean:.2f}" for name, mean in means.items())
