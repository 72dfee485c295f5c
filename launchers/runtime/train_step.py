"""One optimizer step on packed rows: what is inside Megatron's schedule, and around it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from glm5_next.launchers.config_sections import GrpoSection
from glm5_next.launchers.failures import WorkerFailed
from glm5_next.launchers.grpo import importance_weights, low_variance_kl, policy_loss, trained_mask
from glm5_next.launchers.packing import MicroBatch
from glm5_next.launchers.runtime.megatron import check_gradients_are_reset, reset_gradients
from glm5_next.plugins.logprobs import token_logprobs
from glm5_next.plugins.packed_row import PackedRow


@dataclass(eq=False)
class Row:
    """A micro-batch on this rank's device, with what Megatron's layers get of it."""

    batch: MicroBatch
    params: PackedRow


@dataclass(eq=False)
class Collected:
    """What the last pipeline stage saw of a step: sums over trained tokens, and the log-probabilities themselves."""

    sums: dict[str, float] = field(default_factory=dict)
    trainer_logprobs: list[np.ndarray] = field(default_factory=list)
    rollout_logprobs: list[np.ndarray] = field(default_factory=list)

    def add(self, sums: dict[str, Tensor], trainer: Tensor, rollout: Tensor) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.item()
        self.trainer_logprobs.append(trainer.detach().float().cpu().numpy())
        self.rollout_logprobs.append(rollout.float().cpu().numpy())


def accumulate_gradients(
    chunks: Sequence[DistributedDataParallel], rows: Sequence[Row], grpo: GrpoSection
) -> Collected:
    """Forward and backward of every row.

    All ranks of a replica get the same rows, all replicas the same number. Raises RuntimeError for gradients that were
    not reset or are not finite.
    """
    check_gradients_are_reset(chunks)
    collected = Collected()
    with _finite_gradients():
        _run_schedule(chunks, rows, partial(_grpo_loss, grpo, collected), forward_only=False)
    return collected


def update_weights(
    chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler
) -> tuple[float, float]:
    """One update from the gradients there are. Returns their norm and the learning rate."""
    learning_rate = optimizer.param_groups[0]["lr"]
    updated, grad_norm, _ = optimizer.step()
    assert updated, "the optimizer refused the step"
    scheduler.step(increment=1)
    reset_gradients(chunks, optimizer)
    return float(grad_norm), learning_rate


@contextmanager
def _finite_gradients() -> Iterator[None]:
    """Megatron's check of the gradients that a rank is about to add to those of others, in words about the run."""
    try:
        yield
    except RuntimeError as error:
        if "local grad norm" not in str(error):
            raise
        raise WorkerFailed(
            "gradients are not finite: rewards or advantages are too large, or the model diverged"
        ) from error


@torch.no_grad()
def score_rows(chunks: Sequence[torch.nn.Module], rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Log-probability of every label of every sample: float32 `[S - 1]` by sample id, on last-stage ranks only."""
    scores: dict[str, np.ndarray] = {}

    def keep(row: Row, output: Tensor, non_loss_data: bool = False) -> None:
        logprobs = output[0].float().cpu().numpy()
        for sample_id, rows_of_sample in zip(row.batch.sample_ids, row.batch.sample_slices):
            scores[sample_id] = logprobs[rows_of_sample]

    _run_schedule(chunks, rows, keep, forward_only=True)
    return scores


def _run_schedule(
    chunks: Sequence[torch.nn.Module], rows: Sequence[Row], on_output: Any, *, forward_only: bool
) -> None:
    iterators = [iter(rows) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=partial(_forward_step, on_output),
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(rows),
        seq_length=len(rows[0].batch.input_ids),  # a hint only: stages exchange shapes first
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _forward_step(on_output: Any, rows: Iterator[Row], chunk: torch.nn.Module) -> tuple[Tensor, Any]:
    row = next(rows)
    output = chunk(
        row.batch.input_ids.unsqueeze(0),
        row.batch.position_ids.unsqueeze(0),
        None,
        packed_seq_params=row.params,
        output_processor=_logprobs_and_entropy,
        output_processor_context=row,
    )
    return output, partial(on_output, row)


def _logprobs_and_entropy(*, hidden_states: Tensor, output_layer: Any, context: Row, config: Any, **unused) -> Tensor:
    """Megatron's output hook on the last stage: fp32 `[2, T]`, log-probabilities of the labels and entropies."""
    logits, _ = output_layer(hidden_states)
    logprobs, entropy = token_logprobs(
        logits.squeeze(1),
        context.batch.labels,
        vocab_size=config.model.vocab_size,
        tp_group=mpu.get_tensor_model_parallel_group(),
    )
    return torch.stack([logprobs, entropy])


def _grpo_loss(
    grpo: GrpoSection, collected: Collected, row: Row, output: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The row's summed loss and its number of trained tokens; Megatron divides by the count over the whole step."""
    batch, (logprobs, entropy) = row.batch, output
    mask = trained_mask(batch.loss_mask, batch.rollout_logprobs)
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    if grpo.importance_sampling == "truncated":
        weights = importance_weights(old, batch.rollout_logprobs, grpo.is_low, grpo.is_high)
    else:
        weights = torch.ones_like(old)
    loss, sums = policy_loss(
        logprobs, old, batch.advantages, mask, weights, clip_low=grpo.clip_low, clip_high=grpo.clip_high
    )
    trained = mask > 0
    if batch.reference_logprobs is not None:
        kl = (low_variance_kl(logprobs, batch.reference_logprobs) * mask).sum()
        loss = loss + grpo.kl_coef * kl
        sums["reference_kl"] = kl.detach().double()
    sums["entropy"] = (entropy * mask).sum().double()
    sums["loss"] = loss.detach().double()
    collected.add(sums, old[trained], batch.rollout_logprobs[trained])
    return loss, trained.sum().int(), {}
