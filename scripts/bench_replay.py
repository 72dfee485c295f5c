"""What replay costs: bytes per token of the indexer's picks, and the time of a step of the tiny run with and without.

    python scripts/bench_replay.py [--repeats 15]

The picks are uniformly random, the hardest case to code; the released model keeps 512 pools in each of 11 layers. A step is
a rollout (sampling and recording), the check of its payload, and an update. Both kinds alternate. Times are CPU seconds of this
process, which has one thread: other processes on the machine do not count.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from glm5_next.launchers.config import load_run_config
from glm5_next.launchers.cpu_process import use_cpu
from glm5_next.launchers.presets import preset
from glm5_next.plugins.pick_coding import encode_picks, visible_pools

SELECTED, KPOOL = 512, 4


def bytes_per_token(context: int, length: int = 256) -> float:
    """Of one layer, for the `length` tokens before `context`."""
    generator, first = np.random.default_rng(0), context - length
    pools = np.stack([generator.permutation(n)[:SELECTED] for n in visible_pools(first, length, KPOOL)])
    return encode_picks(pools[:, None], layers=(3,), kpool=KPOOL, first=first, name="random").num_bytes / length


class Steps:
    """A trainer and an engine in this process, and steps of the tiny preset on them."""

    def __init__(self, folder: Path):
        import torch.distributed as dist
        from transformers import AutoTokenizer

        from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
        from glm5_next.launchers.replay_plan import Recording, ReplayPlan
        from glm5_next.launchers.runtime.rank_replay import RankReplay
        from glm5_next.launchers.runtime.rollout import Sampler
        from glm5_next.launchers.runtime.trainer import Trainer
        from glm5_next.launchers.runtime.transformers_engine import TransformersEngine
        from glm5_next.launchers.tiny_task import training_prompts

        checkpoint = write_tiny_checkpoint(folder)
        values = preset("tiny")
        values["model"]["checkpoint"] = str(checkpoint)
        values["parallel"] = {"ranks": 1}
        runs = {
            name: load_run_config(None, values, [f"replay.{stream}={name}" for stream in ("routing", "indexer")])
            for name in ("off", "engine")
        }
        self.trainer = Trainer(runs["off"], 0, dist.HashStore(), on_cpu=True)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.prompts = training_prompts()[: runs["off"].rollout.prompts_per_step]
        self.sides: dict[str, Any] = {}
        for name, run in runs.items():
            engine = TransformersEngine(
                checkpoint, precision="fp32", recording=Recording.of(run.replay), batch_size=run.rollout.batch_size
            )
            plan = ReplayPlan.of(run.replay, self.trainer.model)
            store = RankReplay(plan, self.trainer.chunks, self.trainer.device)
            self.sides[name] = run, Sampler(run, tokenizer, engine, lambda prompt, text: float(len(text)), plan), store

    def step(self, name: str) -> float:
        """CPU seconds of one step on the same prompts and seed."""
        from glm5_next.launchers.packing import plan_step
        from glm5_next.launchers.runtime.batch import Batch
        from glm5_next.launchers.runtime.rollout import Rollout

        run, sampler, self.trainer.replay = self.sides[name]
        start = time.process_time()
        groups = sampler.groups(self.prompts, run.rollout.samples_per_prompt, 0, 0, "bench", Rollout())
        samples = tuple(sample for group in groups for sample in group.samples)
        plan = plan_step(
            [len(sample.tokens) - 1 for sample in samples],
            num_replicas=1,
            tokens_per_micro_batch=run.train.tokens_per_micro_batch,
            multiple=1,
        )
        advantages = {sample.sample_id: float(number % 3 - 1) for number, sample in enumerate(samples)}
        report = self.trainer.train(Batch(samples=samples, advantages=advantages, plan=plan))
        assert (report.replay_reads > 0) == (name == "engine")
        return time.process_time() - start


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--repeats", type=int, default=15)
    repeats = arguments.parse_args().repeats
    raw = 4 * SELECTED
    for context in (4096, 32768):
        size = bytes_per_token(context)
        print(
            f"{context} tokens of context: {size:.0f} bytes per token and layer, 1/{raw / size:.1f} of int32 ids ({raw})"
        )
    use_cpu()
    with tempfile.TemporaryDirectory() as scratch:
        steps = Steps(Path(scratch) / "tiny")
        for name in ("off", "engine"):
            steps.step(name)
        seconds: dict[str, list[float]] = {"off": [], "engine": []}
        for _ in range(repeats):
            for name, times in seconds.items():
                times.append(steps.step(name))
    off, engine = (statistics.median(seconds[name]) for name in ("off", "engine"))
    print(f"a step of the tiny run: {off:.3f} s without replay, {engine:.3f} s with both streams")
    pairs = [b / a for a, b in zip(seconds["off"], seconds["engine"])]
    print(
        f"ratios of {repeats} pairs: median {statistics.median(pairs):.3f}, from {min(pairs):.3f} to {max(pairs):.3f}"
    )


if __name__ == "__main__":
    main()
