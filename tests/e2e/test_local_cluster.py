"""The one-process loop of the GPU tests also runs without a GPU: only its device differs."""

import json
import subprocess
import sys

import pytest


@pytest.mark.long
def test_two_steps_in_one_process(tmp_path):
    settings = [
        "model.precision=fp32",
        "parallel.distributed_optimizer=false",
        "train.steps=2",
        "rollout.prompts_per_step=2",
    ]
    command = [sys.executable, "-m", "tests.support.local_cluster", str(tmp_path), *settings]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    lines = run.stdout.splitlines()
    assert '"linear layers": "local"' in lines[0] and '"kda": "naive"' in lines[0]
    assert [record["step"] for record in json.loads(lines[-1])] == [0, 1]
