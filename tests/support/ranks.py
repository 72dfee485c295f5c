"""Forked gloo ranks for tests; see `launchers.runtime.local_ranks`."""

from glm5_next.launchers.runtime.local_ranks import run_ranks

__all__ = ["run_ranks"]
