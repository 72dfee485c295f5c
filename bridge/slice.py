"""Cuts a checkpoint to its first layers: the small checkpoint with real weights that smoke runs use."""

import copy
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.conversion import Options, Report, convert, in_pieces, input_files, largest_group
from glm5_next.bridge.hf_folder import carried_files, check_outside, copy_tensor, write_index, write_json
from glm5_next.bridge.name_map import LANGUAGE, VISION, TensorInfo, inventory
from glm5_next.bridge.pieces import Progress, Work, flush
from glm5_next.bridge.shards import ShardWriter, create_shards, plan_shards, resolve_inside
from glm5_next.bridge.values import STAGING_BYTES
from glm5_next.plugins.config import Glm5NextConfig

SHARD_BYTES = 5_000_000_000
LAYER = re.compile(r"(?<=layers\.)\d+(?=\.|$)")


def slice_checkpoint(
    source: Checkpoint, out: Path, *, layers: int, mtp: bool = True, vision: bool = True, options: Options
) -> Report:
    """Writes the first `layers` layers of a checkpoint, with embedding, norm and head, byte for byte.

    The multi-token-prediction layer follows the last layer that is kept; it and the vision tower can be left out. Config
    and index are rewritten, everything else is copied. Holds a few pieces of tensors in memory. Raises ValueError for a
    number of layers that the checkpoint does not have.
    """
    source.check_inventory()
    check_outside(out, source)
    raw_config = sliced_config(source.raw_config, layers, mtp=mtp, vision=vision)
    config = Glm5NextConfig.from_hf(raw_config)
    moved = layers - source.config.num_layers  # of the multi-token-prediction layer
    origin = {name: _renumbered(name, layers, -moved) for name in inventory(config)}
    infos = {name: TensorInfo(source.stored(old).dtype, source.stored(old).shape) for name, old in origin.items()}
    total = sum(source.stored(old).end - source.stored(old).begin for old in origin.values())
    plans = plan_shards(infos, max(1, math.ceil(total / SHARD_BYTES)))
    places = [place for plan in plans for place in plan.tensors.items()]
    pieces = [[name for name, _ in piece] for piece in in_pieces(places, lambda place: place[1].end - place[1].begin)]
    settings = {
        "conversion": "slice",
        "source": str(source.folder.resolve()),
        "layers": layers,
        "mtp": mtp,
        "vision": vision,
        "pieces": len(pieces),
    }
    work = Work(out, inputs=input_files(source), settings=settings)
    shards = ShardWriter(work.folder, plans)

    def do(number: int, progress: Progress) -> dict[str, Any]:
        for name in pieces[number]:
            copy_tensor(shards, name, source, origin[name])
            progress(shards.tensors[name].end - shards.tensors[name].begin)
        for file in sorted({shards.tensors[name].file for name in pieces[number]}):
            flush(work.folder / file)
        return {}

    def complete(folder: Path) -> None:
        write_index(folder, {name: shards.tensors[name] for name in sorted(shards.tensors)}, {})
        for name in carried_files(source.folder):
            shutil.copyfile(resolve_inside(source.folder, name), folder / name)
        write_json(folder / "config.json", raw_config)

    return convert(
        work,
        lambda folder: create_shards(folder, plans),
        [sum(shards.tensors[name].end - shards.tensors[name].begin for name in piece) for piece in pieces],
        do,
        complete,
        options,
        per_worker=2 * STAGING_BYTES,
        shared=2 * STAGING_BYTES,
        group_bytes=largest_group((name, stored.end - stored.begin) for name, stored in shards.tensors.items()),
        passed_through={},
    )


def sliced_config(raw_config: dict[str, Any], layers: int, *, mtp: bool, vision: bool) -> dict[str, Any]:
    """config.json of the first layers: every list with one entry per layer is cut, unknown keys stay."""
    raw = copy.deepcopy(raw_config)
    text = raw.get("text_config", raw)
    before = text["num_hidden_layers"]
    if not 1 <= layers <= before:
        raise ValueError(f"--layers is {layers}; the checkpoint has {before} layers")
    for key, value in text.items():
        if isinstance(value, list) and len(value) == before and not key.endswith("_token_id"):
            text[key] = value[:layers]
    text["num_hidden_layers"] = layers
    if "first_k_dense_replace" in text:
        text["first_k_dense_replace"] = min(text["first_k_dense_replace"], layers)
    for section in (raw, text):
        if not mtp and "num_nextn_predict_layers" in section:
            section["num_nextn_predict_layers"] = 0
        if (quantization := section.get("quantization_config")) is not None:
            last = before + (text.get("num_nextn_predict_layers") or 0)
            kept = {number: number for number in range(layers)}
            kept |= {number: number - before + layers for number in range(before, last)}
            key = "modules_to_not_convert"
            quantization[key] = list(_renumbered_modules(quantization.get(key) or [], kept))
    if not vision:
        raw.pop("vision_config", None)
    return raw


def _renumbered_modules(modules: list[str], kept: dict[int, int]) -> Iterator[str]:
    for module in modules:
        match = LAYER.search(module) if VISION.removesuffix(".") not in module else None
        if match is None:
            yield module
        elif int(match[0]) in kept:
            yield LAYER.sub(str(kept[int(match[0])]), module, count=1)


def _renumbered(name: str, layers: int, moved: int) -> str:
    """A tensor's name in the source: layers after the trunk have moved down."""
    match = LAYER.search(name) if name.startswith(LANGUAGE) else None
    if match is None or int(match[0]) < layers:
        return name
    return LAYER.sub(str(int(match[0]) + moved), name, count=1)
