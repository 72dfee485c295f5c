"""Servers on the trainers' own devices: they sleep while trainers work and take weights from memory that both see."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.name_map import model_tensors, on_disk
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.engines.client import ALL_MEMORY
from glm5_next.launchers.engines.colocated import ColocatedPublisher
from glm5_next.launchers.engines.order import Order, Outcome
from glm5_next.launchers.engines.tiny_host import ModelHost
from glm5_next.launchers.runtime import weight_sync
from glm5_next.launchers.runtime.trainer import Trainer
from tests.support.colocated import LOADS, Colocated, servers
from tests.support.training import on_trainers

ORDER_OF_CALLS = {
    "sglang": [
        "/resume_memory_occupation",
        "/pause_generation",
        "/flush_cache",
        "/begin_weight_update",
        "/update_weights_from_tensor",
        "/end_weight_update",
        "/update_weight_version",
        "/flush_cache",
        "/resume_memory_occupation",
        "/continue_generation",
    ],
    "vllm": [
        "/wake_up",
        "/init_weight_transfer_engine",
        "/pause",
        "/reset_prefix_cache",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
        "/wake_up",
        "/resume",
    ],
}
PROOF = {"/weights_checker", "/weight_checker"}  # the proof, whose calls are `test_publisher`'s
TOPOLOGIES = {"TP2 PP2": {"ranks": 4, "tp": 2, "pp": 2}, "EP2": {"ranks": 2, "ep": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="module")
def hosts(folder: Path) -> list[ModelHost]:
    return [ModelHost(folder, precision="fp32"), ModelHost(folder, precision="fp32")]


@pytest.fixture
def colocated(hosts: list[ModelHost], folder: Path) -> Iterator[Callable[..., Colocated]]:
    with ExitStack() as stack:
        yield lambda kind, layout, tp: stack.enter_context(servers(kind, hosts, folder, tp, TOPOLOGIES[layout]))


def changed(trainer: Trainer) -> None:
    with torch.no_grad():
        for chunk in trainer.chunks:
            for parameter in chunk.parameters():
                parameter.add_(0.25)


def cycle(trainer: Trainer, order: Order) -> tuple[list[Outcome | None], dict[str, torch.Tensor]]:
    """Version 0; new weights while the engines sleep; version 1. And what this rank exports then."""
    weight_sync.BUCKET_BYTES = 100_000
    outcomes = [trainer.publish_to_servers(order)]
    if trainer.rank == 0:
        publisher = trainer.updates.publisher
        assert isinstance(publisher, ColocatedPublisher)
        publisher._all(lambda client: client.release(ALL_MEMORY))
    changed(trainer)
    outcomes.append(trainer.publish_to_servers(Order(order.addresses, frozenset(), 1, order.run, order.folder)))
    return outcomes, {name: tensor.clone() for name, tensor in trainer._exported()}


def without_repeats(paths: list[str]) -> list[str]:
    return [path for number, path in enumerate(paths) if number == 0 or paths[number - 1] != path]


CASES = [
    ("TP2 PP2", 2, "sglang"),
    pytest.param("EP2", 1, "vllm", marks=pytest.mark.long),
    pytest.param("EP2", 2, "sglang", marks=pytest.mark.long),
    pytest.param("TP2 PP2", 2, "vllm", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("layout", "tp", "kind"), CASES)
def test_a_server_on_the_trainers_devices_holds_every_bit(layout: str, tp: int, kind: str, colocated: Any):
    made: Colocated = colocated(kind, layout, tp)
    first, *others = on_trainers(made.run, cycle, made.order(0, fresh=True))
    assert [outcome.failed for outcome in first[0]] == [{}, {}] and first[0][0].num_bytes > 0
    assert all(outcome is None for outcomes, _ in others for outcome in outcomes)
    checkpoint = Checkpoint(made.run.model.checkpoint)
    names = {n for entry in model_tensors(checkpoint.config, mtp=False) for n in on_disk(entry, checkpoint.config)}
    assert names == first[1].keys()
    for one in made.engines:
        assert one.host.version == "1" and not one.host.paused and not one.host.released
        for name, tensor in first[1].items():
            assert torch.equal(one.host.engine.views[name], tensor.to(one.host.engine.views[name].dtype)), name
        assert np.isfinite(made.ask(one, lambda client: client.score(range(3, 20), 30.0))).all()
    calls = made.engines[0].faulty.calls
    first_update = calls[: next(i for i, (path, _) in enumerate(calls) if path == ORDER_OF_CALLS[kind][-1]) + 1]
    assert without_repeats([path for path, _ in first_update if path not in PROOF]) == ORDER_OF_CALLS[kind]
    assert sum(path == LOADS[kind] for path, _ in calls) > 12, "in pieces"
    if kind == "sglang":
        tags = [body["tags"] for path, body in calls if path == "/resume_memory_occupation"]
        assert tags == 2 * [["weights"], ["kv_cache"]]
        assert {len(body["serialized_named_tensors"]) for path, body in calls if path == LOADS[kind]} == {tp}
