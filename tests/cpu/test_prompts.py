"""Prompt files: what is read, how a fault is named; and the order of draws."""

import json

import pytest

from glm5_next.launchers.prompts import PromptCursor, digest, read_prompts
from glm5_next.launchers.types import Prompt

GOOD = '{"prompt": "1+1?", "answer": 2}'
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
PROMPTS = [Prompt(id=str(number), text=f"{number}?", answer="1") for number in range(7)]


def write(tmp_path, *lines: str):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_prompts_and_messages_are_read_in_order(tmp_path):
    path = write(
        tmp_path,
        GOOD,
        json.dumps({"messages": CHAT, "answer": "4", "id": "sum", "source": "ignored"}),
        '{"prompt": "half?", "answer": 0.50, "id": 7}',
        '{"prompt": "line\u2028separator", "answer": 1e3}',
    )
    assert read_prompts(path) == [
        Prompt(id="train:1", text="1+1?", answer="2"),
        Prompt(id="sum", text="Be brief.\n2+2?", answer="4", messages=tuple(CHAT)),
        Prompt(id="7", text="half?", answer="0.50"),
        Prompt(id="train:4", text="line\u2028separator", answer="1000"),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "x", "answer": 1', "not valid JSON: Expecting ',' delimiter at column 28"),
        ("", "empty line"),
        ("[1]", "expected an object, got '[1]'"),
        ('{"answer": 1}', "needs either 'prompt' or 'messages'"),
        ('{"prompt": "x", "messages": [], "answer": 1}', "not both"),
        ('{"prompt": "x"}', "key 'answer' is missing"),
        ('{"prompt": "x", "anser": 1}', "key 'answer' is missing"),
        ('{"prompt": 5, "answer": 1}', "prompt must be a text that is not empty, got 5"),
        ('{"prompt": " ", "answer": 1}', "prompt must be a text that is not empty"),
        ('{"prompt": "x", "answer": null}', "answer must be a text"),
        ('{"prompt": "x", "answer": true}', "answer must be a text"),
        ('{"prompt": "x", "answer": ""}', "answer must be a text that is not empty"),
        ('{"prompt": "x", "answer": NaN}', "NaN"),
        ('{"prompt": "x", "answer": 1, "id": []}', "id must be a text"),
        ('{"prompt": "x", "answer": 1, "id": "train:1"}', "id 'train:1' is already used in line 1"),
        ('{"messages": [], "answer": 1}', "messages must be a list"),
        ('{"messages": "hi", "answer": 1}', "messages must be a list"),
        ('{"messages": ["hi"], "answer": 1}', "messages[0] must be an object with exactly role and content"),
        ('{"messages": [{"role": "user"}], "answer": 1}', "messages[0] must be an object with exactly"),
        ('{"messages": [{"role": "me", "content": "x"}], "answer": 1}', "messages[0].role must be one of"),
        ('{"messages": [{"role": "user", "content": 1}], "answer": 1}', "messages[0].content must be a text"),
    ],
)
def test_a_broken_line_is_named_by_file_and_line(tmp_path, line, problem):
    path = write(tmp_path, GOOD, line, GOOD)
    with pytest.raises(ValueError) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}:2: ") and problem in str(caught.value)


def test_bytes_that_are_no_text_are_named_by_line(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match=r"train\.jsonl:2: not UTF-8"):
        read_prompts(path)


@pytest.mark.parametrize("content", ["", "\n"])
def test_an_empty_file_is_refused(tmp_path, content):
    path = tmp_path / "train.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"train\.jsonl.*(holds no prompt|empty line)"):
        read_prompts(path)


def test_a_missing_file_or_a_folder_is_named(tmp_path):
    for path in (tmp_path / "nowhere.jsonl", tmp_path):
        with pytest.raises(ValueError, match=f"{path}: cannot be read"):
            read_prompts(path)


def draw(cursor: PromptCursor, position: int, *counts: int) -> list[str]:
    ids = []
    for count in counts:
        prompts, position = cursor.take(count, position)
        ids += [prompt.id for prompt in prompts]
    return ids


@pytest.mark.parametrize("shuffle", [True, False])
def test_five_steps_draw_the_same_as_three_and_a_resumed_two(shuffle):
    whole = draw(PromptCursor(PROMPTS, 3, shuffle), 0, 4, 4, 4, 4, 4)
    first = draw(PromptCursor(PROMPTS, 3, shuffle), 0, 4, 4, 4)
    assert whole == first + draw(PromptCursor(PROMPTS, 3, shuffle), 12, 4, 4)
    assert whole != first + draw(PromptCursor(PROMPTS, 3, shuffle), 11, 4, 4)


def test_the_cursor_counts_prompts():
    assert PromptCursor(PROMPTS, 0, True).take(20, 5)[1] == 25


def test_every_epoch_has_each_prompt_once_in_its_own_order():
    ids = draw(PromptCursor(PROMPTS, 0, True), 0, 70)
    epochs = [tuple(ids[start : start + 7]) for start in range(0, 70, 7)]
    assert all(sorted(epoch) == [prompt.id for prompt in PROMPTS] for epoch in epochs)
    assert len(set(epochs)) > 8
    assert ids != draw(PromptCursor(PROMPTS, 1, True), 0, 70)


def test_without_shuffle_the_order_is_the_file_s():
    assert draw(PromptCursor(PROMPTS, 0, False), 5, 4) == ["5", "6", "0", "1"]


def test_the_order_is_the_same_on_every_machine():
    assert draw(PromptCursor(PROMPTS, 0, True), 0, 7) == list("0341526")


def test_a_cursor_without_prompts_or_before_the_start_is_refused():
    with pytest.raises(ValueError, match="no prompt"):
        PromptCursor([], 0, True)
    with pytest.raises(ValueError, match="position -1"):
        PromptCursor(PROMPTS, 0, True).take(1, -1)


def test_the_digest_sees_order_and_content():
    changed = [Prompt(id="0", text="0?", answer="2"), *PROMPTS[1:]]
    chat = [Prompt(id="0", text="0?", answer="1", messages=tuple(CHAT)), *PROMPTS[1:]]
    digests = {digest(prompts) for prompts in (PROMPTS, PROMPTS[::-1], PROMPTS[:-1], changed, chat)}
    assert len(digests) == 5 and digest(list(PROMPTS)) == digest(PROMPTS)
