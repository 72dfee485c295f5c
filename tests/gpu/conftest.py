"""These tests need a Hopper GPU and the packages of the `gpu` extra; elsewhere all of them are skipped, here and only here."""

from pathlib import Path

import pytest
import torch

from glm5_next.plugins.kernels.registry import DISTRIBUTIONS, installed

PACKAGES = ("transformer_engine", "fla", "flash_mla", "cudnn", "cutlass", "tilelang")


def why_not() -> str | None:
    """What this machine lacks."""
    if not torch.cuda.is_available():
        return "needs a Hopper GPU; torch.cuda.is_available() is False"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"needs a Hopper GPU; this one has compute capability {torch.cuda.get_device_capability()}"
    missing = [package for package in PACKAGES if not installed(package)]
    return f"package {missing[0]} is missing; install {DISTRIBUTIONS[missing[0]]}" if missing else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    here = Path(__file__).parent
    for item in items:
        if reason is not None and here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def memory_goes_back():
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
