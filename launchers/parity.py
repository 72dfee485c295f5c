"""Where two records of the same forward pass depart from each other. Needs torch only for the numbers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class StageError:
    """One stage: relative RMS error of values, or the share of tokens whose sets differ."""

    layer: int
    stage: str
    kind: str  # of the layer, e.g. "kda + dense"
    error: float
    bound: float

    @property
    def departs(self) -> bool:
        return not self.error <= self.bound


@dataclass(frozen=True)
class ParityReport:
    """`first` is the first stage beyond its bound; errors downstream of it are its consequence."""

    stages: tuple[StageError, ...]
    mean_kl: float
    max_kl: float
    top1_agreement: float
    indexer_agreement: float | None
    router_agreement: float | None

    @property
    def first(self) -> StageError | None:
        return next((stage for stage in self.stages if stage.departs), None)

    def as_json(self) -> dict[str, Any]:
        first = self.first
        return asdict(self) | {"first_departure": None if first is None else asdict(first)}


def compare_records(
    ours: Mapping[Any, Tensor],
    reference: Mapping[Any, Tensor],
    kinds: list[str],
    *,
    value_bound: float,
    set_bound: float,
    set_stages: tuple[str, ...],
) -> ParityReport:
    """Compares stage by stage in model order. Raises ValueError if the two sides have different stages."""
    if ours.keys() != reference.keys():
        different = sorted(ours.keys() ^ reference.keys())
        raise ValueError(f"the two sides ran different stages, first {different[:3]}")
    stages = []
    for stage in sorted(reference):
        is_set = stage.name in set_stages
        error = _set_error(ours[stage], reference[stage]) if is_set else _value_error(ours[stage], reference[stage])
        kind = kinds[stage.layer] if 0 <= stage.layer < len(kinds) else ""
        stages.append(StageError(stage.layer, stage.name, kind, error, set_bound if is_set else value_bound))
    logits, wanted = (side[max(side)].double().log_softmax(-1) for side in (ours, reference))
    kl = (wanted.exp() * (wanted - logits)).sum(-1).clamp(min=0)
    return ParityReport(
        stages=tuple(stages),
        mean_kl=kl.mean().item(),
        max_kl=kl.max().item(),
        top1_agreement=(logits.argmax(-1) == wanted.argmax(-1)).double().mean().item(),
        indexer_agreement=_agreement(stages, "indexer set"),
        router_agreement=_agreement(stages, "router set"),
    )


def _value_error(got: Tensor, wanted: Tensor) -> float:
    if got.shape != wanted.shape:
        return float("inf")
    scale = wanted.double().norm().clamp_min(1e-30)
    return ((got.double() - wanted.double()).norm() / scale).item()


def _set_error(got: Tensor, wanted: Tensor) -> float:
    """Share of rows that differ; rows are sorted, unused slots are -1."""
    if got.shape != wanted.shape:
        return float("inf")
    return (got != wanted).any(-1).double().mean().item()


def _agreement(stages: list[StageError], name: str) -> float | None:
    errors = [stage.error for stage in stages if stage.stage == name]
    return 1 - sum(errors) / len(errors) if errors else None
