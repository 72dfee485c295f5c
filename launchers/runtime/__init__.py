"""What needs torch, Megatron or Ray. Ray reads its environment when it is imported, so its settings are made here."""

import os

from glm5_next.launchers.ray_settings import ask_for_a_key

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# A dead process is reported by the run itself, in one message.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")
ask_for_a_key()
