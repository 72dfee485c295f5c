"""`glm5-next parity`: layouts agree with transformers stage by stage, and a planted fault is named where it was planted."""

import json
from collections.abc import Callable
from unittest import mock

import pytest
from typer.testing import CliRunner

from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.cli import app
from glm5_next.launchers.runtime import parity
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.topology import Topology
from tests.support import tiny  # noqa: F401 - installs the CPU runtime

LAYOUTS = {
    "one": Topology(),
    "tp2": Topology(world_size=2, tp=2),
    "pp2_vpp2": Topology(world_size=2, pp=2, vpp=2),
    "ep2": Topology(world_size=2, ep=2),
    "tp2_pp2_ep2": Topology(world_size=4, tp=2, pp=2, ep=2),
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "tiny", vision=False, mtp=False)


@pytest.fixture(scope="module")
def reference(hf):
    """The reference is computed once per token sequence and precision."""
    made = {}
    original = parity.reference_side

    def once(folder, tokens, dtype):
        key = (tuple(tokens.tolist()), dtype)
        if key not in made:
            made[key] = original(folder, tokens, dtype)
        return made[key]

    with mock.patch.object(parity, "reference_side", once):
        yield


def run(hf, topology=LAYOUTS["one"], dtype="float32", tokens=70):
    return parity.run_parity(hf, topology, dtype=dtype, num_tokens=tokens, seed=1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_agrees_stage_by_stage(hf, reference, name):
    report = run(hf, LAYOUTS[name])
    assert report.first is None and report.mean_kl < 1e-8
    assert report.indexer_agreement == report.router_agreement == report.top1_agreement == 1.0
    layers = Glm5NextConfig.from_hf(hf).num_layers
    assert [stage.layer for stage in report.stages] == sorted(stage.layer for stage in report.stages)
    assert {stage.layer for stage in report.stages} == set(range(-1, layers + 1))
    assert {stage.stage for stage in report.stages} >= {"embedding", "indexer set", "router set", "logits"}


def test_bf16_is_as_near_to_the_reference_as_its_own_bf16_run(hf, reference):
    report = run(hf, dtype="bfloat16", tokens=96)
    assert report.first is None
    assert 0 < report.mean_kl <= report.own_mean_kl, report.mean_kl / report.own_mean_kl


def scaled(ending: str, factor: float) -> Callable:
    """Loads the weights and multiplies those whose name ends so."""
    load = parity.load_weights

    def load_and_change(chunks, checkpoint):
        load(chunks, checkpoint)
        found = [tensor for chunk in chunks for name, tensor in chunk.named_parameters() if name.endswith(ending)]
        assert len(found) == 1, ending
        found[0].data.mul_(factor)

    return mock.patch.object(parity, "load_weights", load_and_change)


def reversed_weight(ending: str) -> Callable:
    load = parity.load_weights

    def load_and_change(chunks, checkpoint):
        load(chunks, checkpoint)
        (found,) = [tensor for chunk in chunks for name, tensor in chunk.named_parameters() if name.endswith(ending)]
        found.data.copy_(found.data.flip(0))

    return mock.patch.object(parity, "load_weights", load_and_change)


def shifted_tokens() -> Callable:
    forward = parity.forward_record
    return mock.patch.object(
        parity, "forward_record", lambda chunks, config, tokens: forward(chunks, config, tokens.roll(1))
    )


def wrong_eps() -> Callable:
    build = parity.build_chunks

    def with_other_eps(settings):
        chunks = build(settings)
        for module in (m for chunk in chunks for m in chunk.modules() if type(m).__name__ == "RMSNorm"):
            module.eps = 0.01
        return chunks

    return mock.patch.object(parity, "build_chunks", with_other_eps)


FAULTS = {
    "embedding": (lambda: scaled("word_embeddings.weight", 1.001), (-1, "embedding")),
    "kda_output": (lambda: scaled("layers.2.self_attention.out_proj.weight", 1.01), (2, "attention")),
    "dsa_output": (lambda: scaled("layers.3.self_attention.linear_proj.weight", 1.01), (3, "attention")),
    "indexer": (lambda: reversed_weight("indexer.linear_wq_b.weight"), (3, "indexer set")),
    "router": (lambda: reversed_weight("layers.2.mlp.router.weight"), (2, "router set")),
    "dense_mlp": (lambda: scaled("layers.0.mlp.linear_fc2.weight", 1.01), (0, "MLP")),
    "shared_expert": (lambda: scaled("layers.4.mlp.shared_experts.linear_fc1.weight", 1.01), (4, "MLP")),
    "mapping": (lambda: scaled("layers.1.mlp_hyper_connection.alpha_res", 1.1), (1, "MLP mHC mapping")),
    "norm_weight": (lambda: scaled("layers.4.input_layernorm.weight", 1.01), (4, "attention norm")),
    "head_as_wrong_temperature": (lambda: scaled("output_layer.weight", 1 / 1.1), (5, "logits")),
    "final_norm": (lambda: scaled("decoder.final_layernorm.weight", 1.01), (5, "final norm")),
    "eps": (wrong_eps, (0, "attention norm")),
    "shift": (shifted_tokens, (-1, "embedding")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_where_it_was_planted(hf, reference, name):
    plant, place = FAULTS[name]
    with plant():
        report = run(hf)
    assert report.first is not None
    assert (report.first.layer, report.first.stage) == place


def test_the_command_prints_table_plot_and_json(hf, reference, tmp_path):
    plot = tmp_path / "depth.png"
    result = CliRunner().invoke(app, ["parity", str(hf), "--tokens", "40", "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert "no stage departs" in result.output and "indexer sets 100.00%" in result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    with scaled("layers.2.self_attention.out_proj.weight", 1.01):
        result = CliRunner().invoke(app, ["parity", str(hf), "--tokens", "40", "--json"])
    assert result.exit_code == 1
    found = json.loads(result.output)
    assert not found["equal"] and found["first_departure"]["layer"] == 2
    with scaled("layers.2.self_attention.out_proj.weight", 1.01):
        result = CliRunner().invoke(app, ["parity", str(hf), "--tokens", "40"])
    assert "first departure: layer 2 (kda + moe): attention" in " ".join(result.output.split())


def test_logits_further_apart_than_allowed_fail(hf, reference):
    result = CliRunner().invoke(app, ["parity", str(hf), "--tokens", "40", "--max-kl", "1e-20"])
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "names"),
    [(["--tp", "2", "--tokens", "41"], "--tokens"), (["--ep", "3"], "n_routed_experts"), (["--vpp", "2"], "vpp")],
)
def test_what_does_not_fit_is_refused(hf, arguments, names):
    result = CliRunner().invoke(app, ["parity", str(hf), *arguments])
    assert result.exit_code == 2 and names in result.output
