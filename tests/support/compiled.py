"""Triton kernels compiled for a GPU that is not there: what a wrapper would launch is built and measured instead."""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Compiled:
    """Registers and bytes of stack per thread (a stack means spilled registers), bytes of shared memory per program."""

    name: str
    grid: tuple[int, ...]
    registers: int
    stack: int
    shared: int


@contextlib.contextmanager
def compiling() -> Iterator[list[Compiled]]:
    """Inside, a launch compiles the kernel for Hopper and runs nothing. Tensors may be on the meta device."""
    found: list[Compiled] = []

    def compile_instead(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(_compile(self, args, grid, kwargs))

    with mock.patch.object(JITFunction, "run", compile_instead):
        yield found


def _compile(kernel: JITFunction, args: tuple, grid: Any, kwargs: dict[str, Any]) -> Compiled:
    options = {name: kwargs[name] for name in ("num_warps", "num_stages") if name in kwargs}
    values = dict(zip(kernel.arg_names, args)) | {name: kwargs[name] for name in kernel.arg_names if name in kwargs}
    signature, constants, attributes = {}, {}, {}
    for number, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[(number,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[(number,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                attributes[(number,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    source = ASTSource(kernel, signature, constants, attributes)
    built = triton.compile(source, target=HOPPER, options=options)
    return Compiled(kernel.__name__, tuple(grid), *_resources(built.asm["cubin"]), built.metadata.shared)


def _resources(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert match, text
    return int(match[1]), int(match[2])
