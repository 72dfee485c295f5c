"""Topologies, their memory and the presets, against counts from built modules and against what a tiny model keeps."""

import json
from dataclasses import replace
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from glm5_next.bridge.audit import audit
from glm5_next.bridge.stage_sizes import stage_sizes
from glm5_next.launchers.cli import app
from glm5_next.launchers.memory import GIB, Workload, chunks_in_flight, layer_bytes, rank_memories, streams_bytes
from glm5_next.launchers.plan import Cluster, candidate, make_plan, what_it_lacks
from glm5_next.launchers.presets import PRESETS, RELEASED_CONFIG
from glm5_next.launchers.runtime.local_ranks import close_own_groups
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.topology import Topology
from tests.support.saved_tensors import saved_bytes
from tests.support.tiny import Case

TOPOLOGIES = [
    Topology(),
    Topology(world_size=8, tp=2, pp=2, ep=4),
    Topology(world_size=8, tp=4, ep=2, etp=2),
    Topology(world_size=4, pp=2, vpp=2, ep=2),
]
TINY = Case(layers=5)
WORK = Workload(tokens=256, precision="fp32")


@pytest.fixture(scope="module")
def released() -> Glm5NextConfig:
    return Glm5NextConfig.from_hf(RELEASED_CONFIG)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_parameter_counts_are_those_of_built_modules(topology):
    close_own_groups()  # pretended groups need a process without real ones
    config = replace(TINY.config(), vocab_size=97)  # no TP size divides it
    *_, report = audit(config, topology)
    assert not report.problems
    stages = stage_sizes(config, topology)
    for rank in report.ranks:
        stage = stages[rank.pp]
        counted = (rank.layers, rank.parameters, rank.expert_parameters, rank.fp32_parameters, rank.frozen_parameters)
        assert counted == (stage.layers, stage.parameters, stage.expert, stage.fp32, stage.frozen)


def test_full_recomputation_keeps_exactly_the_input_of_every_layer():
    for case in (TINY, Case(layers=6, dsa_layers=(3, 5)), Case(layers=6, dense_layers=2)):
        streams = streams_bytes(case.config(), Topology(), WORK)
        kept = saved_bytes(case, WORK.tokens, recompute="full")
        assert kept == pytest.approx(case.layers * streams, rel=0.06)  # and a few vectors per token


@pytest.mark.parametrize(
    "larger",
    [Case(layers=6), Case(layers=6, dsa_layers=(3, 5)), Case(layers=6, dense_layers=2, dsa_layers=(4,))],
    ids=["kda_moe", "dsa_moe", "kda_dense"],
)
def test_a_layer_keeps_what_the_estimate_says(larger):
    """One more layer of each kind; operators keep their inputs, as kernels do."""
    base, config = TINY.config(), larger.config()

    def estimate(config: Glm5NextConfig) -> float:
        kinds = zip(config.attention_kinds, config.mlp_kinds)
        return sum(layer_bytes(config, Topology(), WORK, *kind) for kind in kinds)

    measured = saved_bytes(larger, WORK.tokens, recompute="none") - saved_bytes(TINY, WORK.tokens, recompute="none")
    assert measured / (estimate(config) - estimate(base)) == pytest.approx(1.0, abs=0.2)


def test_the_estimate_of_a_layer_moves_with_what_it_keeps():
    config = TINY.config()
    for change in ({"num_streams": 2}, {"kda_head_dim": 8}, {"kv_lora_rank": 64}, {"moe_ffn_hidden_size": 64}):
        changed = replace(config, **change)
        kinds = [("kda", "moe"), ("dsa", "moe")]
        assert any(
            layer_bytes(config, Topology(), WORK, *k) != layer_bytes(changed, Topology(), WORK, *k) for k in kinds
        )


def test_stages_near_the_front_of_a_pipeline_keep_more_micro_batches():
    topology = Topology(world_size=4, pp=4)
    assert [chunks_in_flight(topology, stage) for stage in range(4)] == [4, 3, 2, 1]
    virtual = Topology(world_size=4, pp=4, vpp=2)
    assert [chunks_in_flight(virtual, stage) for stage in range(4)] == [11, 9, 7, 5]


def test_optimizer_state_is_split_over_replicas_only_if_it_is_distributed(released):
    topology = Topology(world_size=64, tp=4, pp=2, ep=16)
    split, whole = (
        rank_memories(released, topology, Workload(tokens=1024, distributed_optimizer=distributed))[0]
        for distributed in (True, False)
    )
    expert_replicas = 64 // (16 * 2)
    assert whole.optimizer / topology.dp < split.optimizer < whole.optimizer / expert_replicas
    offloaded = rank_memories(released, topology, Workload(tokens=1024, offload=True))[0]
    assert (offloaded.optimizer, offloaded.host) == (0, split.optimizer)


def test_every_legal_topology_is_listed_and_every_other_has_a_reason(released):
    cluster, work = Cluster(8, 8, 141), Workload(tokens=32768)
    made = make_plan(released, cluster, work)
    listed = {(c.topology.tp, c.topology.pp, c.topology.ep, c.topology.etp) for c in made.candidates}
    assert (8, 4, 16, 1) in listed
    assert not any(ep in (64, 128) for _, _, ep, _ in listed)
    reasons = {refusal.sizes: refusal.reason for refusal in made.refusals}
    assert "288" in reasons["EP 64"] and "45 layers" in reasons["PP 64"] and "nodes of 8" in reasons["TP 16"]
    sizes = [1, 2, 4, 8, 16, 32, 64]
    legal = {
        (tp, pp, ep, etp)
        for tp in sizes[:4]
        for pp in sizes[:6]
        for ep in sizes[:6]
        for etp in sizes[:4]
        if 64 % (tp * pp) == 0 and 64 % (pp * ep * etp) == 0
    }
    assert listed == legal


def test_the_best_plan_fits_with_the_fewest_cuts(released):
    made = make_plan(released, Cluster(8, 8, 141), Workload(tokens=32768))
    fitting = [c for c in made.candidates if c.fits]
    assert list(made.candidates[: len(fitting)]) == fitting
    cuts = [c.topology.tp * c.topology.pp for c in fitting]
    assert cuts == sorted(cuts)
    assert made.best is fitting[0]
    assert make_plan(released, Cluster(1, 8, 141), Workload(tokens=32768)).best is None


def test_longer_rows_and_smaller_cards_lose_topologies(released):
    def fitting(memory: float, tokens: int) -> int:
        return sum(c.fits for c in make_plan(released, Cluster(8, 8, memory), Workload(tokens=tokens)).candidates)

    assert fitting(141, 131072) < fitting(141, 32768) < fitting(192, 32768)


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.cluster])
def test_plan_accepts_every_preset(name):
    preset = PRESETS[name]
    result = CliRunner().invoke(app, ["plan", "--preset", name])
    assert result.exit_code == 0 and f"{name} fits" in result.output and "host memory" in result.output, result.output
    parallel, rollout = preset.values["parallel"], preset.values["rollout"]
    has_gpus = rollout["engine"] == "sglang" and rollout.get("placement") != "colocated"
    servers = rollout["num_engines"] * rollout["engine_tp"] if has_gpus else 0
    assert parallel["ranks"] + servers == preset.cluster.gpus
    assert parallel["tp"] <= preset.cluster.gpus_per_node


def test_one_card_holds_the_slice_only_with_the_optimizer_in_host_memory():
    result = CliRunner().invoke(app, ["plan", "--preset", "slice-1x1", "--no-offload"])
    assert result.exit_code == 1 and "--offload" in result.output, result.output


def test_what_is_missing_is_named(released):
    work, topology = Workload(tokens=32768), Topology(world_size=8, tp=8, ep=8)
    chosen = candidate(released, topology, Cluster(1, 8, 141), work)
    assert "optimizer" in what_it_lacks(chosen) and f"{chosen.memory.total / GIB:.0f} GiB" in what_it_lacks(chosen)
    assert what_it_lacks(candidate(released, topology, Cluster(1, 8, 1000), work)) is None


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--gpus", "64"], "--gpu-memory"),
        (["--gpus", "10", "--gpu-memory", "80", "--nodes", "3"], "3 nodes"),
        (["--preset", "8x8", "--gpus", "64"], "--gpus"),
        (["--preset", "8x9"], "'8x8'"),
        (["--preset", "tiny"], "CPU"),
    ],
)
def test_contradictory_options_are_refused(arguments, names):
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 2 and names in result.output and len(result.output.splitlines()) == 1


def test_plan_in_json():
    result = CliRunner().invoke(app, ["plan", "--gpus", "64", "--gpu-memory", "141", "--json"])
    made = json.loads(result.output)
    first = made["candidates"][0]
    assert first["fits"] and first["bytes"]["total"] < 141e9 and {"sizes", "reason"} == set(made["refusals"][0])


def test_plan_needs_no_torch():
    with mock.patch.dict("sys.modules", {"torch": None}):
        assert CliRunner().invoke(app, ["plan", "--gpus", "8", "--gpu-memory", "1000"]).exit_code == 0
    assert torch is not None


def test_an_engine_on_the_same_card_is_counted(released):
    """An embedded one stays; a colocated server wakes when nothing is trained, in place of the activations."""
    alone, guest, small, large = (
        rank_memories(released, Topology(world_size=8, tp=8, ep=8), Workload(tokens=32768, **engine))[0]
        for engine in ({}, {"guest": GIB}, {"awake": GIB}, {"awake": 500 * GIB})
    )
    assert guest.total - alone.total == GIB and small.total == alone.total
    assert large.total - alone.total == 500 * GIB - alone.activations - alone.transient


def test_presets_with_an_engine_beside_the_trainer_plan_for_it():
    found = {}
    for name in ("slice-1x1", "slice-1x8-colocated", "slice-1x8"):
        answer = json.loads(CliRunner().invoke(app, ["plan", "--preset", name, "--json"]).output)
        found[name] = tuple(answer["bytes"][part] / GIB for part in ("guest", "awake"))
    assert found["slice-1x1"] == (pytest.approx(17.8, abs=0.1), 0)  # 9.5 B parameters in bf16
    assert found["slice-1x8-colocated"] == (0, pytest.approx(0.4 * 141e9 / GIB, abs=0.1))
    assert found["slice-1x8"] == (0, 0)
