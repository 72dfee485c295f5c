"""Downloads from the Hugging Face hub: weights, JSON and tokenizer files of a model, JSONL of a data set. No code.

A download that was interrupted goes on where it stopped; files that are there are not fetched again. The hub's own
variables (HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE) apply; a token is never printed.
"""

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glm5_next.bridge.hf_folder import check_space

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")
DATA_FILES = ("*.jsonl",)


def fetch_model(repository: str, revision: str | None, out: Path) -> Path:
    """The model's folder."""
    return _fetch(repository, "model", revision, out, MODEL_FILES)


def fetch_prompts(repository: str, revision: str | None, out: Path) -> Path:
    """The one JSONL file of a data set. Raises ValueError if there is none, or several."""
    folder = _fetch(repository, "dataset", revision, out, DATA_FILES)
    files = sorted(path for path in folder.rglob("*.jsonl") if ".cache" not in path.parts)
    if len(files) != 1:
        names = ", ".join(str(path.relative_to(folder)) for path in files) or "none"
        raise ValueError(
            f"{repository}: needs exactly one .jsonl file, it has {names}; give --prompts FILE (a "
            ".parquet file is answered with the command that makes JSONL of it)"
        )
    return files[0]


def _fetch(repository: str, kind: str, revision: str | None, out: Path, patterns: Sequence[str]) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        info: Any = HfApi().repo_info(repository, repo_type=kind, revision=revision, files_metadata=True)
        wanted = {item.rfilename: item.size or 0 for item in info.siblings if _matches(item.rfilename, patterns)}
        check_space(out, sum(size for name, size in wanted.items() if not (out / name).exists()))
        # The commit, not the branch: a download in two goes must not mix two versions.
        folder = snapshot_download(
            repository, repo_type=kind, revision=info.sha, local_dir=out, allow_patterns=list(patterns)
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()
        raise ValueError(
            f"{repository}: cannot be fetched from the hub ({type(error).__name__}: {reason[0] if reason else 'no reason'}); "
            "check name and network, or give a local path"
        ) from None
    return Path(folder)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
