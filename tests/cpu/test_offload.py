"""Optimizer state in host memory trains, saves and loads like state on the GPU; the GPU is pretended."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from glm5_next.launchers.config import RunConfig, load_run_config
from glm5_next.launchers.run_state import RunState
from glm5_next.launchers.runtime import megatron, offload_state
from glm5_next.launchers.runtime.checkpoint_folder import Origin
from glm5_next.launchers.runtime.checkpoints import load_checkpoint, save_checkpoint
from glm5_next.plugins.chunks import build_chunks, wrap_ddp
from glm5_next.plugins.megatron_config import megatron_config
from glm5_next.plugins.topology import Topology
from tests.support import tiny
from tests.support.pretended_gpu import pretend

CASE = tiny.Case(layers=2, dsa_layers=(1,), dense_layers=1)
STATE = RunState(next_step=0, weights_version=0, prompt_cursor=0, seed=0, prompts_digest="")
ROUNDING = 1e-3  # of the update; a state that is not loaded changes it by half
ORIGIN = Origin(hf="none", precision="bf16")


def settings(offload: bool) -> RunConfig:
    values = {
        "model": {"checkpoint": Path("/none"), "precision": "bf16"},
        "data": {"prompts": "tiny"},
        "optimizer": {"lr": 1e-3, "offload": offload},
        "train": {"steps": 8},
    }
    return load_run_config(None, values, [])


class Side:
    """A bf16 model with its optimizer; every one starts from the same weights."""

    def __init__(self, offload: bool):
        tiny.start_single_process()
        config = megatron_config(CASE.config(), Topology(), dtype=torch.bfloat16, on_cpu=True)
        self.chunks = wrap_ddp(build_chunks(config), config, distributed_optimizer=True)
        with torch.no_grad():
            for number, parameter in enumerate(self.chunks[0].parameters()):
                generator = torch.Generator().manual_seed(number)
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            self.optimizer, self.scheduler = megatron.build_optimizer(settings(offload), self.chunks)
        self.optimizer.reload_model_params()

    def train(self, steps: int, first: int = 0) -> list[float]:
        """Norms of the gradients."""
        norms = []
        for step in range(first, first + steps):
            megatron.reset_gradients(self.chunks, self.optimizer)
            megatron.check_gradients_are_reset(self.chunks)
            self.chunks[0](tiny.tokens(20, seed=step), torch.arange(20)[None], None).float().square().mean().backward()
            self.chunks[0].finish_grad_sync()
            done, norm, _ = self.optimizer.step()
            assert done
            norms.append(norm)
        return norms

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.chunks[0].state_dict().items() if tensor is not None}

    def save(self, folder: Path) -> Path:
        save_checkpoint(folder, STATE, ORIGIN, self.chunks, self.optimizer, self.scheduler)
        return folder


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return sum((a[name].double() - b[name].double()).square().sum().item() for name in a) ** 0.5


@pytest.fixture(scope="module", autouse=True)
def pretended_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        yield


@pytest.fixture(scope="module")
def trained(pretended_gpu, tmp_path_factory) -> dict[bool, tuple[Path, Side]]:
    """Three steps and a checkpoint, without and with offloading."""
    folder, sides = tmp_path_factory.mktemp("saved"), {}
    for offload in (False, True):
        side = Side(offload)
        norms = side.train(3)
        sides[offload] = side.save(folder / str(offload)), side, norms
    assert sides[False][2] == sides[True][2]
    return {offload: side[:2] for offload, side in sides.items()}


def test_the_state_is_on_the_host_and_the_weights_become_the_same(trained):
    """Fused and plain Adam round fp32 numbers differently, now and then across a boundary of bf16."""
    start = Side(False).weights()
    plain, offloaded = (trained[offload][1] for offload in (False, True))
    (part,) = offloaded.optimizer.chained_optimizers
    assert part.optimizer.cpu_optimizers and part.optimizer.gpu_optimizer is None
    assert distance(plain.weights(), offloaded.weights()) < ROUNDING * distance(plain.weights(), start)


@pytest.mark.parametrize("saved", [False, True], ids=["from the GPU", "from the host"])
@pytest.mark.parametrize("loaded", [False, True], ids=["to the GPU", "to the host"])
def test_a_checkpoint_goes_on_wherever_the_state_was_and_will_be(trained, saved, loaded):
    folder = trained[saved][0]
    other, same = Side(loaded), Side(saved)
    other.train(1, first=40)  # a state of its own, to be replaced
    for side in (other, same):
        load_checkpoint(folder, side.chunks, side.optimizer, side.scheduler)
    start = same.weights()
    assert equal(other.weights(), start)
    assert other.train(2, first=3) == pytest.approx(same.train(2, first=3), rel=1e-4)
    assert distance(other.weights(), same.weights()) < ROUNDING * distance(same.weights(), start)


def test_saving_before_the_first_step_changes_no_weight(tmp_path):
    side = Side(True)
    before = side.weights()
    side.save(tmp_path / "start")
    assert equal(side.weights(), before)


def test_the_repair_is_needed(trained, monkeypatch):
    """If this fails, megatron-core loads fp32 parameters by itself: delete `load_masters_of_every_dtype`."""
    monkeypatch.setattr(offload_state, "load_masters_of_every_dtype", lambda kind: None)
    monkeypatch.setattr("tests.support.pretended_gpu.load_masters_of_every_dtype", lambda kind: None)
    pretend(monkeypatch)
    side = Side(True)
    with pytest.raises(KeyError):
        load_checkpoint(trained[True][0], side.chunks, side.optimizer, side.scheduler)


def test_views_with_a_history_are_still_refused(monkeypatch):
    """If this fails, Megatron detaches fp32 parameters by itself: `build_optimizer` needs no `no_grad`."""
    side = Side(False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(megatron.torch, "no_grad", torch.enable_grad)
    with pytest.raises(ValueError, match="non-leaf"):
        megatron.build_optimizer(settings(True), side.chunks)


def test_a_state_that_is_not_loaded_is_noticed(trained):
    folder, original = trained[True]
    fresh = Side(True)
    fresh.chunks[0].load_state_dict(original.chunks[0].state_dict())
    fresh.optimizer.reload_model_params()
    whole = Side(True)
    load_checkpoint(folder, whole.chunks, whole.optimizer, whole.scheduler)
    start = whole.weights()
    assert equal(fresh.weights(), start)
    fresh.train(2, first=3), whole.train(2, first=3)
    assert distance(fresh.weights(), whole.weights()) > 100 * ROUNDING * distance(whole.weights(), start)
