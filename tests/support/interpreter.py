"""Triton 3.6.0's interpreter with numpy 2.5, which no longer turns an array of one element into an int.

`install()` before a kernel runs; `tests/cpu/test_triton_kernels.py` says when it can go.
"""

import os
from typing import Any


def install() -> None:
    """Kernels that are imported from here on are interpreted, and loops may have bounds known at run time."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_convert(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_convert
