"""One switch per stream decides what is recorded, and what it costs is said before a run starts."""

import numpy as np
import pytest

from glm5_next.launchers.presets import find_preset
from glm5_next.launchers.replay_plan import Recording, ReplayPlan
from tests.support.replay import picks_of, plan_of


@pytest.mark.parametrize(
    ("settings", "recording", "from_trainer"),
    [
        ({"routing": "off"}, Recording(), False),
        ({"routing": "record", "indexer": "record"}, Recording(), True),
        ({"routing": "engine", "indexer": "record"}, Recording(routes=True), True),
        ({"routing": "off", "indexer": "engine"}, Recording(picks=True), False),
        (
            {"routing": "engine", "indexer": "engine", "routing_weights": "engine"},
            Recording(routes=True, route_weights=True, picks=True),
            False,
        ),
    ],
)
def test_modes_decide_what_the_engine_records_and_whether_the_trainer_does(settings, recording, from_trainer):
    plan = plan_of(**settings)
    assert plan.recording == recording and plan.from_trainer == from_trainer
    assert plan.from_engine == (recording != Recording())


def test_the_printed_bound_holds_for_what_is_sent():
    tokens = np.random.default_rng(0).integers(0, 99, 3000)
    plan = plan_of(routing="engine", indexer="engine", routing_weights="engine", dsa_layers=(3, 7))
    bounds = plan.bytes_of_sample(len(tokens))
    assert bounds["routes"] == np.zeros((len(tokens), *plan.routes_shape), dtype=np.int16).nbytes
    assert bounds["route weights"] == 2 * bounds["routes"]
    found = picks_of(tokens, (3, 7)).num_bytes
    assert found <= bounds["picks"] <= 3 * found


def test_the_released_models_cost_is_said_per_token_and_per_step():
    model = find_preset("8x8").released_model()
    plan = ReplayPlan.of(plan_of(routing="engine", indexer="engine").settings, model)
    assert (len(plan.moe_layers), len(plan.dsa_layers), plan.num_selected) == (42, 11, 512)
    line = plan.cost(32768, 512)
    assert "routes 672" in line and "per step of 512 samples of 32768 tokens" in line
    picks = plan.bytes_of_sample(32768)["picks"] / 32768
    assert picks < 0.3 * 11 * 512 * 4
    assert ReplayPlan.of(plan_of(routing="off").settings, model).cost(100, 1).startswith("replay payload: none")
