"""Collects what Triton's tuning of FLA's kernels found on this machine into plugins/kernels/fla_tuned/.

    python scripts/collect_fla_tuning.py [CACHE]      # default: ~/.triton/cache

Run it after a benchmark with FLA_CACHE_MODE=disabled, which tunes instead of reading that folder. Of every kernel the
fastest configuration for the largest problem is kept, in the format of FLA's `FLA_CONFIG_DIR`.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "plugins" / "kernels" / "fla_tuned"
SUFFIX = ".autotune.json"


def problem_size(record: dict[str, Any]) -> tuple[float, int]:
    """Of packed rows rather than of one document: their kernels have more arguments."""
    return math.prod(value for value in record["key"] if type(value) is int), len(record["key"])


def fastest(record: dict[str, Any]) -> dict[str, Any]:
    config, _ = min(record["configs_timings"], key=lambda pair: pair[1])
    return {name: value for name, value in config.items() if name != "pre_hook"}


def main() -> None:
    cache = Path(sys.argv[1]) if len(sys.argv) > 1 else Path.home() / ".triton" / "cache"
    records: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(cache.rglob(f"*{SUFFIX}")):
        records.setdefault(path.name.removesuffix(SUFFIX), []).append(json.loads(path.read_text()))
    if not records:
        raise SystemExit(f"{cache}: no results of tuning")
    FOLDER.mkdir(exist_ok=True)
    for kernel, found in records.items():
        largest = max(found, key=problem_size)
        content = {"kernel_name": kernel, "tuned_for": largest["key"], "default_config": fastest(largest)}
        (FOLDER / f"{kernel}.json").write_text(json.dumps(content, indent=1) + "\n")
        print(f"{kernel}: {content['default_config']}")


if __name__ == "__main__":
    main()
