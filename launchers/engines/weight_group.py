"""The process group over which weights go from trainer rank 0 to the ranks of engines, apart from every other group.

SGLang 0.5.23 makes its end with `init_custom_process_group` (`srt/utils/common.py`), which calls torch's
`_new_process_group_helper` on a store prefixed with the group's name; both ends have to do the same to meet. torch 2.11
has no public way to do it between programs that share no default group, hence the private import, here only.
"""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm5_next.launchers.engines.client import Meeting, TensorList

POLL_SECONDS = 0.0005
NCCL_ID_BYTES = 128
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def listen(host: str, timeout: timedelta) -> dist.TCPStore:
    """A store that listens on `host` only (torch's default is every interface), on a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as server:
        server.bind((host, 0))
        server.listen()
        port = server.getsockname()[1]
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=server.detach()
        )


def group_name(port: int) -> str:
    """vLLM is not told a name, so both ends make it from what they know."""
    return f"weights-{port}"


class ByAddress:
    """Ranks meet at a store that listens here."""

    def __init__(self, host: str, world_size: int, device: torch.device, timeout: timedelta):
        self.store, self.timeout = listen(host, timeout), timeout
        self.meeting = Meeting(host, self.store.port, world_size, group_name(self.store.port), BACKENDS[device.type])

    def join(self, go_on: Callable[[], Any]) -> dist.ProcessGroup:
        """Waits for all others."""
        return _rank_0(self.meeting, self.store, self.timeout)


class ById:
    """Ranks meet by the id that NCCL makes for them, which vLLM takes instead of an address: the store that its own trainers
    use holds pickles.

    torch makes the id and puts it into the group's store at the first collective, which then waits for the others. vLLM
    wants that one to be an all-reduce of one element (`distributed/weight_transfer/nccl_common.py`).
    """

    def __init__(self, host: str, world_size: int, device: torch.device, timeout: timedelta):
        store, self.timeout, self.failure = dist.HashStore(), timeout, ""
        place = Meeting(host, 0, world_size, group_name(secrets.randbits(32)), BACKENDS[device.type])
        self.group = _rank_0(place, store, timeout)
        self.one = torch.zeros(1, device=device)
        self.first = threading.Thread(target=self._all_reduce, name="first collective", daemon=True)
        self.first.start()
        self.meeting = replace(place, unique_id=self._id(store))

    def join(self, go_on: Callable[[], Any]) -> dist.ProcessGroup:
        """Waits for all others. `go_on` raises to give up; RuntimeError if it takes too long."""
        limit = time.monotonic() + self.timeout.total_seconds()
        while self.first.is_alive():
            go_on()
            if time.monotonic() > limit:
                raise RuntimeError("not all ranks have joined")
            time.sleep(POLL_SECONDS)
        if self.failure:
            raise RuntimeError(self.failure)
        return self.group

    def _all_reduce(self) -> None:
        try:
            dist.all_reduce(self.one, group=self.group)
            self.one.item()  # waits for the device
        except RuntimeError as error:
            self.failure = str(error)

    def _id(self, store: dist.Store) -> bytes:
        limit = time.monotonic() + self.timeout.total_seconds()
        while time.monotonic() < limit and self.first.is_alive():
            for key in store.list_keys():
                if len(value := store.get(key)) == NCCL_ID_BYTES:
                    return value
            time.sleep(POLL_SECONDS)
        raise RuntimeError(f"NCCL made no id: {self.failure or 'it takes too long'}")


def _rank_0(meeting: Meeting, store: dist.Store, timeout: timedelta) -> dist.ProcessGroup:
    from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

    group, _ = _new_process_group_helper(
        meeting.world_size,
        0,
        [],
        Backend(meeting.backend),
        dist.PrefixStore(meeting.group, store),
        group_name=meeting.group,  # type: ignore[arg-type]
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {i: i for i in range(meeting.world_size)}
    return group


class EngineEnd:
    """An engine's end on a CPU, apart from torch's register of groups: one process may have several.

    The prefixes are those that `_new_process_group_helper` puts before the keys of a gloo group.
    """

    def __init__(self, meeting: Meeting, rank: int, timeout: timedelta):
        store: dist.Store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
        for prefix in (meeting.group, f"{meeting.group}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        self.group = dist.ProcessGroupGloo(store, rank, meeting.world_size, timeout)

    def received(self, tensors: TensorList) -> Iterator[tuple[str, Tensor]]:
        """What was broadcast, under its names."""
        flat = torch.empty(sum(tensors.sizes), dtype=torch.uint8)
        self.group.broadcast(flat, 0).wait()  # type: ignore[attr-defined]
        yield from parts_of(flat, tensors)


def parts_of(flat: Tensor, tensors: TensorList) -> Iterator[tuple[str, Tensor]]:
    """Views of a flattened bucket under their names."""
    pieces = flat.split(tensors.sizes)
    for name, shape, kind, part in zip(tensors.names, tensors.shapes, tensors.kinds, pieces, strict=True):
        yield name, part.view(kind).view(shape)


def in_order(bucket: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Widest elements first: then every tensor of a flattened bucket starts at a multiple of its element size."""
    return sorted(bucket, key=lambda item: -item[1].element_size())


def described(bucket: Sequence[tuple[str, Tensor]]) -> TensorList:
    return TensorList(
        names=tuple(name for name, _ in bucket),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket),
        shapes=tuple(tuple(tensor.shape) for _, tensor in bucket),
    )


def flattened(bucket: Sequence[tuple[str, Tensor]], device: torch.device) -> Tensor:
    """All tensors' bytes in one uint8 tensor on the group's device."""
    return torch.cat([tensor.detach().to(device).contiguous().view(-1).view(torch.uint8) for _, tensor in bucket])


def broadcast(flat: Tensor, group: dist.ProcessGroup, go_on: Callable[[], Any]) -> None:
    """Sends from rank 0. `go_on` is called while it waits and raises to give up: a peer that failed never receives."""
    work = dist.broadcast(flat, src=0, group=group, async_op=True)
    while not work.is_completed():
        go_on()
        time.sleep(POLL_SECONDS)
    work.wait()
