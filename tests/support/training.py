"""Real trainer ranks on tiny checkpoints, and made-up samples for them to train on."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from glm5_next.bridge.export import export_weights
from glm5_next.launchers.config import RunConfig, load_run_config
from glm5_next.launchers.packing import Plan, plan_step
from glm5_next.launchers.runtime.batch import Batch
from glm5_next.launchers.runtime.trainer import Trainer
from glm5_next.launchers.types import Sample
from glm5_next.plugins.pick_coding import PickRecord
from tests.support import tiny  # noqa: F401 - installs the CPU runtime
from tests.support.faults import Fault, planted
from tests.support.ranks import run_ranks

# With Adam's usual eps, rounding in a gradient that is nearly zero becomes a step as large as any other, so that layouts
# could not be compared tensor by tensor.
EPS = 1e-3


def settings(checkpoint: Path, **changes: Any) -> RunConfig:
    """A run's settings; `changes` are dotted keys with two underscores: `train__steps=3`."""
    values: dict[str, dict[str, Any]] = {
        "model": {"checkpoint": str(checkpoint), "precision": "fp32"},
        "parallel": {"distributed_optimizer": False},
        "data": {"prompts": "tiny"},
        "rollout": {"max_new_tokens": 4},
        "optimizer": {"lr": 1e-3, "eps": EPS},
        "replay": {"routing": "off"},
        "train": {"steps": 10, "tokens_per_micro_batch": 96},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        values.setdefault(section, {})[name] = value
    return load_run_config(None, values, [])


def samples(
    count: int,
    *,
    seed: int = 0,
    vocab: int = 100,
    routes: Callable[[np.ndarray], np.ndarray] | None = None,
    picks: Callable[[np.ndarray], PickRecord] | None = None,
) -> tuple[Sample, ...]:
    """Responses of 2 to 11 tokens to prompts of 3 to 34; `routes` and `picks` make records from the tokens fed in."""
    generator = np.random.default_rng(seed)
    made = []
    for number in range(count):
        prompt, response = int(generator.integers(3, 35)), int(generator.integers(2, 12))
        tokens = generator.integers(0, vocab, prompt + response).astype(np.int32)
        made.append(
            Sample(
                prompt_id="prompt",
                sample_id=f"sample-{number}",
                tokens=tokens,
                prompt_length=prompt,
                rollout_logprobs=(-5 * generator.random(response)).astype(np.float32),
                reward=0.0,
                routes=None if routes is None else routes(tokens[:-1]),
                picks=None if picks is None else picks(tokens[:-1]),
                finish_reason="stop",
                weights_version=0,
                response_text="",
            )
        )
    return tuple(made)


def batch(run: RunConfig, these: tuple[Sample, ...], plan: Plan | None = None, **fields: Any) -> Batch:
    """The update on these samples; every third advantage is negative."""
    topology = run.parallel.topology()
    if plan is None:
        plan = plan_step(
            [len(sample.tokens) - 1 for sample in these],
            num_replicas=topology.dp,
            tokens_per_micro_batch=run.train.tokens_per_micro_batch,
            multiple=topology.pp if topology.vpp else 1,
        )
    advantages = {sample.sample_id: (-0.3, 0.5, 1.4)[number % 3] for number, sample in enumerate(these)}
    return Batch(samples=these, advantages=advantages, plan=plan, **fields)


def on_trainers(
    run: RunConfig, fn: Callable[..., Any], *args: Any, timeout: float = 90, fault: Fault | None = None
) -> list[Any]:
    """Calls `fn(trainer, *args)` on every rank of a run, with a planted fault if asked, and returns their answers."""
    return run_ranks(_with_trainer, run.parallel.ranks, run, fn, args, fault, timeout=timeout, start_group=False)


def _with_trainer(
    rank: int, store: dist.Store, run: RunConfig, fn: Callable[..., Any], args: tuple, fault: Fault | None
) -> Any:
    with nullcontext() if fault is None else planted(fault):
        return fn(Trainer(run, rank, store, on_cpu=True), *args)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """fp32 copies of all trained tensors, by HF name."""
    return {name: tensor.clone() for name, tensor in export_weights(trainer.chunks, trainer.model, "float32")}


def total(reports: list[Any], name: str) -> float:
    """A sum of a step over the ranks that report for their replica."""
    return sum(report.sums[name] for report in reports if report.speaks)


def unequal_updates(
    got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], source: Any, bound: float = 1e-4
) -> dict[str, float]:
    """Tensors whose difference is above `bound` times the size of the expected update, with that share.

    A unit in the last place of the weights themselves is allowed on top: it is all that rounding leaves of an update
    that is small against them.
    """
    unequal = {}
    for name, value in expected.items():
        update, error = (value - source.read(name)).norm().item(), (got[name] - value).norm().item()
        if not error <= bound * update + torch.finfo(torch.float32).eps * value.norm().item():
            unequal[name] = error / update if update else float("inf")
    return unequal
