"""Importing the bridge costs nothing, and mbridge knows the model whichever of the two is imported first."""

import importlib
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.support import tiny  # noqa: F401 - installs the CPU runtime
from tests.support.ranks import run_ranks


def run(code: str, folder: Path | None = None) -> str:
    """What the code prints, in a fresh process that sees `folder` first."""
    path = f"import sys; sys.path.insert(0, {str(folder)!r})\n" if folder else ""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", path + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def stand_ins(folder: Path) -> Path:
    """An mbridge and a bridge module that only note that they were imported."""
    (folder / "mbridge").mkdir()
    (folder / "mbridge" / "__init__.py").write_text("print('mbridge')\n")
    (folder / "mbridge" / "core.py").write_text("print('mbridge.core')\n")
    (folder / "stand_in_bridge.py").write_text("import mbridge.core\nprint('ours')\n")
    return folder


def test_importing_the_bridge_imports_neither_torch_nor_mbridge():
    heavy = run("""
        import sys
        import glm5_next.bridge
        print(sorted({"torch", "mbridge", "megatron", "transformers", "numpy"} & set(sys.modules)))
    """)
    assert heavy == "[]"


def test_our_bridge_follows_mbridge_once_when_mbridge_comes_later(tmp_path):
    printed = run(
        """
        import sys
        import glm5_next.bridge
        glm5_next.bridge.BRIDGE_MODULE = "stand_in_bridge"
        finders = len(sys.meta_path)
        print("before")
        import mbridge
        import mbridge.core
        assert len(sys.meta_path) == finders - 1, "the hook stays behind"
        """,
        stand_ins(tmp_path),
    )
    assert printed.split() == ["before", "mbridge", "mbridge.core", "ours"]


def test_importing_a_part_of_mbridge_first_is_enough(tmp_path):
    printed = run(
        """
        import glm5_next.bridge
        glm5_next.bridge.BRIDGE_MODULE = "stand_in_bridge"
        from mbridge.core import __name__
        """,
        stand_ins(tmp_path),
    )
    assert printed.split() == ["mbridge", "mbridge.core", "ours"]


def test_a_missing_mbridge_is_reported_as_python_does(tmp_path):
    (tmp_path / "mbridge.py").write_text("raise ModuleNotFoundError('No module named numpy_of_mbridge')\n")
    printed = run(
        """
        import glm5_next.bridge
        for _ in range(2):
            try:
                import mbridge
            except ModuleNotFoundError as error:
                print(error)
        """,
        tmp_path,
    )
    assert printed.splitlines() == ["No module named numpy_of_mbridge"] * 2


def mbridge_first() -> tuple[list[str], list[str]]:
    """Our models that mbridge knows before and after our bridge is imported, in a process that forgets both first."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "_WhenMbridgeIsImported"]
    for name in [name for name in sys.modules if name.split(".")[0] == "mbridge"]:
        del sys.modules[name]
    for name in ("glm5_next.bridge", "glm5_next.bridge.mbridge_bridge"):
        sys.modules.pop(name, None)
    auto_bridge = importlib.import_module("mbridge").AutoBridge
    before = [name for name in auto_bridge.list_supported_models() if name.startswith("glm5")]
    importlib.import_module("glm5_next.bridge")
    return before, [name for name in auto_bridge.list_supported_models() if name.startswith("glm5")]


def test_mbridge_that_was_imported_before_knows_the_model_too():
    """The real one; the other order is in tests/distributed/test_bridge_layouts.py."""
    assert run_ranks(mbridge_first, 1, timeout=60) == [([], ["glm5_next", "glm5_next_text"])]
