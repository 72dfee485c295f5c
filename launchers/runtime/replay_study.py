"""How much of the mismatch between engine and trainer replay removes: the same samples, scored in four modes.

The engine decodes token by token with its caches, the trainer computes packed rows in one pass: other orders of the same
sums, in the same precision. Nothing else differs, and nothing is added.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from glm5_next.launchers.config import load_run_config
from glm5_next.launchers.config_sections import ReplaySection
from glm5_next.launchers.grpo import mismatch_stats
from glm5_next.launchers.packing import pack_row, plan_step
from glm5_next.launchers.replay_plan import Recording, ReplayPlan
from glm5_next.launchers.replay_study import ALL, BUCKETS, MODES, Kl, Scored, Side
from glm5_next.launchers.runtime.batch import Batch
from glm5_next.launchers.runtime.local_ranks import run_ranks
from glm5_next.launchers.runtime.rank_replay import STREAMS, RankReplay
from glm5_next.launchers.runtime.train_step import Row, score_rows
from glm5_next.launchers.runtime.trainer import Trainer
from glm5_next.launchers.runtime.transformers_engine import TransformersEngine
from glm5_next.launchers.types import Sample
from glm5_next.plugins.pick_coding import visible_pools
from glm5_next.plugins.replay import OwnRecord

ROW = 2048  # tokens of a packed row
DEADLINE = 3600.0  # seconds for one precision
Scores = dict[str, np.ndarray]


def run_side(
    checkpoint: Path, *, precision: str, prompt_lengths: Sequence[int], copies: int, new_tokens: int, seed: int
) -> Side:
    """`copies` responses of `new_tokens` to a random prompt of each length, in one precision and a process of its own.

    Needs `use_cpu()`.
    """
    task = checkpoint, precision, tuple(prompt_lengths), copies, new_tokens, seed
    return run_ranks(_side, 1, *task, timeout=DEADLINE, start_group=False)[0]


def _side(
    rank: int,
    store: dist.Store,
    checkpoint: Path,
    precision: str,
    prompt_lengths: Sequence[int],
    copies: int,
    new_tokens: int,
    seed: int,
) -> Side:
    samples = engine_samples(checkpoint, precision, prompt_lengths, copies, new_tokens, seed)
    values = {
        "model": {"checkpoint": str(checkpoint), "precision": precision},
        "data": {"prompts": "tiny"},
        "rollout": {"max_new_tokens": new_tokens},
        "train": {"tokens_per_micro_batch": max(ROW, max(prompt_lengths) + new_tokens)},
    }
    trainer = Trainer(load_run_config(None, values, []), rank, store, on_cpu=True)
    return Side(precision, {name: score_mode(trainer, samples, streams) for name, streams in MODES.items()})


def engine_samples(
    checkpoint: Path, precision: str, prompt_lengths: Sequence[int], copies: int, new_tokens: int, seed: int
) -> list[Sample]:
    """What the embedded engine samples with its caches, recorded; no response ends before `new_tokens`."""
    engine = TransformersEngine(
        checkpoint, precision=precision, recording=Recording(routes=True, picks=True), batch_size=16 * copies
    )
    engine.stop_tokens = frozenset()
    generator = np.random.default_rng(seed)
    vocabulary = engine.model.config.text_config.vocab_size
    prompts = [generator.integers(0, vocabulary, length).astype(np.int32) for length in prompt_lengths]
    answers = engine.generate(prompts, copies, max_new_tokens=new_tokens, seed=seed)
    return [
        Sample(
            prompt_id=str(number),
            sample_id=f"{number}.{copy}",
            tokens=np.concatenate([prompt, answer.tokens]),
            prompt_length=len(prompt),
            rollout_logprobs=answer.logprobs,
            reward=None,
            routes=answer.routes,
            picks=answer.picks,
            finish_reason=answer.finish_reason,
            weights_version=0,
            response_text="",
        )
        for number, (prompt, answers_to_it) in enumerate(zip(prompts, answers, strict=True))
        for copy, answer in enumerate(answers_to_it)
    ]


def score_mode(trainer: Trainer, samples: Sequence[Sample], replayed: Sequence[str]) -> Scored:
    """The trainer's forward pass with some streams replayed and its own choices in the others noted.

    Raises RuntimeError unless every layer read every row's record exactly once.
    """
    modes: dict[str, Any] = {stream: "engine" if stream in replayed else "off" for stream in STREAMS}
    plan = ReplayPlan.of(ReplaySection(routing=modes["routes"], indexer=modes["picks"]), trainer.model)
    batch = _batch(trainer, samples)
    packed = [
        pack_row([samples[i] for i in row], batch.advantages, pad_to=1, pad_token=0, replay=plan)
        for row in batch.plan[0]
    ]
    replay = RankReplay(plan, trainer.chunks, trainer.device)
    rows = replay.rows(batch, packed, passes=1, own=False)
    own: dict[str, list[OwnRecord]] = {stream: [] for stream in STREAMS if stream not in replayed}
    for stream, records in own.items():
        for row in rows:
            records.append(OwnRecord())
            setattr(row.params, stream, records[-1])
    scores = score_rows(trainer.chunks, rows)
    differing = dict.fromkeys(STREAMS, 0.0)
    for stream, records in own.items():
        differing[stream] = _differing(rows, records, samples, plan, stream)
        for row, record in zip(rows, records):
            record.close(replay.layers[stream], f"replay study, {stream}")
            setattr(row.params, stream, None)  # only reads of the engine's record are counted
    reads = replay.check(rows, passes=1)
    wanted = len(rows) * sum(len(replay.layers[stream]) for stream in replayed)
    assert reads == wanted, f"{reads} reads of {wanted}"
    return Scored(_kl(samples, scores), differing, reads)


def _batch(trainer: Trainer, samples: Sequence[Sample]) -> Batch:
    budget = trainer.run.train.tokens_per_micro_batch
    lengths = [len(sample.tokens) - 1 for sample in samples]
    plan = plan_step(lengths, num_replicas=1, tokens_per_micro_batch=budget, multiple=1)
    return Batch(samples=tuple(samples), advantages={sample.sample_id: 0.0 for sample in samples}, plan=plan)


def _differing(
    rows: Sequence[Row], records: Sequence[OwnRecord], samples: Sequence[Sample], plan: ReplayPlan, stream: str
) -> float:
    """Share of (token, layer) pairs with a choice whose set is not the engine's."""
    by_id = {sample.sample_id: sample for sample in samples}
    differ, total = 0, 0
    for row, record in zip(rows, records):
        for layer, chosen in record.chosen.items():
            for sample_id, part in zip(row.batch.sample_ids, row.batch.sample_slices):
                ours = np.sort(chosen[part].numpy(), axis=-1)
                theirs, choice = _recorded(by_id[sample_id], plan, stream, layer)
                unequal = (ours != np.sort(theirs, axis=-1)).any(-1) & choice
                differ, total = differ + int(unequal.sum()), total + int(choice.sum())
    return differ / total if total else 0.0


def _recorded(sample: Sample, plan: ReplayPlan, stream: str, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """The engine's choice in a layer, and which tokens had one to make."""
    num_rows = len(sample.tokens) - 1
    if stream == "routes":
        assert sample.routes is not None
        return sample.routes[:, plan.moe_layers.index(layer)], np.ones(num_rows, dtype=bool)
    assert sample.picks is not None
    return sample.picks.decode(layer), visible_pools(0, num_rows, plan.kpool) > plan.num_selected


def _kl(samples: Sequence[Sample], scores: Scores) -> dict[str, Kl]:
    """Of all response tokens, and by the number of tokens before each."""
    ours = np.concatenate([scores[sample.sample_id][sample.prompt_length - 1 :] for sample in samples])
    theirs = np.concatenate([sample.rollout_logprobs for sample in samples])
    context = np.concatenate([np.arange(sample.prompt_length, len(sample.tokens)) for sample in samples])
    bounds = (0, *BUCKETS)
    masks = {ALL: np.ones(len(context), dtype=bool)}
    masks |= {f"{low + 1}-{high}": (context > low) & (context <= high) for low, high in pairwise(bounds)}
    found = {}
    for name, mask in masks.items():
        trainer, engine = torch.from_numpy(ours[mask]), torch.from_numpy(theirs[mask])
        stats = mismatch_stats(trainer, engine, torch.ones_like(engine))
        found[name] = Kl(stats["mean"], stats["p99"], int(stats["tokens"]))
    return found
