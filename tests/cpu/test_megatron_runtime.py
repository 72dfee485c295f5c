"""Learning rates follow their closed form, parameters are grouped as they must be, and old gradients are noticed."""

import math
from functools import cache
from pathlib import Path

import pytest
import torch

from glm5_next.launchers.config import RunConfig, load_run_config
from glm5_next.launchers.runtime.megatron import (
    build_optimizer,
    check_gradients_are_reset,
    optimizer_config,
    reset_gradients,
)
from glm5_next.plugins.chunks import build_chunks, wrap_ddp
from glm5_next.plugins.megatron_config import megatron_config
from glm5_next.plugins.topology import Topology
from tests.support import tiny

CASE = tiny.Case(layers=2, dsa_layers=(1,), dense_layers=1)
LR, MIN_LR = 3e-4, 2e-5


def settings(**changes) -> RunConfig:
    """Ten optimizer steps: five steps with two mini-batches each. Keys with two underscores, `train__steps`."""
    values = {
        "model": {"checkpoint": Path("/none"), "precision": "fp32"},
        "data": {"prompts": "tiny"},
        "optimizer": {"lr": LR, "min_lr": MIN_LR, "weight_decay": 0.1},
        "grpo": {"mini_batches": 2},
        "train": {"steps": 5},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        values.setdefault(section, {})[name] = value
    return load_run_config(None, values, [])


@cache
def chunks(precision: str = "fp32", distributed_optimizer: bool = True):
    tiny.start_single_process()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    config = megatron_config(CASE.config(), Topology(), dtype=dtype, on_cpu=True)
    return wrap_ddp(build_chunks(config), config, distributed_optimizer=distributed_optimizer)


def rates(run: RunConfig, count: int = 12) -> list[float]:
    """The learning rates of `count` updates; all groups of parameters have the same."""
    optimizer, scheduler = build_optimizer(run, chunks())
    found = []
    for _ in range(count):
        (rate,) = {group["lr"] for group in optimizer.param_groups}
        found.append(rate)
        scheduler.step(increment=1)
    return found


def closed_form(update: int, schedule: str, warmup: int) -> float:
    """Of update number `update` (from 0) of ten; the schedule counts optimizer updates, not steps of the run."""
    if update <= warmup and warmup:
        return LR * update / warmup
    if schedule == "constant":
        return LR
    done = min(1.0, (update - warmup) / (10 - warmup))
    return MIN_LR + (LR - MIN_LR) * {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_learning_rates_follow_their_closed_form(schedule, warmup):
    run = settings(optimizer__schedule=schedule, optimizer__warmup_steps=warmup)
    assert rates(run) == pytest.approx([closed_form(update, schedule, warmup) for update in range(12)], rel=1e-12)


def test_a_resumed_schedule_goes_on_where_it_was_with_the_settings_of_now():
    """More steps and another rate: with the old ones, a linear schedule would be at its end and train at `min_lr`."""
    _, before = build_optimizer(settings(optimizer__schedule="linear"), chunks())
    before.step(increment=10)
    optimizer, after = build_optimizer(
        settings(optimizer__schedule="linear", optimizer__lr=1e-3, train__steps=10), chunks()
    )
    after.load_state_dict(before.state_dict())
    (rate,) = {group["lr"] for group in optimizer.param_groups}
    assert rate == pytest.approx(MIN_LR + (1e-3 - MIN_LR) / 2)
    assert after.num_steps == 10


def test_a_run_of_nothing_but_warm_up_is_accepted():
    run = settings(optimizer__schedule="cosine", optimizer__warmup_steps=5, grpo__mini_batches=1)
    assert rates(run, 5) == pytest.approx([LR * update / 5 for update in range(5)])


def test_the_optimizer_has_the_settings_of_the_run():
    run = settings(optimizer__betas=[0.8, 0.9], optimizer__eps=1e-5, optimizer__clip_grad=0.7)
    optimizer, _ = build_optimizer(run, chunks())
    assert optimizer.config.clip_grad == 0.7
    for group in optimizer.param_groups:
        assert group["betas"] == (0.8, 0.9) and group["eps"] == 1e-5


def test_vectors_are_not_decayed_and_matrices_are():
    optimizer, scheduler = build_optimizer(settings(), chunks())
    scheduler.step(increment=1)
    (decayed,) = {group["weight_decay"] for group in optimizer.param_groups if group["wd_mult"] == 1.0}
    (kept,) = {group["weight_decay"] for group in optimizer.param_groups if group["wd_mult"] == 0.0}
    assert (decayed, kept) == (0.1, 0.0)


def test_every_trained_parameter_is_in_the_optimizer_once_and_no_frozen_one():
    optimizer, _ = build_optimizer(settings(parallel__distributed_optimizer=False), chunks("fp32", False))
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    named = dict(chunks("fp32", False)[0].named_parameters())
    trained = {id(parameter) for parameter in named.values() if parameter.requires_grad}
    assert len(held) == len(set(held)) and set(held) == trained
    frozen = {name for name, parameter in named.items() if not parameter.requires_grad}
    assert len(frozen) == 7 and all(".indexer." in name for name in frozen)


def test_no_group_of_a_bf16_run_mixes_parameters_of_two_dtypes():
    """The distributed optimizer of megatron-core 0.19.2 gives the parameters of a mixed group each other's state."""
    optimizer, _ = build_optimizer(settings(model__precision="bf16"), chunks("bf16"))
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    kinds = [
        (bool(wide), bool(narrow))
        for part in parts
        for wide, narrow in zip(part.model_fp32_groups, part.model_float16_groups, strict=True)
    ]
    assert (True, True) not in kinds and {(True, False), (False, True)} <= set(kinds)


@pytest.fixture
def trained():
    """Chunks and optimizer with gradients from a backward pass, as a step leaves them."""
    these = chunks("fp32", False)
    optimizer, _ = build_optimizer(settings(parallel__distributed_optimizer=False), these)
    reset_gradients(these, optimizer)
    check_gradients_are_reset(these)
    ids = tiny.tokens(20)
    these[0](ids, torch.arange(20)[None], None).square().mean().backward()
    yield these, optimizer
    reset_gradients(these, optimizer)


def test_gradients_of_a_backward_pass_are_noticed_until_they_are_reset(trained):
    these, optimizer = trained
    with pytest.raises(RuntimeError, match="gradients would add up"):
        check_gradients_are_reset(these)
    reset_gradients(these, optimizer)
    check_gradients_are_reset(these)


def test_what_the_optimizer_points_at_the_buffers_is_noticed_by_name(trained):
    these, optimizer = trained
    optimizer.prepare_grads()
    for chunk in these:
        chunk.zero_grad_buffer()
    with pytest.raises(RuntimeError, match=r"module\..*\.grad was not reset before the step; it would be counted"):
        check_gradients_are_reset(these)


def test_one_value_in_one_buffer_is_enough(trained):
    these, optimizer = trained
    reset_gradients(these, optimizer)
    these[0].buffers[-1].grad_data[-1] = 1e-30
    with pytest.raises(RuntimeError, match="gradients would add up"):
        check_gradients_are_reset(these)


@pytest.mark.parametrize("offload", [False, True])
def test_the_optimizers_place_reaches_megatron(offload):
    config = optimizer_config(settings(optimizer__offload=offload, parallel__distributed_optimizer=True))
    assert config.optimizer_cpu_offload is offload and config.optimizer_offload_fraction == float(offload)
    assert config.use_precision_aware_optimizer is offload


def test_offloading_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match=r"optimizer\.offload is true, but there is no GPU"):
        build_optimizer(settings(optimizer__offload=True), chunks())


def test_offloading_takes_the_distributed_optimizer():
    with pytest.raises(ValueError, match=r"optimizer\.offload.*parallel\.distributed_optimizer"):
        settings(optimizer__offload=True, parallel__distributed_optimizer=False)
