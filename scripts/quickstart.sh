#!/usr/bin/env bash
# From nothing to a trained model on any machine with Python: installs, writes a tiny checkpoint, trains it with GRPO.
# Results go to runs/ in the folder it is called from.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

if [ ! -e runs/tiny-checkpoint ]; then
    echo "== writing a tiny GLM-5.3-Flash checkpoint to runs/tiny-checkpoint"
    glm5-next tiny-checkpoint runs/tiny-checkpoint
fi
echo "== training it with GRPO on two Megatron-Core ranks (preset tiny)"
exec glm5-next train --preset tiny "$@"
