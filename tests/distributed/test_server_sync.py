"""Servers of any tensor-parallel size take weights from trainers of any layout, over one process group or a folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.engines.order import Order, Outcome
from glm5_next.launchers.engines.tiny_host import ModelHost
from glm5_next.launchers.engines.tiny_sglang import SGLangProtocol
from glm5_next.launchers.engines.tiny_vllm import VllmProtocol
from glm5_next.launchers.runtime.trainer import Trainer
from tests.support.engine_server import Engine, engine
from tests.support.training import on_trainers, settings

LAYOUTS: dict[str, dict[str, int]] = {"TP2 PP2": {"ranks": 4, "tp": 2, "pp": 2}, "EP2": {"ranks": 2, "ep": 2}}
# The folder is written by the same export, whatever the layout.
CASES = [
    ("TP2 PP2", "distributed"),
    pytest.param("EP2", "distributed", marks=pytest.mark.long),
    pytest.param("TP2 PP2", "disk", marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="module")
def host(folder: Path) -> ModelHost:
    return ModelHost(folder, precision="fp32")


@pytest.fixture(params=["sglang", "vllm"])
def server(request: pytest.FixtureRequest, host: ModelHost, folder: Path) -> Iterator[Engine]:
    """Two ranks wide; vLLM's merged convolutions are in the way of nothing here, so they are taken out."""
    host.load_folder(folder)
    host.version, host.paused = "default", False
    protocol: Any = (SGLangProtocol if request.param == "sglang" else VllmProtocol)(host, tp=2)
    with engine("engine 0", protocol, request.param) as running:
        yield running
    if request.param == "vllm":
        protocol.merged.remove()


def send_twice(trainer: Trainer, order: Order) -> list[Outcome | None]:
    """Version 0, then, with every parameter changed, version 1 to the same group."""
    outcomes = [trainer.publish_to_servers(order)]
    with torch.no_grad():
        for chunk in trainer.chunks:
            for parameter in chunk.parameters():
                parameter.add_(0.25)
    changed = Order(order.addresses, frozenset(), 1, order.run, order.folder)
    return [*outcomes, trainer.publish_to_servers(changed)]


@pytest.mark.parametrize(("layout", "transport"), CASES)
def test_a_server_holds_what_the_trainers_hold(
    layout: str, transport: str, server: Engine, folder: Path, tmp_path: Path
):
    sizes = {f"parallel__{key}": value for key, value in LAYOUTS[layout].items()}
    kind = server.address.protocol
    run = settings(folder, **sizes, rollout__engine=kind, rollout__transport=transport)
    order = Order((server.address,), frozenset({"engine 0"}), 0, run, tmp_path / "weights")
    first, *others = on_trainers(run, send_twice, order)
    assert [outcome.failed for outcome in first] == [{}, {}] and first[0].num_bytes > 0
    assert all(outcome is None for rank in others for outcome in rank)
    assert server.host.version == "1" and not (tmp_path / "weights").exists()
    checkpoint, name = Checkpoint(folder), "model.language_model.layers.{}.self_attn.o_proj.weight"
    for layer in range(checkpoint.config.num_layers):  # of every pipeline stage
        held, before = server.host.engine.views[name.format(layer)], checkpoint.read(name.format(layer)).float()
        assert torch.allclose(held, before + 0.25, atol=1e-6)
