"""The audit on the released model: totals for the presets' topologies, and what it says of a model that does not fit."""

import json
from dataclasses import replace
from unittest import mock

import pytest
from typer.testing import CliRunner

from glm5_next.bridge import audit as audit_module
from glm5_next.bridge import name_map
from glm5_next.bridge.audit import AuditReport, audit
from glm5_next.launchers.cli import app
from glm5_next.launchers.inspect_commands import preset_topology, topology_of
from glm5_next.launchers.presets import PRESETS, RELEASED_CONFIG
from glm5_next.launchers.runtime.local_ranks import close_own_groups
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.topology import Topology
from tests.support import tiny  # noqa: F401 - installs the CPU runtime
from tests.support.tiny import Case

TOTALS = (38_770, 321_323_031_390)
SPREAD = (preset_topology("16x8"), preset_topology("8x4"))  # the most ranks and the fewest
FULL_SIZE = {preset_topology(name) for name, preset in PRESETS.items() if preset.cluster and preset.layers is None}


@pytest.fixture(autouse=True, scope="module")
def no_group():
    """Pretended groups need a process without a real one, which another test file may have left."""
    close_own_groups()


@pytest.fixture(scope="module")
def released() -> Glm5NextConfig:
    return Glm5NextConfig.from_hf(RELEASED_CONFIG)


def last(config: Glm5NextConfig, topology: Topology) -> AuditReport:
    *_, report = audit(config, topology)
    return report


@pytest.mark.parametrize(
    "topology",
    [pytest.param(each, marks=() if each in SPREAD else pytest.mark.long) for each in sorted(FULL_SIZE, key=str)],
    ids=lambda t: f"tp{t.tp}pp{t.pp}ep{t.ep}x{t.world_size}",
)
def test_every_preset_holds_the_whole_released_model(released, topology):
    report = last(released, topology)
    assert report.problems == []
    assert (report.tensors, report.parameters) == TOTALS
    assert len(report.ranks) == topology.world_size


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.layers is not None])
def test_the_slices_hold_their_layers(name):
    config = PRESETS[name].released_model()
    report = last(config, preset_topology(name))
    assert report.problems == [] and {layer for rank in report.ranks for layer in rank.layers} == set(range(4))
    assert report.tensors == len(name_map.inventory(config))


def test_the_totals_are_counted_from_the_built_modules(released):
    """Fewer experts and fewer layers: both numbers move by exactly what was taken away."""
    small = replace(released.first_layers(4), num_experts=32, vision=None)
    topology = Topology(world_size=4, tp=2, pp=2, ep=2)
    whole = last(small, topology)
    fewer_experts = last(replace(small, num_experts=30), topology)
    hidden, width, moe_layers = small.hidden_size, small.moe_ffn_hidden_size, small.mlp_kinds.count("moe")
    router_rows = 2 * (hidden + 1)  # weight and selection bias
    assert whole.tensors - fewer_experts.tensors == moe_layers * 2 * 3
    assert whole.parameters - fewer_experts.parameters == moe_layers * (2 * 3 * hidden * width + router_rows)
    fewer_layers = last(small.first_layers(3), topology)
    assert whole.tensors > fewer_layers.tensors and whole.parameters > fewer_layers.parameters


@pytest.fixture
def tiny_config() -> Glm5NextConfig:
    return Case(layers=5).config()


def test_a_wrong_cut_is_found(tiny_config):
    """Every rank claims the first slice."""
    topology = Topology(world_size=4, tp=2, pp=2)
    assert last(tiny_config, topology).problems == []
    with mock.patch.object(audit_module, "part_range", lambda row, length, rank, size: (0, length // size)):
        problems = last(tiny_config, topology).problems
    assert any("ranks hold the slices" in problem for problem in problems)


def test_a_rank_that_lacks_a_tensor_is_found(tiny_config):
    topology = Topology(world_size=2, pp=2)
    original = audit_module.local_tensors

    def without(chunks, config):
        return {name: local for name, local in original(chunks, config).items() if "router.weight" not in name}

    with mock.patch.object(audit_module, "local_tensors", without):
        problems = last(tiny_config, topology).problems
    assert any("gate.weight: no rank holds it" in problem for problem in problems)


def test_a_parameter_of_the_wrong_size_is_found(tiny_config):
    topology = Topology(world_size=2, tp=2)
    wide = replace(tiny_config, ffn_hidden_size=2 * tiny_config.ffn_hidden_size)
    with mock.patch.object(audit_module, "inventory", lambda config: name_map.inventory(wide)):
        problems = last(tiny_config, topology).problems
    assert any("linear_fc1.weight has shape" in problem for problem in problems)


def test_the_command_prints_stages_and_totals(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(Case(layers=5).text_config()))
    result = CliRunner().invoke(app, ["audit", str(config), "--tp", "2", "--pp", "2", "--ep", "2"])
    assert result.exit_code == 0, result.output
    assert "every tensor is held" in result.output
    counted = json.loads(CliRunner().invoke(app, ["audit", str(config), "--pp", "2", "--json"]).output)
    assert counted["tensors"] == len(name_map.inventory(Case(layers=5).config())) and counted["problems"] == []
    assert [rank["layers"] for rank in counted["ranks"]] == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [(["--ep", "64"], "288"), (["--preset", "8x8", "--tp", "2"], "--tp"), (["--tp", "3"], "num_attention_heads")],
)
def test_topologies_that_do_not_fit_are_refused(arguments, names):
    result = CliRunner().invoke(app, ["audit", *arguments])
    assert result.exit_code == 2 and names in result.output


def test_as_few_ranks_as_the_sizes_allow():
    assert topology_of(None, tp=8, pp=4, ep=16, etp=1, vpp=None).world_size == 64
    assert topology_of(None, tp=2, pp=1, ep=3, etp=2, vpp=None).world_size == 6
