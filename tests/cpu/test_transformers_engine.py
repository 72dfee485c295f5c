"""The embedded engine samples the model's own distribution, says with which probability and experts, and takes weights."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.name_map import trained_names
from glm5_next.bridge.reference import load_reference
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.replay_plan import Recording
from glm5_next.launchers.runtime.engine import Completion
from glm5_next.launchers.runtime.transformers_engine import TransformersEngine
from glm5_next.launchers.runtime.weight_digest import weight_digest

VOCAB = 120
PROMPTS = [np.random.default_rng(length).integers(0, VOCAB, length).astype(np.int32) for length in (41, 13, 20, 1, 17)]
COPIES, MAX_NEW_TOKENS = 3, 14
# A random model hardly ever ends its turn; every eighth token does here, so sequences leave the batch at any time.
DSA = 3  # the sparse-attention layer of five
RECORDING = Recording(routes=True, route_weights=True, picks=True)
STOP_TOKENS = frozenset(range(0, VOCAB, 8))
NAME = "model.language_model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "tiny")


def engine_of(folder: Path, **changes) -> TransformersEngine:
    return TransformersEngine(folder, **{"precision": "fp32", "recording": RECORDING, "batch_size": 9, **changes})


@pytest.fixture(scope="module")
def engine(folder) -> TransformersEngine:
    """Shared, so its weights are never changed. Nine sequences at once: three prompts, then the other two."""
    engine = engine_of(folder)
    engine.stop_tokens = STOP_TOKENS
    return engine


@pytest.fixture(scope="module")
def model(folder):
    return load_reference(folder)


@pytest.fixture(scope="module")
def completions(engine) -> list[list[Completion]]:
    return engine.generate(PROMPTS, COPIES, max_new_tokens=MAX_NEW_TOKENS, seed=1)


@torch.no_grad()
def uncached(model, tokens: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """One forward pass: log-probabilities `[S, vocab]`, the combine weight of every expert `[S, MoE layers, experts]`
    (0: not chosen) and the tokens that sparse attention reads, as the indexer of the layer gives them `[S, width]`."""
    routes: list[Tensor] = []
    picks: list[Tensor] = []

    def on_router(module, inputs, output):
        routes.append(torch.zeros(len(tokens), 8).scatter(1, output[2], output[1]))

    layers = model.model.language_model.layers
    hooks = [layer.mlp.gate.register_forward_hook(on_router) for layer in layers if hasattr(layer.mlp, "gate")]
    hooks.append(layers[DSA].self_attn.indexer.register_forward_hook(lambda m, i, output: picks.append(output[0])))
    logits = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    for hook in hooks:
        hook.remove()
    return logits.float().log_softmax(-1), torch.stack(routes, dim=1), picks[0]


def every(completions) -> list[tuple[np.ndarray, Completion]]:
    """(whole sequence, completion) of every sample."""
    return [
        (np.concatenate([prompt, completion.tokens]), completion)
        for prompt, samples in zip(PROMPTS, completions, strict=True)
        for completion in samples
    ]


def test_cached_batches_of_different_lengths_give_the_log_probabilities_of_single_uncached_passes(completions, model):
    for tokens, completion in every(completions):
        logprobs, _, _ = uncached(model, tokens)
        picked = logprobs[:-1].gather(1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0]
        expected = picked[-len(completion.tokens) :].numpy()
        assert completion.logprobs.dtype == np.float32
        assert np.abs(completion.logprobs - expected).max() < 1e-5


def test_recorded_experts_are_those_of_uncached_passes(completions, model):
    for tokens, completion in every(completions):
        _, weights, _ = uncached(model, tokens[:-1])
        assert completion.routes.dtype == np.int16
        got = torch.from_numpy(completion.routes).long()
        assert torch.equal(torch.zeros_like(weights).scatter(2, got, 1.0), (weights > 0).float())
        given = torch.zeros_like(weights).scatter(2, got, torch.from_numpy(completion.route_weights))
        assert (given - weights).abs().max() < 1e-5, "weights of other experts, or of another token"


def test_recorded_picks_are_those_of_uncached_passes_for_prompt_and_response_alike(completions, model):
    """Pool ids and the implied tail, expanded to tokens, are what the reference's indexer returns."""
    choices = 0
    for tokens, completion in every(completions):
        _, _, expected = uncached(model, tokens[:-1])
        pools = completion.picks.decode(DSA)
        assert completion.picks.layers == (DSA,) and not completion.picks.holes.any()
        for position, (row, reference) in enumerate(zip(pools, expected.numpy(), strict=True)):
            full = [4 * pool + member for pool in row if pool >= 0 for member in range(4)]
            tail = list(range((position + 1) // 4 * 4, position + 1))
            assert sorted(full + tail) == sorted(token for token in reference if token >= 0)
            choices += position >= 19
    assert choices > 100, "hardly a token had a choice to make"


def test_sequences_are_longer_than_what_sparse_attention_selects(completions, model):
    limit = model.config.text_config.index_topk
    assert limit == 16
    lengths = [(len(tokens) - len(completion.tokens), len(tokens)) for tokens, completion in every(completions)]
    assert sum(prompt > limit for prompt, _ in lengths) >= 9
    assert any(prompt < limit < total - 4 for prompt, total in lengths), "none gets past it while it is sampled"


def test_a_response_ends_with_its_first_stop_token_or_at_the_limit(completions):
    reasons = set()
    for _, completion in every(completions):
        stops = [int(token) in STOP_TOKENS for token in completion.tokens]
        assert not any(stops[:-1])
        assert completion.finish_reason == ("stop" if stops[-1] else "length")
        assert stops[-1] or len(completion.tokens) == MAX_NEW_TOKENS
        reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}


def test_the_stop_tokens_are_those_of_the_generation_config(folder):
    expected = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert len(expected) == 3 and engine_of(folder).stop_tokens == frozenset(expected)


@pytest.mark.parametrize(("content", "message"), [(None, "no such file"), ({"top_p": 1}, "eos_token_id is missing")])
def test_a_checkpoint_that_names_no_stop_token_is_refused(folder, tmp_path, content, message):
    broken = shutil.copytree(folder, tmp_path / "hf")
    (broken / "generation_config.json").unlink()
    if content is not None:
        (broken / "generation_config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"generation_config.json: {message}"):
        engine_of(broken)


def same(a: list[list[Completion]], b: list[list[Completion]]) -> bool:
    return all(
        np.array_equal(x.tokens, y.tokens) and np.array_equal(x.logprobs, y.logprobs)
        for xs, ys in zip(a, b, strict=True)
        for x, y in zip(xs, ys, strict=True)
    )


def test_the_same_seed_gives_the_same_samples_and_another_seed_others(engine, completions):
    assert same(engine.generate(PROMPTS, COPIES, max_new_tokens=MAX_NEW_TOKENS, seed=1), completions)
    assert not same(engine.generate(PROMPTS, COPIES, max_new_tokens=MAX_NEW_TOKENS, seed=2), completions)


def test_samples_of_one_prompt_differ(completions):
    assert all(len({tuple(sample.tokens) for sample in samples}) == COPIES for samples in completions)


def test_without_recording_there_are_no_routes_and_the_same_samples(folder, completions):
    engine = engine_of(folder, recording=Recording())
    engine.stop_tokens = STOP_TOKENS
    silent = engine.generate(PROMPTS, COPIES, max_new_tokens=MAX_NEW_TOKENS, seed=1)
    assert same(silent, completions) and {c.routes for samples in silent for c in samples} == {None}


def excess(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square of counts, in standard deviations above what the distribution itself gives; rare tokens in one bin."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def test_first_tokens_follow_the_models_distribution_at_temperature_1(folder, model):
    draws = 6000
    engine = engine_of(folder, batch_size=draws)
    (samples,) = engine.generate(PROMPTS[2:3], draws, max_new_tokens=1, seed=3)
    counts = np.bincount([int(sample.tokens[0]) for sample in samples], minlength=VOCAB)
    logprobs = uncached(model, PROMPTS[2])[0][-1].double()
    assert excess(counts, logprobs.exp().numpy()) < 4
    assert excess(counts, (logprobs / 0.9).softmax(-1).numpy()) > 10, "another temperature would pass, too"


def test_scores_are_the_models_log_probabilities_of_every_token_after_the_first(engine, model):
    sequences = [tokens for tokens in PROMPTS if len(tokens) > 1]
    for tokens, scores in zip(sequences, engine.score(sequences), strict=True):
        labels = torch.from_numpy(tokens[1:].astype(np.int64))[:, None]
        expected = uncached(model, tokens)[0][:-1].gather(1, labels)[:, 0].numpy()
        assert scores.dtype == np.float32 and scores.shape == (len(tokens) - 1,)
        assert np.abs(scores - expected).max() < 1e-6


# Weight updates.


@pytest.fixture
def updated(folder) -> TransformersEngine:
    return engine_of(folder)


def new_values(engine: TransformersEngine, dtype: torch.dtype) -> dict[str, Tensor]:
    """Other values for every tensor that training changes."""
    return {
        name: (view * 1.5 + 0.01).to(dtype).clone()
        for name, view in engine.views.items()
        if not name.startswith("model.visual.")
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_update_puts_every_tensor_in_place_and_reports_what_is_held(updated, folder, dtype):
    sent = new_values(updated, dtype)
    assert sent.keys() == trained_names(Checkpoint(folder).config)
    before = updated.score(PROMPTS[:1])[0]
    updated.begin_update(7)
    for name, tensor in sent.items():
        updated.put_weights([(name, tensor)])
    assert updated.weights_version() == 0
    held = updated.commit_update()
    assert updated.weights_version() == 7
    assert held == {name: weight_digest(tensor, dtype) for name, tensor in sent.items()}
    assert all(torch.equal(updated.views[name], tensor.float()) for name, tensor in sent.items())
    assert np.abs(updated.score(PROMPTS[:1])[0] - before).max() > 0.01


def test_a_tensor_that_was_not_sent_is_reported_too(updated):
    sent = new_values(updated, torch.float32)
    del sent[NAME]
    updated.begin_update(1)
    updated.put_weights(list(sent.items()))
    assert updated.commit_update().keys() - sent.keys() == {NAME}


def test_a_value_that_the_sent_dtype_cannot_express_is_reported(updated):
    updated.begin_update(1)
    updated.put_weights([(NAME, updated.views[NAME].bfloat16())])
    updated.views[NAME][0, 0] = 1 + 2**-12
    assert updated.commit_update()[NAME] == "not a torch.bfloat16 tensor"


def test_an_engine_of_less_precision_reports_that_it_holds_something_else(folder):
    engine = engine_of(folder, precision="bf16")
    sent = engine.views[NAME].float() + 2**-12
    engine.begin_update(1)
    engine.put_weights([(NAME, sent)])
    assert engine.commit_update()[NAME] != weight_digest(sent, torch.float32)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.language_model.layers.1.mlp.router.weight", (8, 64), "no tensor named"),
        (NAME, (64, 32), r"has shape \(64, 32\), the engine's \(32, 64\)"),
    ],
)
def test_unknown_names_and_wrong_shapes_are_refused(updated, name, shape, message):
    updated.begin_update(1)
    with pytest.raises(ValueError, match=message) as refusal:
        updated.put_weights([(name, torch.zeros(shape))])
    assert name in str(refusal.value)


def test_weights_change_only_inside_an_update_and_nothing_is_sampled_there(engine):
    before = engine.views[NAME].clone()
    with pytest.raises(AssertionError, match="outside an update"):
        engine.put_weights([(NAME, torch.zeros(32, 64))])
    with pytest.raises(AssertionError, match="outside an update"):
        engine.commit_update()
    assert torch.equal(engine.views[NAME], before)
    engine.begin_update(1)
    try:
        with pytest.raises(AssertionError, match="while an update is open"):
            engine.begin_update(2)
        with pytest.raises(AssertionError, match="during a weight update"):
            engine.generate(PROMPTS[:1], 1, max_new_tokens=1, seed=0)
    finally:
        engine._update = None
