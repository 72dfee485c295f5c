"""FLA's kernels without tuning: on first use FLA 0.6.0 tries some 300 configurations, for minutes, and ranks may differ in
what they find. `fla_tuned/` holds what an H200 found for the released sizes, one configuration a kernel."""

import importlib
import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "fla_tuned"
MODE = "FLA_CACHE_MODE"  # FLA's own switch; who sets it is left alone ("disabled" tunes as before)


def use_tuned_configurations() -> bool:
    """Makes FLA read its configurations from `FOLDER`; returns whether it does. Right for Hopper GPUs."""
    if MODE in os.environ:
        return False
    os.environ |= {MODE: "default", "FLA_CONFIG_DIR": str(FOLDER)}
    # FLA reads the switch when it is imported, which Megatron may have done before.
    cache: Any = importlib.import_module("fla.ops.utils.cache")
    cache.FLA_CACHE_MODE = cache.FlaCacheMode.DEFAULT
    return True
