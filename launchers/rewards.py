"""Rewards by name: how good is a response to a prompt. Needs no torch."""

import importlib
import math
import os
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from numbers import Real
from typing import Any

import math_verify

from glm5_next.launchers.types import Prompt

Reward = Callable[[Prompt, str], float]

# Tokens that end a turn of this model (eos ids 154820, 154827, 154829).
END_OF_TURN = ("<|endoftext|>", "<|user|>", "<|observation|>")
END_OF_REASONING = "</think>"


def exact(prompt: Prompt, text: str) -> float:
    """1.0 where the final answer is the expected one, character by character; surrounding space does not count."""
    return float(final_answer(text) == prompt.answer.strip())


def math_answer(prompt: Prompt, text: str) -> float:
    """1.0 where math-verify finds the final answer equal to the expected one; 0.0 where not, or where it finds none.

    Raises ValueError where the expected answer itself cannot be read. Main thread only (math-verify's time limits).
    """
    return float(math_verify.verify(_expected_expressions(prompt.answer), math_verify.parse(final_answer(text))))


BUILT_IN: dict[str, Reward] = {"exact": exact, "math": math_answer}


def load_reward(name: str) -> Reward:
    """A built-in reward, or `module:function`, found on the Python path or in the current folder.

    Raises ValueError that names what cannot be imported, is missing or is not callable.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"reward {name!r}: expected {', '.join(BUILT_IN)} or module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # an installed command does not have it there
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(f"reward {name!r}: cannot import {module_name!r} ({_describe(error)})") from error
    if not hasattr(module, attribute):
        raise ValueError(f"reward {name!r}: module {module_name!r} has no {attribute!r}")
    reward = getattr(module, attribute)
    if not callable(reward):
        raise ValueError(f"reward {name!r}: {attribute!r} is a {type(reward).__name__}, not a function")
    return reward


def check_answers(reward: Reward, prompts: Iterable[Prompt]) -> None:
    """Raises ValueError that names the first prompt whose expected answer the reward cannot read."""
    if reward is not math_answer:
        return
    for prompt in prompts:
        try:
            _expected_expressions(prompt.answer)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.id!r}: {error}") from None


def score(reward: Reward, prompt: Prompt, text: str) -> float:
    """What the reward gives; one ValueError naming reward and prompt where it raises or gives no finite number."""
    where = f"reward {_name(reward)!r} on prompt {prompt.id!r}"
    try:
        value: Any = reward(prompt, text)
    except Exception as error:
        raise ValueError(f"{where} raised {_describe(error)}") from error
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{where} returned {value!r}, which is not a finite number")
    return float(value)


def final_answer(text: str) -> str:
    """The response without its reasoning, its end-of-turn tokens and surrounding space."""
    answer = text.rpartition(END_OF_REASONING)[2].strip()
    while answer.endswith(END_OF_TURN):
        for token in END_OF_TURN:
            answer = answer.removesuffix(token).rstrip()
    return answer


@lru_cache(maxsize=4096)
def _expected_expressions(answer: str) -> list[Any]:
    # Bare LaTeX is read as its first number ("2\sqrt{3}" as 2), so an answer without delimiters gets a box.
    delimited = "$" in answer or "\\boxed" in answer
    expressions = math_verify.parse(answer if delimited else f"\\boxed{{{answer}}}")
    if all(isinstance(expression, str) for expression in expressions):  # it hands back text that it could not parse
        raise ValueError(f"the expected answer {answer!r} is no mathematical expression")
    return expressions


def _name(reward: Reward) -> str:
    built_in = [name for name, function in BUILT_IN.items() if function is reward]
    if built_in:
        return built_in[0]
    # a callable object has no name of its own
    return f"{reward.__module__}:{getattr(reward, '__qualname__', type(reward).__name__)}"


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
