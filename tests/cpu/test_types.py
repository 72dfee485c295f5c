"""Prompts, samples and groups: what their constructors refuse."""

import pickle

import numpy as np
import pytest

from glm5_next.launchers.types import Group, Prompt, Sample

PROMPT = Prompt(id="p0", text="1+1?", answer="2")


def sample(**changes) -> Sample:
    fields = {
        "prompt_id": "p0",
        "sample_id": "p0/3",
        "tokens": np.array([1, 2, 3, 4, 5], dtype=np.int32),
        "prompt_length": 3,
        "rollout_logprobs": np.array([-0.5, -0.25], dtype=np.float32),
        "reward": None,
        "routes": np.zeros((4, 2, 3), dtype=np.int16),
        "finish_reason": "stop",
        "weights_version": 0,
        "response_text": "4 5",
    }
    return Sample(**{**fields, **changes})


def test_a_right_sample_passes_and_survives_pickling():
    copy = pickle.loads(pickle.dumps(sample(reward=1.0)))
    assert copy.num_response_tokens == 2
    assert np.array_equal(copy.tokens, [1, 2, 3, 4, 5])
    assert sample(routes=None).routes is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tokens": np.array([1, 2, 3, 4, 5])}, "tokens is int64, expected int32"),
        ({"tokens": [1, 2, 3]}, "tokens is list, expected int32"),
        ({"tokens": np.zeros((5, 1), dtype=np.int32)}, "tokens has shape"),
        ({"prompt_length": 5}, "prompt_length is 5 of 5 tokens"),
        ({"prompt_length": 0}, "prompt_length is 0 of 5 tokens"),
        ({"rollout_logprobs": np.zeros(3, dtype=np.float32)}, r"rollout_logprobs has shape \(3,\), expected \(2\)"),
        ({"rollout_logprobs": np.zeros(2)}, "rollout_logprobs is float64"),
        ({"rollout_logprobs": np.array([0, -np.inf], dtype=np.float32)}, r"rollout_logprobs\[1\] is -inf"),
        ({"rollout_logprobs": np.array([np.nan, 0], dtype=np.float32)}, r"rollout_logprobs\[0\] is nan"),
        ({"reward": float("nan")}, "reward is nan"),
        ({"void": "retracted"}, r"is void \(retracted\) and carries a record"),
        ({"finish_reason": "eos"}, "finish_reason is 'eos'"),
        ({"weights_version": -1}, "weights_version is -1"),
    ],
)
def test_a_wrong_sample_is_refused_by_its_id(changes, problem):
    with pytest.raises(ValueError, match="sample 'p0/3': .*" + problem):
        sample(**changes)


def test_a_group_holds_samples_of_its_prompt_only_and_each_once():
    assert len(Group(prompt=PROMPT, samples=(sample(), sample(sample_id="p0/4"))).samples) == 2
    with pytest.raises(ValueError, match="group of prompt 'p0' has no sample"):
        Group(prompt=PROMPT, samples=())
    with pytest.raises(ValueError, match="sample 'p0/3': answers prompt 'p1'"):
        Group(prompt=PROMPT, samples=(sample(prompt_id="p1"),))
    with pytest.raises(ValueError, match="sample 'p0/3': is in its group twice"):
        Group(prompt=PROMPT, samples=(sample(), sample()))
