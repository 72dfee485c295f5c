"""Named starting points for `train --preset`: values that a file and `--set` can still override. Needs no torch."""

import copy
import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5_next.launchers.plan import Cluster
from glm5_next.plugins.config import Glm5NextConfig

# Small enough for two CPU cores; everything else about it is a real run: expert parallelism, replay, checkpoints.
TINY: dict[str, Any] = {
    "model": {"checkpoint": "runs/tiny-checkpoint", "precision": "fp32"},
    "parallel": {"ranks": 2, "ep": 2, "distributed_optimizer": False},
    "data": {"prompts": "tiny", "heldout": "tiny", "reward": "exact"},
    "rollout": {"prompts_per_step": 16, "samples_per_prompt": 8, "max_new_tokens": 4, "batch_size": 512},
    "optimizer": {"lr": 3e-3, "betas": [0.9, 0.95], "schedule": "linear"},
    "replay": {"routing": "engine", "indexer": "engine"},
    "train": {"steps": 40, "tokens_per_micro_batch": 2048, "checkpoint_every": 10, "eval_every": 10},
}

# The same in bf16 on one GPU, which the trainer shares with the embedded engine.
TINY_GPU: dict[str, Any] = TINY | {
    "model": TINY["model"] | {"precision": "bf16"},
    "parallel": {"ranks": 1, "distributed_optimizer": True},
}

# The same with servers: rollouts and weights over HTTP, as on a cluster.
TINY_HTTP: dict[str, Any] = TINY | {
    "rollout": TINY["rollout"]
    | {
        "engine": "sglang",
        "num_engines": 2,
        "launch": [
            "{python}",
            "-m",
            "glm5_next.launchers.engines.tiny_server",
            *("--protocol", "sglang", "--checkpoint", "{checkpoint}", "--precision", "fp32", "--picks", "recorded"),
            *("--host", "{host}", "--port", "{port}", "--key-file", "{key_file}"),
        ],
        "request_deadline": 60.0,
        "sample_deadline": 120.0,
        "step_deadline": 180.0,
        "start_deadline": 120.0,
    },
    "train": TINY["train"] | {"steps": 10},
}

# What the presets for clusters train, on the hub: the release in bf16, and the prompts in one JSONL file.
HUB_MODEL, HUB_PROMPTS = "zai-org/GLM-5.3-Flash-BF16", "zhuzilin/dapo-math-17k"
RELEASED_CONFIG = Path(__file__).parent / "released_config.json"


@dataclass(frozen=True)
class Preset:
    """`values` are settings by section; `cluster` is what they are for (None: any machine, no GPU).

    `layers` is set where only the first layers of the released model are trained.
    """

    values: dict[str, Any]
    cluster: Cluster | None = None
    layers: int | None = None

    def released_model(self) -> Glm5NextConfig:
        """The model it trains, if the checkpoint is the released one or its first layers."""
        model = Glm5NextConfig.from_hf(RELEASED_CONFIG)
        return model if self.layers is None else model.first_layers(self.layers)


def _full_size(cluster: Cluster, tp: int, pp: int, ep: int) -> dict[str, Any]:
    """GRPO on the released model: competition mathematics with long answers, 64 samples an update.

    Half of the nodes train, the others hold a server each.
    """
    servers = cluster.nodes // 2
    ranks = cluster.gpus - servers * cluster.gpus_per_node
    return {
        "model": {"checkpoint": "GLM-5.3-Flash", "precision": "bf16"},
        "parallel": {"ranks": ranks, "tp": tp, "pp": pp, "ep": ep, "distributed_optimizer": True},
        "data": {"prompts": "dapo-math-17k.jsonl", "reward": "math"},
        "rollout": {
            "engine": "sglang",
            "num_engines": servers,
            "engine_tp": cluster.gpus_per_node,
            "prompts_per_step": 8,
            "samples_per_prompt": 8,
            "max_new_tokens": 32768,
            "request_deadline": 1800.0,  # the longest answer takes 11 minutes at 50 tokens a second
            "sample_deadline": 2400.0,
            "step_deadline": 3600.0,
        },
        "optimizer": {
            "lr": 1e-6,
            "betas": [0.9, 0.98],
            "weight_decay": 0.1,
            "schedule": "constant",
            "offload": True,
        },
        "replay": {"routing": "engine"},
        "train": {"steps": 200, "tokens_per_micro_batch": 34816, "recompute": "full", "checkpoint_every": 20},
    }


def _slice(cluster: Cluster, ranks: int, rollout: dict[str, Any]) -> Preset:
    """The same on the first four layers, to try an installation: three KDA layers and a sparse one, all experts."""
    values = _full_size(cluster, tp=1, pp=1, ep=ranks)
    values["model"] = {"checkpoint": "GLM-5.3-Flash-4-layers", "precision": "bf16"}
    values["parallel"] |= {"ranks": ranks}
    values["rollout"] |= {"max_new_tokens": 1024, **rollout}
    values["train"] |= {"steps": 10, "tokens_per_micro_batch": 8192, "checkpoint_every": 0}
    return Preset(values, cluster, layers=4)


def _preset(cluster: Cluster, tp: int, pp: int, ep: int) -> Preset:
    return Preset(_full_size(cluster, tp, pp, ep), cluster)


PRESETS = {
    "tiny": Preset(TINY),
    "tiny-gpu": Preset(TINY_GPU),
    "tiny-http": Preset(TINY_HTTP),
    "16x4": _preset(Cluster(16, 4, 276), tp=4, pp=2, ep=16),
    "8x4": _preset(Cluster(8, 4, 276), tp=4, pp=2, ep=8),
    "8x8": _preset(Cluster(8, 8, 141), tp=8, pp=2, ep=16),
    "16x8": _preset(Cluster(16, 8, 141), tp=8, pp=4, ep=16),
    "slice-1x8": _slice(Cluster(1, 8, 141), 4, {"num_engines": 1, "engine_tp": 4}),
    # Servers on the GPUs that train: they sleep meanwhile.
    "slice-1x8-colocated": _slice(Cluster(1, 8, 141), 8, {"placement": "colocated", "num_engines": 1, "engine_tp": 8}),
    # One card has no room for a server beside the trainer: the embedded engine samples, on the same card.
    "slice-1x1": _slice(Cluster(1, 1, 141), 1, {"engine": "transformers", "num_engines": 1, "engine_tp": 1}),
}


def find_preset(name: str) -> Preset:
    """Raises ValueError that names the nearest preset."""
    if name not in PRESETS:
        nearest = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown preset {name!r}; the nearest is {nearest!r} (known: {', '.join(PRESETS)})")
    return PRESETS[name]


def preset(name: str) -> dict[str, Any]:
    """A copy of a preset's values, as section -> key -> value. Raises ValueError that names the nearest preset."""
    return copy.deepcopy(find_preset(name).values)
