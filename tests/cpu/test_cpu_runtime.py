"""The CPU runtime replaces exactly what it lists, once, and never in a process that uses a GPU."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5_next.plugins import cpu_runtime

ROOT = Path(__file__).resolve().parents[2]
TARGETS = [replacement.target for replacement in cpu_runtime.REPLACEMENTS]

# Every attribute of every module and class that holds a target (torch, torch.cuda, torch.Tensor, Megatron's modules).
SNAPSHOT = """
import functools, importlib, json, warnings
warnings.simplefilter("ignore")
import torch
from glm5_next.plugins import cpu_runtime

OWNERS = {}
for replacement in cpu_runtime.REPLACEMENTS:
    module, path = replacement.target.split(":")
    owners = path.split(".")[:-1]
    OWNERS[module + ":" + "".join(owner + "." for owner in owners)] = functools.reduce(
        getattr, owners, importlib.import_module(module)
    )

def snapshot():
    return {(prefix, name): value for prefix, owner in OWNERS.items() for name, value in vars(owner).items()}

def changed(before, after):
    keys = sorted(before.keys() | after.keys())
    return sorted(prefix + name for prefix, name in keys if before.get((prefix, name)) is not after.get((prefix, name)))
"""


def in_a_fresh_process(code: str, preamble: str = SNAPSHOT) -> Any:
    """What the code prints last, as JSON."""
    result = subprocess.run(
        [sys.executable, "-c", preamble + code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def installation():
    """One process: refused while CUDA looks initialised, then installed, then installed again."""
    return in_a_fresh_process("""
before = snapshot()
is_initialized, torch.cuda.is_initialized = torch.cuda.is_initialized, lambda: True
try:
    cpu_runtime.install()
    refusal = None
except RuntimeError as error:
    refusal = str(error)
torch.cuda.is_initialized = is_initialized
after_refusal = snapshot()
installed = [cpu_runtime.is_installed()]
cpu_runtime.install()
once = snapshot()
installed.append(cpu_runtime.is_installed())
cpu_runtime.install()

def refuse(*args):
    raise SystemExit("compiled")

print(json.dumps({
    "refusal": refusal,
    "changed_by_the_refused_call": changed(before, after_refusal),
    "installed": installed,
    "changed": changed(before, once),
    "changed_by_the_second_call": changed(once, snapshot()),
    "compiled_function": torch.compile(lambda x: x + 1, backend=refuse)(torch.ones(1)).item(),
}))
""")


def test_what_is_listed_is_what_changes_and_nothing_else(installation):
    assert installation["changed"] == sorted(TARGETS)


def test_importing_the_module_changes_nothing_and_installing_says_so(installation):
    assert installation["installed"] == [False, True]


def test_installing_twice_is_harmless(installation):
    assert installation["changed_by_the_second_call"] == []


def test_no_target_is_listed_twice_and_each_has_a_reason():
    assert len(set(TARGETS)) == len(TARGETS)
    assert all(len(replacement.why) > 10 for replacement in cpu_runtime.REPLACEMENTS)


def test_process_that_uses_a_gpu_is_refused_and_left_as_it_is(installation):
    assert "already uses a GPU" in installation["refusal"]
    assert installation["changed_by_the_refused_call"] == []


def test_packages_for_gpus_look_absent_and_are_refused_if_megatron_may_hold_them(tmp_path):
    (tmp_path / "transformer_engine.py").write_text("raise RuntimeError('imported on a CPU')")
    hidden = in_a_fresh_process(
        f"""
import json, sys, types
sys.path.insert(0, {str(tmp_path)!r})
from glm5_next.plugins import cpu_runtime
from glm5_next.plugins.kernels.registry import installed
before = installed("transformer_engine")
sys.modules["transformer_engine"] = types.ModuleType("transformer_engine")
try:
    cpu_runtime.install()
    refusal = None
except RuntimeError as error:
    refusal = str(error)
del sys.modules["transformer_engine"]
cpu_runtime.install()
installed.cache_clear()
print(json.dumps([before, refusal, installed("transformer_engine")]))
""",
        preamble="",
    )
    assert hidden == [
        True,
        "cpu_runtime.install() after transformer_engine was imported; call it before Megatron is imported",
        False,
    ]


def test_nothing_is_compiled(installation):
    assert installation["compiled_function"] == 2.0


def test_gpu_configuration_and_spec_never_touch_it():
    """All of plugins is imported and a configuration for a GPU is built; torch stays as it was."""
    modules = sorted(
        path.stem for path in (ROOT / "plugins").glob("*.py") if path.stem not in ("__init__", "cpu_runtime")
    )
    report = in_a_fresh_process(
        f"""
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
import torch
def attributes():
    cuda = [getattr(torch.cuda, name) for name in ("current_device", "Stream", "Event", "synchronize", "stream")]
    return [*cuda, torch.zeros, torch.tensor, torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.type]
before = attributes()
for module in {modules!r}:
    importlib.import_module("glm5_next.plugins." + module)
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.megatron_config import megatron_config
from glm5_next.plugins.topology import Topology
model = Glm5NextConfig.from_hf(json.loads({json.dumps(json.dumps(tiny_config()))}))
config = megatron_config(model, Topology(), dtype=torch.bfloat16, on_cpu=False)
same = all(a is b for a, b in zip(before, attributes()))
print(json.dumps([same, config.use_cpu_initialization, "glm5_next.plugins.cpu_runtime" in sys.modules]))
""",
        preamble="",
    )
    assert report == [True, False, False]


def tiny_config() -> dict[str, Any]:
    from tests.support.tiny import Case  # installs the runtime, which the other process must not

    return Case().text_config()


def imports_of_the_runtime(path: Path) -> list[ast.AST]:
    """Import statements that reach cpu_runtime, and calls of its install()."""
    found: list[ast.AST] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("cpu_runtime.install"):
            names = {"glm5_next.plugins.cpu_runtime"}
        else:
            continue
        if "glm5_next.plugins.cpu_runtime" in names:
            found.append(node)
    return found


@pytest.mark.parametrize("folder", ["plugins", "bridge"])
def test_no_library_module_imports_or_installs_it(folder):
    users = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py") if imports_of_the_runtime(path)]
    assert users == []


def says_cpu(node: ast.AST) -> bool:
    """A function with cpu in its name, or a branch with cpu in its condition."""
    if isinstance(node, ast.FunctionDef):
        return "cpu" in node.name
    return isinstance(node, ast.If) and "cpu" in ast.unparse(node.test)


def test_entry_points_install_it_only_where_the_code_says_cpu():
    for path in (ROOT / "launchers").rglob("*.py"):
        places = [node for node in ast.walk(ast.parse(path.read_text())) if says_cpu(node)]
        lines = {line for place in places for line in range(place.body[0].lineno, place.body[-1].end_lineno + 1)}
        outside = [node.lineno for node in imports_of_the_runtime(path) if node.lineno not in lines]
        assert not outside, f"{path.relative_to(ROOT)}: lines {outside} use cpu_runtime where a GPU may be in use"


@pytest.fixture
def runtime():
    cpu_runtime.install()


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 1)], ids=str)
def test_cuda_means_the_cpu(runtime, device):
    like = torch.ones(2)
    tensors = [
        torch.zeros(2, device=device),
        torch.tensor([1.0], device=device),
        torch.arange(3, device=device),
        torch.empty_like(like, device=device),
        like.to(device),
        like.to(device=device, dtype=torch.float64),
        like.to(device, torch.float64),
        like.cuda(),
    ]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert tensors[5].dtype == tensors[6].dtype == torch.float64


def test_other_devices_and_dtypes_mean_themselves(runtime):
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.ones(2).to("meta").device.type == "meta"
    assert torch.ones(2).to(torch.bfloat16).dtype == torch.bfloat16
    assert torch.ones(2).to(torch.zeros(1, dtype=torch.int64)).dtype == torch.int64
    assert torch.zeros(2).device.type == "cpu"


def test_type_names_are_those_that_megatron_compares_with(runtime):
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1).bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type(torch.float64).dtype == torch.float64
    assert torch.ones(1).type_as(torch.ones(1, dtype=torch.int32)).dtype == torch.int32


def test_streams_and_events_do_nothing(runtime):
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        event.record(torch.cuda.current_stream())
    stream.wait_event(event)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    assert event.query()
