"""convert, slice and verify as a user types them: what they print, their JSON, their exit status."""

import io
import json
import re
import shutil
import time
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers import bridge_commands
from glm5_next.launchers.cli import app

NAME = "model.language_model.layers.1.mlp.gate.weight"


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "hf", layers=4, experts=2)


@pytest.fixture
def noisy(folder, tmp_path) -> Path:
    """One tensor half as large again, another changed in its last bits."""
    copy = Path(shutil.copytree(folder, tmp_path / "noisy"))
    for path in copy.glob("*.safetensors"):
        tensors = load_file(path)
        for name, factor in ((NAME, 1.5), ("lm_head.weight", 1.01)):
            if name in tensors:
                tensors[name] = tensors[name] * factor
        save_file(tensors, path)
    return copy


def test_convert_says_what_it_will_take_what_it_took_and_what_it_passed_through(folder, tmp_path):
    result = invoke("convert", folder, tmp_path / "megatron")
    assert result.exit_code == 0, result.output
    assert "predicted peak memory" in result.output and "measured peak memory" in result.output
    assert "vision tower: 39 tensors left in the source" in result.output and "model.visual." in result.output
    again = invoke("convert", folder, tmp_path / "megatron")
    assert again.exit_code == 0 and "is complete; nothing was left to do" in again.output


def test_the_bar_shows_gigabytes_speed_and_time_left(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(bridge_commands, "bars", Console(file=screen, force_terminal=True, width=120))
    with bridge_commands._bar("writing", 4 * 10**9) as bar:
        for _ in range(3):
            bar(10**9)
            time.sleep(0.05)
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", screen.getvalue())
    assert re.search(r"writing .* 3\.0/4\.0 GB [\d.]+ GB/s 0:00:0\d", text), text


def test_converts_json_is_one_object_that_names_every_tensor_that_was_passed_through(folder, tmp_path):
    result = json.loads(invoke("convert", folder, tmp_path / "megatron", "--json").stdout)
    assert result["is_finished"] and result["written_bytes"] == result["num_bytes"] > 0
    assert result["measured_peak"] > 0 and 0 < result["predicted_peak"] <= result["budget"]
    back = json.loads(invoke("convert", "--to-hf", tmp_path / "megatron", tmp_path / "back", "--json").stdout)
    for report in (result, back):
        assert len(report["passed_through"]["vision tower"]) == 39
        assert all(name.startswith("model.visual.") for name in report["passed_through"]["vision tower"])
    assert invoke("verify", folder, tmp_path / "back").exit_code == 0


def test_a_budget_too_small_and_options_of_the_other_direction_are_refused(folder, tmp_path):
    result = invoke("convert", folder, tmp_path / "megatron", "--budget", "0.01")
    assert result.exit_code != 0 and "--budget is 0.01 GiB" in result.output
    result = invoke("convert", folder, tmp_path / "megatron", "--dtype", "float32")
    assert result.exit_code != 0 and "--hf and --dtype go with --to-hf" in result.output
    result = invoke("convert", folder, tmp_path / "megatron", "--share", "3/2")
    assert result.exit_code != 0 and "--share is '3/2'" in result.output
    assert list(tmp_path.iterdir()) == []


def test_slice_writes_a_checkpoint_that_converts(folder, tmp_path):
    result = invoke("slice", folder, tmp_path / "slice", "--layers", "2", "--no-mtp", "--no-vision")
    assert result.exit_code == 0 and f"wrote {tmp_path / 'slice'}" in result.output, result.output
    assert "measured peak memory" in result.output
    assert invoke("convert", tmp_path / "slice", tmp_path / "megatron").exit_code == 0
    result = invoke("slice", folder, tmp_path / "other", "--layers", "9")
    assert result.exit_code != 0 and "--layers is 9; the checkpoint has 4 layers" in result.output


def test_verify_names_what_differs_in_bits(folder, noisy):
    result = invoke("verify", folder, noisy)
    assert result.exit_code == 1
    assert f"values: {NAME}: " in result.output and "values: lm_head.weight" in result.output
    found = json.loads(invoke("verify", folder, noisy, "--json").stdout)
    assert not found["equal"] and {line["name"] for line in found["differences"]} == {NAME, "lm_head.weight"}
    assert json.loads(invoke("verify", folder, folder, "--json").stdout)["equal"]


@pytest.mark.parametrize(("tolerance", "status"), [("0.6", 0), ("0.4", 1), ("0.001", 1), ("0", 1)])
def test_verify_within_a_tolerance_lists_the_worst_tensors_first(folder, noisy, tolerance, status):
    result = invoke("verify", folder, noisy, "--tolerance", tolerance, "--worst", "2")
    assert result.exit_code == status, result.output
    lines = [line.split() for line in result.output.splitlines() if line.endswith("weight")]
    assert [line[-1] for line in lines] == [NAME, "lm_head.weight"]
    assert float(lines[0][0]) == pytest.approx(0.5, abs=0.01) and float(lines[1][0]) == pytest.approx(0.01, abs=0.004)
    found = json.loads(invoke("verify", folder, noisy, "--tolerance", tolerance, "--worst", "2", "--json").stdout)
    assert found["equal"] == (status == 0) and [error["name"] for error in found["worst"]] == [NAME, "lm_head.weight"]


def test_verify_with_a_tolerance_reads_fp8_with_its_scales_and_names_missing_tensors(folder, tmp_path):
    other = write_tiny_checkpoint(tmp_path / "fp8", layers=4, experts=2, fp8=True)
    assert invoke("verify", folder, other, "--tolerance", "0.1").exit_code == 0
    assert invoke("verify", folder, other, "--tolerance", "0.001").exit_code == 1
    assert invoke("slice", folder, tmp_path / "slice", "--layers", "3").exit_code == 0
    result = invoke("verify", folder, tmp_path / "slice", "--tolerance", "0.1")
    assert result.exit_code == 1 and "only in a: model.language_model.layers.3.hc_attn_fn" in result.output
