"""Hugging Face folder <-> Megatron distributed checkpoint, with what a run needs to know of a checkpoint.

Needs neither Megatron nor a process group: the files are read and written piece by piece, without a model.
"""

import json
from dataclasses import asdict
from pathlib import Path

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.conversion import Options, Report
from glm5_next.bridge.dist_names import regions
from glm5_next.bridge.dist_read import DistCheckpoint
from glm5_next.bridge.hf_folder import ExportDtype
from glm5_next.bridge.name_map import model_tensors
from glm5_next.bridge.pieces import flush
from glm5_next.bridge.to_hf import to_hf
from glm5_next.bridge.to_megatron import to_megatron
from glm5_next.launchers.runtime.checkpoint_folder import MARKER, ORIGIN_FILE, STATE_FILE, Origin, check_finished


def hf_to_megatron(source: Path, out: Path, options: Options | None = None) -> Report:
    """Writes a Hugging Face folder as a distributed checkpoint that any layout can load; the marker is the last file."""
    checkpoint = Checkpoint(source)
    dtype = checkpoint.config.dtype
    origin = Origin(hf=str(source.resolve()), precision={"bfloat16": "bf16", "float32": "fp32"}[dtype])

    def complete(folder: Path) -> None:
        (folder / ORIGIN_FILE).write_text(json.dumps(asdict(origin)))

    report = to_megatron(checkpoint, out, precision=dtype, complete=complete, options=options or Options())
    if report.is_finished:
        (out / MARKER).touch()  # has no content, so it is whole or not there
        flush(out)
    return report


def check_conversion(folder: Path, source: Checkpoint, precision: str) -> None:
    """Raises ValueError unless `folder` is what `hf_to_megatron` made of this very source, in this precision.

    Engines start from the source, so no other weights will do, not even those of a run. Values are not compared.
    """
    check_finished(folder)
    if (folder / STATE_FILE).exists():
        raise ValueError(f"{folder}: is the checkpoint of a run; model.megatron_checkpoint takes what convert made")
    origin = Origin.load(folder)
    if Path(origin.hf) != source.folder.resolve():
        raise ValueError(f"{folder}: was made of {origin.hf}, model.checkpoint is {source.folder}; convert that")
    if origin.precision != precision:
        raise ValueError(
            f"{folder}: holds {origin.precision} and model.precision is {precision}; without model.megatron_checkpoint "
            f"the weights are read from {source.folder} and cast"
        )
    held = DistCheckpoint(folder)
    for entry in model_tensors(source.config, mtp=False):
        for region in regions(entry, source.config):
            held.check(region)


def megatron_to_hf(
    source: Path, out: Path, hf: Path | None, dtype: ExportDtype | None = None, options: Options | None = None
) -> Report:
    """Writes the weights of a distributed checkpoint (a converted one or a run's) as a Hugging Face folder.

    `hf` is the folder that config, tokenizer and untrained tensors come from; by default the one the checkpoint names.
    Without `dtype` a run in bf16 gives the source's dtypes, one in fp32 fp32.
    """
    check_finished(source)
    origin = Origin.load(source)
    checkpoint = Checkpoint(Path(origin.hf) if hf is None else hf)
    return to_hf(
        DistCheckpoint(source), checkpoint, out, dtype=dtype or origin.export_dtype, options=options or Options()
    )
