"""What every test relies on: one thread, fixed seeds, a quiet log."""

import logging

import pytest
import torch

torch.set_num_threads(1)
# It says at every construction that GPTModel is deprecated; spec.py is the place that would change.
logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
