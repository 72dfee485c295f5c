"""The study of what replay removes: nothing to remove in fp32, much in bf16, and every record counted."""

import json

import pytest

from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.replay_study import MODES, Side, Study, markdown, write_study
from glm5_next.launchers.runtime.replay_study import run_side
from glm5_next.plugins.layer import HyperTransformerLayer
from tests.support import tiny  # noqa: F401 - installs the CPU runtime
from tests.support.faults import Fault, edit, planted

TASK = {"prompt_lengths": (24, 41, 60, 100), "copies": 2, "new_tokens": 8, "seed": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "tiny"
    return write_tiny_checkpoint(folder, layers=8, experts=16, mtp=False, vision=False)


@pytest.fixture(scope="module")
def sides(checkpoint) -> dict[str, Side]:
    return {precision: run_side(checkpoint, precision=precision, **TASK) for precision in ("bf16", "fp32")}


def test_in_fp32_both_sides_choose_alike_and_agree(sides):
    for scored in sides["fp32"].modes.values():
        assert scored.differing == {"routes": 0.0, "picks": 0.0}
        assert scored.kl["all"].tokens == 64 and scored.kl["all"].p99 < 1e-9


def test_in_bf16_choices_differ_and_replay_of_both_removes_most_of_the_mismatch(sides):
    modes = sides["bf16"].modes
    assert min(modes["off"].differing.values()) > 0.01
    assert modes["routing"].differing["routes"] == modes["indexer"].differing["picks"] == 0.0
    assert modes["both"].kl["all"].mean < 0.2 * modes["off"].kl["all"].mean
    assert modes["both"].kl["all"].p99 < 0.2 * modes["off"].kl["all"].p99


def test_every_layer_read_every_rows_record(sides):
    """One packed row: seven MoE layers, two of sparse attention."""
    for side in sides.values():
        assert {name: scored.reads for name, scored in side.modes.items()} == {
            "off": 0, "routing": 7, "indexer": 2, "both": 9,
        }  # fmt: skip


def test_layers_that_do_not_ask_for_a_record_are_found(checkpoint):
    ignores = edit("getattr(row, stream) if isinstance(row, PackedRow) else None", "None")
    with planted(Fault(HyperTransformerLayer, "_record", ignores)):
        with pytest.raises(RuntimeError, match=r"replay study, routes: layers \[\] recorded"):
            run_side(checkpoint, precision="fp32", **TASK)


def test_results_are_written_as_numbers_tables_and_a_plot(sides, tmp_path):
    study = Study({"seed": 0}, tuple(sides.values()))
    write_study(study, tmp_path)
    written = json.loads((tmp_path / "study.json").read_text())
    mean = written["sides"][0]["modes"]["both"]["kl"]["all"]["mean"]
    assert mean == sides["bf16"].modes["both"].kl["all"].mean
    table = markdown(study)
    assert table == (tmp_path / "study.md").read_text()
    assert f"{mean:.2e}" in table and all(mode in table for mode in MODES)
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")
