"""The model as transformers computes it, on a CPU and in plain torch: what everything else is compared with."""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.name_map import LANGUAGE, VISION
from glm5_next.bridge.shards import shorten

MODELING = "transformers.models.glm5_next.modeling_glm5_next"
# transformers binds these at import time, whatever the device, and they run on GPUs only.
GPU_PACKAGES = ("fla", "causal_conv1d")
# An unread vision tower of the default size would cost 563 million random parameters.
ABSENT_VISION = {
    "depth": 1,
    "hidden_size": 8,
    "num_heads": 1,
    "intermediate_size": 8,
    "projection_intermediate_size": 8,
}


def load_reference(folder: str | Path, dtype: Literal["float32", "bfloat16"] = "float32") -> Any:
    """Loads a checkpoint into transformers' Glm5NextForConditionalGeneration, in eval mode on the CPU.

    Every tensor of the checkpoint is loaded except the MTP layers, which transformers does not have. A checkpoint
    without vision tower gives a model without one (`model.model.visual` is None). Raises ValueError if the checkpoint
    does not fit its config, or if transformers' model was already imported with GPU kernels bound into it.
    """
    checkpoint = Checkpoint(folder)
    checkpoint.check_inventory()
    modeling = import_modeling()
    config = modeling.Glm5NextConfig.from_pretrained(folder)
    if checkpoint.config.vision is None:
        config.vision_config = modeling.Glm5NextVisionConfig(
            **ABSENT_VISION, out_hidden_size=checkpoint.config.hidden_size
        )
    with _quiet_transformers():
        model, report = modeling.Glm5NextForConditionalGeneration.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
    _check_report(checkpoint, report)
    if checkpoint.config.vision is None:
        model.model.visual = None
    return model.eval()


def import_modeling() -> ModuleType:
    """transformers' modeling file, bound to its torch operators even where FLA is installed.

    Raises ValueError if something imported it before with FLA within reach.
    """
    installed = [package for package in GPU_PACKAGES if importlib.util.find_spec(package)]
    module = sys.modules.get(MODELING)
    if module is None:
        with _hidden(installed):
            module = importlib.import_module(MODELING)
        module.bound_to_torch = True  # type: ignore[attr-defined]
        # It warns at the first forward that the torch operators are slow.
        logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    if installed and not hasattr(module, "bound_to_torch"):
        raise ValueError(
            f"{MODELING} was imported with {' and '.join(installed)} installed, so it would call GPU kernels on the CPU; "
            "call glm5_next.bridge.reference.import_modeling() before anything else imports it"
        )
    return module


def disk_views(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name on disk -> a view of the memory that holds the tensor in a model from `load_reference`.

    Holds all text and vision tensors. Writing into a view changes the model. Dtypes are the model's, not the file's.
    """
    return {
        name: view
        for key, tensor in model.state_dict().items()  # detached, but the same memory; buffers included
        for name, view in _views(key, tensor)
    }


def _views(key: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if key.endswith("self_attn.conv1d.weight"):
        for part, rows in zip("qkv", tensor.chunk(3), strict=True):
            yield key.replace("conv1d", f"{part}_conv1d"), rows
    elif key.endswith("mlp.experts.gate_up_proj"):
        for expert, both in enumerate(tensor):
            for part, rows in zip(("gate", "up"), both.chunk(2), strict=True):
                yield key.replace("gate_up_proj", f"{expert}.{part}_proj.weight"), rows
    elif key.endswith("mlp.experts.down_proj"):
        for expert, weight in enumerate(tensor):
            yield key.replace("down_proj", f"{expert}.down_proj.weight"), weight
    else:
        renamed = key.replace(".forget_gate.", ".").replace(".attn_hc.", ".hc_attn_").replace(".ffn_hc.", ".hc_ffn_")
        yield renamed, tensor


def _check_report(checkpoint: Checkpoint, report: dict[str, Any]) -> None:
    """transformers loads what fits and reports the rest; here only MTP layers and an absent tower may be reported."""
    config = checkpoint.config
    # By layer, not by name: transformers reports experts by their stacked names.
    mtp = tuple(f"{LANGUAGE}layers.{config.num_layers + depth}." for depth in range(config.num_mtp_layers))
    missing = {key for key in report["missing_keys"] if config.vision or not key.startswith(VISION)}
    problems = {
        "did not find": missing,
        "did not use": {key for key in report["unexpected_keys"] if not key.startswith(mtp)},
        "could not fit": {str(item) for item in report["mismatched_keys"]},
        "failed with": set(report["error_msgs"]),
    }
    for what, names in problems.items():
        if names:
            raise ValueError(f"{checkpoint.folder}: transformers {what} {shorten(sorted(names))}")


@contextmanager
def _hidden(packages: list[str]) -> Iterator[None]:
    """Makes packages look absent to import statements; parts of them that are loaded come back afterwards."""
    loaded = {name: module for name, module in sys.modules.items() if name.split(".")[0] in packages}
    for name in loaded:
        del sys.modules[name]
    sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for package in packages:
            del sys.modules[package]
        sys.modules.update(loaded)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bar, and no report of MTP layers as unexpected: `_check_report` reads it instead."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
