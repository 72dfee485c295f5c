"""fp32 tensors keep their bits whatever wraps or casts the model."""

import pytest
import torch
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from glm5_next.bridge.local_tensors import local_tensors
from glm5_next.plugins.megatron_config import megatron_config
from glm5_next.plugins.precision import Fp32Weight
from glm5_next.plugins.spec import build_gpt_model
from glm5_next.plugins.topology import Topology
from tests.support import tiny
from tests.support.parity import logits_of
from tests.support.tiny import Case

CASE = Case()
# Seven HF tensors of the contract, by the end of our names.
FP32 = (
    "A_log",
    "dt_bias",
    "conv1d.weight",
    "router.weight",
    "router.expert_bias",
    "hyper_connection.mapping_proj.weight",
    "hyper_connection.bias",
    "hyper_connection.alpha_pre",
    "hyper_connection.alpha_post",
    "hyper_connection.alpha_res",
)
CASTS = {
    "Float16Module": lambda model: Float16Module(model.config, model).module,
    "bfloat16": lambda model: model.bfloat16(),
    "to": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "twice": lambda model: model.bfloat16().float().bfloat16(),
}


def bf16_model() -> torch.nn.Module:
    tiny.start_single_process()
    return build_gpt_model(megatron_config(CASE.config(), Topology(), dtype=torch.bfloat16, on_cpu=True))


def state(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: local.tensor for name, local in local_tensors([model], CASE.config()).items()}


@pytest.fixture(params=CASTS)
def cast(request):
    return CASTS[request.param]


def test_fp32_tensors_keep_bits_that_bf16_cannot_hold(cast):
    model = bf16_model()
    wide = {name: tensor for name, tensor in state(model).items() if name.endswith(FP32)}
    with torch.no_grad():
        for tensor in wide.values():
            tensor.copy_(1.0 + torch.rand_like(tensor) * 2**-9)  # between 1 and the next bf16 number
    before = {name: tensor.clone() for name, tensor in wide.items()}
    after = state(cast(model))
    for name, tensor in before.items():
        assert after[name].dtype == torch.float32, f"{name} is {after[name].dtype}"
        assert torch.equal(after[name], tensor), f"{name} lost bits"
        assert not torch.equal(tensor.bfloat16().float(), tensor), f"{name}: bf16 holds these values, nothing is tested"


def test_everything_else_is_cast():
    model = CASTS["Float16Module"](bf16_model())
    assert {tensor.dtype for name, tensor in state(model).items() if not name.endswith(FP32)} == {torch.bfloat16}


def test_fp32_tensors_are_those_of_the_name_table():
    model = bf16_model()
    by_table = {name for name, local in local_tensors([model], CASE.config()).items() if local.entry.row.fp32_in_model}
    assert by_table == {name for name in state(model) if name.endswith(FP32)}
    assert {name for name, tensor in state(model).items() if tensor.dtype == torch.float32} == by_table


def test_parameters_stay_the_same_objects_so_that_an_optimizer_keeps_them(cast):
    model = bf16_model()
    before = {name: parameter for name, parameter in model.named_parameters() if name.endswith(FP32)}
    after = dict(cast(model).named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())


def test_fp32_tensors_get_fp32_gradients_in_a_bf16_model():
    model = CASTS["Float16Module"](bf16_model())
    logits_of(model, tiny.tokens(20)).float().square().mean().backward()
    wide = {name: parameter for name, parameter in model.named_parameters() if name.endswith(FP32)}
    assert {parameter.grad.dtype for parameter in wide.values()} == {torch.float32}


def test_a_cast_moves_fp32_tensors_to_the_new_device_and_leaves_their_dtype():
    module = Fp32Weight(3)
    module.weight.data.fill_(1 + 2**-10)
    assert module.to(device="meta", dtype=torch.bfloat16).weight.device.type == "meta"
    assert module.weight.dtype == torch.float32
