"""The router: selection with the bias, weights without it, a bias that stays, and recorded routes in place of live ones."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from glm5_next.plugins.megatron_config import megatron_config
from glm5_next.plugins.moe import Glm5NextRouter
from glm5_next.plugins.packed_row import packed_row
from glm5_next.plugins.replay import RouteReplay
from glm5_next.plugins.topology import Topology
from tests.support import tiny
from tests.support.parity import DoublePrecision, logits_of, models, recorded, widened
from tests.support.tiny import Case, relative_error

CASE = Case(seed=2)
CONFIG = CASE.config()
LAYER = 2
TOPK, SCALE = CONFIG.num_experts_per_token, CONFIG.routed_scaling_factor
MOE_LAYERS = tuple(i for i, kind in enumerate(CONFIG.mlp_kinds) if kind == "moe")
LENGTH = 40


def router_of(case: Case = CASE) -> Glm5NextRouter:
    """A router with random weight and bias, as layer `LAYER`."""
    tiny.start_single_process()
    config = megatron_config(case.config(), Topology(), dtype=torch.float32, on_cpu=True)
    router = Glm5NextRouter(config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(LAYER + 1)
    torch.nn.init.normal_(router.weight, std=0.1)
    router.expert_bias.normal_(std=0.1)
    return router


def hidden(length: int = LENGTH) -> Tensor:
    return torch.randn(length, 1, CONFIG.hidden_size)


def other_experts(router: Glm5NextRouter, x: Tensor) -> Tensor:
    """int16 `[T, 1, topk]`: for each token the experts that the router likes least."""
    scores = router.gating(x).sigmoid()[:, 0] + router.expert_bias
    return scores.topk(TOPK, largest=False).indices.unsqueeze(1).short()


def weights_of(logits: Tensor, experts: Tensor) -> Tensor:
    """`[T, experts]`: sigmoid scores of the given experts, normalised over them, times the scale."""
    scores = logits.double().sigmoid()
    out = torch.zeros_like(scores)
    for token, row in enumerate(experts.tolist()):
        total = scores[token, row].sum()
        for expert in row:
            out[token, expert] = SCALE * scores[token, expert] / total
    return out


def assert_weights(probs: Tensor, expected: Tensor) -> None:
    error = relative_error(probs, expected)
    assert error < 1e-6, f"combine weights differ by {error:.1e}, bound 1e-06"


def test_bias_takes_part_in_the_selection_and_not_in_the_weights():
    router, x = router_of(), hidden()
    probs, chosen = router(x)
    logits = x[:, 0] @ router.weight.T
    experts = (logits.sigmoid() + router.expert_bias).topk(TOPK).indices
    assert not torch.equal(experts.sort().values, logits.topk(TOPK).indices.sort().values), "the bias decides nothing"
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, experts, True))
    assert_weights(probs, weights_of(logits, experts))
    assert torch.allclose(probs.sum(1), torch.tensor(SCALE))


def test_logits_are_fp32_products_of_fp32_operands():
    router, x = router_of(), hidden().bfloat16()
    logits = router.gating(x)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, x.float() @ router.weight.T)


def step(bias_update_rate: float) -> tuple[Tensor, Tensor]:
    """The selection bias of every MoE layer before and after one training step's finalisation."""
    tiny.start_single_process()
    model = tiny.our_model(CASE, models(CASE)[0], moe_router_bias_update_rate=bias_update_rate)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)

    def bias() -> Tensor:
        return torch.stack([layer.mlp.router.expert_bias for layer in model.decoder.layers[1:]]).clone()

    before = bias()
    logits_of(wrapped, tiny.tokens(LENGTH)).square().mean().backward()
    finalize_model_grads([wrapped], num_tokens=torch.tensor(LENGTH))
    return before, bias()


@pytest.mark.parametrize("routing", [Glm5NextRouter.routing, TopKRouter.routing], ids=["ours", "Megatron's"])
def test_weights_have_the_same_bits_with_and_without_gradients(monkeypatch, routing):
    """A recomputed pass must repeat the first one; Megatron sums the chosen scores in another order without gradients.

    On a CPU torch sorts in both cases, so the order of a GPU is put in its place.
    """

    def topk(*args, sorted=True, original=torch.topk, **kwargs):
        values, indices = original(*args, **kwargs)
        return (values, indices) if sorted else (values.flip(-1), indices.flip(-1))

    monkeypatch.setattr(torch, "topk", topk)
    router, logits = router_of(), 3 * torch.randn(500, CONFIG.num_experts)
    router.topk = 5
    with_gradients, _ = routing(router, logits)
    with torch.no_grad():
        without, _ = routing(router, logits)
    assert torch.equal(with_gradients, without) == (routing is Glm5NextRouter.routing)


def test_bias_is_the_same_after_a_training_step():
    before, after = step(0.0)
    assert torch.equal(before, after)


def test_bias_moves_where_an_update_rate_is_asked_for():
    before, after = step(1e-3)
    assert not torch.equal(before, after), "nothing would have moved it, so the test above shows nothing"


def test_recorded_experts_are_used_with_live_weights():
    router, x = router_of(), hidden()
    experts = other_experts(router, x)
    live = router(x)[1]
    router.replay = RouteReplay(experts, (LAYER,))
    probs, chosen = router(x)
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, experts[:, 0].long(), True))
    assert not (chosen & live).any(), "the record should differ from the live choice everywhere"
    assert_weights(probs, weights_of(router.gating(x)[:, 0], experts[:, 0]))


def test_tokens_without_a_record_choose_for_themselves():
    router, x = router_of(), hidden()
    live_probs, live = router(x)
    experts = other_experts(router, x)
    experts[10:25] = -1
    router.replay = RouteReplay(experts, (LAYER,))
    probs, chosen = router(x)
    assert torch.equal(chosen[10:25], live[10:25]) and torch.equal(probs[10:25], live_probs[10:25])
    assert not (chosen & live)[:10].any() and not (chosen & live)[25:].any()


def test_record_of_the_live_choice_changes_nothing():
    router, x = router_of(), hidden()
    probs, chosen = router(x)
    experts = chosen.nonzero()[:, 1].view(LENGTH, 1, TOPK).flip(-1)  # in another order
    router.replay = RouteReplay(experts, (LAYER,))
    replayed_probs, replayed = router(x)
    assert torch.equal(replayed, chosen)
    assert_weights(replayed_probs, probs)


def test_gradient_of_replayed_weights_is_the_finite_difference():
    router, x, mix = router_of(), hidden(7), torch.randn(7, CONFIG.num_experts)
    router.replay = RouteReplay(other_experts(router, x), (LAYER,))
    router, x, mix = widened(router), x.double(), mix.double()

    def value() -> Tensor:
        return (router(x)[0] * mix).sum()

    with DoublePrecision():
        (gradient,) = torch.autograd.grad(value(), router.weight)
        direction = torch.randn_like(gradient)
        with torch.no_grad():
            router.weight += 1e-6 * direction
            above = value()
            router.weight -= 2e-6 * direction
            below = value()
    numeric = ((above - below) / 2e-6).item()
    assert numeric == pytest.approx((gradient * direction).sum().item(), rel=1e-6)
    assert abs(numeric) > 1e-3


def test_weights_of_the_engine_are_used_as_they_are_and_pass_the_gradient_of_the_models_own():
    router, x, mix = router_of(), hidden(7), torch.randn(7, CONFIG.num_experts)
    experts = other_experts(router, x)
    given = torch.rand(7, 1, TOPK) + 0.1
    router.replay = RouteReplay(experts, (LAYER,))
    own = router(x)[0]
    (expected,) = torch.autograd.grad((own * mix).sum(), router.weight)
    experts[5] = -1  # chooses and weighs for itself
    router.replay = RouteReplay(experts, (LAYER,), given)
    probs, chosen = router(x)
    assert torch.equal(probs.gather(1, experts[:5, 0].long()), given[:5, 0])
    assert ((probs != 0) == chosen).all() and (probs[:5] - own[:5]).abs().max() > 0.1
    router.replay = None
    assert torch.equal(probs[5], router(x)[0][5])
    router.replay = RouteReplay(other_experts(router, x), (LAYER,), given)
    (gradient,) = torch.autograd.grad((router(x)[0] * mix).sum(), router.weight)
    assert relative_error(gradient, expected) < 1e-6 and expected.norm() > 1e-3


def test_agreement_with_the_live_choice_is_counted_over_recorded_slots():
    router, x = router_of(), hidden()
    live = router(x)[1].nonzero()[:, 1].view(LENGTH, 1, TOPK)
    experts = live.clone()
    experts[:5] = other_experts(router, x)[:5].long()  # 5 tokens without agreement
    experts[5:8, 0, 0] = torch.tensor([min(set(range(8)) - set(row)) for row in live[5:8, 0].tolist()])  # 3 with half
    experts[30:] = -1
    router.replay = replay = RouteReplay(experts, (LAYER,))
    router(x)
    assert int(replay.total[LAYER]) == 30 * TOPK
    assert int(replay.same[LAYER]) == 30 * TOPK - 5 * TOPK - 3
    assert replay.reads == {LAYER: 1}


def test_load_of_replayed_experts_is_counted_where_gradients_are_taken():
    """A bias that is allowed to move follows the experts that are used, not the ones that would have been."""
    router, x = router_of(), hidden()
    experts = other_experts(router, x)
    router.replay = RouteReplay(experts, (LAYER,))
    with torch.no_grad():
        router(x)
    assert not router.local_tokens_per_expert.any()
    router(x)
    assert torch.equal(router.local_tokens_per_expert, experts.flatten().long().bincount(minlength=8).float())


def test_load_of_an_expert_is_counted_beyond_what_bf16_can_count():
    router, x = router_of().bfloat16(), hidden(700).bfloat16()
    router.replay = RouteReplay(torch.tensor([0, 1]).expand(700, 1, TOPK), (LAYER,))
    router(x)
    router(x)
    assert router.local_tokens_per_expert.tolist() == [1400, 1400, 0, 0, 0, 0, 0, 0]


def test_expert_numbers_beyond_255_survive():
    router, x = router_of(Case(experts=288)), hidden()
    experts = torch.tensor([[287, 256]]).expand(LENGTH, 1, TOPK).short()
    router.replay = RouteReplay(experts, (LAYER,))
    probs, chosen = router(x)
    assert chosen.nonzero()[:, 1].unique().tolist() == [256, 287]
    assert_weights(probs, weights_of(router.gating(x)[:, 0], experts[:, 0]))


@pytest.mark.parametrize("shape", [(LENGTH, TOPK), (LENGTH, 2, TOPK)], ids=str)
def test_record_that_does_not_have_one_entry_per_layer_is_refused(shape):
    with pytest.raises(ValueError, match=r"expected \[tokens, 1 MoE layers, topk\]"):
        RouteReplay(torch.full(shape, -1), (LAYER,))


@pytest.mark.parametrize(("tokens", "topk"), [(LENGTH - 1, TOPK), (LENGTH + 1, TOPK), (LENGTH, TOPK + 1)])
def test_record_of_another_row_is_refused(tokens, topk):
    router = router_of()
    router.replay = RouteReplay(torch.arange(topk).expand(tokens, 1, topk), (LAYER,))
    with pytest.raises(
        ValueError, match=f"layer {LAYER}: the row has {LENGTH} tokens on this rank with {TOPK} experts"
    ):
        router(hidden())


def test_layer_without_a_record_is_refused():
    router = router_of()
    router.replay = RouteReplay(torch.arange(TOPK).expand(LENGTH, 1, TOPK), (LAYER + 1,))
    with pytest.raises(ValueError, match=f"layer {LAYER} asks for replayed routes"):
        router(hidden())


@pytest.mark.parametrize("row", [[0, 0], [5, 5], [-1, 3]], ids=str)
def test_record_that_names_an_expert_twice_or_half_of_them_is_refused(row):
    """All zeros is what an engine hands over that records nothing."""
    routes = torch.tensor([0, 1]).repeat(LENGTH, 1, 1)
    routes[7, 0] = torch.tensor(row)
    with pytest.raises(ValueError, match=f"token 7, layer {LAYER}: .* is no record"):
        RouteReplay(routes, (LAYER,))


def routes_of(model: torch.nn.Module, ids: Tensor, *, rolled: int = 0) -> Tensor:
    """`[T, MoE layers, topk]`: what the model chooses, each expert number moved on by `rolled`."""
    with torch.no_grad(), recorded(model) as record:
        logits_of(model, ids)
    chosen = [record.routes[layer].nonzero()[:, 1].view(-1, TOPK) for layer in MOE_LAYERS]
    return (torch.stack(chosen, dim=1) + rolled) % CONFIG.num_experts


def replaying_row(routes: Tensor):
    return packed_row(torch.tensor([0, len(routes)], dtype=torch.int32), RouteReplay(routes, MOE_LAYERS))


def test_whole_model_follows_the_record_on_every_layer():
    model, ids = models(CASE)[1], tiny.tokens(LENGTH)
    with torch.no_grad(), recorded(model) as record:
        live = logits_of(model, ids)
    same, other = routes_of(model, ids), routes_of(model, ids, rolled=3)
    with torch.no_grad():
        assert relative_error(logits_of(model, ids, replaying_row(same)), live) < 1e-6
        with recorded(model) as record:
            moved = logits_of(model, ids, row := replaying_row(other))
    assert relative_error(moved, live) > 1e-2
    for number, layer in enumerate(MOE_LAYERS):
        expected = torch.zeros(LENGTH, CONFIG.num_experts, dtype=torch.bool).scatter(1, other[:, number], True)
        assert torch.equal(record.routes[layer], expected), f"layer {layer} does not follow its own record"
    assert row.routes.reads == dict.fromkeys(MOE_LAYERS, 1)


def test_row_without_a_record_is_not_answered_from_the_row_before():
    model, ids = models(CASE)[1], tiny.tokens(LENGTH)
    with torch.no_grad():
        live = logits_of(model, ids)
        logits_of(model, ids, replaying_row(routes_of(model, ids, rolled=3)))
        assert torch.equal(logits_of(model, ids), live)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def test_recomputation_is_answered_from_the_record_of_its_own_micro_batch():
    """Two micro-batches are in flight, as in a pipeline, when the first one's layers are computed again."""
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    plain, recomputing = (tiny.our_model(CASE, models(CASE)[0], **settings) for settings in ({}, recompute))
    ids = [tiny.tokens(LENGTH, seed) for seed in (1, 2)]
    records = [routes_of(plain, row, rolled=1 + seed) for seed, row in enumerate(ids)]

    for row, record in zip(ids, records):
        logits_of(plain, row, replaying_row(record)).square().mean().backward()
    expected = gradients(plain)

    rows = [replaying_row(record) for record in records]
    losses = [logits_of(recomputing, row, params).square().mean() for row, params in zip(ids, rows)]
    for loss in losses:
        loss.backward()
    for name, gradient in gradients(recomputing).items():
        assert torch.equal(gradient, expected[name]), f"gradient of {name} changes with recomputation"
    assert [params.routes.reads for params in rows] == [dict.fromkeys(MOE_LAYERS, 2)] * 2
