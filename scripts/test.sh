#!/usr/bin/env bash
# Lint, types and the tests that need no GPU. The same set-up as quickstart.sh. With --all also the tests marked as long:
# more layouts of a kind that is tested anyway, and a run with rollout servers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

selected=(-m "not long")
if [ "${1:-}" = --all ]; then
    selected=()
fi

echo "== lint and types"
ruff check .
ruff format --check .
bash scripts/dev_links.sh
types=$(mktemp) log=$(mktemp)
mypy >"$types" 2>&1 & # beside the tests: it has one thread
mypy=$!
trap 'kill "$mypy" ${distributed:-} 2>/dev/null || true; rm -f "$types" "$log"' EXIT

echo "== one process"
failed=
pytest --quiet "${selected[@]}" --numprocesses=2 --dist=loadfile tests/cpu || failed="$failed tests/cpu"
wait "$mypy" || failed="$failed types"
cat "$types"

# Side by side: each spends much of its time on processes that start or wait for each other.
pytest --quiet "${selected[@]}" tests/distributed >"$log" 2>&1 &
distributed=$!
echo "== end to end (Ray, command line)"
pytest --quiet "${selected[@]}" tests/e2e || failed="$failed tests/e2e"
echo "== several processes (gloo, nodes of Ray)"
wait "$distributed" || failed="$failed tests/distributed"
cat "$log"
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
echo "all checks passed"
