"""Our bridge behind mbridge's public behaviour, driven as training frameworks drive it."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from transformers import AutoConfig

import glm5_next.bridge  # registers with mbridge
from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.bridge.verify import compare
from glm5_next.plugins.topology import Topology
from tests.distributed.test_bridge_layouts import TP2, described, held, start, stored_tensors
from tests.support.ranks import run_ranks

from mbridge import AutoBridge  # isort: skip  (after our bridge, as a user would)


def through_mbridge(folder: Path, out: Path, topology: Topology) -> tuple[str, list]:
    start(topology)
    bridge = AutoBridge.from_pretrained(str(folder))
    models = bridge.get_model()
    for _, tensor in held(models):
        tensor.data.fill_(float("nan"))
    bridge.load_weights(models, str(folder))
    exported = [described(*item) for item in bridge.export_weights(models)]
    bridge.save_weights(models, str(out))
    return type(bridge).__module__, exported


def test_mbridge_finds_our_bridge_and_saves_a_folder_equal_to_the_source(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "hf", layers=4)
    out, topology = tmp_path / "out", Topology(world_size=2, tp=2, ep=2)
    for module, exported in run_ranks(through_mbridge, 2, folder, out, topology, timeout=60):
        assert module == glm5_next.bridge.BRIDGE_MODULE
        assert exported == stored_tensors(Checkpoint(folder))
    assert compare(folder, out).equal, compare(folder, out).lines()


def through_a_framework(folder: Path, out: Path, topology: Topology) -> dict:
    start(topology)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    bridge = AutoBridge.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    bridge.set_extra_args(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    bridge.set_extra_args(mtp_num_layers=1)
    seen = []
    models = bridge.get_model(
        post_model_creation_callbacks=[lambda model, **stage: seen.append(sorted(stage))],
        wrap_with_ddp=True,
        fp16=False,
        bf16=True,
        ddp_config={"use_distributed_optimizer": False, "overlap_grad_reduce": True, "grad_reduce_in_fp32": True},
    )
    bridge.load_weights(models, str(folder), memory_efficient=True)
    loaded = [described(*item) for item in bridge.export_weights(models)]
    train_a_little(models)
    trained = [described(*item) for item in bridge.export_weights(models)]
    bridge.save_weights(models, str(out), memory_efficient=True)
    dist.barrier()  # as with mbridge, the first rank writes
    again = AutoBridge.from_pretrained(str(out), trust_remote_code=True)
    again.set_extra_args(mtp_num_layers=1)
    reloaded = [described(*item) for item in again.export_weights(again.get_model(weight_path=str(out)))]
    facts = (bridge.config.recompute_granularity, models[0].ddp_config.overlap_grad_reduce, seen)
    return {"loaded": loaded, "trained": trained, "reloaded": reloaded, "facts": facts}


def train_a_little(models: list[torch.nn.Module]) -> None:
    """Through Megatron's schedule; what has a gradient grows by half."""
    ids = torch.arange(1, 41)[None]
    get_forward_backward_func()(
        forward_step_func=lambda rows, chunk: (
            chunk(next(rows), None, None, labels=ids),
            lambda losses: (losses.sum(), torch.tensor(losses.numel()), {}),
        ),
        data_iterator=iter([ids]),
        model=models,
        num_microbatches=1,
        seq_length=40,
        micro_batch_size=1,
    )
    for parameter in (parameter for model in models for parameter in model.parameters() if parameter.requires_grad):
        if parameter.main_grad.any():  # the same on every rank that holds it
            parameter.data.mul_(1.5)


@pytest.mark.parametrize("topology", [TP2, Topology(world_size=2, pp=2)], ids=["tp2", "pp2"])
def test_a_framework_that_takes_an_mbridge_bridge_takes_ours(tmp_path, topology):
    folder, out = write_tiny_checkpoint(tmp_path / "hf", layers=4, experts=4, vision=False), tmp_path / "out"
    checkpoint = Checkpoint(folder)
    for result in run_ranks(through_a_framework, 2, folder, out, topology, timeout=90):
        assert result["loaded"] == stored_tensors(checkpoint, mtp=True)
        assert result["trained"] == result["reloaded"] == stored_tensors(Checkpoint(out), mtp=True)
        assert result["facts"][:2] == ("full", True)
        assert result["facts"][2] == [["config", "hf_config", "post_process", "pre_process"]]
    changed = {value.name for value in compare(folder, out).values}
    frozen = {name for name in checkpoint.tensors if ".indexer." in name or name.endswith("correction_bias")}
    assert not changed & frozen and len(changed) > 0.9 * len(checkpoint.tensors.keys() - frozen)
    assert any(".layers.4.eh_proj" in name for name in changed)


def test_fp16_is_refused(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "hf", layers=1, mtp=False, vision=False)

    def ask_for_fp16() -> str:
        start(Topology())
        with pytest.raises(ValueError) as error:
            AutoBridge.from_pretrained(str(folder)).get_model(fp16=True)
        return str(error.value)

    assert run_ranks(ask_for_fp16, 1, timeout=60)[0].startswith("fp16=True")
