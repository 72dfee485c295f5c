"""A checkpoint with the released layers' dimensions converts within a memory limit that the operating system enforces."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.memory import GIB, plan_memory, resident_bytes
from tests.support.big_checkpoint import STRIP, strip_offsets, write_big_checkpoint

LIMIT = int(2.5 * GIB)
EXPERTS = 52

CONVERT = """
    import json, os, sys
    os.fsync = lambda descriptor: None  # the disk is not what is tested
    from pathlib import Path
    from glm5_next.bridge.conversion import Options
    from glm5_next.launchers.runtime.convert import hf_to_megatron, megatron_to_hf
    source, megatron, back = map(Path, sys.argv[1:])
    plans = []
    options = Options(workers=2, on_plan=lambda plan: plans.append(plan.memory.predicted_peak))
    reports = [hf_to_megatron(source, megatron, options), megatron_to_hf(megatron, back, None, options=options)]
    print(json.dumps([[plan, report.measured_peak, report.num_bytes] for plan, report in zip(plans, reports)]))
"""
HOLD_EVERYTHING = """
    import sys
    from glm5_next.bridge.checkpoint import Checkpoint
    checkpoint = Checkpoint(sys.argv[1])
    held = {name: checkpoint.read(name) for name in checkpoint.tensors}
"""


def limited(code: str, *arguments: Path) -> tuple[subprocess.CompletedProcess, int]:
    """Runs Python code that may not hold more than LIMIT of private memory; its peak resident set, as wait4 says."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_DATA, ({LIMIT}, {LIMIT}))\n"
    command = [sys.executable, "-W", "ignore", "-c", limit + textwrap.dedent(code), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        out, errors = process.stdout.read(), process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return subprocess.CompletedProcess(command, process.returncode, out, errors), usage.ru_maxrss * 1024


def differing_strips(a: Path, b: Path) -> list[str]:
    """Tensors that differ where `write_big_checkpoint` has put values; all places are the same in both folders."""
    first, second = Checkpoint(a), Checkpoint(b)
    assert first.tensors == second.tensors
    return [name for name in first.tensors if strips(first, name) != strips(second, name)]


def strips(checkpoint: Checkpoint, name: str) -> list[bytes]:
    stored = checkpoint.tensors[name]
    with (checkpoint.folder / stored.file).open("rb") as file:
        return [os.pread(file.fileno(), STRIP, at) for at in strip_offsets(stored)]


@pytest.fixture
def big(tmp_path):
    size = write_big_checkpoint(tmp_path / "hf", experts=EXPERTS)
    yield tmp_path / "hf", size
    shutil.rmtree(tmp_path)


def test_six_gigabytes_convert_there_and_back_under_a_limit_of_two_and_a_half(big, tmp_path):
    source, size = big
    assert size > 6e9
    result, peak = limited(CONVERT, source, tmp_path / "megatron", tmp_path / "back")
    assert result.returncode == 0, result.stderr
    print(f"peak resident set {peak / GIB:.2f} GiB; predicted, measured, bytes by direction: {result.stdout}")
    assert peak < LIMIT
    for predicted, measured, num_bytes in json.loads(result.stdout):
        assert measured <= predicted < LIMIT and num_bytes > 6e9
    assert not differing_strips(source, tmp_path / "back")
    shutil.rmtree(tmp_path / "megatron")
    result, _ = limited(HOLD_EVERYTHING, source)
    assert result.returncode != 0 and "memory" in result.stderr.lower(), "the limit limits nothing"


def test_a_budget_that_one_thread_does_not_fit_in_is_refused_with_what_it_needs():
    with pytest.raises(ValueError, match=r"--budget is 0\.00 GiB; .* give it at least"):
        plan_memory(1000, GIB, 0, 4)


def test_threads_are_as_many_as_fit():
    base = resident_bytes()
    plan = plan_memory(base + int(3.5 * GIB), GIB, 0, 8)
    assert plan.workers in (2, 3) and plan.predicted_peak <= plan.budget
    assert plan_memory(base + 100 * GIB, GIB, 0, 8).workers == 8
