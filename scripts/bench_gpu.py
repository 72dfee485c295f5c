"""Speed on one GPU, in one run: every operator, both layer kinds and the four-layer slice at 8192 tokens.

    python scripts/bench_gpu.py [--out FILE.json] [--tokens N] [--only operators|slice|OPERATOR ...]

Medians of at least five runs after warm-up. Ratios are against what a user would otherwise run: transformers with FLA on
the same weights, FLA's and Megatron-Core's TileLang kernels alone, plain torch; and against the copy and matrix rates of
the same card. The first run on a machine compiles and tunes kernels, which takes minutes.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("FLA_TILELANG", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from gpu_timing import Report, free, measure_card
from torch import Tensor

from glm5_next.launchers.gpu_check import released_place
from glm5_next.launchers.operator_cases import Problem, problem, row_of
from glm5_next.plugins.kernels.registry import NAIVE, OPERATORS, load


def run_operators(report: Report, operators: list[str]) -> None:
    """Every backend of these operators; the naive one in bf16 is plain torch, mostly what transformers computes."""
    place, row = released_place(), row_of((report.tokens,), torch.device("cuda"))
    for operator in operators:
        backends = OPERATORS[operator]
        case = problem(operator, place, row)
        if operator == "sparse_attention":  # slots as the model's own expansion leaves them
            pools = problem("expand_pools", place, row).tensors["pools"]
            case.tensors["indices"] = load("expand_pools", "triton")(pools, row, place.model.index_kpool)
        for name in (*(backend.name for backend in backends if not backend.refusal(place)), NAIVE):
            measure_operator(report, case, name)
        del case
        free()


def measure_operator(report: Report, case: Problem, name: str) -> None:
    function = load(case.operator, name)
    plain = {key: x.detach() for key, x in case.tensors.items()}
    leaves = {key: x.detach().requires_grad_(x.is_floating_point() and case.trains) for key, x in plain.items()}
    with torch.set_grad_enabled(case.trains):
        outputs = list(case.call(function, leaves).values())
    read = outputs if case.operator == "short_convolution" else plain.values()  # which reads a third of its wide rows
    moved = sum(x.nbytes for x in (*read, *outputs))
    grads = [torch.randn_like(out) for out in outputs if out.requires_grad]
    del outputs

    def both() -> None:
        outputs = [out for out in case.call(function, leaves).values() if out.requires_grad]
        torch.autograd.grad(outputs, [x for x in leaves.values() if x.requires_grad], grads)

    row = report.measure(case.operator, name, lambda: case.call(function, plain), both if case.trains else None)
    report.compare_with_card(row, moved, multiplications(case.operator, plain))


def multiplications(operator: str, inputs: dict[str, Tensor]) -> float:
    """Floating-point operations of the forward pass in products of matrices; 0 for operators without any.

    KDA: the recurrence, token by token (S k, the update, S q); chunked kernels do more.
    """
    if operator == "kda":
        tokens, heads, width = inputs["q"].shape
        return 2 * 3 * tokens * heads * width * width
    if operator == "sparse_attention":
        return 2 * 2 * int((inputs["indices"] >= 0).sum()) * inputs["q"].shape[1] * inputs["q"].shape[2]
    if operator == "select_pools":  # a query scores the pools before it
        return 2 * inputs["q"].numel() * len(inputs["pooled"]) / 2
    if operator == "mhc_site":
        return 2 * inputs["streams"].numel() * len(inputs["weight"])
    return 0.0


# Name, ours, what it replaces, and the least ratio asked for (of forward and backward, or of the forward if it is all).
TARGETS = (
    ("slice", "ours", "transformers", 2.0),
    ("KDA + dense layer", "ours", "transformers", 1.0),
    ("DSA + MoE layer", "ours", "transformers", 1.0),
    ("mHC site", "ours", "transformers", 4.0),
    ("indexer", "ours", "transformers", 8.0),
    ("sparse_attention", "flash_mla", "tilelang", 4.0),
    ("kda", "cudnn", "fla", 1.0),
    ("select_pools", "cudnn", "triton", 1.0),
    *((operator, backends[0].name, NAIVE, 1.0) for operator, backends in OPERATORS.items()),
)


def ratios(report: Report) -> list[dict[str, Any]]:
    found = []
    for name, ours, other, wanted in TARGETS:
        ratio = report.ratio(name, ours, other)
        if ratio:
            value = ratio.get("both", ratio["forward"])
            found.append({"name": name, "ours": ours, "other": other, "wanted": wanted, **ratio, "ok": value >= wanted})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--tokens", type=int, default=8192, help="length of the one document (default: 8192)")
    parts = ("operators", "slice", *OPERATORS)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts[:2], metavar="PART", help=", ".join(parts))
    options = parser.parse_args()
    torch.manual_seed(0)
    report = Report(options.tokens)
    measure_card(report)
    operators = [name for name in OPERATORS if name in options.only or "operators" in options.only]
    run_operators(report, operators)
    if "slice" in options.only:
        from gpu_bench_slice import run_slice  # needs the model's packages; operators alone do not

        run_slice(report)
    found = ratios(report)
    for entry in found:
        both = f"{entry['both']:7.2f}" if "both" in entry else "      -"
        verdict = "ok" if entry["ok"] else f"BELOW {entry['wanted']}"
        print(f"{entry['name']:20} {entry['ours']:10} vs {entry['other']:13} {entry['forward']:7.2f} {both}  {verdict}")
    if options.out:
        content = {"tokens": report.tokens, "facts": report.facts, "ratios": found}
        options.out.write_text(json.dumps(content | {"rows": [asdict(row) for row in report.rows]}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
