"""A record that is not what the engine used is refused, with the sample, the layer and the likely cause."""

from dataclasses import replace

import numpy as np
import pytest

from glm5_next.launchers.replay_payload import check_record
from glm5_next.launchers.types import Sample
from tests.support.replay import picks_of, plan_of

MOE_LAYERS, EXPERTS, ROWS = (1, 2), 288, 30
PLAN = plan_of(
    routing="engine", indexer="engine", routing_weights="engine", moe_layers=MOE_LAYERS, num_experts=EXPERTS,
    dsa_layers=(3, 7),
)  # fmt: skip
TOKENS = np.arange(ROWS + 1, dtype=np.int32)
ROUTES = np.stack([np.arange(ROWS) * 9, np.arange(ROWS) * 9 + 1], axis=1)[:, None].repeat(2, axis=1).astype(np.int16)
WEIGHTS = np.full(ROUTES.shape, 1.25, dtype=np.float32)


def sample(**changes) -> Sample:
    record = {"routes": ROUTES, "route_weights": WEIGHTS, "picks": picks_of(TOKENS[:-1], (3, 7))}
    return Sample(
        prompt_id="p",
        sample_id="3.0.1.2",
        tokens=TOKENS,
        prompt_length=10,
        rollout_logprobs=np.zeros(ROWS - 9, dtype=np.float32),
        reward=None,
        finish_reason="stop",
        weights_version=0,
        response_text="",
        **(record | changes),
    )


def put(array: np.ndarray, index, value) -> np.ndarray:
    array = array.copy()
    array[index] = value
    return array


def test_a_right_record_passes_and_so_does_one_with_holes():
    check_record(sample(), PLAN)
    assert ROUTES.max() > 255, "ids beyond a byte should be among them"
    check_record(sample(routes=put(ROUTES, (5, 1), -1)), PLAN)
    check_record(sample(routes=put(ROUTES, (5, 1), -1), route_weights=put(WEIGHTS, (5, 1), 0)), PLAN)
    check_record(sample(routes=None, route_weights=None, picks=None), plan_of(routing="off"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"routes": None}, "routes of all layers are missing: the engine was not asked for them"),
        (
            {"routes": np.zeros_like(ROUTES)},
            r"token 0, layer 1 names an expert twice: .*bypasses the capture sends zeros",
        ),
        ({"routes": put(ROUTES, (slice(None), 1), 0)}, "token 0, layer 2 names an expert twice"),
        ({"routes": put(ROUTES, (7, 1), 4)}, r"token 7, layer 2 names an expert twice.*\[4, 4\]"),
        (
            {"routes": put(ROUTES, (7, 0, 1), EXPERTS)},
            "token 7, layer 1 names experts that do not exist: ids of another",
        ),
        ({"routes": put(ROUTES, (7, 0), -2)}, "token 7, layer 1 names experts that do not exist"),
        ({"routes": put(ROUTES, (7, 0, 1), -1)}, "token 7, layer 1 is cut off: -1 in some slots only"),
        ({"routes": put(ROUTES, (slice(None), 1), -1)}, "routes of layer 2 have no record for any token"),
        ({"routes": ROUTES[:-1]}, "routes of all layers have shape .*: the engine's prefix cache or its start offset"),
        ({"routes": put(ROUTES, 0, ROUTES[0]).repeat(2, 0)[: ROWS + 1]}, "shape .*: the engine counts the last token"),
        ({"routes": ROUTES[:, :1]}, "shape .*: the engine counts other layers"),
        (
            {"routes": ROUTES.astype(np.int32)},
            "routes of all layers are int32, expected int16: .*decoded as another type",
        ),
        ({"routes": ROUTES.astype(np.float32)}, "routes of all layers are float32"),
        ({"routes": ROUTES.tolist()}, "routes of all layers are list"),
        ({"route_weights": None}, "route_weights of all layers are missing"),
        ({"route_weights": put(WEIGHTS, (4, 1, 0), np.nan)}, "token 4, layer 2 are not finite"),
        ({"route_weights": put(WEIGHTS, (4, 1, 0), np.inf)}, "token 4, layer 2 are not finite"),
        ({"route_weights": put(WEIGHTS, (4, 1, 0), -0.5)}, "token 4, layer 2 are negative"),
        ({"route_weights": put(WEIGHTS, (4, 1), 0)}, "token 4, layer 2 are all zero: the engine does not capture"),
        ({"route_weights": WEIGHTS[:-1]}, "route_weights of all layers have shape"),
        ({"route_weights": WEIGHTS.astype(np.float64)}, "route_weights of all layers are float64"),
        ({"picks": None}, "picks of all layers are missing"),
        ({"picks": np.zeros((ROWS, 2, 4), dtype=np.int32)}, "picks of all layers are int32, expected a PickRecord"),
        ({"picks": picks_of(TOKENS[:-1], (3,))}, r"picks are of layers \(3,\), the model's .* are \(3, 7\)"),
        ({"picks": replace(picks_of(TOKENS[:-1], (3, 7)), kpool=8)}, "picks are 4 pools of 8 tokens"),
        ({"picks": picks_of(TOKENS[:-2], (3, 7))}, "picks cover tokens 0 to 29 .*expected 0 to 30: .*left out tokens"),
        ({"picks": picks_of(TOKENS, (3, 7))}, "picks cover tokens 0 to 31 .*counts the last token"),
        ({"picks": replace(picks_of(TOKENS[:-1], (3, 7)), first=4)}, "picks cover tokens 4 to 34"),
    ],
)
def test_a_wrong_record_is_refused_with_sample_layer_and_cause(changes, message):
    with pytest.raises(ValueError, match=f"sample '3.0.1.2': .*{message}"):
        check_record(sample(**changes), PLAN)


def test_picks_that_are_holes_everywhere_are_a_capture_that_is_off():
    picks = sample().picks
    holes = [replace_holes(chunk) for chunk in picks.chunks]
    with pytest.raises(ValueError, match="picks of layer 7 have no record for any token: the engine does not capture"):
        check_record(sample(picks=replace(picks, chunks=tuple(holes))), PLAN)


def replace_holes(chunk):
    holes = chunk.holes.copy()
    holes[19:, 1] = True
    return replace(chunk, holes=holes)
