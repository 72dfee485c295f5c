"""Parallel sizes: what is legal, and which layers each pipeline stage gets."""

from dataclasses import replace

import pytest

from glm5_next.plugins.topology import Topology
from tests.support.tiny import Case

MODEL = Case(layers=8, dense_layers=3).config()


def test_data_parallel_size_is_what_is_left():
    assert Topology(world_size=16, tp=2, pp=2).dp == 4
    assert Topology().dp == 1
    assert Topology(world_size=8, ep=8).dp == 8, "experts are spread over data-parallel ranks"


@pytest.mark.parametrize(("vpp", "stages"), [(None, 4), (2, 8)])
def test_virtual_stages_count_as_stages(vpp, stages):
    assert Topology(world_size=4, pp=4, vpp=vpp).num_stages == stages


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
        ({"tp": 0}, "tp must be at least 1, got 0"),
        ({"etp": -1}, "etp must be at least 1, got -1"),
        ({"world_size": 6, "tp": 2, "pp": 2}, "6 ranks cannot hold tp 2 x pp 2: the number of ranks must be a multiple of 4"),
        ({"world_size": 6, "ep": 4}, "6 ranks cannot hold etp 1 x ep 4 x pp 1"),
        ({"world_size": 4, "etp": 2, "ep": 4}, "4 ranks cannot hold etp 2 x ep 4 x pp 1"),
        ({"vpp": 2}, "vpp 2 needs vpp >= 2 and pp >= 2 (pp is 1)"),
        ({"world_size": 2, "pp": 2, "vpp": 1}, "vpp 1 needs vpp >= 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError) as caught:
        Topology(**sizes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("topology", "changes", "message"),
    [
        (Topology(world_size=4, tp=4), {"num_attention_heads": 6}, "num_attention_heads (6) is not a multiple of tp (4)"),
        (Topology(world_size=4, tp=4), {"kda_num_heads": 6}, "linear_attn_config.num_heads (6) is not a multiple of tp (4)"),
        (Topology(world_size=4, tp=4), {"ffn_hidden_size": 90}, "intermediate_size (90) is not a multiple of tp (4)"),
        (Topology(world_size=4, tp=4), {"moe_ffn_hidden_size": 30}, "the shared experts' width (30) is not a multiple of tp (4)"),
        (Topology(world_size=4, etp=4), {"moe_ffn_hidden_size": 30}, "moe_intermediate_size (30) is not a multiple of etp (4)"),
        (Topology(world_size=3, ep=3), {}, "n_routed_experts (8) is not a multiple of ep (3)"),
        (Topology(world_size=16, pp=16), {}, "8 layers cannot fill 16 pipeline stages"),
        (Topology(world_size=8, pp=8, vpp=2), {}, "8 layers cannot fill 16 pipeline stages"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_model_that_does_not_divide_is_refused_with_both_numbers(topology, changes, message):
    with pytest.raises(ValueError) as caught:
        topology.check_model(replace(MODEL, **changes))
    assert message in str(caught.value)


def test_model_that_divides_is_accepted():
    Topology(world_size=8, tp=2, pp=2, ep=4).check_model(MODEL)


@pytest.mark.parametrize("num_layers", [5, 7, 8, 45])
@pytest.mark.parametrize(("pp", "vpp"), [(1, None), (2, None), (4, None), (2, 2)])
def test_stages_hold_every_layer_once_in_order_and_differ_by_one_at_most(num_layers, pp, vpp):
    stages = Topology(world_size=pp, pp=pp, vpp=vpp).layers_per_stage(num_layers)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert len(stages) == pp * (vpp or 1) and max(sizes) - min(sizes) <= 1


def test_last_stage_never_has_more_layers_than_the_first():
    assert [len(stage) for stage in Topology(world_size=4, pp=4).layers_per_stage(45)] == [12, 11, 11, 11]
