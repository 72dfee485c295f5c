"""The self-check of the GPU backends: each against the naive operator in fp32, at the released model's sizes."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5_next.launchers.operator_cases import Problem, errors, poisoned, problem, reference, results, row_of, worst
from glm5_next.launchers.presets import RELEASED_CONFIG
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.kernels.registry import OPERATORS, Backend, Place, load

LENGTHS = (1, 63, 700, 2052, 260)  # of the documents of the one packed row that is computed


@dataclass(frozen=True)
class Check:
    """One backend. `result` is the output or gradient ("d" + input) nearest to its bound, `error` relative.

    `skipped` says why a backend cannot be used on this machine; then nothing was computed. `failure` is the error it
    raised in place of a result.
    """

    operator: str
    backend: str
    result: str = ""
    error: float | None = None
    bound: float | None = None
    seconds: float = 0.0
    skipped: str | None = None
    failure: str | None = None

    @property
    def ok(self) -> bool:
        if self.skipped is not None:
            return True
        return self.failure is None and self.error is not None and self.bound is not None and self.error <= self.bound


def released_place() -> Place:
    """The released model in bf16 on this process's GPU; ValueError if there is none."""
    if not torch.cuda.is_available():
        raise ValueError("no GPU: torch.cuda.is_available() is False; check the driver and that torch is a CUDA build")
    model = Glm5NextConfig.from_hf(RELEASED_CONFIG)
    return Place(model, torch.bfloat16, "cuda", torch.cuda.get_device_capability())


def check_backends() -> Iterator[Check]:
    """Checks every backend of every operator, about a minute in all (the first run also compiles and tunes kernels).

    A backend that fails does not end the check. Raises ValueError without a GPU.
    """
    place, row = released_place(), row_of(LENGTHS, torch.device("cuda"))
    for operator, backends in OPERATORS.items():
        case = problem(operator, place, row)
        wanted = reference(case)
        for backend in backends:
            yield _check(backend, place, case, wanted)
        del case, wanted
        torch.cuda.empty_cache()


def _check(backend: Backend, place: Place, case: Problem, wanted: Mapping[str, Tensor]) -> Check:
    refusal = backend.refusal(place)
    if refusal is not None:
        return Check(case.operator, backend.name, skipped=refusal)
    start = time.monotonic()
    try:
        with poisoned():
            got = results(case, load(case.operator, backend.name))
        name, error, bound = worst(case, errors(case, got, wanted))
    except Exception as failure:  # noqa: BLE001 - whatever another package raises is this backend's result
        text = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
        return Check(case.operator, backend.name, failure=text, seconds=time.monotonic() - start)
    return Check(case.operator, backend.name, name, error, bound, time.monotonic() - start)
