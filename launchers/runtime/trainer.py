"""One Megatron rank of a training run: what the controller calls, rank by rank."""

import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.export import export_weights, save_hf_folder
from glm5_next.bridge.load import load_weights
from glm5_next.launchers.config import RunConfig
from glm5_next.launchers.engines.order import Order, Outcome
from glm5_next.launchers.packing import MicroBatch, Scores, pack_row, plan_digest
from glm5_next.launchers.replay_plan import ReplayPlan
from glm5_next.launchers.run_state import RunState
from glm5_next.launchers.runtime.batch import Batch, StepReport
from glm5_next.launchers.runtime.checkpoint_folder import Origin
from glm5_next.launchers.runtime.checkpoints import load_checkpoint, load_model, save_checkpoint
from glm5_next.launchers.runtime.megatron import build_optimizer, start_ranks
from glm5_next.launchers.runtime.rank_replay import RankReplay
from glm5_next.launchers.runtime.replay_probe import Sightings
from glm5_next.launchers.runtime.server_updates import ServerUpdates
from glm5_next.launchers.runtime.train_step import Row, accumulate_gradients, score_rows, update_weights
from glm5_next.launchers.runtime.weight_sync import WeightSink, publish
from glm5_next.plugins.chunks import build_chunks, wrap_ddp
from glm5_next.plugins.expert_products import choose_expert_products
from glm5_next.plugins.megatron_config import backend_settings, megatron_config
from glm5_next.plugins.replay import RouteReplay


class Trainer:
    """Holds this rank's part of the model and its optimizer. Every public method is collective over all ranks."""

    def __init__(self, run: RunConfig, rank: int, store: dist.Store, *, on_cpu: bool):
        self.run, self.rank, self.topology = run, rank, run.parallel.topology()
        self.device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        start_ranks(self.topology, rank, store, on_cpu=on_cpu, seed=run.train.seed)
        self.source = Checkpoint(run.model.checkpoint)
        self.origin = Origin(hf=str(run.model.checkpoint), precision=run.model.precision)
        self.model = self.source.config
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[run.model.precision]
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        self.megatron = megatron_config(
            self.model,
            self.topology,
            dtype=dtype,
            on_cpu=on_cpu,
            perform_initialization=False,
            **backend_settings(run.model.transformer_impl, run.model.kernels, dtype=dtype, on_cpu=on_cpu),
            **(recompute if run.train.recompute == "full" else {}),
        )
        self.expert_products = choose_expert_products(self.megatron, run.train.tokens_per_micro_batch)
        chunks = self._loaded_chunks()
        self.reference = self._loaded_chunks() if run.grpo.kl_coef > 0 else None
        self.chunks = wrap_ddp(chunks, self.megatron, distributed_optimizer=run.parallel.distributed_optimizer)
        self.optimizer, self.scheduler = build_optimizer(run, self.chunks)
        self.updates = ServerUpdates(self._exported, self.source, self.origin.export_dtype, self.device)
        self.replay = RankReplay(ReplayPlan.of(run.replay, self.model), self.chunks, self.device)
        self.passes = 2 if run.train.recompute == "full" else 1  # of a row through every layer in a training step

    def backends(self) -> dict[str, str]:
        """What computes: the implementation of the linear layers, of the experts' products, and of every operator."""
        linears = {"linear layers": self.megatron.transformer_impl, "experts": self.expert_products}
        return linears | self.megatron.kernels.chosen

    def train(self, batch: Batch) -> StepReport:
        """One optimizer step on a batch. Nothing is updated unless every record was read as often as planned."""
        rows = self._rows(batch)
        collected = accumulate_gradients(self.chunks, rows, self.run.grpo)
        reads = self.replay.check(rows, passes=self.passes)
        grad_norm, lr = update_weights(self.chunks, self.optimizer, self.scheduler)
        same, total = self._expert_overlap(rows)
        return StepReport(
            speaks=self._speaks,
            sums=collected.sums if self._speaks else {},
            trainer_logprobs=_joined(collected.trainer_logprobs if self._speaks else []),
            rollout_logprobs=_joined(collected.rollout_logprobs if self._speaks else []),
            grad_norm=grad_norm,
            lr=lr,
            experts_same=same,
            experts_total=total,
            replay_reads=reads,
            memory_bytes=_peak_memory(self.device),
        )

    def score(self, batch: Batch, *, replayed: bool = True, reference: bool = False, record: bool = False) -> Scores:
        """Log-probabilities of every label under the policy, or under the checkpoint the run started from.

        Non-empty on ranks that speak for their replica. `replayed` uses what the engine recorded if the run replays it;
        the reference always chooses by itself. `record` keeps the choices for the `train` of the same batch.
        """
        chunks = self.reference if reference else self.chunks
        assert chunks is not None, "the run keeps no reference (grpo.kl_coef is 0)"
        replayed = replayed and not reference
        rows = self.replay.rows(batch, self._packed(batch, replayed=replayed), passes=1, own=False)

        def run() -> Scores:
            return score_rows(chunks, rows)

        scores = self.replay.recorded(batch, rows, run) if record else run()
        self.replay.check(rows, passes=1)
        return scores if self._speaks else {}

    def probe_replay(self, batch: Batch) -> Sightings:
        """Which records this rank's layers have and read in one forward pass, by sample."""
        rows = self.replay.rows(batch, self._packed(batch), passes=2, own=False)
        score_rows(self.chunks, rows)
        seen = self.replay.sightings(rows)
        return {sample.sample_id: seen.get(sample.sample_id, {}) for sample in batch.samples}

    def publish(self, sinks: Sequence[WeightSink], version: int) -> int:
        """Sends the current weights to the engines and checks their bits. Returns the bytes sent (rank 0)."""
        weights = self._exported()
        if self.rank == 0:
            return publish(weights, sinks, version)
        for _ in weights:
            pass
        return 0

    def publish_to_servers(self, order: Order) -> Outcome | None:
        """The same to servers; their failures are in the outcome (rank 0)."""
        return self.updates.publish(order)

    def make_room(self) -> None:
        """Gives GPU memory that nothing uses back, for an engine on the same GPU."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def export(self, out: Path) -> None:
        """Writes a complete Hugging Face folder; the rest of it comes from the checkpoint the run started from."""
        save_hf_folder(
            self._exported(),
            self.source,
            out,
            dtype=self.origin.export_dtype,
        )

    def save(self, folder: Path, state: RunState) -> None:
        save_checkpoint(folder, state, self.origin, self.chunks, self.optimizer, self.scheduler)

    def load(self, folder: Path) -> RunState:
        return load_checkpoint(folder, self.chunks, self.optimizer, self.scheduler)

    def _exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        return export_weights(self.chunks, self.model, self.origin.export_dtype)

    def _loaded_chunks(self) -> list[torch.nn.Module]:
        chunks = build_chunks(self.megatron)
        if self.run.model.megatron_checkpoint is None:
            load_weights(chunks, self.source)
        else:
            load_model(self.run.model.megatron_checkpoint, chunks)
        return chunks

    @property
    def _speaks(self) -> bool:
        return mpu.is_pipeline_last_stage(ignore_virtual=True) and mpu.get_tensor_model_parallel_rank() == 0

    def _rows(self, batch: Batch) -> list[Row]:
        """The rows of a training step with all that they replay."""
        return self.replay.rows(batch, self._packed(batch), passes=self.passes, own=True)

    def _packed(self, batch: Batch, *, replayed: bool = True) -> list[MicroBatch]:
        """This replica's rows; raises RuntimeError unless all ranks hold the same plan."""
        self._agree(plan_digest(batch.plan))
        return [
            pack_row(
                [batch.samples[i] for i in micro_batch],
                batch.advantages,
                pad_to=self.topology.tp,
                pad_token=0,
                replay=self.replay.plan if replayed else None,
                old_logprobs=batch.old_logprobs,
                reference_logprobs=batch.reference_logprobs,
            )
            for micro_batch in batch.plan[mpu.get_data_parallel_rank()]
        ]

    def _agree(self, digest: str) -> None:
        digests: list[str] = [""] * self.topology.world_size
        dist.all_gather_object(digests, digest)
        different = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if different:
            raise RuntimeError(f"ranks {different} planned another step than rank 0; they would wait for ever")

    def _expert_overlap(self, rows: Sequence[Row]) -> tuple[int, int]:
        """Expert slots where live routing agrees with the record, and all recorded slots, over all ranks."""
        replays = [row.params.routes for row in rows if isinstance(row.params.routes, RouteReplay)]
        same = sum(int(count) for replay in replays for count in replay.same.values())
        total = sum(int(count) for replay in replays for count in replay.total.values())
        counts = torch.tensor([same, total], device=self.device)
        dist.all_reduce(counts)
        return int(counts[0]), int(counts[1])


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.float32)


def _peak_memory(device: torch.device) -> int:
    """Device memory on a GPU, resident set on a CPU; bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
