"""Before the first step a request goes through the whole path of replay; what is lost on the way is named with its hop."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.config import RunConfig
from glm5_next.launchers.replay_plan import Recording, ReplayPlan
from glm5_next.launchers.runtime import trainer as trainer_module
from glm5_next.launchers.runtime.batch import Batch
from glm5_next.launchers.runtime.engine import Lost
from glm5_next.launchers.runtime.replay_probe import probe_replay, probe_tokens
from glm5_next.launchers.runtime.rollout import Sampler
from glm5_next.launchers.runtime.trainer import Trainer
from glm5_next.launchers.runtime.transformers_engine import TransformersEngine
from glm5_next.plugins.layer import HyperTransformerLayer
from glm5_next.plugins.replay import PickReplay
from tests.support.faults import Fault, edit, planted
from tests.support.ranks import run_ranks
from tests.support.replay import plan_of, reads_nothing
from tests.support.training import batch, settings

PROMPT = np.arange(5, 15, dtype=np.int32)
Change = Callable[[Any], Any]


def without(field: str) -> Change:
    return lambda completion: replace(completion, **{field: None})


def zeros(completion: Any) -> Any:
    return replace(completion, routes=np.zeros_like(completion.routes))


def lost(completion: Any) -> Any:
    return Lost("request deadline")


def packs_nothing(original: Callable) -> Callable:
    return lambda *args, **options: replace(original(*args, **options), picks=None)


def drops(original: Callable) -> Callable:
    return lambda self, *args: replace(original(self, *args), picks=None)


# what is wrong -> (a fault, a change of what the engine sends, the message)
CASES: dict[str, tuple[Fault | None, Change | None, str | None]] = {
    "nothing": (None, None, None),
    "engine without picks": (None, without("picks"), "hop 'engine 0': it returned no picks"),
    "engine without routes": (None, without("routes"), "hop 'engine 0': it returned no routes"),
    "engine without answer": (None, lost, r"hop 'engine 0': no answer to the probe (request deadline)"),
    "engine of zeros": (
        None,
        zeros,
        "hop 'engine': sample 'probe.0': routes of token 0, layer 1 names an expert twice",
    ),
    "sample": (Fault(Sampler, "sample", drops), None, "hop 'sample': 'probe.0' has no picks"),
    "packed row": (
        Fault(trainer_module, "pack_row", packs_nothing),
        None,
        "hop 'packed row': the picks of sample 'probe.0', layer 3, are in no rank's store",
    ),
    "store": (
        Fault(PickReplay, "content", edit("self._decode(layer)[0]", "self._decode(layer)[0].roll(1, 0)")),
        None,
        "hop 'store': the picks of sample 'probe.0', layer 3, are not what the engine sent",
    ),
    "layer": (
        Fault(HyperTransformerLayer, "_record", reads_nothing),
        None,
        "hop 'layer': the routes of sample 'probe.0', layer 2, were read [0] times in one pass",
    ),
}


def messages(rank: int, store: dist.Store, run: RunConfig) -> dict[str, str | None]:
    """What the probe says in every case, with a real engine and a real trainer."""
    trainer = Trainer(run, rank, store, on_cpu=True)
    engine = TransformersEngine(
        run.model.checkpoint, precision="fp32", recording=Recording.of(run.replay), batch_size=4
    )
    plan = ReplayPlan.of(run.replay, trainer.model)
    found: dict[str, str | None] = {}
    for name, (fault, change, _) in CASES.items():

        def generate(*args: Any, change: Change | None = change, **options: Any) -> list[list[Any]]:
            answers = engine.generate(*args, **options)
            return answers if change is None else [[change(answer)] for (answer,) in answers]

        cluster = SimpleNamespace(generate=generate, train=lambda method, update: [getattr(trainer, method)(update)])
        tokenizer = SimpleNamespace(decode=lambda tokens: "")
        sampler = Sampler(run, tokenizer, cluster, lambda prompt, text: 0.0, plan)

        def planned(samples: Any) -> Batch:
            return batch(run, tuple(samples))

        try:
            with nullcontext() if fault is None else planted(fault):
                probe_replay(sampler, cluster, planned, PROMPT, replicas=1)
            found[name] = None
        except RuntimeError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, str | None]:
    folder: Path = write_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "tiny", layers=4, mtp=False, vision=False)
    run = settings(folder, replay__routing="engine", replay__indexer="engine")
    return run_ranks(messages, 1, run, timeout=90, start_group=False)[0]


@pytest.mark.parametrize("name", CASES)
def test_the_probe_names_the_hop_that_lost_or_changed_the_record(name, said):
    expected = CASES[name][2]
    if expected is None:
        assert said[name] is None
    else:
        assert said[name] is not None and expected in said[name] and "no step was made" in said[name]


def test_the_probes_prompt_is_long_enough_for_the_indexer_to_choose_unless_rows_are_short():
    plan = plan_of(indexer="engine")
    assert len(probe_tokens(PROMPT, plan, longest=96)) == 24 and len(probe_tokens(PROMPT, plan, longest=20)) == 16
    assert probe_tokens(PROMPT, plan_of(indexer="off"), longest=96) is PROMPT
    long = np.arange(50, dtype=np.int32)
    assert np.array_equal(probe_tokens(long, plan, longest=96), long)
