"""From samples to packed rows: which sample is trained where, and the tensors of one row. Needs torch only.

T is the number of tokens of a row, padding included. A sample of S tokens is a document of S - 1 rows: token t goes in,
token t + 1 is its label.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from glm5_next.launchers.replay_payload import require_streams
from glm5_next.launchers.replay_plan import Recording, ReplayPlan
from glm5_next.launchers.types import Sample
from glm5_next.plugins.pick_coding import PickRecord, no_picks

Plan = list[list[list[int]]]
Scores = Mapping[str, np.ndarray]  # float32 [S - 1] of every label, by sample id


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """One packed row: documents one after the other, and at the end one document of padding where T asks for it.

    input_ids, labels, position_ids: int64 [T]; positions restart at 0 in every document.
    loss_mask: float32 [T], 1 where the label is a response token.
    rollout_logprobs, advantages: float32 [T], of the label; 0 where the mask is.
    cu_seqlens: int32 [documents + 1], from 0 to T.
    old_logprobs, reference_logprobs: float32 [T] of every label, 0 in padding; None where the step needs none.
    routes: int16 [T, MoE layers, experts per token] of the input tokens, -1 in padding; None unless the engine's experts
        are replayed. route_weights: float32 of the same shape, or None.
    picks: the indexer's record of every document, padding included; None unless the engine's picks are replayed.
    sample_slices: rows of each of sample_ids, in order.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    cu_seqlens: torch.Tensor
    position_ids: torch.Tensor
    old_logprobs: torch.Tensor | None
    reference_logprobs: torch.Tensor | None
    routes: torch.Tensor | None
    route_weights: torch.Tensor | None
    picks: tuple[PickRecord, ...] | None
    sample_ids: tuple[str, ...]
    sample_slices: tuple[slice, ...]

    def to(self, device: torch.device) -> "MicroBatch":
        moved: dict[str, Any] = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Document:
    """Arrays with one entry per row of the document, all cut from a sample by `_document`."""

    input_ids: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    routes: np.ndarray | None
    route_weights: np.ndarray | None
    picks: PickRecord | None


def plan_step(lengths: Sequence[int], *, num_replicas: int, tokens_per_micro_batch: int, multiple: int) -> Plan:
    """Replica -> micro-batch -> indices into `lengths` (rows of each sample: its tokens minus one).

    Deterministic. Samples are spread so that replicas get about equally many tokens, then put into as few rows of at
    most `tokens_per_micro_batch` as fit. Every replica has the same number of micro-batches, a positive multiple of
    `multiple` (what a pipeline schedule wants); missing ones are empty. Raises ValueError that names a sample which
    no row can hold.
    """
    for index, length in enumerate(lengths):
        if not 1 <= length <= tokens_per_micro_batch:
            raise ValueError(
                f"sample {index} has {length} tokens to train on; a micro-batch holds 1 to {tokens_per_micro_batch} "
                "(train.tokens_per_micro_batch)"
            )
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    plan = [
        _fill_rows(share, lengths, tokens_per_micro_batch) for share in _shares(longest_first, lengths, num_replicas)
    ]
    count = max(1, *(len(rows) for rows in plan))
    count += -count % multiple
    return [rows + [[] for _ in range(count - len(rows))] for rows in plan]


def plan_digest(plan: Plan) -> str:
    """SHA-256 of a plan, for ranks to compare before the first forward."""
    return hashlib.sha256(json.dumps(plan).encode()).hexdigest()


def pack_row(
    samples: Sequence[Sample],
    advantages: Mapping[str, float],
    *,
    pad_to: int,
    pad_token: int,
    replay: ReplayPlan | None = None,
    old_logprobs: Scores | None = None,
    reference_logprobs: Scores | None = None,
) -> MicroBatch:
    """The tensors of one micro-batch; without samples, `pad_to` tokens of padding with a mask of zeros.

    `advantages` is by sample id. T is padded up to a multiple of `pad_to` with `pad_token`. `replay` demands
    of every sample what the engine has to record, and gives it to an empty row too; without it no record is packed.
    `old_logprobs` (the policy before the step's first update) and `reference_logprobs` are needed only where the loss
    uses them. Raises ValueError that names a sample without its advantage or record.
    """
    recording = Recording() if replay is None else replay.recording
    documents = [_document(sample, advantages, replay) for sample in samples]
    filled = sum(len(document.input_ids) for document in documents)
    num_padding = -filled % pad_to if samples else pad_to
    if num_padding:
        documents.append(_padding(num_padding, pad_token, replay))
    ends = np.cumsum([0] + [len(document.input_ids) for document in documents])
    return MicroBatch(
        input_ids=_join([document.input_ids for document in documents]),
        labels=_join([document.labels for document in documents]),
        loss_mask=_join([document.loss_mask for document in documents]),
        rollout_logprobs=_join([document.rollout_logprobs for document in documents]),
        advantages=_join([document.advantages for document in documents]),
        cu_seqlens=torch.tensor(ends, dtype=torch.int32),
        position_ids=_join([np.arange(len(document.input_ids)) for document in documents]),
        old_logprobs=_join_scores(old_logprobs, samples, num_padding),
        reference_logprobs=_join_scores(reference_logprobs, samples, num_padding),
        routes=_join([document.routes for document in documents]) if recording.routes else None,
        route_weights=_join([document.route_weights for document in documents]) if recording.route_weights else None,
        picks=tuple(document.picks for document in documents if document.picks is not None)
        if recording.picks
        else None,
        sample_ids=tuple(sample.sample_id for sample in samples),
        sample_slices=tuple(slice(int(start), int(end)) for start, end in pairwise(ends))[: len(samples)],
    )


def _shares(order: Sequence[int], lengths: Sequence[int], num_replicas: int) -> list[list[int]]:
    """Longest first to whichever replica has the fewest tokens."""
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    loads = [0] * num_replicas
    for index in order:
        replica = loads.index(min(loads))
        shares[replica].append(index)
        loads[replica] += lengths[index]
    return shares


def _fill_rows(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First fit: each sample goes to the first row that has room."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in order:
        row = next((i for i, free in enumerate(room) if free >= lengths[index]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(budget)
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def covered_rows(sample: Sample, recording: Recording) -> int:
    """Rows of the sample's document up to the first response row that has no record: those that can be trained on.

    A later row saw the state that such a row left behind, so it is no better.
    """
    num_rows = len(sample.tokens) - 1
    holes = np.zeros(num_rows, dtype=bool)
    if recording.routes and sample.routes is not None:
        holes |= (sample.routes < 0).any((1, 2))
    if recording.picks and sample.picks is not None:
        holes |= sample.picks.holes.any(1)
    holes[: sample.prompt_length - 1] = False
    return int(holes.argmax()) if holes.any() else num_rows


def _document(sample: Sample, advantages: Mapping[str, float], replay: ReplayPlan | None) -> _Document:
    """The only place that cuts a sample, so tokens, log-probabilities and records cannot shift against each other."""
    if sample.sample_id not in advantages:
        raise ValueError(f"sample {sample.sample_id!r}: has no advantage")
    recording = Recording() if replay is None else replay.recording
    if replay is not None:
        require_streams(sample, replay)
    row = np.arange(len(sample.tokens) - 1)
    response = row >= sample.prompt_length - 1  # the last prompt token predicts the first response token
    trained = response & (row < covered_rows(sample, recording))
    rollout_logprobs = np.zeros(len(row), dtype=np.float32)
    rollout_logprobs[response] = sample.rollout_logprobs
    return _Document(
        input_ids=sample.tokens[:-1].astype(np.int64),
        labels=sample.tokens[1:].astype(np.int64),
        loss_mask=trained.astype(np.float32),
        rollout_logprobs=np.where(trained, rollout_logprobs, np.float32(0)),
        advantages=np.where(trained, advantages[sample.sample_id], 0.0).astype(np.float32),
        routes=sample.routes,
        route_weights=sample.route_weights,
        picks=sample.picks,
    )


def _padding(length: int, pad_token: int, replay: ReplayPlan | None) -> _Document:
    tokens = np.full(length, pad_token, dtype=np.int64)
    zeros = np.zeros(length, dtype=np.float32)
    shape = (0, 0) if replay is None else replay.routes_shape
    return _Document(
        input_ids=tokens,
        labels=tokens,
        loss_mask=zeros,
        rollout_logprobs=zeros,
        advantages=zeros,
        routes=np.full((length, *shape), -1, dtype=np.int16),
        route_weights=np.zeros((length, *shape), dtype=np.float32),
        picks=None if replay is None else no_picks(length, replay.dsa_layers, replay.num_selected, replay.kpool),
    )


def _join_scores(scores: Scores | None, samples: Sequence[Sample], num_padding: int) -> torch.Tensor | None:
    if scores is None:
        return None
    wrong = [
        sample.sample_id
        for sample in samples
        if sample.sample_id not in scores or scores[sample.sample_id].shape != (len(sample.tokens) - 1,)
    ]
    if wrong:
        raise ValueError(f"samples {wrong[:3]} have no score for each of their labels")
    return _join([*(scores[sample.sample_id] for sample in samples), np.zeros(num_padding, dtype=np.float32)])


def _join(arrays: Sequence[Any]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays))
