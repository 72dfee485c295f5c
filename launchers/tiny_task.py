"""The built-in task: say which letter comes next. Needs no download, no torch, and a tiny model learns it in minutes.

A prompt is a line of letters; the answer is the successor of the last one, around the alphabet ("...h" -> "a"). It
depends on the prompt, so a constant answer is right one time in eight, and the prompt is longer than the tiny model's
`index_topk`, so sparse attention really selects.
"""

import random
from collections import Counter
from collections.abc import Sequence

from glm5_next.launchers.types import Prompt

ALPHABET = "abcdefgh"
LENGTHS = (18, 28)  # letters of a prompt, inclusive
NUM_TRAINING, NUM_HELDOUT = 512, 64


def training_prompts() -> list[Prompt]:
    """The prompts the tiny preset trains on; always the same."""
    return _prompts("train", NUM_TRAINING)


def heldout_prompts() -> list[Prompt]:
    """Prompts that are in no training set."""
    seen = {prompt.text for prompt in training_prompts()}
    return [prompt for prompt in _prompts("heldout", NUM_HELDOUT) if prompt.text not in seen]


def random_policy_reward() -> float:
    """Expected reward of answering with a random letter."""
    return 1 / len(ALPHABET)


def best_constant_reward(prompts: Sequence[Prompt]) -> float:
    """Reward of the one answer that is right most often."""
    return max(Counter(prompt.answer for prompt in prompts).values()) / len(prompts)


def successor(letter: str) -> str:
    return ALPHABET[(ALPHABET.index(letter) + 1) % len(ALPHABET)]


def _prompts(split: str, count: int) -> list[Prompt]:
    generator = random.Random(f"glm5-next/{split}")
    prompts = []
    for number in range(count):
        letters = "".join(generator.choices(ALPHABET, k=generator.randint(*LENGTHS)))
        message = {"role": "user", "content": letters}
        prompts.append(Prompt(id=f"{split}-{number}", text=letters, answer=successor(letters[-1]), messages=(message,)))
    return prompts
