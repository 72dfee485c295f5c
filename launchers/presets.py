"""Named starting points for `train --preset`: values that a file and `--set` can still override. Needs no torch."""

import copy
import difflib
from typing import Any

# Small enough for two CPU cores; everything else about it is a real run: expert parallelism, replay, checkpoints.
TINY: dict[str, Any] = {
    "model": {"checkpoint": "runs/tiny-checkpoint", "precision": "fp32"},
    "parallel": {"ranks": 2, "ep": 2, "distributed_optimizer": False},
    "data": {"prompts": "tiny", "heldout": "tiny", "reward": "exact"},
    "rollout": {"prompts_per_step": 16, "samples_per_prompt": 8, "max_new_tokens": 4, "batch_size": 512},
    "optimizer": {"lr": 3e-3, "betas": [0.9, 0.95], "schedule": "linear"},
    "replay": {"routing": "engine"},
    "train": {"steps": 40, "tokens_per_micro_batch": 2048, "checkpoint_every": 10, "eval_every": 10},
}

PRESETS: dict[str, dict[str, Any]] = {"tiny": TINY}


def preset(name: str) -> dict[str, Any]:
    """A copy of a preset's values, as section -> key -> value. Raises ValueError that names the nearest preset."""
    if name not in PRESETS:
        nearest = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown preset {name!r}; the nearest is {nearest!r} (known: {', '.join(PRESETS)})")
    return copy.deepcopy(PRESETS[name])
