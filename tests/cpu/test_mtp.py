"""The multi-token-prediction layer: outputs and gradients of the equations, packed rows, and training."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from glm5_next.bridge.name_map import inventory, mtp_tensors
from glm5_next.bridge.reference import _views
from glm5_next.plugins.dsa import DsaAttention
from glm5_next.plugins.layer import HyperTransformerLayer
from glm5_next.plugins.norm import RMSNorm
from glm5_next.plugins.packed_row import packed_row
from tests.support import tiny
from tests.support.mtp import CASE, reference_logits, reference_with_mtp, total_loss
from tests.support.parity import MAX_GRADIENT_ERROR, MAX_LOGITS_ERROR, hf_gradients
from tests.support.tiny import relative_error

LENGTH = 45  # past index_topk
MTP_NAMES = {name for entry in mtp_tensors(CASE.config()) for name in entry.hf}
FROZEN = {name for name in inventory(CASE.config()) if ".indexer." in name or name.endswith("correction_bias")}


@cache
def models() -> tuple:
    reference = reference_with_mtp(CASE)
    return reference, tiny.our_model(CASE, reference, mtp_num_layers=1)


def our_logits(model: torch.nn.Module, ids: Tensor, row=None) -> tuple[Tensor, Tensor]:
    """As `reference_logits`: Megatron asks the head for the second next token first, and its loss overwrites the answer."""
    found: list[Tensor] = []
    handle = model.output_layer.register_forward_hook(lambda module, args, out: found.append(out[0].clone()))
    out = model(ids, torch.arange(ids.shape[1])[None], None, packed_seq_params=row)
    handle.remove()
    assert len(found) == 2
    return out[0], found[0][:, 0]


@cache
def expected() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    reference, ids = models()[0], tiny.tokens(LENGTH)
    logits, second = reference_logits(reference, ids)
    total_loss(logits, second, ids).backward()
    named = [(name, p.grad) for name, p in reference.named_parameters() if p.grad is not None]
    return logits.detach(), second.detach(), dict(view for name, grad in named for view in _views(name, grad))


def our_gradients(model: torch.nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Of the next-token loss; Megatron adds the other one by itself."""
    model.zero_grad(set_to_none=True)
    logits, _ = our_logits(model, ids)
    F.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum").backward()
    gradients = hf_gradients(model, CASE.config())
    model.zero_grad(set_to_none=True)
    return gradients


def test_it_is_megatrons_layer_with_sparse_attention_and_plain_residuals():
    (layer,) = models()[1].mtp.layers
    assert type(layer.mtp_model_layer) is TransformerLayer
    assert type(layer.mtp_model_layer.self_attention) is DsaAttention
    assert {type(norm) for norm in (layer.enorm, layer.hnorm, layer.final_layernorm)} == {RMSNorm}
    assert {type(trunk) for trunk in models()[1].decoder.layers} == {HyperTransformerLayer}


def test_it_is_not_built_unless_asked_for_and_does_not_change_the_trunk():
    reference, model = models()
    plain = tiny.our_model(CASE, reference)
    assert not any(name.startswith("mtp.") for name, _ in plain.named_parameters())
    ids = tiny.tokens(LENGTH)
    assert torch.equal(plain(ids, torch.arange(LENGTH)[None], None)[0], our_logits(model, ids)[0])


def test_its_logits_are_those_of_the_equations():
    for found, wanted in zip(our_logits(models()[1], tiny.tokens(LENGTH)), expected()[:2], strict=True):
        assert relative_error(found, wanted) < MAX_LOGITS_ERROR


def test_its_gradients_are_those_of_the_equations_in_the_layer_and_in_the_trunk():
    gradients, wanted = our_gradients(models()[1], tiny.tokens(LENGTH)), expected()[2]
    assert MTP_NAMES - FROZEN <= gradients.keys() == wanted.keys()
    errors = {name: relative_error(gradients[name], wanted[name]) for name in wanted}
    assert max(errors.values()) < MAX_GRADIENT_ERROR, max(errors.items(), key=lambda item: item[1])


def swap_halves(model: torch.nn.Module) -> None:
    weight = model.mtp.layers[0].eh_proj.weight
    weight.data = weight.data.roll(weight.shape[1] // 2, 1)


def drop_norm_weight(model: torch.nn.Module) -> None:
    model.mtp.layers[0].hnorm.weight.data.fill_(1.0)


def drop_residual(model: torch.nn.Module) -> None:
    model.mtp.layers[0].mtp_model_layer.mlp_bda = lambda training, fused: lambda out, residual, dropout: out[0]


@pytest.mark.parametrize("fault", [swap_halves, drop_norm_weight, drop_residual])
def test_a_fault_in_the_layer_shows_in_its_logits_only(fault):
    model = tiny.our_model(CASE, models()[0], mtp_num_layers=1)
    fault(model)
    logits, second = our_logits(model, tiny.tokens(LENGTH))
    assert relative_error(second, expected()[1]) > 0.01
    assert relative_error(logits, expected()[0]) < MAX_LOGITS_ERROR


def test_documents_of_a_packed_row_do_not_see_each_other():
    model, lengths = models()[1], (23, 1, LENGTH)
    documents = [tiny.tokens(length, seed) for seed, length in enumerate(lengths)]
    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    packed = our_logits(model, torch.cat(documents, 1), packed_row(bounds))
    for number, ids in enumerate(documents):
        for whole, alone in zip(packed, our_logits(model, ids), strict=True):
            assert relative_error(whole[bounds[number] : bounds[number + 1]], alone) < MAX_LOGITS_ERROR


@pytest.mark.parametrize("scale", [0.1, 0.0])
def test_its_loss_trains_its_weights(scale):
    reference, ids = models()[0], tiny.tokens(LENGTH)
    model = tiny.our_model(CASE, reference, mtp_num_layers=1, mtp_loss_scaling_factor=scale)
    gradients = our_gradients(model, ids)
    moved = {name for name in MTP_NAMES if name in gradients and gradients[name].any()}
    assert moved == (MTP_NAMES - FROZEN if scale else set())
    if scale:
        before = F.cross_entropy(our_logits(model, ids)[1][:-2], ids[0, 2:])
        optimizer = torch.optim.SGD([p for p in model.mtp.parameters() if p.requires_grad], lr=0.02)
        logits, _ = our_logits(model, ids)
        F.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum").backward()
        optimizer.step()
        assert F.cross_entropy(our_logits(model, ids)[1][:-2], ids[0, 2:]) < before
