"""Writes a small random checkpoint in the file layout of the release: for newcomers, tests and smoke runs.

Everything that the release has is there in miniature: composite config, per-expert tensors, split convolutions, F32
tensors, MTP layer, vision tower, several shards with an index, tokenizer and processor files. No value is zero or one,
so that no operator can be left out unnoticed.
"""

import hashlib
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glm5_next.bridge.checkpoint import TORCH_DTYPES, as_bytes
from glm5_next.bridge.fp8 import quantize
from glm5_next.bridge.hf_folder import check_space, staged_folder, write_index, write_json
from glm5_next.bridge.name_map import LANGUAGE, SCALE_SUFFIX, inventory
from glm5_next.bridge.shards import ShardWriter, create_shards, plan_shards
from glm5_next.bridge.tiny_config import TinyModel, composite_config
from glm5_next.bridge.tiny_tokenizer import END_TOKENS, TOKEN_IDS, write_tokenizer
from glm5_next.plugins.config import Glm5NextConfig

# What is drawn for a tensor, by its name (first match): centre and standard deviation. All others are matrices: centre
# 0, deviation 1 / sqrt(fan in), so that every activation has a size near 1.
VALUES = (
    (re.compile(r".*norm\d?\.weight"), 1.0, 0.2),
    (re.compile(r".*\.bias"), 0.05, 0.2),
    (re.compile(r".*\.e_score_correction_bias"), 0.05, 0.1),
    (re.compile(r".*\.A_log"), 0.1, 0.5),
    (re.compile(r".*\.dt_bias"), -3.0, 1.0),  # a memory of a few to some hundred tokens
    (re.compile(r".*\.hc_(attn|ffn)_base"), 0.1, 0.7),
    (re.compile(r".*\.hc_(attn|ffn)_scale"), 0.6, 0.2),
    (re.compile(r".*\.index_kpool_compress_ape"), 0.1, 0.5),
    (re.compile(r".*\.embed_tokens\.weight"), 0.0, 1.0),
)
# The tensors that write into the residual streams.
STREAM_WRITERS = re.compile(re.escape(LANGUAGE) + r"(embed_tokens\.weight|.*\.(o_proj|down_proj)\.weight)")


def write_tiny_checkpoint(
    out: str | Path, *, seed: int = 0, spread: float = 1.0, stream_scale: float = 1.0, **sizes: Any
) -> Path:
    """Writes a random checkpoint to `out` and returns that path. `sizes` are the fields of TinyModel.

    The same arguments give the same bytes. `spread` multiplies every deviation from the centre of a tensor's values;
    `stream_scale` multiplies what writes into the residual streams, so their RMS is near it (the released model's is
    near 2e-3). Raises ValueError if `out` exists and is not empty or if the sizes do not fit together.
    """
    model = TinyModel(**sizes)
    raw_config = composite_config(model)
    plans = plan_shards(inventory(Glm5NextConfig.from_hf(raw_config)), model.shards)
    with staged_folder(out) as folder:
        check_space(Path(out), sum(plan.num_bytes for plan in plans))
        create_shards(folder, plans)
        shards = ShardWriter(folder, plans)
        for name, stored in shards.tensors.items():
            weight = shards.tensors[name.removesuffix(SCALE_SUFFIX)]
            values = _draw(name.removesuffix(SCALE_SUFFIX), weight.shape, seed, spread, stream_scale)
            if weight.dtype == "F8_E4M3":
                values = quantize(values.bfloat16())[name != name.removesuffix(SCALE_SUFFIX)]
            shards.write(name, [as_bytes(values.to(TORCH_DTYPES[stored.dtype]))])
        shards.check_complete()
        write_index(folder, dict(sorted(shards.tensors.items())), {})
        write_json(folder / "config.json", raw_config)
        write_tokenizer(folder)
        _write_other_files(folder)
    return Path(out)


def _draw(name: str, shape: tuple[int, ...], seed: int, spread: float, stream_scale: float) -> torch.Tensor:
    """A float32 tensor that depends on the seed and the tensor's own name only."""
    centre, deviation = 0.0, 1.0 / math.sqrt(math.prod(shape[1:]))
    for pattern, *numbers in VALUES:
        if pattern.fullmatch(name):
            centre, deviation = numbers
            break
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    normal = np.random.default_rng(list(digest)).standard_normal(shape, dtype=np.float32)
    scale = stream_scale if STREAM_WRITERS.fullmatch(name) else 1.0
    return torch.from_numpy(normal).mul_(deviation * spread).add_(centre).mul_(scale)


def _write_other_files(folder: Path) -> None:
    ends = [TOKEN_IDS[token] for token in END_TOKENS]
    generation = {"do_sample": True, "temperature": 1.0, "eos_token_id": ends, "pad_token_id": ends[0]}
    image = {"image_processor_type": "Glm5NextImageProcessor", "processor_class": "Glm5NextProcessor"}
    write_json(folder / "generation_config.json", generation)
    write_json(
        folder / "preprocessor_config.json", image | {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    )
    write_json(folder / "processor_config.json", {"processor_class": "Glm5NextProcessor"})
