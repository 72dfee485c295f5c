"""Planted faults: the real code with one thing wrong, for tests that must notice it."""

import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

from glm5_next.plugins import kernels
from glm5_next.plugins.kernels import naive

Change = Callable[[Callable], Callable]


@dataclass(frozen=True)
class Fault:
    """`owner.name` becomes `change(owner.name)`."""

    owner: ModuleType | type
    name: str
    change: Change


def edit(old: str, new: str) -> Change:
    """Compiles a function again with one passage of its source replaced; fails if the passage is gone."""

    def change(original: Callable) -> Callable:
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(old) == 1, (
            f"{original.__qualname__}: {old!r} is not there exactly once; update this control"
        )
        source = source.replace(old, new).replace("super()", "super(type(self), self)")
        namespace: dict[str, Any] = {}
        code = compile(source, f"<{original.__qualname__} with a fault>", "exec")
        exec(code, original.__globals__, namespace)  # noqa: S102 - of our own source, which is the point
        return namespace[original.__name__]

    return change


@contextlib.contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """The fault is in place inside, under every name by which the operators are called."""
    original = getattr(fault.owner, fault.name)
    replacement = fault.change(original)
    owners = {fault.owner, *(module for module in (naive, kernels) if getattr(module, fault.name, None) is original)}
    with contextlib.ExitStack() as undo:
        for owner in owners:
            undo.enter_context(mock.patch.object(owner, fault.name, replacement))
        yield
