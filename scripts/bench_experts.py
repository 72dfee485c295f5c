"""Transformer Engine's products of experts on one GPU: one launch for all (CUTLASS) against one for each (cuBLAS).

    python scripts/bench_experts.py [--hidden 4096] [--intermediate 2048]

What `plugins/expert_products.py` chooses by. Two grouped linear layers in bf16, forward and backward, medians of seven calls
as the host issues them: launches count. `host` is the time in which it does.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformer_engine.pytorch as te
from torch import Tensor

from glm5_next.plugins.expert_products import SWITCH

# Experts on a rank, and tokens of each on average: 8192 tokens on every rank with EP 1 to 32, then short rows.
SHAPES = ((288, 227), (144, 455), (72, 910), (36, 1820), (18, 3640), (9, 7280), (288, 57), (72, 227), (18, 227))


def timed(call: Callable[[], object], count: int = 7) -> tuple[float, float]:
    """Medians: milliseconds on the GPU's clock from the first launch to the last result, and of the host."""
    call()
    call()
    torch.cuda.synchronize()
    spans, hosts = [], []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start = time.perf_counter()
        begin.record()
        call()
        end.record()
        hosts.append(1e3 * (time.perf_counter() - start))
        end.synchronize()
        spans.append(begin.elapsed_time(end))
    return statistics.median(spans), statistics.median(hosts)


def measure(experts: int, rows: int, hidden: int, intermediate: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of forward and backward, and of the host, by implementation."""
    settings = {"bias": False, "params_dtype": torch.bfloat16}
    first = te.GroupedLinear(experts, hidden, 2 * intermediate, **settings)
    second = te.GroupedLinear(experts, intermediate, hidden, **settings)
    splits = torch.randint(rows // 2, rows * 3 // 2, (experts,), generator=torch.Generator().manual_seed(1)).tolist()
    x = torch.randn(sum(splits), hidden, device="cuda", dtype=torch.bfloat16)

    def both() -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        out = second(first(leaf, splits)[:, :intermediate].contiguous(), splits)
        out.backward(torch.ones_like(out))
        first.zero_grad(set_to_none=True)
        second.zero_grad(set_to_none=True)
        assert leaf.grad is not None
        return out.detach(), leaf.grad

    found = {}
    for name, value in (("cuBLAS", "0"), ("CUTLASS", "1")):
        os.environ[SWITCH] = value
        found[name] = timed(both)
        assert all(torch.equal(a, b) for a, b in zip(both(), both(), strict=True)), f"{name}: two runs differ"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=2048)
    options = parser.parse_args()
    print("experts   rows   cuBLAS, ms (host)    CUTLASS, ms (host)   ratio")
    for experts, rows in SHAPES:
        found = measure(experts, rows, options.hidden, options.intermediate)
        shown = "   ".join(f"{span:8.2f} ({host:6.2f})" for span, host in found.values())
        print(f"{experts:7d} {rows:6d}   {shown}   {found['cuBLAS'][0] / found['CUTLASS'][0]:5.2f}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
