"""Rewards: golden answers, and what happens where a reward is wrong itself."""

import math
import os
from fractions import Fraction

import pytest

from glm5_next.launchers.rewards import check_answers, final_answer, load_reward, score
from glm5_next.launchers.types import Prompt


def prompt(answer: str) -> Prompt:
    return Prompt(id="p7", text="?", answer=answer)


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("42", " 42 ", 1.0),
        (" 42", "42", 1.0),
        ("42", "42<|user|>", 1.0),
        ("42", "42 <|endoftext|><|endoftext|>\n", 1.0),
        ("42", "<think>41?</think>\n42<|observation|>", 1.0),
        ("42", "43", 0.0),
        ("42", "42.0", 0.0),
        ("42", "", 0.0),
        ("a b", "a  b", 0.0),
    ],
)
def test_exact_compares_characters(answer, text, reward):
    assert score(load_reward("exact"), prompt(answer), text) == reward


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("42", "42", 1.0),
        ("42", "The answer is \\boxed{42}.", 1.0),
        ("42", "\\boxed{42}<|user|>", 1.0),
        ("42", "So it is $42$.<|endoftext|>", 1.0),
        ("42", "<think>\\boxed{42}</think> It is \\boxed{41}", 0.0),
        ("42", "<think>maybe 41</think>\\boxed{42}<|user|>", 1.0),
        ("\\boxed{42}", "42", 1.0),
        ("$42$", "42", 1.0),
        ("1000", "1,000", 1.0),
        ("1/2", "\\boxed{\\frac12}", 1.0),
        ("\\frac{1}{2}", "0.5", 1.0),
        ("0.5", "$\\frac{2}{4}$", 1.0),
        ("1/3", "0.33", 0.0),
        ("2\\sqrt{3}", "$2\\sqrt3$", 1.0),
        ("2\\sqrt{3}", "2", 0.0),
        ("x=5", "\\boxed{5}", 1.0),
        ("-7", "7", 0.0),
        ("42", "\\boxed{41}", 0.0),
        ("42", "no idea", 0.0),
        ("42", "\\boxed{", 0.0),
        ("42", "", 0.0),
    ],
)
def test_math_compares_values(answer, text, reward):
    assert score(load_reward("math"), prompt(answer), text) == reward


@pytest.mark.parametrize("answer", ["", "???", "\\frac{"])
def test_an_expected_answer_that_is_no_mathematics_is_an_error_and_not_a_zero(answer):
    with pytest.raises(ValueError, match=r"reward 'math' on prompt 'p7'.*is no mathematical expression"):
        score(load_reward("math"), prompt(answer), "42")
    with pytest.raises(ValueError, match=r"prompt 'p7': .*is no mathematical expression"):
        check_answers(load_reward("math"), [prompt("1"), prompt(answer)])
    check_answers(load_reward("exact"), [prompt(answer)])


def test_reasoning_and_end_of_turn_tokens_are_not_part_of_an_answer():
    assert final_answer("<think>a</think>b</think> c <|user|> <|endoftext|>") == "c"
    assert final_answer("<|user|>c") == "<|user|>c"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the current folder, which an installed command does not have on its path."""
    (tmp_path / "my_reward_module.py").write_text(
        "import numpy, fractions\n"
        "NUMBER = 5\n"
        "def length(prompt, text): return len(text)\n"
        "def right(prompt, text): return text == prompt.answer\n"
        "def nan(prompt, text): return float('nan')\n"
        "def word(prompt, text): return 'good'\n"
        "def nothing(prompt, text): pass\n"
        "def small(prompt, text): return numpy.float32(0.5)\n"
        "def part(prompt, text): return fractions.Fraction(1, 4)\n"
        "def wrong(prompt, text): return {}['key']\n"
        "class Judge:\n"
        "    def __call__(self, prompt, text): raise RuntimeError('no verdict')\n"
        "judge = Judge()\n"
    )
    (tmp_path / "my_broken_module.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in os.sys.path if entry not in ("", os.getcwd())])
    return "my_reward_module"


def test_a_function_of_a_module_is_a_reward(module):
    assert score(load_reward(f"{module}:length"), prompt("a"), "abc") == 3.0
    assert score(load_reward(f"{module}:right"), prompt("a"), "a") == 1.0
    assert score(load_reward(f"{module}:small"), prompt("a"), "a") == 0.5
    assert score(load_reward(f"{module}:part"), prompt("a"), "a") == float(Fraction(1, 4))
    assert type(score(load_reward(f"{module}:right"), prompt("a"), "a")) is float


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("maths", "reward 'maths': expected exact, math or module:function"),
        ("my_reward_module:", "expected exact, math or module:function"),
        ("no_such_module:f", "cannot import 'no_such_module' \\(ModuleNotFoundError"),
        ("my_broken_module:f", "cannot import 'my_broken_module' \\(ZeroDivisionError"),
        ("my_reward_module:nowhere", "module 'my_reward_module' has no 'nowhere'"),
        ("my_reward_module:NUMBER", "'NUMBER' is a int, not a function"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_named(module, name, problem):
    with pytest.raises(ValueError, match=problem):
        load_reward(name)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("nan", "returned nan, which is not a finite number"),
        ("word", "returned 'good'"),
        ("nothing", "returned None"),
        ("wrong", "raised KeyError: 'key'"),
    ],
)
def test_a_reward_that_fails_is_named_with_its_prompt(module, function, problem):
    with pytest.raises(ValueError, match=f"reward '{module}:{function}' on prompt 'p7' {problem}"):
        score(load_reward(f"{module}:{function}"), prompt("a"), "a")


def test_a_callable_object_is_named_by_its_class(module):
    with pytest.raises(ValueError, match=f"reward '{module}:Judge' on prompt 'p7' raised RuntimeError: no verdict"):
        score(load_reward(f"{module}:judge"), prompt("a"), "a")


def test_scores_are_finite():
    assert math.isfinite(score(load_reward("exact"), prompt("a"), "a"))
