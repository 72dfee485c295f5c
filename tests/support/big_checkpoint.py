"""A checkpoint with the released model's dimensions in two layers and some experts, on disk almost without bytes.

Files are sparse: of every tensor only a few strips have values, the rest reads as zeros.
"""

import hashlib
from pathlib import Path

import numpy as np

from glm5_next.bridge.hf_folder import write_index, write_json
from glm5_next.bridge.name_map import inventory
from glm5_next.bridge.shards import ShardPlan, Stored, create_shards, plan_shards
from glm5_next.bridge.tiny_config import RELEASED_WIDTHS, TinyModel, composite_config
from glm5_next.plugins.config import Glm5NextConfig

STRIP = 4096  # bytes with values, at the start, in the middle and at the end of a tensor


def write_big_checkpoint(out: Path, *, experts: int) -> int:
    """One KDA layer with a dense MLP and one DSA layer with `experts` experts; returns the bytes of all tensors."""
    raw = composite_config(
        TinyModel(layers=2, dense_layers=1, experts=experts, mtp=False, vision=False, **RELEASED_WIDTHS)
    )
    raw["text_config"]["layer_types"] = ["linear_attention", "deepseek_sparse_attention"]
    plans = plan_shards(inventory(Glm5NextConfig.from_hf(raw)), 5)
    out.mkdir(parents=True)
    create_shards(out, plans)
    for plan in plans:
        _fill(out / plan.file, plan)
    tensors = {name: stored for plan in plans for name, stored in plan.tensors.items()}
    write_index(out, dict(sorted(tensors.items())), {})
    write_json(out / "config.json", raw)
    return sum(stored.end - stored.begin for stored in tensors.values())


def _fill(path: Path, plan: ShardPlan) -> None:
    with path.open("r+b") as file:
        for name, stored in plan.tensors.items():
            generator = np.random.default_rng(list(hashlib.sha256(name.encode()).digest()))
            size = min(STRIP, stored.end - stored.begin)
            for at in strip_offsets(stored):
                file.seek(at)
                file.write(_numbers(generator, size))


def strip_offsets(stored: Stored) -> tuple[int, int, int]:
    """Where in its file a tensor has values: at its start, in the middle and before its end."""
    size = min(STRIP, stored.end - stored.begin)
    middle = (stored.begin + stored.end - size) // 2 // 4 * 4
    return stored.begin, max(stored.begin, middle), stored.end - size


def _numbers(generator: np.random.Generator, size: int) -> bytes:
    """Bytes that are finite numbers both as bf16 and as fp32: no exponent of all ones."""
    values = generator.integers(0, 2**16, size // 2, dtype=np.uint16)
    return (values & 0xBFFF).tobytes()
