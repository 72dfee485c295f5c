"""The packages listed in pyproject.toml are exactly the package folders on disk."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def test_every_package_folder_is_listed():
    on_disk = {
        f"glm5_next.{init.parent.relative_to(ROOT)}".replace("/", ".")
        for root in SETUPTOOLS["package-dir"].values()
        for init in (ROOT / root).rglob("__init__.py")
    }
    assert set(SETUPTOOLS["packages"]) == on_disk


def test_every_folder_with_python_files_is_a_package():
    for root in SETUPTOOLS["package-dir"].values():
        for path in (ROOT / root).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.relative_to(ROOT)} would be missing from a wheel"


def test_each_top_level_package_tells_type_checkers_that_it_is_typed():
    assert SETUPTOOLS["package-data"] == {"*": ["py.typed", "*.json", "fla_tuned/*.json"]}
    for root in SETUPTOOLS["package-dir"].values():
        assert (ROOT / root / "py.typed").exists()


def test_megatron_and_its_bridge_are_pinned_to_the_releases_this_is_written_against():
    assert {"megatron-core==0.19.2", "mbridge==0.15.1"} <= set(PROJECT["project"]["dependencies"])
