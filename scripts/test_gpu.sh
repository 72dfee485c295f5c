#!/usr/bin/env bash
# Every check that needs a GPU, on one Hopper card. Meant for eight minutes once kernels are compiled and tuned; the first run
# on a machine takes several minutes more, because Triton tunes FLA's kernels (its cache, ~/.triton, is kept). Needs the
# `gpu` extra installed. What was last seen is in tests/golden/gpu_h200.json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export FLA_TILELANG=0 TOKENIZERS_PARALLELISM=false
exec python3 -m pytest -q -rA --durations=15 --numprocesses=2 --dist=loadfile tests/gpu "$@"
