#!/usr/bin/env bash
# Gives static tools (mypy, pyright, jedi) the tree that pip's editable hook gives the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build/typing/glm5_next
for folder in plugins bridge launchers; do
    ln -sfn "../../../$folder" "build/typing/glm5_next/$folder"
done
