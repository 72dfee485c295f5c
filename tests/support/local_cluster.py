"""The training loop in one process: its trainer rank on the GPU, the rollout engine beside it, no Ray.

`python -m tests.support.local_cluster FOLDER [SETTING=VALUE ...]` trains the tiny preset that way and prints its record.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.config import RunConfig, load_run_config
from glm5_next.launchers.metrics import MetricsLog, read_metrics
from glm5_next.launchers.presets import preset
from glm5_next.launchers.replay_plan import Recording
from glm5_next.launchers.run_state import RunState
from glm5_next.launchers.runtime.controller import Controller, StopRequest
from glm5_next.launchers.runtime.engine import Completion
from glm5_next.launchers.runtime.preflight import check_inputs
from glm5_next.launchers.runtime.trainer import Trainer
from glm5_next.launchers.runtime.transformers_engine import TransformersEngine
from glm5_next.launchers.runtime.weight_sync import check_digests
from tests.support import tiny  # noqa: F401 - installs the CPU runtime where there is no GPU

ONE_RANK = [
    "parallel.ranks=1",
    "parallel.ep=1",
    "parallel.distributed_optimizer=true",
    "model.precision=bf16",
    "train.checkpoint_every=0",
]


class LocalSink:
    """The engine of this process, as the trainer's weight sync sees it."""

    def __init__(self, engine: TransformersEngine):
        self.begin_update, self.put_weights, self.engine = engine.begin_update, engine.put_weights, engine

    def commit_update(self, digests: Mapping[str, str]) -> None:
        check_digests(digests, self.engine.commit_update(), "the engine")


class LocalCluster:
    """What the controller asks of a `Cluster`, answered by one trainer and one engine."""

    def __init__(self, run: RunConfig):
        self.trainer = Trainer(run, 0, dist.HashStore(), on_cpu=not torch.cuda.is_available())
        self.engine = TransformersEngine(
            run.model.checkpoint,
            precision=run.model.precision,
            recording=Recording.of(run.replay),
            batch_size=run.rollout.batch_size,
            num_threads=torch.get_num_threads(),
        )

    def train(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [getattr(self.trainer, method)(*args, **kwargs)]

    def publish(self, version: int) -> int:
        return self.trainer.publish([LocalSink(self.engine)], version)

    def generate(
        self, prompts: Sequence[np.ndarray], samples_per_prompt: int, **options: Any
    ) -> list[list[Completion]]:
        return self.engine.generate(prompts, samples_per_prompt, **options)

    def score(self, sequences: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        return [self.engine.score(sequences)]


class Shown:
    """The progress display: one line per step."""

    def update(self, step: int, values: dict[str, Any]) -> None:
        keys = ("reward_mean", "mismatch_kl_mean", *(key for key in values if key.startswith("seconds_")))
        print(
            f"step {step + 1}: " + " ".join(f"{key}={values[key]:.4g}" for key in keys if values.get(key) is not None),
            flush=True,
        )


def main(folder: Path, settings: list[str]) -> None:
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        write_tiny_checkpoint(checkpoint)
    values = preset("tiny") | {"model": {"checkpoint": str(checkpoint)}}
    run = load_run_config(None, values, [*ONE_RANK, *settings])
    inputs = check_inputs(run)
    cluster = LocalCluster(run)
    print("backends:", json.dumps(cluster.trainer.backends()), flush=True)
    state = RunState(
        next_step=0, weights_version=0, prompt_cursor=0, seed=run.train.seed, prompts_digest=inputs.prompts_digest
    )
    controller = Controller(run, inputs, cluster, folder, state)  # type: ignore[arg-type]
    with MetricsLog(folder, tensorboard=False, next_step=0) as log:
        controller.loop(log, Shown(), StopRequest())  # type: ignore[arg-type]
    print(json.dumps(read_metrics(folder / "metrics.jsonl")))


if __name__ == "__main__":
    torch.set_num_threads(8)
    main(Path(sys.argv[1]), sys.argv[2:])
