"""Times on one GPU, and what the same card reaches in a copy and in a product of matrices."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

MIB, GIB = 2**20, 2**30
FEWEST, MOST, SECONDS = 5, 30, 0.6
# Cycles (2 and 10 ms) in which the host queues a call, so that launches are not what is timed: as many as the host needs.
CYCLES_PER_MS = 2_000_000
SHORTEST_START, LONGEST_START = 2.0, 10.0


@dataclass
class Row:
    """One path: milliseconds of forward, and of forward and backward (None: not differentiable); peak GiB on top of inputs.

    `of_copy` and `of_matrix`: what the forward pass reaches of the rates that a copy and a product of matrices had in the
    same run, counting what has to be moved and multiplied at least (None: not counted).
    """

    name: str
    path: str
    forward_ms: float
    both_ms: float | None
    extra_gib: float
    of_copy: float | None = None
    of_matrix: float | None = None


@dataclass
class Report:
    tokens: int
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def measure(self, name: str, path: str, forward: Callable[[], Any], both: Callable[[], Any] | None) -> Row:
        """Prints as it goes: compilation and tuning of the first call can take long."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            forward_ms = median_ms(forward)
        both_ms = None if both is None else median_ms(both)
        extra = (torch.cuda.max_memory_allocated() - before) / GIB
        self.rows.append(Row(name, path, forward_ms, both_ms, extra))
        shown = "       -" if both_ms is None else f"{both_ms:8.3f}"
        seconds = time.monotonic() - self.started
        print(f"{seconds:6.0f} s  {name:20} {path:22} {forward_ms:8.3f} {shown} ms {extra:7.2f} GiB", flush=True)
        return self.rows[-1]

    def compare_with_card(self, row: Row, moved_bytes: float, flops: float) -> None:
        """Of a row that was just measured; see `Row`."""
        row.of_copy = moved_bytes / row.forward_ms / 1e9 / self.facts["copy_tb_per_s"]
        row.of_matrix = flops / row.forward_ms / 1e9 / self.facts["matrix_tflop_per_s"]
        print(f"{'':10}of the card's rates: copy {row.of_copy:.0%}, matrix {row.of_matrix:.0%}", flush=True)

    def ratio(self, name: str, ours: str, other: str) -> dict[str, float]:
        """How many times as fast ours is; {} unless both were measured."""
        rows = {row.path: row for row in self.rows if row.name == name}
        if ours not in rows or other not in rows:
            return {}
        out = {"forward": rows[other].forward_ms / rows[ours].forward_ms}
        if rows[ours].both_ms and rows[other].both_ms:
            out["both"] = rows[other].both_ms / rows[ours].both_ms
        return out


def median_ms(call: Callable[[], Any]) -> float:
    """By the GPU's clock, with a cold L2 each time."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    host_ms = 1e3 * (time.perf_counter() - start)
    head_start = min(max(2 * host_ms, SHORTEST_START), LONGEST_START)
    torch.cuda.synchronize()
    flush = torch.empty(256 * MIB, dtype=torch.int8, device="cuda")
    times, started = [], time.monotonic()
    while len(times) < FEWEST or (len(times) < MOST and time.monotonic() - started < SECONDS):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(head_start * CYCLES_PER_MS))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def measure_card(report: Report) -> None:
    x = torch.randn(2 * GIB // 2, device="cuda", dtype=torch.bfloat16)
    report.facts["copy_tb_per_s"] = 2 * x.nbytes / median_ms(x.clone) / 1e9
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    report.facts["matrix_tflop_per_s"] = 2 * 8192**3 / median_ms(lambda: a @ a) / 1e9
    print({name: round(value, 2) for name, value in report.facts.items()}, flush=True)


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
