"""Hugging Face <-> Megatron weights. Importing this package registers its bridge with mbridge."""

from importlib.util import find_spec

# The name table is also useful where neither torch nor Megatron is installed.
if find_spec("torch") is not None and find_spec("megatron") is not None:
    from glm5_next.bridge import mbridge_bridge as mbridge_bridge
