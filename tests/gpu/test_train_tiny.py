"""The tiny preset trains on the GPU in bf16: the loop's own trainer and engine in one process."""

import json
import subprocess
import sys


def test_reward_rises_and_both_sides_agree(tmp_path):
    command = [sys.executable, "-m", "tests.support.local_cluster", str(tmp_path), "train.steps=25"]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    print(run.stdout[-6000:])
    assert run.returncode == 0, run.stderr[-3000:]
    records = json.loads(run.stdout.splitlines()[-1])
    start, end = (sum(record["reward_mean"] for record in part) / 5 for part in (records[:5], records[-5:]))
    assert end > start + 0.3, f"mean reward {start:.3f} -> {end:.3f}"
    mismatch = [record["mismatch_kl_mean"] for record in records if record["mismatch_kl_mean"] is not None]
    assert mismatch and max(mismatch) < 0.01
