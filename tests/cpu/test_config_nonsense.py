"""Every key of config.json in turn: a value without sense, or none at all, is refused by name or was not read."""

import copy
from collections.abc import Iterator

import pytest

from glm5_next.bridge.tiny_config import TinyModel, composite_config
from glm5_next.plugins.config import Glm5NextConfig

RAW = composite_config(TinyModel())
CONFIG = Glm5NextConfig.from_hf(RAW)
NONSENSE = (None, -1, 0, 1.5, "x", True, [], {}, [None], [1], float("nan"), float("inf"))
ACCEPTED = {
    "num_nextn_predict_layers": (None, 0),
    "vision_config": (None, 0, [], {}),  # a text-only checkpoint
    "gate_lower_bound": (-1, None),
    **dict.fromkeys(("rms_norm_eps", "swiglu_limit", "routed_scaling_factor", "hc_eps"), (1.5,)),
}


def keys(section: dict, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in section.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from keys(value, (*path, key))


def changed(path: tuple[str, ...], value: object = ...) -> dict:
    """The tiny config with one key changed, or left out."""
    raw = copy.deepcopy(RAW)
    section = raw
    for key in path[:-1]:
        section = section[key]
    if value is ...:
        del section[path[-1]]
    else:
        section[path[-1]] = value
    return raw


@pytest.mark.parametrize("path", keys(RAW), ids=".".join)
def test_a_value_without_sense_is_refused_by_name_unless_the_key_is_not_read(path):
    for value in NONSENSE:
        try:
            config = Glm5NextConfig.from_hf(changed(path, value))
        except ValueError as error:
            assert path[-1] in str(error) or (value == {} and "is missing" in str(error)), (value, error)
        else:
            assert config == CONFIG or value in ACCEPTED.get(path[-1], ()), value


@pytest.mark.parametrize("path", keys(RAW), ids=".".join)
def test_no_default_replaces_a_missing_key(path):
    try:
        config = Glm5NextConfig.from_hf(changed(path))
    except ValueError as error:
        assert "missing" in str(error) or "model_type is None" in str(error), error
    else:
        assert config == CONFIG or path[-1] in ("num_nextn_predict_layers", "vision_config")


@pytest.mark.parametrize(
    "path",
    [
        ("text_config", "n_routed_experts"),
        ("text_config", "num_nextn_predict_layers"),
        ("vision_config", "depth"),
    ],
    ids=".".join,
)
def test_an_absurd_number_of_tensors_is_refused(path):
    with pytest.raises(ValueError, match=rf"{path[-1]} is 1000000000; more than \d+ is refused"):
        Glm5NextConfig.from_hf(changed(path, 10**9))


def test_vision_heads_have_to_divide_the_width():
    with pytest.raises(ValueError, match=r"hidden_size \(32\) must be a multiple of num_heads \(3\)"):
        Glm5NextConfig.from_hf(changed(("vision_config", "num_heads"), 3))
