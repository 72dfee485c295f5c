"""A short supervised warm-up of a tiny checkpoint, so that reinforcement learning has something to reinforce.

A random model answers with random bytes and is never rewarded. The warm-up teaches it the form of an answer (one letter,
then the end of the turn); the letter itself is right only in a quarter of the examples and random in the others.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.export import export_weights, save_hf_folder
from glm5_next.bridge.load import load_weights
from glm5_next.launchers.runtime.megatron import start_ranks
from glm5_next.launchers.runtime.rollout import encode
from glm5_next.launchers.tiny_task import ALPHABET, training_prompts
from glm5_next.plugins.chunks import build_chunks
from glm5_next.plugins.logprobs import token_logprobs
from glm5_next.plugins.megatron_config import megatron_config
from glm5_next.plugins.packed_row import packed_row
from glm5_next.plugins.topology import Topology

EXAMPLES_PER_STEP = 32
LEARNING_RATE = 3e-3
SHARE_RIGHT = 0.25


def warm_up(source: Path, out: Path, *, steps: int, seed: int, tokenizer: Any) -> Iterator[float]:
    """Trains `source` on examples of the built-in task and writes the result to `out`; yields the loss of every step.

    One process on the CPU, in fp32; the output has the dtypes of `source`.
    """
    checkpoint = Checkpoint(source)
    start_ranks(Topology(), 0, dist.HashStore(), on_cpu=True, seed=seed)
    try:
        config = megatron_config(
            checkpoint.config, Topology(), dtype=torch.float32, on_cpu=True, perform_initialization=False
        )
        (model,) = build_chunks(config)
        load_weights([model], checkpoint)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        examples = _examples(tokenizer, random.Random(f"warm-up/{seed}"))
        for _ in range(steps):
            loss = _loss(model, [next(examples) for _ in range(EXAMPLES_PER_STEP)])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            yield loss.item()
        save_hf_folder(export_weights([model], checkpoint.config), checkpoint, out)
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def _examples(tokenizer: Any, generator: random.Random) -> Iterator[tuple[np.ndarray, int]]:
    """(tokens of prompt and answer, number of prompt tokens), for ever."""
    prompts = training_prompts()
    while True:
        prompt = generator.choice(prompts)
        answer = prompt.answer if generator.random() < SHARE_RIGHT else generator.choice(ALPHABET)
        question = encode(tokenizer, prompt)
        response = tokenizer.encode(answer, add_special_tokens=False) + tokenizer.encode("<|user|>")
        yield np.concatenate([question, response]), len(question)


def _loss(model: torch.nn.Module, examples: list[tuple[np.ndarray, int]]) -> Tensor:
    """Mean cross-entropy of the answers' tokens, all examples packed into one row."""
    inputs = torch.from_numpy(np.concatenate([tokens[:-1] for tokens, _ in examples]))
    labels = torch.from_numpy(np.concatenate([tokens[1:] for tokens, _ in examples]))
    answered = torch.from_numpy(np.concatenate([np.arange(1, len(tokens)) >= n for tokens, n in examples]))
    ends = torch.tensor([0] + [len(tokens) - 1 for tokens, _ in examples]).cumsum(0)
    logits = model(
        inputs.unsqueeze(0),
        torch.arange(len(inputs)).unsqueeze(0),
        None,
        packed_seq_params=packed_row(ends.int()),
    )
    logprobs, _ = token_logprobs(
        logits[0], labels.long(), vocab_size=logits.shape[-1], tp_group=mpu.get_tensor_model_parallel_group()
    )
    return -logprobs[answered].mean()
