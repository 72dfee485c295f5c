"""Whatever is wrong with a run's inputs is one ValueError that names it, before anything is started or written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.config import load_run_config
from glm5_next.launchers.runtime.preflight import Inputs, check_inputs
from glm5_next.launchers.tiny_task import heldout_prompts, training_prompts


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "tiny", max_length=512)


@pytest.fixture
def folder(original, tmp_path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(original, tmp_path / "model")


def check(folder: Path, *overrides: str) -> Inputs:
    values = {
        "model": {"checkpoint": str(folder), "precision": "fp32"},
        "data": {"prompts": "tiny", "heldout": "tiny"},
        "rollout": {"max_new_tokens": 4},
    }
    return check_inputs(load_run_config(None, values, overrides))


def refusal(folder: Path, *overrides: str) -> str:
    """The one message; nothing may have been written."""
    parent = folder.parent
    before = {path: path.stat().st_mtime_ns for path in parent.rglob("*")}
    with pytest.raises(ValueError) as error:
        check(folder, *overrides)
    assert {path: path.stat().st_mtime_ns for path in parent.rglob("*")} == before
    return str(error.value)


def change_config(folder: Path, change: Callable[[dict], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[2]


def test_good_inputs_are_handed_on(folder):
    inputs = check(folder)
    assert inputs.prompts.prompts == tuple(training_prompts()) and inputs.heldout == tuple(heldout_prompts())
    assert inputs.longest_prompt == 28 + 2  # letters, and a token each for <|user|> and <|assistant|>
    assert inputs.checkpoint.folder == folder and len(inputs.prompts_digest) == 64
    assert inputs.tokenizer.decode(inputs.tokenizer.encode("abc")) == "abc"


def test_a_folder_that_is_not_there_is_named(tmp_path):
    assert f"{tmp_path / 'nowhere'}: no such folder" in refusal(tmp_path / "nowhere")


def test_a_shard_that_the_index_names_and_the_folder_lacks_is_named(folder):
    missing = shard(folder)
    missing.unlink()
    assert f"{missing}: no such file" in refusal(folder)


def test_a_truncated_shard_is_named_with_both_sizes(folder):
    short = shard(folder)
    size = short.stat().st_size
    short.write_bytes(short.read_bytes()[:-100])
    message = refusal(folder)
    assert f"{short}: truncated, has {size - 100} bytes, needs {size}" in message


def test_a_shard_cut_inside_its_header_is_named(folder):
    short = shard(folder)
    short.write_bytes(short.read_bytes()[:50])
    assert f"{short}: truncated, has 50 bytes" in refusal(folder)


def test_a_tensor_that_config_json_does_not_call_for_is_named(folder):
    change_config(folder, lambda config: config["text_config"].update(n_shared_experts=2))
    assert "mlp.shared_experts.gate_proj.weight is [32, 64], not [64, 64]" in refusal(folder)


@pytest.mark.parametrize("model_type", ["glm4_moe", "", None])
def test_another_model_is_refused(folder, model_type):
    change_config(folder, lambda config: config.update(model_type=model_type))
    message = refusal(folder)
    assert "model_type" in message and "glm5_next" in message and str(folder) in message


def test_a_missing_config_is_named(folder):
    (folder / "config.json").unlink()
    assert f"{folder / 'config.json'}: no such file" in refusal(folder)


def test_a_missing_tokenizer_is_named(folder):
    (folder / "tokenizer.json").unlink()
    assert f"{folder / 'tokenizer.json'}: no such file" in refusal(folder)


def test_a_broken_tokenizer_is_named(folder):
    (folder / "tokenizer.json").write_text("{")
    assert f"{folder}: its tokenizer cannot be loaded" in refusal(folder)


@pytest.mark.parametrize("template", [None, "{{ messages[", "{{ raise_exception('no system message') }}"])
def test_a_chat_template_that_is_missing_or_fails_is_named_with_the_prompt(folder, template):
    (folder / "chat_template.jinja").unlink()
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    assert "prompt 'train-0': the checkpoint's chat template fails on it" in refusal(folder)


@pytest.mark.parametrize("content", [None, "{}"])
def test_a_checkpoint_that_names_no_stop_token_is_refused(folder, content):
    path = folder / "generation_config.json"
    path.unlink() if content is None else path.write_text(content)
    message = refusal(folder)
    assert str(path) in message and "eos_token_id" in message


@pytest.mark.parametrize("setting", ["data.prompts", "data.heldout"])
def test_a_broken_line_of_a_prompt_file_is_named(folder, tmp_path, setting):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1+1", "answer": 2}\n{"prompt": "1+2", "answer": }\n')
    assert f"{path}:2: not valid JSON" in refusal(folder, f"{setting}={path}")


def test_a_prompt_file_that_is_not_there_is_named(folder, tmp_path):
    assert f"{tmp_path / 'none.jsonl'}: cannot be read" in refusal(folder, f"data.prompts={tmp_path / 'none.jsonl'}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise RuntimeError('no licence')", "cannot import 'bad_reward' (RuntimeError: no licence)"),
        ("def other(prompt, text): ...", "module 'bad_reward' has no 'score'"),
        ("score = 3", "'score' is a int, not a function"),
    ],
)
def test_a_reward_that_cannot_be_used_is_named(folder, tmp_path, monkeypatch, source, message):
    (tmp_path / "bad_reward.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "bad_reward", raising=False)
    assert message in refusal(folder, "data.reward=bad_reward:score")


def test_an_expected_answer_that_the_reward_cannot_read_is_named_with_its_prompt(folder, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "good", "prompt": "1+1", "answer": 2}\n{"id": "bad", "prompt": "?", "answer": "???"}\n')
    message = refusal(folder, f"data.prompts={path}", "data.heldout=none", "data.reward=math")
    assert "prompt 'bad'" in message and "'???'" in message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.ranks=3", "parallel.ep=3"], "n_routed_experts (8) is not a multiple of ep (3)"),
        (["parallel.ranks=8", "parallel.tp=8"], "num_attention_heads (4) is not a multiple of tp (8)"),
        (["parallel.ranks=8", "parallel.pp=8"], "5 layers cannot fill 8 pipeline stages"),
    ],
)
def test_ranks_that_do_not_divide_the_model_are_named(folder, overrides, message):
    assert message in refusal(folder, *overrides)


def test_ranks_that_do_not_divide_each_other_are_refused_with_the_settings(folder):
    with pytest.raises(ValueError, match=r"parallel\.ranks: 3 ranks cannot hold tp 2"):
        check(folder, "parallel.ranks=3", "parallel.tp=2")


def test_a_prompt_that_does_not_fit_into_a_row_is_named(folder):
    message = refusal(folder, "train.tokens_per_micro_batch=33")
    longest = {p.id for p in (*training_prompts(), *heldout_prompts()) if len(p.text) == 28}
    assert message.split("'")[1] in longest
    assert "has 30 tokens" in message and "train.tokens_per_micro_batch = 33" in message
    check(folder, "train.tokens_per_micro_batch=34")


def test_a_prompt_that_is_longer_than_the_model_allows_is_named(folder):
    message = refusal(folder, "rollout.max_new_tokens=483")
    assert "has 30 tokens" in message and "max_position_embeddings = 512" in message
    check(folder, "rollout.max_new_tokens=482")


def test_a_converted_checkpoint_is_checked_before_anything_starts(folder, tmp_path):
    assert f"{tmp_path / 'none'}: has no COMPLETE marker" in refusal(
        folder, f"model.megatron_checkpoint={tmp_path / 'none'}"
    )
