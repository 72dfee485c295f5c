"""SGLang retracts a request when KV slots run out and computes it again: its log-probabilities stay those of the first pass,
its experts and picks are those of the second (miles#3277). Over HTTP, from the answer to the samples of a step."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.config import load_run_config
from glm5_next.launchers.engines.client import Request
from glm5_next.launchers.engines.fleet import Fleet
from glm5_next.launchers.engines.sglang import SGLangClient
from glm5_next.launchers.engines.tiny_host import ModelHost
from glm5_next.launchers.engines.tiny_sglang import SGLangProtocol
from glm5_next.launchers.engines.wire import EngineError
from glm5_next.launchers.prompts import PromptCursor
from glm5_next.launchers.replay_plan import ReplayPlan
from glm5_next.launchers.runtime.engine import Completion, Lost
from glm5_next.launchers.runtime.rollout import Rollout, Sampler
from glm5_next.launchers.types import Prompt
from tests.support.engine_server import Engine, engine, retracts

PROMPTS = [Prompt(id=f"p{number}", text="abcdefgh"[number:] * 4, answer="a") for number in range(3)]
FIRST_COPY = retracts(lambda request: request.endswith(".0"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="module")
def server(folder) -> Iterator[Engine]:
    host = ModelHost(folder, precision="fp32", batch_size=64)
    host.version = "0"
    with engine("engine 0", SGLangProtocol(host, picks="recorded")) as running:
        yield running


class OverHttp:
    """The engines of a run, as far as a sampler asks them."""

    def __init__(self, server: Engine, run: Any, replay: ReplayPlan):
        self.server, self.run, self.recording = server, run, replay.recording

    def client(self) -> SGLangClient:
        return SGLangClient(self.server.address, self.server.host.config, stop_tokens=[2], recording=self.recording)

    def generate(
        self, prompts: Sequence[np.ndarray], samples_per_prompt: int, *, max_new_tokens: int, seed: int
    ) -> list[list[Completion | Lost]]:
        async def ask() -> list[list[Completion | Lost]]:
            client = self.client()
            fleet = Fleet([client], self.run.rollout)
            await fleet.look_after()
            fleet.updated(0, {}, [client.name])
            try:
                return await fleet.generate(prompts, samples_per_prompt, max_new_tokens=max_new_tokens, seed=seed)
            finally:
                await client.close()

        return asyncio.run(ask())


def made(server: Engine, folder: Path, replay: str) -> Sampler:
    values = {
        "model": {"checkpoint": str(folder)},
        "data": {"prompts": "tiny"},
        "rollout": {"engine": "sglang", "prompts_per_step": 3, "samples_per_prompt": 3, "max_new_tokens": 4},
        "grpo": {"max_resample_rounds": 0, "drop_zero_spread": False},
        "replay": {"routing": replay, "indexer": replay},
    }
    run = load_run_config(None, values, [])
    plan = ReplayPlan.of(run.replay, server.host.config)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Sampler(run, tokenizer, OverHttp(server, run, plan), lambda prompt, text: float(len(text)), plan)


def step(server: Engine, folder: Path, replay: str) -> Rollout:
    return made(server, folder, replay).step(0, PromptCursor(PROMPTS, seed=0, shuffle=False), 0, weights_version=0)


def test_a_retracted_answer_carries_no_record_though_the_server_sent_one(server, folder):
    server.fail("/generate", FIRST_COPY)
    engines = made(server, folder, "engine").engines
    for copy, void in ((0, "retracted"), (1, None)):
        (completion,) = asyncio.run(answers_of(engines.client(), Request(f"1-0-0.{copy}", tuple(range(3, 40)), 4, 7)))
        assert completion.void == void
        assert (completion.routes is None, completion.picks is None) == (bool(void), bool(void))


async def answers_of(client: SGLangClient, request: Request) -> list[Completion]:
    try:
        return [await client.generate(request, 30.0)]
    finally:
        await client.close()


def test_a_run_that_replays_the_engine_leaves_retracted_samples_out_and_counts_them(server, folder):
    server.fail("/generate", FIRST_COPY)
    rollout = step(server, folder, "engine")
    assert rollout.not_trained["retracted"] == 3 and not rollout.kept
    server.fail("/generate", retracts(lambda request: False))
    whole = step(server, folder, "engine")
    assert not whole.not_trained and len(whole.samples) == 9
    assert all(sample.routes is not None and sample.picks is not None for sample in whole.samples)


def test_a_run_that_replays_nothing_trains_on_them(server, folder):
    server.fail("/generate", FIRST_COPY)
    samples = step(server, folder, "off").samples
    assert len(samples) == 9 and sum(sample.void == "retracted" for sample in samples) == 3


def test_an_answer_of_two_versions_of_the_weights_is_no_sample(server, folder):
    def mixed(body: Any, go_on: Any) -> Any:
        code, answer = go_on(body)
        spans = [{"version": "0", "start": 0, "end": 1}, {"version": "1", "start": 1, "end": 4}]
        answer["meta_info"] |= {"num_retractions": 1, "weight_versions": spans}
        return code, answer

    server.fail("/generate", mixed)
    engines = made(server, folder, "off").engines
    with pytest.raises(EngineError, match="sampled by several versions of the weights"):
        asyncio.run(answers_of(engines.client(), Request("1-0-0.0", tuple(range(3, 40)), 4, 7)))
