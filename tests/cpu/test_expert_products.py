"""Which products of Transformer Engine a rank asks for."""

import os

import pytest
import torch

from glm5_next.launchers.presets import RELEASED_CONFIG
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.expert_products import SWITCH, choose_expert_products
from glm5_next.plugins.megatron_config import TRANSFORMER_ENGINE, Glm5NextTransformerConfig, megatron_config
from glm5_next.plugins.topology import Topology

MODEL = Glm5NextConfig.from_hf(RELEASED_CONFIG)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setenv(SWITCH, "")
    monkeypatch.delenv(SWITCH)


def config(transformer_impl: str = TRANSFORMER_ENGINE, **sizes: int) -> Glm5NextTransformerConfig:
    """Asks for Transformer Engine after the fact: Megatron refuses to where it is not installed."""
    made = megatron_config(MODEL, Topology(**sizes), dtype=torch.bfloat16, on_cpu=True)
    made.transformer_impl = transformer_impl
    return made


@pytest.mark.parametrize(
    ("tokens", "sizes", "name"),
    [
        (8192, {}, "CUTLASS"),
        (16384, {}, "CUTLASS"),
        (16384, {"world_size": 2, "tp": 2, "etp": 2}, "CUTLASS"),
        (32768, {"world_size": 2, "tp": 2}, "CUTLASS"),  # each rank dispatches half of a row
        (64, {"world_size": 2, "ep": 2}, "cuBLAS"),  # a rank's experts may get no token
        (32768, {}, "cuBLAS"),
    ],
)
def test_few_tokens_for_each_expert_take_one_launch(tokens, sizes, name):
    assert choose_expert_products(config(**sizes), tokens) == name
    assert os.environ[SWITCH] == ("1" if name == "CUTLASS" else "0")


def test_other_cards_and_the_users_own_choice_stay_with_cublas(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert choose_expert_products(config(), 8192) == "cuBLAS"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setenv(SWITCH, "0")
    assert choose_expert_products(config(), 8192) == "cuBLAS"


def test_megatrons_own_layers_have_no_such_choice():
    assert choose_expert_products(config("local"), 8192) == "torch"
    assert SWITCH not in os.environ
