"""Hugging Face <-> Megatron weights. Importing this package makes mbridge's `AutoBridge` know GLM-5.3-Flash.

mbridge pulls in Megatron and transformers (10 s), which most of this package does not need. So nothing is imported
here: our bridge registers itself at the moment mbridge is imported, by whoever does it.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

BRIDGE_MODULE = "glm5_next.bridge.mbridge_bridge"


class _ThenRegister(Loader):
    """mbridge's own loader, and our registration after it."""

    def __init__(self, loader: Loader):
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        importlib.import_module(BRIDGE_MODULE)


class _WhenMbridgeIsImported(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "mbridge":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


if "mbridge" in sys.modules:
    importlib.import_module(BRIDGE_MODULE)
else:
    sys.meta_path.insert(0, _WhenMbridgeIsImported())
