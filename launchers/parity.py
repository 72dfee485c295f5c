"""Where two records of the same forward pass depart from each other. Needs torch only for the numbers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

FP32_BOUND = 1e-4  # relative RMS error that the order of fp32 sums explains
OWN_FACTOR = 2.0  # in bf16, relative to the error of the reference's own bf16 run, and on top of it
VALUE_FLOOR = 2.0**-7
SET_FLOOR = 0.05


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
    """`first` is the first stage beyond its bound; errors downstream of it are its consequence.

    KL divergences are per token, of our distribution from the fp32 reference's. `own_mean_kl` is that of the reference
    computed in the run's precision (None in fp32).
    """

    stages: tuple[StageError, ...]
    mean_kl: float
    max_kl: float
    own_mean_kl: float | None
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
    own: Mapping[Any, Tensor] | None,
    kinds: list[str],
    set_stages: tuple[str, ...],
) -> ParityReport:
    """Compares stage by stage in model order. Raises ValueError if the two sides have different stages.

    `own` is the reference in the precision of `ours`: rounding may cost us a small multiple of what it costs the
    reference, stage by stage. Without it both sides are fp32 and have to agree to `FP32_BOUND`.
    """
    if ours.keys() != reference.keys():
        different = sorted(ours.keys() ^ reference.keys())
        raise ValueError(f"the two sides ran different stages, first {different[:3]}")
    stages = []
    for stage in sorted(reference):
        is_set = stage.name in set_stages
        error = _error(ours[stage], reference[stage], is_set)
        bound = 0.0 if is_set else FP32_BOUND
        if own is not None:
            bound = OWN_FACTOR * _error(own[stage], reference[stage], is_set) + (SET_FLOOR if is_set else VALUE_FLOOR)
        stages.append(StageError(stage.layer, stage.name, _kind(kinds, stage.layer), error, bound))
    last = max(reference)
    kl = _kl(ours[last], reference[last])
    return ParityReport(
        stages=tuple(stages),
        mean_kl=kl.mean().item(),
        max_kl=kl.max().item(),
        own_mean_kl=None if own is None else _kl(own[last], reference[last]).mean().item(),
        top1_agreement=(ours[last].argmax(-1) == reference[last].argmax(-1)).double().mean().item(),
        indexer_agreement=_agreement(stages, "indexer set"),
        router_agreement=_agreement(stages, "router set"),
    )


def _kind(kinds: list[str], layer: int) -> str:
    return kinds[layer] if 0 <= layer < len(kinds) else ""


def _kl(got: Tensor, wanted: Tensor) -> Tensor:
    """KL of `[T, V]` logits from the wanted ones, per token."""
    p, q = wanted.double().log_softmax(-1), got.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp(min=0)


def _error(got: Tensor, wanted: Tensor, is_set: bool) -> float:
    return _set_error(got, wanted) if is_set else _value_error(got, wanted)


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


def draw_depth(report: ParityReport) -> Figure:
    """Error of every stage by depth, with the bounds; values above, sets below."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    for panel, is_set in zip(figure.subplots(2, 1, sharex=True), (False, True)):
        for name in dict.fromkeys(stage.stage for stage in report.stages):
            points = [(place, stage) for place, stage in enumerate(report.stages) if stage.stage == name]
            if name.endswith(" set") == is_set:
                panel.plot([place for place, _ in points], [stage.error for _, stage in points], "o", label=name)
        chosen = [(place, stage) for place, stage in enumerate(report.stages) if stage.stage.endswith(" set") == is_set]
        panel.plot([place for place, _ in chosen], [stage.bound for _, stage in chosen], "k_", label="bound")
        panel.set_ylabel("share of tokens with another set" if is_set else "relative RMS error")
        panel.legend(fontsize="x-small", ncols=4)
        if not is_set:
            panel.set_yscale("log")
    starts = {stage.layer: place for place, stage in reversed(list(enumerate(report.stages))) if stage.kind}
    panel.set_xticks(list(starts.values()), [str(layer) for layer in starts])
    panel.set_xlabel("layer")
    return figure
