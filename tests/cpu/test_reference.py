"""The reference model is loaded whole, in plain torch, and its memory can be reached by the names on disk."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glm5_next.bridge import reference
from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.name_map import VISION, inventory, mtp_tensors
from glm5_next.bridge.reference import disk_views, load_reference
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint

IDS = torch.arange(60).view(1, 60)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Checkpoint:
    return Checkpoint(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "hf", dtype="float32"))


@pytest.fixture
def model(source):
    return load_reference(source.folder)


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=IDS).logits


def test_the_views_are_the_tensors_of_the_file(source, model):
    views = disk_views(model)
    mtp = {name for entry in mtp_tensors(source.config) for name in entry.hf}
    assert views.keys() == inventory(source.config).keys() - mtp
    for name, view in views.items():
        assert view.shape == source.tensors[name].shape and torch.equal(view, source.read(name)), name


def test_bf16_values_and_fp32_parameters_survive_loading_in_bf16(tmp_path):
    checkpoint = Checkpoint(write_tiny_checkpoint(tmp_path / "hf"))
    for name, view in disk_views(load_reference(checkpoint.folder, "bfloat16")).items():
        assert torch.equal(view.float(), checkpoint.read(name).float()), name
        assert view.dtype == torch.bfloat16 or not name.startswith(VISION)


def test_writing_through_a_view_changes_the_model(model):
    before, views = logits(model), disk_views(model)
    text = {name for name in views if not name.startswith(VISION)}
    # One expert may get no token, and a changed score may select the same pools.
    choices = {name for name in text if "mlp.experts." in name or ".indexer." in name}
    kinds = {name.split(".layers.")[-1].split(".", 1)[-1]: name for name in text - choices}
    for name in kinds.values():
        kept = views[name].clone()
        views[name].mul_(3).add_(0.5)
        assert not torch.equal(logits(model), before), name
        views[name].copy_(kept)
    assert torch.equal(logits(model), before)
    for group in ("gate_proj", "up_proj", "down_proj", "indexer.wk", "index_kpool_compress_gate"):
        changed = [views[name] for name in choices if group in name]
        for view in changed:
            view.neg_().add_(0.5)
        after = logits(model)
        assert not torch.equal(after, before), group
        before = after


def test_a_checkpoint_without_vision_tower_gives_a_model_without_one(tmp_path):
    checkpoint = Checkpoint(write_tiny_checkpoint(tmp_path / "hf", dtype="float32", vision=False, mtp=False))
    model = load_reference(checkpoint.folder)
    assert model.model.visual is None and disk_views(model).keys() == checkpoint.tensors.keys()
    assert logits(model).isfinite().all()


def test_logits_are_neither_flat_nor_certain(model):
    log_probabilities = logits(model).log_softmax(-1)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
    assert 3.0 < entropy.mean() < 4.6 and log_probabilities.max() < -0.1


def test_loading_prints_nothing(source, capfd):
    logits(load_reference(source.folder))
    assert capfd.readouterr() == ("", "")


def test_a_checkpoint_that_does_not_fit_is_refused(source, tmp_path):
    write_tiny_checkpoint(tmp_path / "hf", layers=4)
    (tmp_path / "hf" / "config.json").write_text((source.folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"do not fit config\.json"):
        load_reference(tmp_path / "hf")


@pytest.mark.parametrize(
    ("report", "match"),
    [
        ({"missing_keys": {"lm_head.weight"}}, "did not find lm_head.weight"),
        ({"unexpected_keys": {"model.language_model.layers.4.x"}}, r"did not use .*layers\.4\.x"),
        ({"mismatched_keys": {("lm_head.weight", (1,), (2,))}}, "could not fit"),
        ({"error_msgs": ["broken"]}, "failed with broken"),
    ],
)
def test_what_transformers_only_reports_is_an_error(source, report, match):
    nothing = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}
    reference._check_report(source, nothing | {"unexpected_keys": {"model.language_model.layers.5.enorm.weight"}})
    with pytest.raises(ValueError, match=match):
        reference._check_report(source, nothing | report)


FLA_STUB = """
def chunk_kda(query, key, value, g, beta, **kwargs):
    raise RuntimeError("a GPU kernel was called")
"""
WITH_FLA = """
import importlib, sys, torch
sys.modules["megatron"] = None  # not needed here, and slow to import
from glm5_next.bridge.reference import MODELING, import_modeling, load_reference
load_reference(sys.argv[1])(input_ids=torch.arange(9).view(1, 9))
import fla
print("ran on torch beside", fla.__name__)

del sys.modules[MODELING]
modeling = importlib.import_module(MODELING)
try:
    modeling.chunk_kimi_delta_attention(*[torch.ones(1, 1, 1, 1)] * 5)
except RuntimeError as error:
    print(error)
try:
    import_modeling()
except ValueError as error:
    print("refused:", error)
"""


def test_an_installed_fla_is_never_called(source, tmp_path):
    for package in ("fla", "fla/ops", "fla/ops/kda"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(FLA_STUB)
    environment = {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "PATH": str(Path(sys.executable).parent)}
    command = [sys.executable, "-c", WITH_FLA, str(source.folder)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    lines = result.stdout.splitlines()
    assert lines[:2] == ["ran on torch beside fla", "a GPU kernel was called"], result.stdout + result.stderr
    assert lines[2].startswith("refused: ") and "was imported with fla installed" in lines[2]


def pool_scores(indexer, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Score of every pool for every query, [queries, pools]; pools that a query cannot see have -inf."""
    hidden, length = inputs["hidden_states"], inputs["hidden_states"].shape[1]
    queries = indexer.wq_b(inputs["q_resid"]).view(length, indexer.n_heads, indexer.head_dim)
    gate = torch.nn.functional.linear(hidden, indexer.index_kpool_compress_gate)
    packed = torch.cat([indexer.k_norm(indexer.wk(hidden)), gate, torch.ones_like(gate[..., :1])], dim=-1)
    pools = indexer.get_pooled_states(packed)[0][0]
    scores = torch.einsum("qh,qhp->qp", indexer.weights_proj(hidden)[0], (queries @ pools.T).relu())
    last_token = torch.arange(len(pools)) * indexer.index_kpool + indexer.index_kpool - 1
    return scores.masked_fill(last_token > torch.arange(length)[:, None], -torch.inf)


@pytest.mark.parametrize("seed", range(3))
def test_no_two_pools_tie_where_the_selection_ends(tmp_path, seed):
    model = load_reference(write_tiny_checkpoint(tmp_path / "hf", seed=seed, dtype="float32", vision=False))
    indexer = model.model.language_model.layers[3].self_attn.indexer
    seen: list[dict[str, torch.Tensor]] = []
    indexer.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    with torch.no_grad():
        model(input_ids=torch.randint(117, (1, 500), generator=torch.Generator().manual_seed(seed)))
        ordered = pool_scores(indexer, seen[0]).sort(-1, descending=True).values
    taken = indexer.index_topk // indexer.index_kpool
    last, first_left_out = ordered[:, taken - 1], ordered[:, taken]
    assert (first_left_out > -torch.inf).sum() > 450
    assert (last > first_left_out)[first_left_out > -torch.inf].all()
