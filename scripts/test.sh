#!/usr/bin/env bash
# Everything that is checked: lint, types and all tests that need no GPU. The same set-up as quickstart.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

echo "== lint and types"
ruff check .
ruff format --check .
bash scripts/dev_links.sh
mypy

echo "== one process"
pytest --quiet --numprocesses=2 --dist=loadfile tests/cpu
echo "== several processes (gloo)"
pytest --quiet tests/distributed
echo "== end to end (Ray, command line)"
pytest --quiet tests/e2e
echo "all checks passed"
