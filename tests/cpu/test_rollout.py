"""Prompts become scored groups; groups that teach nothing are replaced, up to a limit."""

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from glm5_next.launchers.config import load_run_config
from glm5_next.launchers.prompts import PromptCursor
from glm5_next.launchers.run_state import step_seed
from glm5_next.launchers.runtime.engine import Completion
from glm5_next.launchers.runtime.rollout import Rollout, Sampler, encode, longest_prompt, write_rollout
from glm5_next.launchers.types import Prompt
from tests.support.replay import plan_of

PROMPTS = [Prompt(id=f"p{number}", text="x" * (number + 1), answer=str(number)) for number in range(10)]


class Characters:
    """A tokenizer: one token per character, its code point."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(token) for token in tokens)

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize, return_dict) -> list[int]:
        assert add_generation_prompt and tokenize and not return_dict
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>")


class ScriptedEngines:
    """Answers every prompt with the same responses, or with those a function makes of the call's number."""

    def __init__(self, responses):
        self.responses = responses
        self.calls: list[tuple[list[int], int, int, int]] = []

    def generate(self, prompts: Sequence[np.ndarray], samples_per_prompt: int, *, max_new_tokens: int, seed: int):
        self.calls.append(([len(prompt) for prompt in prompts], samples_per_prompt, max_new_tokens, seed))
        texts = self.responses(len(self.calls) - 1) if callable(self.responses) else self.responses
        assert len(texts) == samples_per_prompt
        return [[completion(text, len(prompt)) for text in texts] for prompt in prompts]


def completion(text: str, prompt_length: int) -> Completion:
    tokens = np.array([ord(character) for character in text], dtype=np.int32)
    routes = np.arange((prompt_length + len(text) - 1) * 4, dtype=np.int16).reshape(-1, 2, 2)
    logprobs = -np.arange(1, len(text) + 1, dtype=np.float32)
    return Completion(tokens=tokens, logprobs=logprobs, routes=routes, finish_reason="stop")


def sampler(responses, reward=lambda prompt, text: float(len(text)), routing="engine", **changes) -> Sampler:
    values = {
        "model": {"checkpoint": "/none"},
        "data": {"prompts": "tiny"},
        "rollout": {"prompts_per_step": 3, "samples_per_prompt": 2, "max_new_tokens": 8},
        "grpo": changes,
        "train": {"seed": 5},
    }
    replay = plan_of(moe_layers=(0, 1), routing=routing)
    return Sampler(load_run_config(None, values, []), Characters(), ScriptedEngines(responses), reward, replay)


def cursor() -> PromptCursor:
    return PromptCursor(PROMPTS, seed=0, shuffle=False)


def test_a_step_turns_prompts_into_scored_groups():
    it = sampler(["ab", "abc"])
    rollout = it.step(4, cursor(), 2, weights_version=3)
    assert [group.prompt.id for group in rollout.kept] == ["p2", "p3", "p4"]
    assert (rollout.rounds, rollout.cursor, rollout.dropped) == (0, 5, [])
    for group in rollout.kept:
        assert group.rewards == [2.0, 3.0]
        for sample, text in zip(group.samples, ("ab", "abc")):
            prompt_tokens = [ord(character) for character in group.prompt.text]
            assert sample.tokens.tolist() == prompt_tokens + [ord(character) for character in text]
            assert sample.prompt_length == len(prompt_tokens) and sample.response_text == text
            assert sample.rollout_logprobs.tolist() == [-1.0, -2.0, -3.0][: len(text)]
            assert sample.routes.shape == (len(sample.tokens) - 1, 2, 2)
            assert (sample.prompt_id, sample.weights_version, sample.finish_reason) == (group.prompt.id, 3, "stop")
    ids = [sample.sample_id for sample in rollout.samples]
    assert len(set(ids)) == len(ids) == 6


def test_the_engines_get_the_runs_settings_and_a_seed_of_the_step_and_round():
    it = sampler(lambda call: ["a", "a"] if call == 0 else ["a", "ab"])
    it.step(4, cursor(), 0, weights_version=0)
    expected = [step_seed(5, 4, f"rollout/{number}") for number in range(2)]
    assert it.engines.calls == [([1, 2, 3], 2, 8, expected[0]), ([4, 5, 6], 2, 8, expected[1])]
    assert expected[0] != expected[1]


def test_groups_without_spread_are_replaced_by_as_many_others():
    def reward(prompt: Prompt, text: str) -> float:
        return float(prompt.id == "p5" or len(text) == 1)

    it = sampler(["a", "ab"], reward)
    rollout = it.step(0, cursor(), 3, weights_version=0)
    assert [group.prompt.id for group in rollout.kept] == ["p3", "p4", "p6"]
    assert [group.prompt.id for group in rollout.dropped] == ["p5"]
    assert (rollout.rounds, rollout.cursor) == (1, 7)
    assert [len(lengths) for lengths, *_ in it.engines.calls] == [3, 1]
    ids = [sample.sample_id for sample in rollout.samples]
    assert len(set(ids)) == len(ids) == 8, "samples of different rounds share an id"


def test_resampling_ends_at_its_limit_with_what_there_is():
    it = sampler(["same", "same"], max_resample_rounds=2)
    rollout = it.step(0, cursor(), 0, weights_version=0)
    assert rollout.kept == [] and len(rollout.dropped) == 9
    assert (rollout.rounds, rollout.cursor, len(it.engines.calls)) == (2, 9, 3)


def test_groups_without_spread_stay_if_the_run_says_so():
    rollout = sampler(["same", "same"], drop_zero_spread=False).step(0, cursor(), 0, weights_version=0)
    assert len(rollout.kept) == 3 and not rollout.dropped and rollout.rounds == 0


def test_a_difference_of_a_billionth_is_spread():
    rollout = sampler(["a", "ab"], lambda prompt, text: 1e-9 * len(text)).step(0, cursor(), 0, weights_version=0)
    assert len(rollout.kept) == 3


def test_a_reward_that_raises_names_itself_and_the_prompt():
    def broken(prompt: Prompt, text: str) -> float:
        raise KeyError("unit")

    with pytest.raises(ValueError, match="broken' on prompt 'p0' raised KeyError: 'unit'"):
        sampler(["a", "b"], broken).step(0, cursor(), 0, weights_version=0)


def test_times_of_all_rounds_add_up():
    rollout = sampler(["same", "same"]).step(0, cursor(), 0, weights_version=0)
    assert rollout.seconds_generate > 0 and rollout.seconds_reward > 0


def test_chat_messages_go_through_the_template_and_text_goes_as_it_is():
    chat = Prompt(id="c", text="hi", answer="", messages=({"role": "user", "content": "hi"},))
    assert encode(Characters(), chat).tolist() == [ord(character) for character in "<user>hi<assistant>"]
    tokens = encode(Characters(), PROMPTS[2])
    assert tokens.tolist() == [ord("x")] * 3 and tokens.dtype == np.int32


def test_a_prompt_without_tokens_is_named():
    with pytest.raises(ValueError, match="prompt 'empty' has no tokens"):
        encode(Characters(), Prompt(id="empty", text="", answer=""))


def test_the_longest_prompt_is_found_by_its_tokens():
    assert longest_prompt(Characters(), PROMPTS[3:] + PROMPTS[:3]) == (10, "p9")


def test_every_sample_is_written_with_whether_it_is_trained_on(tmp_path):
    def reward(prompt: Prompt, text: str) -> float:
        return float(prompt.id == "p1" or len(text) == 1)

    rollout = sampler(["a", "ab"], reward, max_resample_rounds=0).step(7, cursor(), 0, weights_version=2)
    write_rollout(tmp_path, 7, rollout)
    records = [json.loads(line) for line in (tmp_path / "rollouts" / "step-000007.jsonl").read_text().splitlines()]
    assert [(record["prompt_id"], record["trained"], record["reward"]) for record in records] == [
        *(("p0", True, 1.0), ("p0", True, 0.0), ("p2", True, 1.0), ("p2", True, 0.0)),
        *(("p1", False, 1.0), ("p1", False, 1.0)),
    ]
    assert records[1]["response"] == "ab" and records[1]["prompt"] == "x" and records[1]["num_tokens"] == 3
    assert {record["weights_version"] for record in records} == {2}
    assert [record["sample_id"] for record in records] == [sample.sample_id for sample in rollout.samples]


def test_a_step_that_is_written_again_replaces_its_file(tmp_path):
    rollout = sampler(["a", "ab"]).step(7, cursor(), 0, weights_version=2)
    write_rollout(tmp_path, 7, rollout)
    write_rollout(tmp_path, 7, Rollout(kept=rollout.kept[:1]))
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step-000007.jsonl"]
    assert len((tmp_path / "rollouts" / "step-000007.jsonl").read_text().splitlines()) == 2


def with_completions(it: Sampler, change) -> Sampler:
    """The engines' completions, changed by a function of their number in the call and the completion."""
    generate = it.engines.generate

    def changed(*args, **kwargs):
        answers = generate(*args, **kwargs)
        numbers = iter(range(1000))
        return [[change(next(numbers), completion) for completion in completions] for completions in answers]

    it.engines.generate = changed
    return it


def test_a_retracted_sample_leaves_a_run_that_replays_the_engine_and_trains_without_its_record_elsewhere():
    def retracted(number: int, completion: Completion) -> Completion:
        return replace(completion, void="retracted") if number in (0, 3) else completion

    replaying, other = (
        with_completions(sampler(["a", "ab"], routing=routing, max_resample_rounds=0), retracted).step(
            0, cursor(), 0, weights_version=0
        )
        for routing in ("engine", "off")
    )
    assert [lost.sample_id for lost in replaying.lost] == ["0.0.0.0", "0.0.1.1"]
    assert replaying.not_trained == {"retracted": 2, "short group": 2} and len(replaying.kept) == 1
    assert not other.lost and [s.sample_id for s in other.samples if s.void] == ["0.0.0.0", "0.0.1.1"]
    assert all(s.routes is None for s in other.samples if s.void)


def test_a_record_that_is_wrong_names_the_sample():
    it = with_completions(
        sampler(["a", "ab"]),
        lambda number, completion: replace(completion, routes=completion.routes[:-1]) if number == 3 else completion,
    )
    with pytest.raises(ValueError, match=r"sample '4.0.1.1': routes of all layers have shape .*start offset left out"):
        it.step(4, cursor(), 0, weights_version=0)


def test_a_group_that_is_not_trained_on_carries_no_record():
    rollout = sampler(["same", "same"], max_resample_rounds=0).step(0, cursor(), 0, weights_version=0)
    assert rollout.dropped and all(sample.routes is None for sample in rollout.samples)
