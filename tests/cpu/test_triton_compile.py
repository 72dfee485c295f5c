"""Every Triton kernel of ours compiles for Hopper at the released model's sizes, and fits."""

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def built() -> dict[str, list[dict]]:
    """In a process of its own: in this one kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.hopper_build"]
    run = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=600)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def compiled(built) -> list[dict]:
    return built["kernels"]


def test_every_kernel_is_launched_with_a_program_for_every_multiprocessor(compiled):
    assert len(compiled) == 23
    for kernel in compiled:
        programs = 1
        for size in kernel["grid"]:
            programs *= size
        assert programs >= 128, f"{kernel['name']}: {kernel['grid']}"


def test_no_kernel_keeps_values_on_the_stack(compiled):
    spilling = {kernel["name"]: kernel["stack"] for kernel in compiled if kernel["stack"] > 16}
    assert not spilling


def test_every_kernel_fits_twice_on_a_multiprocessor(compiled):
    """228 KiB of shared memory; 65536 registers at 255 a thread are two programs of 128 threads."""
    large = {kernel["name"]: kernel["shared"] for kernel in compiled if kernel["shared"] > 113 * 1024}
    assert not large


def test_no_kernel_overwrites_what_a_product_still_reads(compiled):
    racing = {kernel["name"]: kernel["overwritten"] for kernel in compiled if kernel["overwritten"]}
    assert not racing


def test_triton_still_overwrites_rows_that_are_also_read_into_registers(built):
    """If this fails, `site_products` needs no detour any more."""
    assert built["wrong"][0]["overwritten"]
