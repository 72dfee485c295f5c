"""What this process holds in memory, as the operating system counts it, and what a conversion may hold."""

from dataclasses import dataclass
from pathlib import Path

STATUS = Path("/proc/self/status")
GIB = 2**30


def resident_bytes() -> int:
    """Resident set of this process now."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """Largest resident set of this process so far."""
    return _status("VmHWM")


def _status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


@dataclass(frozen=True)
class MemoryPlan:
    """How many threads work at a time, and the most that the process will then hold."""

    workers: int
    predicted_peak: int
    budget: int


def plan_memory(budget: int, per_worker: int, shared: int, workers: int) -> MemoryPlan:
    """At most `workers` threads that hold `per_worker` bytes each beside `shared` ones, within a budget for the process.

    Raises ValueError if not even one thread fits.
    """
    base = resident_bytes() + shared
    fitting = (budget - base) // per_worker
    if fitting < 1:
        raise ValueError(
            f"--budget is {budget / GIB:.2f} GiB; this process holds {base / GIB:.2f} GiB before it starts and needs "
            f"{per_worker / GIB:.2f} GiB for one thread, so give it at least {(base + per_worker) / GIB:.2f}"
        )
    workers = min(workers, fitting)
    return MemoryPlan(workers, base + workers * per_worker, budget)
