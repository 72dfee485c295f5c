"""The other commands, as a user types them."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from glm5_next.launchers.cli import app
from tests.e2e.conftest import Ended, Workplace

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_settings.toml"


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def dry_run(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the tiny preset prints where its checkpoint is at its place; nothing else may appear there."""
    folder = tmp_path_factory.mktemp("dry-run")
    (folder / "runs").mkdir()
    (folder / "runs/tiny-checkpoint").symlink_to(workplace.folder / "tiny-checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = invoke("train", "--preset", "tiny", "--dry-run")
    assert result.exit_code == 0, result.output
    assert [path.name for path in folder.rglob("*")] == ["runs", "tiny-checkpoint"]
    return result.output


def test_dry_run_prints_the_settings_that_are_on_record(dry_run: str):
    """After a change on purpose: write what is printed before the plan to tests/golden/tiny_settings.toml."""
    assert settings_part(dry_run) == GOLDEN.read_text()


def test_dry_run_prints_settings_that_a_file_can_hold(dry_run: str):
    settings = tomllib.loads(settings_part(dry_run))
    assert settings["parallel"]["ep"] == 2 and settings["train"]["steps"] == 40


def test_dry_run_shows_what_every_rank_holds(dry_run: str):
    rows = [line.split("│")[1:4] for line in dry_run.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["0-1", "0: 0-4", "4 of 8"],
    ]
    assert "random answers earn 0.125" in dry_run
    assert "replay payload: at most" in dry_run and "per step of 128 samples" in dry_run


def settings_part(output: str) -> str:
    lines = output.splitlines(keepends=True)
    end = next(number for number, line in enumerate(lines) if line.strip() == "plan")
    return "".join(lines[:end]).rstrip("\n") + "\n"


def test_conversion_there_and_back_changes_no_bit_and_a_runs_checkpoint_is_its_export(
    workplace: Workplace, straight: Ended, tmp_path: Path
):
    steps = [
        ["convert", workplace.folder / "tiny-checkpoint", tmp_path / "megatron"],
        ["convert", "--to-hf", tmp_path / "megatron", tmp_path / "back"],
        ["convert", "--to-hf", straight.run_dir / "checkpoints/step-000006", tmp_path / "trained"],
    ]
    in_one_process(steps)
    assert invoke("verify", workplace.folder / "tiny-checkpoint", tmp_path / "back").exit_code == 0
    assert invoke("verify", straight.run_dir / "export", tmp_path / "trained").exit_code == 0
    different = invoke("verify", workplace.folder / "tiny-checkpoint", tmp_path / "trained")
    assert different.exit_code == 1 and "model.language_model." in different.output


def in_one_process(commands: list[list[str | Path]]) -> None:
    """Runs commands one after the other in a fresh process: they start Megatron, and its import is what takes time."""
    code = (
        "import sys; from glm5_next.launchers.cli import app\n"
        f"for arguments in {[[str(word) for word in words] for words in commands]!r}:\n"
        "    app(arguments, standalone_mode=False)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
