"""Several gloo ranks on this machine: import once, then fork. For commands and tests; a training run uses Ray."""

import gc
import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

CONTEXT = multiprocessing.get_context("fork")
_closed: list[dict[str, Any]] = []


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120, start_group: bool = True
) -> list[Any]:
    """Calls `fn(*args)` on every rank of a gloo group and returns what the ranks returned.

    Without `start_group` it calls `fn(rank, store, *args)` instead, for code that starts its own group. The first rank
    that fails or dies ends the others and is named here; so does `timeout` (seconds), because a hang looks like a slow
    run.
    """
    close_own_groups()
    ranks: list[Any] = []
    pipes: list[Any] = []
    for rank in range(world_size):
        ours, theirs = CONTEXT.Pipe()
        ranks.append(CONTEXT.Process(target=_rank, args=(rank, world_size, timeout, theirs, start_group, fn, args)))
        ranks[-1].start()
        theirs.close()  # so that the pipe ends when the rank does
        pipes.append(ours)
    try:
        # After the last fork: the store's thread looks up the address of a rank that connects, under a lock of the C
        # library; a rank that is forked meanwhile would find that lock taken for ever.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for pipe in pipes:
            pipe.send(store.port)
        return _collect(pipes, time.monotonic() + timeout)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def close_own_groups() -> None:
    """Ends the groups of this process, which other tests may have started.

    Their threads do not survive a fork, and a rank that frees such a group crashes; so Megatron's references to them
    are kept for ever.
    """
    if dist.is_initialized():
        _closed.append(dict(vars(parallel_state)))
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _collect(pipes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        for rank, pipe in enumerate(pipes):
            if rank not in results and pipe.poll(0.02):
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    raise RuntimeError(f"rank {rank} died without a word") from None
                if not ok:
                    raise RuntimeError(f"rank {rank} failed:\n{value}")
                results[rank] = value
        if time.monotonic() > deadline:
            raise RuntimeError(f"ranks {sorted(set(range(len(pipes))) - set(results))} did not finish in time")
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    rank: int,
    world_size: int,
    timeout: float,
    pipe: Any,
    start_group: bool,
    fn: Callable[..., Any],
    args: tuple,
) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # garbage of the parent may hold a store or a group; freeing it here would wait for threads that are gone
    try:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), is_master=False)
        if start_group:
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
            )
            result = True, fn(*args)
        else:
            result = True, fn(rank, store, *args)
    except BaseException:  # noqa: BLE001  (whatever it is, the parent raises it)
        result = False, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(result))  # not send(): it would share the memory of tensors with a process that ends
