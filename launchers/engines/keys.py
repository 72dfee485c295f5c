"""Where the servers' key comes from. It is passed on in memory, environments and files of mode 600, never in words of a command."""

import os
import secrets
from pathlib import Path


def find_key(source: str) -> str:
    """A new key ("generated"), or what "env:NAME" or "file:PATH" holds. Raises ValueError if that is nothing."""
    kind, _, place = source.partition(":")
    if kind == "generated":
        return secrets.token_urlsafe(32)
    if kind == "file":
        return read_key(Path(place))
    key = os.environ.get(place, "")
    if not key:
        raise ValueError(f"rollout.api_key is {source!r}, but the environment has no {place}")
    return key


def read_key(path: Path) -> str:
    """The key in a file that only its owner can read; raises ValueError otherwise."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; it has to hold the key of the servers")
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{path}: others can read this key; make it mode 600")
    key = path.read_text().strip()
    if not key:
        raise ValueError(f"{path}: empty; it has to hold the key of the servers")
    return key
