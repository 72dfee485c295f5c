"""What may import what."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = {"plugins": ("bridge", "launchers"), "bridge": ("launchers",), "launchers": ()}
# Usable on a laptop without the GPU stack.
LIGHT = (
    "plugins.config",
    "plugins.topology",
    "bridge.name_map",
    "launchers.config",
    "launchers.presets",
    "launchers.doctor",
    "launchers.slurm_commands",
    "launchers.node",
    "launchers.cli",
)
HEAVY = ("torch", "megatron", "ray", "fla", "transformer_engine")


def imported_modules(source: str) -> set[str]:
    """Every module an import statement names, `from package import module` counted as the module too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def forbidden_imports(folder: str, source: str) -> set[str]:
    banned = tuple(f"glm5_next.{name}" for name in FORBIDDEN[folder])
    return {module for module in imported_modules(source) if banned and module.startswith(banned)}


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_dependencies_point_one_way(folder):
    for path in (ROOT / folder).rglob("*.py"):
        wrong = forbidden_imports(folder, path.read_text())
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


@pytest.mark.parametrize(
    "source",
    [
        "import glm5_next.bridge.load",
        "from glm5_next.launchers import grpo",
        "from glm5_next import bridge",
        "def load():\n    from glm5_next.bridge.load import load_weights",
    ],
)
def test_a_wrong_import_would_be_found(source):
    assert forbidden_imports("plugins", source)


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_are_absolute_and_by_the_package_name(folder):
    """A relative import, or `import plugins`, would load the same file under a second name."""
    for path in (ROOT / folder).rglob("*.py"):
        modules = imported_modules(path.read_text())
        wrong = {name for name in modules if name.startswith(".") or name.split(".")[0] in FORBIDDEN}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


@pytest.mark.parametrize("module", LIGHT)
def test_light_module_needs_no_gpu_stack(module):
    code = f"import sys; sys.modules.update(dict.fromkeys({HEAVY})); import glm5_next.{module}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_heavy_module_would_be_noticed():
    code = f"import sys; sys.modules.update(dict.fromkeys({HEAVY})); import glm5_next.plugins.norm"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode != 0 and "torch" in result.stderr
