"""Distributed tests on a CPU: import once, then fork the ranks."""

import multiprocessing
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("fork")


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """Calls `fn(*args)` on every rank of a gloo group and returns what the ranks returned.

    The first rank that fails ends the others and its traceback is raised here; so does `timeout` (seconds), because a
    hang looks like a slow run.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [
        CONTEXT.Process(target=_rank, args=(rank, world_size, store.port, timeout, pipes[rank][1], fn, args))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    try:
        return _collect([receive for receive, _ in pipes], time.monotonic() + timeout)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _collect(pipes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        for rank, pipe in enumerate(pipes):
            if rank not in results and pipe.poll(0.02):
                ok, value = pipe.recv()
                if not ok:
                    raise AssertionError(f"rank {rank} failed:\n{value}")
                results[rank] = value
        if time.monotonic() > deadline:
            raise AssertionError(f"ranks {sorted(set(range(len(pipes))) - set(results))} did not finish in time")
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    rank: int, world_size: int, port: int, timeout: float, pipe: Any, fn: Callable[..., Any], args: tuple
) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        pipe.send((True, fn(*args)))
    except BaseException:  # noqa: BLE001  (whatever it is, the parent raises it)
        pipe.send((False, traceback.format_exc()))
