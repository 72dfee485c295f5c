"""What we load into vLLM, on stand-ins with the code of its 0.33.0 that matters: the merged convolution, and the open paths."""

import asyncio
import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glm5_next.launchers.engines import vllm_plugin
from glm5_next.launchers.engines.vllm_middleware import RequireKey
from glm5_next.launchers.engines.vllm_picks import PoolsBeside


class KdaLayer(nn.Module):
    """`vllm/models/glm5next/common/kda.py`, lines 296-299 and 558-567."""

    def __init__(self) -> None:
        super().__init__()
        for part in "qkv":
            conv = nn.Module()
            conv.weight = nn.Parameter(torch.randn(6, 1, 4))
            setattr(self, f"{part}_conv1d", conv)
        self._merged_conv_weight: Tensor | None = None

    def forward(self) -> Tensor:
        if self._merged_conv_weight is None:

            def _w(m: Any) -> Tensor:
                return m.weight.view(m.weight.size(0), m.weight.size(2))

            self._merged_conv_weight = torch.cat([_w(self.q_conv1d), _w(self.k_conv1d), _w(self.v_conv1d)]).contiguous()
        return self._merged_conv_weight


def worker_class() -> type:
    class Worker:
        """Takes weights as `vllm.v1.worker.gpu_worker.Worker` does: into the parameters, and nothing else."""

        def __init__(self) -> None:
            self.model = nn.ModuleList([KdaLayer(), nn.Linear(2, 2), KdaLayer()])
            self.model_runner = SimpleNamespace(get_model=lambda: self.model)

        def finish_weight_update(self, version: str | None = None) -> str:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter += 1.0
            return f"finished {version}"

        def reload_weights(self, weights_path: str) -> None:
            self.finish_weight_update()

    return Worker


def is_current(layer: Any) -> bool:
    whole = torch.cat([getattr(layer, f"{part}_conv1d").weight.squeeze(1) for part in "qkv"])
    return torch.equal(layer(), whole)


@pytest.mark.parametrize("method", ["finish_weight_update", "reload_weights"])
def test_a_merged_convolution_is_rebuilt_in_place_after_an_update(method):
    plain, patched = worker_class(), worker_class()
    vllm_plugin.patch(patched)
    for kind, expected in ((plain, False), (patched, True)):
        worker = kind()
        first = worker.model[0]()
        address = first.data_ptr()
        getattr(worker, method)("7")
        assert is_current(worker.model[0]) is expected
        assert worker.model[0]().data_ptr() == address, "captured graphs hold the address"
        assert is_current(worker.model[2]), "a layer that has not run yet merges what it has"


def test_a_worker_is_patched_once_and_answers_as_before():
    worker = worker_class()
    vllm_plugin.patch(worker)
    once = worker.finish_weight_update
    vllm_plugin.patch(worker)
    assert worker.finish_weight_update is once
    assert worker().finish_weight_update("3") == "finished 3"


@pytest.mark.parametrize(("version", "fits"), [("0.33.0", True), ("0.34.0", False)])
def test_the_plugin_refuses_another_vllm(monkeypatch, version, fits):
    worker, recorders = worker_class(), "vllm.distributed.aux_output_connector.worker"
    names = ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu_worker")
    names += ("vllm.distributed", "vllm.distributed.aux_output_connector", recorders)
    modules = {name: ModuleType(name) for name in names}
    vars(modules[recorders]).update(RoutedExpertsCapturer=object, bind_routed_experts_capturer=None)
    vars(modules["vllm.distributed.aux_output_connector"])["worker"] = modules[recorders]
    modules["vllm"].__version__ = version  # type: ignore[attr-defined]
    modules["vllm.v1.worker.gpu_worker"].Worker = worker  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    if fits:
        vllm_plugin.register()
        assert hasattr(worker.finish_weight_update, "rebuilds")
        assert issubclass(vars(modules[recorders])["RoutedExpertsCapturer"], PoolsBeside)
    else:
        with pytest.raises(RuntimeError, match=r"for vLLM 0\.33\.x, this is 0\.34\.0"):
            vllm_plugin.register()


def test_the_entry_point_leads_to_the_plugin():
    found = [point for point in entry_points(group="vllm.general_plugins") if point.name == "glm5_next"]
    assert all(point.load() is vllm_plugin.register for point in found)
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    name = project["entry-points"]["vllm.general_plugins"]["glm5_next"]
    assert name == f"{vllm_plugin.__name__}:register"


def asked(path: str, *headers: tuple[bytes, bytes]) -> int:
    """The status of a request behind the middleware."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(RequireKey(app)({"type": "http", "path": path, "headers": list(headers)}, None, send))
    return sent[0]["status"]


def test_every_path_but_health_needs_the_key(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    for path in ("/update_weights", "/pause", "/collective_rpc", "/v1/models", "/inference/v1/generate"):
        assert asked(path) == 401
        assert asked(path, (b"authorization", b"Bearer wrong")) == 401
        assert asked(path, (b"authorization", b"Bearer secret")) == 200
    assert asked("/health") == 200


def test_a_server_without_a_key_does_not_start(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ValueError, match="VLLM_API_KEY is not set"):
        asked("/health")
