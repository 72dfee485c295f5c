"""The command that starts a real server for this model, with backends that record what replay needs."""

from glm5_next.launchers.config import RunConfig
from glm5_next.plugins.config import Glm5NextConfig


def engine_command(run: RunConfig, model: Glm5NextConfig) -> tuple[str, ...]:
    """Words with placeholders (see rollout.launch); raises ValueError for flags that cannot work together."""
    raise ValueError("rollout.launch is not set")
