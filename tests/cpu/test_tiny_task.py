"""The built-in task cannot be won without reading the prompt, and its held-out prompts are not trained on."""

import re
from collections import Counter

import pytest
from transformers import AutoTokenizer

from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.rewards import load_reward, score
from glm5_next.launchers.runtime.rollout import encode
from glm5_next.launchers.tiny_task import (
    ALPHABET,
    best_constant_reward,
    heldout_prompts,
    random_policy_reward,
    successor,
    training_prompts,
)

INDEX_TOPK = 16  # of the tiny checkpoint
EXACT = load_reward("exact")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "tiny", layers=1, mtp=False, vision=False)
    return AutoTokenizer.from_pretrained(folder)


def test_answering_at_random_earns_an_eighth():
    prompts = training_prompts()
    earned = [score(EXACT, prompt, letter) for prompt in prompts for letter in ALPHABET]
    assert sum(earned) / len(earned) == random_policy_reward() <= 0.3


@pytest.mark.parametrize("prompts", [training_prompts(), heldout_prompts()], ids=["training", "heldout"])
def test_no_constant_answer_earns_much(prompts):
    means = {letter: sum(score(EXACT, p, letter) for p in prompts) / len(prompts) for letter in ALPHABET}
    assert max(means.values()) == best_constant_reward(prompts) <= 0.4


def test_the_best_constant_of_prompts_that_all_agree_is_one():
    same = [prompt for prompt in training_prompts() if prompt.answer == "c"]
    assert best_constant_reward(same) == 1.0


@pytest.mark.parametrize("prompts", [training_prompts(), heldout_prompts()], ids=["training", "heldout"])
def test_the_answer_is_the_letter_after_the_prompts_last_one(prompts):
    following = dict(zip("abcdefgh", "bcdefgha"))
    assert all(prompt.answer == following[prompt.text[-1]] for prompt in prompts)
    assert set(Counter(prompt.answer for prompt in prompts)) == set(ALPHABET)
    assert {letter: successor(letter) for letter in ALPHABET} == following


def test_the_answer_does_not_depend_on_anything_but_the_last_letter():
    """Or a prompt's length or first letters would give it away."""
    for place in (0, 5, -2):
        by_letter = {
            letter: Counter(p.answer for p in training_prompts() if p.text[place] == letter) for letter in ALPHABET
        }
        assert all(max(counts.values()) / counts.total() < 0.4 for counts in by_letter.values()), place


def test_heldout_prompts_are_in_no_training_set():
    training, heldout = training_prompts(), heldout_prompts()
    assert len(training) == 512 and len(heldout) >= 60
    assert not {prompt.text for prompt in training} & {prompt.text for prompt in heldout}
    ids = [prompt.id for prompt in (*training, *heldout)]
    assert len(set(ids)) == len(ids)


def test_the_prompts_are_the_same_every_time():
    assert training_prompts() == training_prompts() and heldout_prompts() == heldout_prompts()


def test_every_prompt_is_longer_than_what_sparse_attention_selects(tokenizer):
    prompts = [*training_prompts(), *heldout_prompts()]
    assert min(len(encode(tokenizer, prompt)) for prompt in prompts) > INDEX_TOPK
    assert all(re.fullmatch(f"[{ALPHABET}]+", prompt.text) for prompt in prompts)


def test_a_right_answer_is_one_token_and_the_end_of_the_turn(tokenizer):
    prompt = training_prompts()[0]
    tokens = tokenizer.encode(prompt.answer, add_special_tokens=False)
    assert len(tokens) == 1
    assert score(EXACT, prompt, tokenizer.decode([*tokens, *tokenizer.encode("<|user|>")])) == 1.0
