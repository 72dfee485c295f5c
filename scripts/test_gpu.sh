#!/usr/bin/env bash
# Every check that needs a GPU, on one Hopper card. Seven minutes once kernels are compiled; the first run on a machine takes
# longer (Triton keeps compiled kernels in ~/.triton). Needs the `gpu` extra installed. What was last seen is in
# tests/golden/gpu_h200.json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export FLA_TILELANG=0 TOKENIZERS_PARALLELISM=false
exec python3 -m pytest -q -rA --durations=15 --numprocesses=2 --dist=loadfile tests/gpu "$@"
