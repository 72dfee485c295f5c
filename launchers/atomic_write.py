"""Files that are either whole or absent: written under a temporary name, flushed to disk, then renamed."""

import os
from pathlib import Path


def write_atomic(path: Path, content: bytes) -> None:
    """Replaces `path` with `content`; a crash at any moment leaves the old file or the new one.

    The temporary file lies next to `path` as `.<name>.<process id>.tmp`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)
