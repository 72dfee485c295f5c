"""What this machine has for a run, and what is wrong with it. Needs no torch: what may be broken runs in a subprocess."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from glm5_next.launchers.network import choose_interface, interfaces
from glm5_next.launchers.ray_settings import OBJECT_STORE_BYTES

GIB = 2**30
IMPORT_DEADLINE = 180.0  # seconds; megatron.core on a cold, shared file system is slow
MIN_DISK_BYTES = 5 * GIB  # a tiny run with its checkpoints and plots
PYTHONS = ((3, 12), (3, 13))
LOCK_VARIABLE = "GLM5_NEXT_LOCK"  # set in our images: the lock that they were built from
NEEDED = ("torch", "megatron.core", "transformers", "mbridge", "ray", "math_verify")
OPTIONAL = (
    "transformer_engine.pytorch",
    "triton",
    "fla",
    "tilelang",
    "cudnn",
    "cutlass",
    "flash_mla",
    "flash_attn",
    "apex",
    "deep_ep",
    "sglang",
    "torch_memory_saver",  # SGLang gives memory back with it
    "vllm",
)


@dataclass(frozen=True)
class Finding:
    """One fact; `problem` says what is wrong with it and what to do."""

    topic: str
    name: str
    value: str
    problem: str | None = None


def default_lock() -> Path | None:
    """The lock of the image we run in, or the constraints of the checkout."""
    if LOCK_VARIABLE in os.environ:
        return Path(os.environ[LOCK_VARIABLE])
    constraints = Path(__file__).resolve().parents[1] / "constraints.txt"
    return constraints if constraints.is_file() else None


def read_lock(path: Path) -> dict[str, str]:
    """Name -> version of every `name==version` line; hashes, comments and markers are passed over."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ValueError(f"{path}: the lock cannot be read ({error.strerror})") from None
    pins = (re.match(r"([A-Za-z0-9][\w.-]*)==([\w.!+-]+)", line) for line in lines)
    return {_normal(pin[1]): pin[2] for pin in pins if pin}


def check_versions(lock: Path | None) -> Iterator[Finding]:
    """Python, what this package requires, and everything installed that the lock names."""
    wanted = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    here = ".".join(str(part) for part in sys.version_info[:3])
    yield Finding("version", "python", here, None if sys.version_info[:2] in PYTHONS else f"needs {wanted}")
    try:
        requirements = [Requirement(text) for text in metadata.requires("glm5-next") or ()]
    except metadata.PackageNotFoundError:
        yield Finding("version", "glm5-next", "not installed", "install it: pip install -e .")
        return
    pins = read_lock(lock) if lock else {}
    required = {_normal(item.name): item for item in requirements}
    for name in sorted(required.keys() | pins.keys()):
        yield from _version(name, required.get(name), pins.get(name))
    yield Finding("version", "lock", str(lock) if lock else "none: only ranges are checked")


def _version(name: str, requirement: Requirement | None, pin: str | None) -> Iterator[Finding]:
    needed = requirement is not None and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        if needed:
            yield Finding("version", name, "not installed", f"install {requirement}")
        elif requirement is not None:
            yield Finding("version", name, "not installed (optional)")
        return
    if requirement is not None and not requirement.specifier.contains(found, prereleases=True):
        yield Finding("version", name, found, f"needs {requirement.specifier}")
    elif pin is not None and not _same(found, pin):
        yield Finding("version", name, found, f"the lock says {pin}")
    elif requirement is not None:
        yield Finding("version", name, found)


def _same(found: str, pin: str) -> bool:
    """A lock without a local part ("+cu130") takes any."""
    a, b = Version(found), Version(pin)
    return a == b if b.local else a.public == b.public


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def check_packages(needed: tuple[str, ...] = NEEDED, optional: tuple[str, ...] = OPTIONAL) -> list[Finding]:
    """Imports each in a process of its own: an optional package that is half broken takes Megatron's import with it."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(lambda name: check_package(name, needed=name in needed), (*needed, *optional)))


def check_package(name: str, *, needed: bool) -> Finding:
    """Absent is fine for an optional package; present and not importable never is."""
    if find_spec(name.partition(".")[0]) is None:
        return Finding("package", name, "not installed", f"{name} is needed" if needed else None)
    command = [sys.executable, "-W", "ignore", "-c", f"import {name}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_DEADLINE, check=False)
    except subprocess.TimeoutExpired:
        return Finding("package", name, "broken", f"its import did not end within {IMPORT_DEADLINE:.0f} seconds")
    if done.returncode == 0:
        return Finding("package", name, "imports")
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1] if done.returncode > 0 and lines else f"killed by signal {-done.returncode}"
    return Finding("package", name, "broken", f"{last} (reinstall or remove it)")


def check_backends() -> Iterator[Finding]:
    """The devices, and the backend of every operator."""
    command = [sys.executable, "-W", "ignore", "-m", "glm5_next.launchers.runtime.backend_choice"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_DEADLINE, check=False)
    except subprocess.TimeoutExpired:
        yield Finding("backend", "all", "unknown", f"no answer within {IMPORT_DEADLINE:.0f} seconds")
        return
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        yield Finding("backend", "all", "unknown", lines[-1])
        return
    answer = json.loads(done.stdout.splitlines()[-1])
    yield Finding("backend", "devices", ", ".join(answer["gpus"]) or "CPU only")
    for operator, name in answer["backends"].items():
        yield Finding("backend", operator, name)


def check_gpu() -> Iterator[Finding]:
    """Every backend's outputs and gradients against the reference, on this machine's first GPU."""
    from glm5_next.launchers.gpu_check import check_backends as compute

    try:
        for check in compute():
            name = f"{check.operator} by {check.backend}"
            if check.skipped is not None:
                yield Finding("gpu", name, f"skipped: {check.skipped}")
            elif check.failure is not None:
                yield Finding("gpu", name, "failed", check.failure)
            else:
                value = f"{check.result}: error {check.error:.1e}, bound {check.bound:.1e}, {check.seconds:.0f} s"
                yield Finding(
                    "gpu", name, value, None if check.ok else "further from the reference than its precision explains"
                )
    except ValueError as error:
        yield Finding("gpu", "self-check", "not done", str(error))


def check_network(wanted: str | None) -> Iterator[Finding]:
    """Every interface, and the one that a job would use."""
    for item in interfaces():
        yield Finding("network", item.name, item.address)
    try:
        chosen = choose_interface(wanted)
    except ValueError as error:
        yield Finding("network", "chosen", "none", str(error))
        return
    yield Finding("network", "chosen", f"{chosen.name} ({chosen.address})")


def check_room(folder: Path, min_disk: float = MIN_DISK_BYTES, shared_memory: Path = Path("/dev/shm")) -> list[Finding]:
    """Free disk under a folder, shared memory for Ray's object store and NCCL, and main memory."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    disk = shutil.disk_usage(folder).free
    findings = [
        Finding(
            "room",
            f"disk at {folder.resolve()}",
            _gib(disk),
            _too_little(disk, min_disk, "free some, or name a folder"),
        )
    ]
    if shared_memory.is_dir():
        free = shutil.disk_usage(shared_memory).free
        fix = "raise the limit of shared memory (docker: --shm-size)"
        findings.append(Finding("room", str(shared_memory), _gib(free), _too_little(free, OBJECT_STORE_BYTES, fix)))
    return [*findings, Finding("room", "memory", _gib(psutil.virtual_memory().available))]


def _too_little(free: float, wanted: float, fix: str) -> str | None:
    return None if free >= wanted else f"less than {_gib(wanted)}: {fix}"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
