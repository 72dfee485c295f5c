"""`prepare`: from a folder or a stand-in of the hub to a checked and converted checkpoint, again and again."""

import fnmatch
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from typer.testing import CliRunner, Result

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.dist_read import DistCheckpoint
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.bridge.verify_dist import differing_tensors
from glm5_next.launchers import presets
from glm5_next.launchers.cli import app
from glm5_next.launchers.prompts import read_prompts
from glm5_next.launchers.prompts_import import import_prompts
from glm5_next.launchers.runtime.convert import hf_to_megatron

TARGET = "GLM-5.3-Flash-4-layers"
CHAT = [{"content": "What is 2 + 2?", "role": "user"}]
DAPO = [{"prompt": CHAT, "label": "4"}, {"prompt": CHAT, "label": "4"}, {"prompt": "What is $1/2$ of 4?", "label": "2"}]


def jsonl(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in the place of the released one."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("hub") / "model")


@pytest.fixture
def place(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(presets, "RELEASED_CONFIG", whole / "config.json")
    jsonl(tmp_path / "hub.jsonl", DAPO)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def prepare(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["prepare", "--preset", "slice-1x1", *map(str, arguments)])


def files(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_local_paths_become_a_checked_and_converted_slice(place: Path, whole: Path):
    arguments = ["--model", whole, "--prompts", place.parent / "hub.jsonl"]
    first = prepare(*arguments, "--json")
    assert first.exit_code == 0, first.output
    report = json.loads(first.stdout)
    assert [step["name"] for step in report["steps"]] == ["model", "check", "prompts", "convert", "verify"]
    assert all(step["num_bytes"] > 0 and step["seconds"] >= 0 for step in report["steps"]) and report["free_bytes"] > 0
    assert Checkpoint(place / TARGET).config.num_layers == 4
    before = files(place)
    again = prepare(*arguments)
    assert again.exit_code == 0 and "were there" in again.output and "0 pieces written" in again.output, again.output
    kept = {name for name in before if not name.endswith("dapo-math-17k.jsonl")}
    assert {name: files(place)[name] for name in kept} == {name: before[name] for name in kept}


def test_a_changed_value_is_found_by_the_verification(place: Path, whole: Path):
    hf_to_megatron(whole, place / "converted")
    assert differing_tensors(DistCheckpoint(place / "converted"), Checkpoint(whole)) == []
    shutil.copytree(whole, place / "changed")
    stored = Checkpoint(whole).stored("lm_head.weight")
    with (place / "changed" / stored.file).open("r+b") as file:
        file.seek(stored.begin)
        byte = file.read(1)[0]
        file.seek(stored.begin)
        file.write(bytes([byte ^ 1]))
    assert differing_tensors(DistCheckpoint(place / "converted"), Checkpoint(place / "changed")) == ["lm_head.weight"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "tiny"], "needs no preparation"),
        (["--set", "model.checkpointt=a"], "model.checkpoint"),
    ],
)
def test_what_cannot_be_prepared_is_refused(place: Path, arguments, message):
    result = prepare(*arguments)
    assert result.exit_code == 2 and message in result.output, result.output
    assert not list(place.iterdir())


def test_another_model_than_the_presets_is_refused(place: Path, whole: Path, monkeypatch):
    other = json.loads((whole / "config.json").read_text())
    other["text_config"]["num_experts_per_tok"] += 1
    (place.parent / "other.json").write_text(json.dumps(other))
    monkeypatch.setattr(presets, "RELEASED_CONFIG", place.parent / "other.json")
    result = prepare("--model", whole, "--prompts", place.parent / "hub.jsonl")
    assert result.exit_code == 2 and "num_experts_per_token is 2, not 3" in result.output, result.output


class Hub:
    """Repositories as folders; the parts of huggingface_hub that are used, and what was asked of them."""

    def __init__(self, folder: Path):
        self.folder, self.asked, self.fails = folder, [], None

    def repo_info(self, name, repo_type, revision, files_metadata):
        if self.fails:
            raise self.fails
        paths = [path for path in (self.folder / name).rglob("*") if path.is_file()]
        siblings = [
            SimpleNamespace(rfilename=str(p.relative_to(self.folder / name)), size=p.stat().st_size) for p in paths
        ]
        return SimpleNamespace(siblings=siblings, sha="c0ffee")

    def snapshot_download(self, name, repo_type, revision, local_dir, allow_patterns):
        self.asked.append((name, repo_type, revision))
        for path in (self.folder / name).rglob("*"):
            relative = str(path.relative_to(self.folder / name))
            if path.is_file() and any(fnmatch.fnmatch(relative, pattern) for pattern in allow_patterns):
                Path(local_dir).mkdir(exist_ok=True)
                shutil.copy(path, Path(local_dir) / relative)
        return str(local_dir)


@pytest.fixture
def hub(place: Path, whole: Path, monkeypatch) -> Hub:
    made = Hub(place.parent / "hub")
    shutil.copytree(whole, made.folder / presets.HUB_MODEL)
    for name in ("modeling_evil.py", "pytorch_model.bin"):
        (made.folder / presets.HUB_MODEL / name).write_text("raise SystemExit")
    (made.folder / presets.HUB_PROMPTS).mkdir(parents=True)
    jsonl(made.folder / presets.HUB_PROMPTS / "dapo-math-17k.jsonl", DAPO)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    return made


def test_the_hub_is_asked_once_and_for_no_code(place: Path, hub: Hub):
    result = prepare()
    assert result.exit_code == 0, result.output
    assert hub.asked == [(presets.HUB_MODEL, "model", "c0ffee"), (presets.HUB_PROMPTS, "dataset", "c0ffee")]
    names = {path.name for path in place.rglob("*")}
    assert not names & {"modeling_evil.py", "pytorch_model.bin"} and "tokenizer.json" in names
    assert [prompt.answer for prompt in read_prompts(place / "dapo-math-17k.jsonl")] == ["4", "2"]
    hub.fails = OSError("no network")  # nothing is left to ask for
    again = prepare()
    assert again.exit_code == 0, again.output


def test_a_hub_that_does_not_answer_is_one_message(place: Path, hub: Hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    hub.fails = OSError("no network")
    result = prepare()
    assert result.exit_code == 2 and "cannot be fetched from the hub (OSError: no network)" in result.output
    assert "hf_verysecret" not in result.output


def test_a_disk_that_is_too_small_is_told_before_a_download(place: Path, hub: Hub, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    result = prepare()
    assert result.exit_code == 2 and "the disk has 0.0 GB left" in result.output and not hub.asked


ORIGINAL = {"prompt": CHAT, "reward_model": {"ground_truth": "4", "style": "rule"}, "extra_info": {"index": "x"}}


@pytest.mark.parametrize(
    ("records", "answers"),
    [
        (DAPO, ["4", "2"]),
        ([ORIGINAL, ORIGINAL], ["4"]),
        ([{"prompt": "2 + 2?", "answer": 4}, {"id": "b", "messages": CHAT, "answer": "5"}], ["4", "5"]),
    ],
)
def test_every_layout_becomes_ours_and_repetitions_go(records, answers, tmp_path):
    source = jsonl(tmp_path / "in.jsonl", records)
    assert import_prompts(source, tmp_path / "out.jsonl") == len(answers)
    prompts = read_prompts(tmp_path / "out.jsonl")
    assert [prompt.answer for prompt in prompts] == answers and prompts[0].id == "in:1"
    assert import_prompts(source, tmp_path / "out.jsonl") == len(answers)
    jsonl(source, [{"prompt": "other", "answer": "1"}])
    with pytest.raises(ValueError, match="exists with other prompts"):
        import_prompts(source, tmp_path / "out.jsonl")
    assert [prompt.answer for prompt in read_prompts(tmp_path / "out.jsonl")] == answers


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": CHAT}, "in.jsonl:2: has none of the keys"),
        ({"prompt": CHAT, "label": ""}, "in.jsonl:2"),
        ({"prompt": CHAT, "reward_model": {}}, "in.jsonl:2"),
        ({"prompt": [3], "label": "1"}, "in.jsonl:2"),
        (3, "in.jsonl:2: expected an object"),
    ],
)
def test_a_line_that_does_not_fit_is_named(line, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        import_prompts(jsonl(tmp_path / "in.jsonl", [DAPO[0], line]), tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_parquet_is_refused_with_the_command_that_makes_jsonl_of_it(tmp_path):
    source = tmp_path / "in.parquet"
    source.write_bytes(b"PAR1" + bytes(range(256)))
    for read in (read_prompts, lambda path: import_prompts(path, tmp_path / "out.jsonl")):
        with pytest.raises(
            ValueError, match=r"in.parquet: is Parquet, .*read_table\('.*in.parquet'\).* > in.jsonl"
        ) as error:
            read(source)
        command = str(error.value).split('"')[1]
        compile(command, "command", "exec")


def test_a_line_separator_within_a_text_ends_no_line(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": "one\u2028two", "label": "1"}, ensure_ascii=False) + "\n")
    assert import_prompts(source, tmp_path / "out.jsonl") == 1
