"""Before the first step: one request per engine through the whole path of replay, so that a lost payload costs seconds.

The path is engine -> sample -> packed row -> store -> layer. A failure names the first hop where the record is missing or
is another one.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from glm5_next.launchers.replay_plan import ReplayPlan
from glm5_next.launchers.runtime.batch import Batch
from glm5_next.launchers.runtime.engine import Completion, Lost
from glm5_next.launchers.runtime.rollout import Sampler
from glm5_next.launchers.types import Sample

NEW_TOKENS = 4


class Seen(NamedTuple):
    """What one layer of one rank had of a sample: a digest of the record in its store, and how often it read it."""

    digest: str
    reads: int


# sample id -> (stream, layer) -> what was there
Sightings = Mapping[str, Mapping[tuple[str, int], Seen]]


def probe_replay(
    sampler: Sampler, cluster: Any, planned: Callable[[Sequence[Sample]], Batch], prompt: np.ndarray, *, replicas: int
) -> None:
    """A request to every engine, and a sample for every replica at least, along the path; RuntimeError names the hop.

    `cluster` generates and trains as `Cluster` does; `planned` makes a batch of samples.
    """
    run, plan = sampler.run, sampler.replay
    tokens, count = probe_tokens(prompt, plan, run.train.tokens_per_micro_batch), run.rollout.num_engines
    try:
        answers = cluster.generate([tokens] * max(count, replicas), 1, max_new_tokens=NEW_TOKENS, seed=run.train.seed)
        completions = check_completions([completion for (completion,) in answers], plan, count)
        samples = [
            sampler.sample("probe", tokens, completion, 0, f"probe.{number}")
            for number, completion in enumerate(completions)
        ]
    except ValueError as error:
        raise lost("engine", str(error)) from error
    for sample in samples:
        for stream in streams(plan):
            if getattr(sample, stream) is None:
                raise lost("sample", f"{sample.sample_id!r} has no {stream}, although the engine sent them")
    check_sightings(samples, cluster.train("probe_replay", planned(samples)), plan)


def probe_tokens(prompt: np.ndarray, plan: ReplayPlan, longest: int) -> np.ndarray:
    """The prompt, repeated until the indexer has a choice to make, as far as `longest` tokens allow."""
    if not plan.recording.picks:
        return prompt
    wanted = min(longest - NEW_TOKENS, (plan.num_selected + 2) * plan.kpool)
    return np.resize(prompt, max(len(prompt), wanted))


def check_completions(answers: Sequence[Completion | Lost], plan: ReplayPlan, num_engines: int) -> list[Completion]:
    """The answers, if all have a record; RuntimeError that names the engine which sent none otherwise.

    Answer i is of engine i mod `num_engines`.
    """
    completions: list[Completion] = []
    for number, completion in enumerate(answers):
        if isinstance(completion, Lost):
            why = completion.error or completion.reason
            raise lost(f"engine {number % num_engines}", f"no answer to the probe ({why})")
        completions.append(completion)
        for stream in streams(plan):
            if getattr(completion, stream) is None:
                raise lost(
                    f"engine {number % num_engines}",
                    f"it returned no {stream}; it was started without recording, or a proxy before it drops the field",
                )
    return completions


def check_sightings(samples: Sequence[Sample], sightings: Sequence[Sightings], plan: ReplayPlan) -> None:
    """RuntimeError that names the hop where what a sample carries did not arrive; `sightings` are by trainer rank."""
    for sample in samples:
        for (stream, layer), digest in digests_of(sample, plan).items():
            found = [seen[stream, layer] for rank in sightings if (stream, layer) in (seen := rank[sample.sample_id])]
            where = f"the {stream} of sample {sample.sample_id!r}, layer {layer},"
            if not found:
                raise lost("packed row", f"{where} are in no rank's store")
            if any(seen.digest != digest for seen in found):
                raise lost("store", f"{where} are not what the engine sent")
            if any(seen.reads != 1 for seen in found):
                raise lost("layer", f"{where} were read {[seen.reads for seen in found]} times in one pass")


def streams(plan: ReplayPlan) -> list[str]:
    """Fields of completions and samples that the engine fills in."""
    recording = plan.recording
    return [name for name in ("routes", "route_weights", "picks") if getattr(recording, name)]


def digests_of(sample: Sample, plan: ReplayPlan) -> dict[tuple[str, int], str]:
    """Of the experts and pools of every layer of a sample."""
    found: dict[tuple[str, int], str] = {}
    if plan.recording.routes and sample.routes is not None:
        found |= {("routes", layer): digest(sample.routes[:, i]) for i, layer in enumerate(plan.moe_layers)}
    if plan.recording.picks and sample.picks is not None:
        found |= {("picks", layer): digest(sample.picks.decode(layer)) for layer in plan.dsa_layers}
    return found


def digest(rows: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(rows, dtype=np.int32).tobytes()).hexdigest()


def lost(hop: str, what: str) -> RuntimeError:
    return RuntimeError(f"replay probe, hop {hop!r}: {what}; no step was made")
