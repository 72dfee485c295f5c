"""vLLM's ranks are told NCCL's id, which torch makes at the group's first collective; here a store says what NCCL would."""

import asyncio
import base64
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from glm5_next.launchers.engines import weight_group
from glm5_next.launchers.engines.client import Meeting
from glm5_next.launchers.engines.vllm import VllmClient
from glm5_next.launchers.engines.weight_group import ById
from glm5_next.launchers.engines.wire import Address
from glm5_next.launchers.replay_plan import Recording

ID = bytes(range(128))


@pytest.fixture
def others(monkeypatch) -> threading.Event:
    """The first collective ends when they are there."""
    there = threading.Event()

    def group(meeting: Meeting, store: Any, timeout: timedelta) -> str:
        store.set("something else", "short")
        store.set("weights/cuda/0", ID)
        return meeting.group

    def all_reduce(tensor: torch.Tensor, group: str) -> None:
        assert tensor.numel() == 1
        if not there.wait(5.0):
            raise RuntimeError("nobody came")

    monkeypatch.setattr(weight_group, "_rank_0", group)
    monkeypatch.setattr(weight_group.dist, "all_reduce", all_reduce)
    return there


def end(seconds: float = 5.0) -> ById:
    return ById("127.0.0.1", 3, torch.device("cpu"), timedelta(seconds=seconds))


def test_the_id_is_there_before_the_others_are_and_joining_waits_for_them(others):
    made = end()
    assert made.meeting.unique_id == ID and made.meeting.world_size == 3
    threading.Timer(0.05, others.set).start()
    asked: list[int] = []
    assert made.join(lambda: asked.append(1)) == made.group and asked


def refuses() -> None:
    raise RuntimeError("an engine has refused")


@pytest.mark.parametrize(
    ("go_on", "seconds", "message"),
    [(refuses, 5.0, "an engine has refused"), (lambda: None, 0.1, "not all ranks have joined")],
)
def test_a_meeting_that_will_not_happen_is_given_up(others, go_on: Callable[[], None], seconds: float, message: str):
    made = end(seconds)
    with pytest.raises(RuntimeError, match=message):
        made.join(go_on)
    others.set()


def test_what_nccl_says_about_a_failure_is_passed_on(others, monkeypatch):
    def fails(tensor: torch.Tensor, group: str) -> None:
        raise RuntimeError("Mismatched NCCL version detected")

    monkeypatch.setattr(weight_group.dist, "all_reduce", fails)
    with pytest.raises(RuntimeError, match="Mismatched NCCL version"):
        end().join(lambda: None)


@pytest.mark.parametrize("unique_id", [b"", ID])
def test_vllm_is_told_the_id_or_the_address_and_packs_a_piece_into_one_message(unique_id, monkeypatch):
    told: list[Any] = []

    async def post(path: str, body: Any, *, deadline: float) -> None:
        told.append((path, body["init_info"]))

    client = VllmClient(Address("engine 0", "vllm", "http://x", "k"), None, stop_tokens=[], recording=Recording())  # type: ignore
    monkeypatch.setattr(client.wire, "post", post)
    asyncio.run(client.join(Meeting("10.0.0.1", 4711, 3, "g", "nccl", unique_id), 1, 1.0))
    ((path, info),) = told
    assert (
        path == "/init_weight_transfer_engine" and info["packed"] is True and info["packed_buffer_size_bytes"] > 2**38
    )
    assert (info["rank_offset"], info["world_size"]) == (1, 3)
    if unique_id:
        assert base64.b64decode(info["nccl_unique_id_b64"]) == ID and "master_address" not in info
    else:
        assert (info["master_address"], info["master_port"]) == ("10.0.0.1", 4711) and "nccl_unique_id_b64" not in info
