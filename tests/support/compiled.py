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
    """Registers and bytes of stack per thread (a stack means spilled registers), bytes of shared memory per program.

    overwritten: buffers that are filled again while a product of matrices may still read them (a race).
    """

    name: str
    grid: tuple[int, ...]
    registers: int
    stack: int
    shared: int
    overwritten: tuple[str, ...]


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
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):  # as a launch has it
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
    overwritten = tuple(_overwritten(built.asm["ttgir"], built.metadata.num_stages))
    return Compiled(kernel.__name__, tuple(grid), *_resources(built.asm["cubin"]), built.metadata.shared, overwritten)


def _overwritten(ttgir: str, stages: int) -> Iterator[str]:
    """Operands of products that a loop leaves running while it loads `stages - 1` steps ahead, in fewer than `stages` buffers.

    Triton 3.6 counts one buffer less for rows that are also read into registers, as if nothing else read them.
    """
    buffers = dict(re.findall(r"(%[\w]+) = ttg\.memdesc_index [^:]*: !ttg\.memdesc<(\d+)x", ttgir))
    for name, source in re.findall(r"(%[\w]+) = ttg\.memdesc_(?:trans|subslice) (%[\w]+)", ttgir):
        buffers[name] = buffers.get(source, stages)
    for loop in re.findall(r"= scf\.for (.*?)scf\.yield", ttgir, flags=re.DOTALL):
        waits = re.findall(r"warp_group_dot_wait [^\n]*pendings = (\d+)", loop)
        if not waits or waits[-1] == "0":
            continue
        for operands in re.findall(r"warp_group_dot (%[\w#]+), (%[\w#]+), [^\n]*isAsync = true", loop):
            yield from (name for name in operands if int(buffers.get(name, stages)) < stages)


def _resources(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert match, text
    return int(match[1]), int(match[2])
