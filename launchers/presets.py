"""Named starting points for `train --preset`: values that a file and `--set` can still override. Needs no torch."""

import copy
import difflib
from typing import Any

# Small enough for two CPU cores; everything else about it is a real run: expert parallelism, replay, checkpoints.
TINY: dict[str, Any] = {
    "model": {"checkpoint": "runs/tiny-checkpoint", "precision": "fp32"},
    "parallel": {"ranks": 2, "ep": 2},
    "data": {"prompts": "tiny", "heldout": "tiny", "reward": "exact"},
    "rollout": {"prompts_per_step": 8, "samples_per_prompt": 8, "max_new_tokens": 16, "batch_size": 64},
    "optimizer": {"lr": 1e-3, "warmup_steps": 2},
    "replay": {"routing": "engine"},
    "train": {"steps": 60, "tokens_per_micro_batch": 1024, "checkpoint_every": 20, "eval_every": 20},
}

PRESETS: dict[str, dict[str, Any]] = {"tiny": TINY}


def preset(name: str) -> dict[str, Any]:
    """A copy of a preset's values, as section -> key -> value. Raises ValueError that names the nearest preset."""
    if name not in PRESETS:
        nearest = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown preset {name!r}; the nearest is {nearest!r} (known: {', '.join(PRESETS)})")
    return copy.deepcopy(PRESETS[name])
