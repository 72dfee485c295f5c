#!/usr/bin/env bash
# Every check that needs a GPU, on one Hopper card, in under eight minutes once kernels are compiled and tuned; the first run
# on a machine takes longer, because Triton tunes FLA's kernels (its cache is kept). Needs the `gpu` extra installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export FLA_TILELANG=0 TOKENIZERS_PARALLELISM=false
exec python3 -m pytest -q -rA --durations=15 tests/gpu "$@"
