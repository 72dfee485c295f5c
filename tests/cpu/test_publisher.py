"""A new policy reaches every server whole, over a process group or a folder, or the server that did not take it is named."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.name_map import model_tensors, on_disk
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.engines.publisher import EnginesFailed, Publisher
from glm5_next.launchers.engines.sglang import SGLangClient
from glm5_next.launchers.engines.tiny_host import Job, ModelHost
from glm5_next.launchers.engines.tiny_sglang import SGLangProtocol
from glm5_next.launchers.replay_plan import Recording
from glm5_next.launchers.runtime import weight_sync
from glm5_next.launchers.runtime.weight_sync import publish
from tests.support.engine_server import Engine, engine, only, stall, status

NAME = "model.language_model.layers.1.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "tiny", layers=5)


@pytest.fixture(scope="module")
def hosts(folder) -> list[ModelHost]:
    """Shared by the tests; each of them starts from the checkpoint's weights."""
    return [ModelHost(folder, precision="fp32"), ModelHost(folder, precision="fp32")]


@pytest.fixture
def engines(hosts, folder) -> Iterator[list[Engine]]:
    with ExitStack() as stack:
        for host in hosts:
            host.load_folder(folder)
            host.version, host.paused = "default", False
        yield [
            stack.enter_context(engine(f"engine {number}", SGLangProtocol(host, tp=number + 1)))
            for number, host in enumerate(hosts)
        ]


@pytest.fixture(scope="module")
def weights(folder) -> list[tuple[str, Tensor]]:
    checkpoint = Checkpoint(folder)
    names = [
        name for entry in model_tensors(checkpoint.config, mtp=False) for name in on_disk(entry, checkpoint.config)
    ]
    return [(name, checkpoint.read(name)) for name in names]


def changed(weights: list[tuple[str, Tensor]], *names: str) -> list[tuple[str, Tensor]]:
    return [(name, value + 0.125 if not names or name in names else value) for name, value in weights]


def publisher_of(engines: list[Engine], deadline: float = 30.0) -> Publisher:
    model = engines[0].host.config
    clients = [SGLangClient(one.address, model, stop_tokens=[], recording=Recording(routes=True)) for one in engines]
    made = Publisher(clients, host="127.0.0.1", deadline=deadline)
    made.fresh = {client.name for client in clients}
    return made


@pytest.fixture
def publisher(engines, monkeypatch) -> Iterator[Publisher]:
    monkeypatch.setattr(weight_sync, "BUCKET_BYTES", 200_000)
    made = publisher_of(engines)
    yield made
    made.close()


def test_every_engine_holds_every_bit_under_the_new_version(publisher, engines, weights):
    publish(weights, [publisher], 0)
    publish(changed(weights), [publisher], 1)
    for one in engines:
        assert one.host.version == "1" and not one.host.paused
        for name, value in changed(weights):
            assert torch.equal(one.host.engine.views[name], value.to(torch.float32)), name
    assert len([path for path in engines[0].faulty.paths() if path == "/update_weights_from_distributed"]) > 4


def test_an_engine_is_stopped_and_emptied_before_and_emptied_again_after(publisher, engines, weights):
    publish(weights, [publisher], 0)
    engines[0].faulty.calls.clear()
    publish(weights, [publisher], 1)
    paths = [path for path in engines[0].faulty.paths() if path != "/update_weights_from_distributed"]
    assert paths == [
        "/pause_generation",
        "/flush_cache",
        "/begin_weight_update",
        "/end_weight_update",
        "/update_weight_version",
        "/flush_cache",
        "/weights_checker",
        "/continue_generation",
    ]


def dropping(name: str) -> Any:
    """The engine loses a tensor of an update, as one whose name it does not know, and says that all is well."""

    def fault(body, go_on):
        # the broadcast has to be received as it is sent, so the name is changed, not the list
        return go_on({**body, "names": ["unknown" if other == name else other for other in body["names"]]})

    return fault


def test_a_tensor_that_an_engine_does_not_take_is_named_at_the_first_update(publisher, engines, weights):
    engines[1].fail("/update_weights_from_distributed", dropping(NAME))
    with pytest.raises(EnginesFailed) as error:
        publish(weights, [publisher], 0)
    assert set(error.value.reasons) == {"engine 1"}
    assert "1 of" in str(error.value) and NAME in str(error.value) and "version 0 was sent" in str(error.value)


def test_half_of_a_fused_projection_is_dropped_by_the_engine_and_named(publisher, engines, weights):
    """The pair in two calls, which our buckets never do: the engine drops both halves without a word."""
    pair = [(n, v) for n, v in weights if "layers.3" in n and ("q_a_proj." in n or "kv_a_proj_with_mqa." in n)]
    rest = [item for item in weights if item not in pair]
    publisher.begin_update(0)
    publisher.put_weights(rest)
    for item in pair:
        publisher.put_weights([item])
    with pytest.raises(EnginesFailed, match=r"2 of .*kv_a_proj_with_mqa.*q_a_proj"):
        publisher.commit_update({})


def test_a_layer_that_changed_in_the_trainer_only_is_named_later(publisher, engines, weights):
    publish(weights, [publisher], 0)
    for one in engines:  # both, or the difference between them would be the news
        one.fail("/update_weights_from_distributed", dropping(NAME))
    with pytest.raises(EnginesFailed, match=r"changed in the trainer but not here: \['layer 1'\]"):
        publish(changed(weights, NAME), [publisher], 1)


def test_engines_that_hold_different_weights_are_noticed(publisher, engines, weights):
    publish(weights, [publisher], 0)
    engines[1].fail("/update_weights_from_distributed", dropping(NAME))
    with pytest.raises(EnginesFailed, match=r"engine 1.*1 of \d+ tensors is not that of engine 0"):
        publish(changed(weights), [publisher], 1)


def test_a_bucket_that_one_engine_refuses_ends_the_update_with_its_name(publisher, engines, weights):
    publish(weights, [publisher], 0)
    engines[1].fail("/update_weights_from_distributed", only(3, status(400)))
    with pytest.raises(EnginesFailed) as error:
        publish(changed(weights), [publisher], 1)
    assert list(error.value.reasons) == ["engine 1"] and "status 400" in str(error.value)
    assert engines[0].host.version == "0", "no engine says that it holds what it does not hold"


def test_an_engine_whose_update_failed_takes_the_next_one_whole(publisher, engines, weights):
    """Its session is still open, and half of its weights are new."""
    publish(weights, [publisher], 0)
    engines[1].fail("/update_weights_from_distributed", only(3, status(502)))
    with pytest.raises(EnginesFailed):
        publish(changed(weights), [publisher], 1)
    again = publisher_of(engines)
    publish(changed(weights), [again], 1)
    again.close()
    assert all(torch.equal(one.host.engine.views[NAME], dict(changed(weights))[NAME]) for one in engines)


def test_an_engine_that_dies_in_an_update_is_named_and_the_other_is_not_waited_for(publisher, engines, weights):
    publish(weights, [publisher], 0)

    def dies(body, go_on):
        engines[1].die()
        return 200, {}

    engines[1].fail("/update_weights_from_distributed", only(2, dies))
    with pytest.raises(EnginesFailed) as error:
        publish(changed(weights), [publisher], 1)
    assert list(error.value.reasons) == ["engine 1"]
    alone = publisher_of(engines[:1])
    publish(changed(weights), [alone], 1)
    alone.close()
    assert engines[0].host.version == "1"


def test_an_engine_that_does_not_answer_an_update_is_given_up_at_its_deadline(engines, weights):
    until = threading.Event()
    engines[1].fail("/begin_weight_update", stall(until))
    made = publisher_of(engines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("glm5_next.launchers.engines.sglang.WEIGHTS_DEADLINE", 0.5)
        with pytest.raises(EnginesFailed) as error:
            publish(weights, [made], 0)
    until.set()
    made.close()
    assert list(error.value.reasons) == ["engine 1"] and "no answer within" in str(error.value)


def test_a_cache_that_stays_busy_is_asked_for_again_and_again_and_then_given_up(engines, weights, monkeypatch):
    made = publisher_of(engines[:1])
    engines[0].fail("/flush_cache", only(1, status(400)))
    publish(weights, [made], 0)
    assert engines[0].faulty.paths().count("/flush_cache") == 3, "refused, before, after"
    engines[0].fail("/flush_cache", status(400))
    monkeypatch.setattr("glm5_next.launchers.engines.client.until_accepted.__defaults__", (0.3,))
    with pytest.raises(EnginesFailed, match="/flush_cache: status 400"):
        publish(weights, [made], 1)
    made.close()


def test_weights_through_a_folder(engines, weights, folder):
    made = publisher_of(engines)
    made.uses_group = False
    made.begin_update(0)
    made.load_folder(folder)
    made.commit_update({})
    assert made.group is None and all(one.host.version == "0" for one in engines)
    made.begin_update(1)
    with pytest.raises(EnginesFailed, match="update_weights_from_disk: status 400"):
        made.load_folder(folder / "nowhere")
    made.close()


def test_a_server_refuses_updates_outside_a_session(engines):
    client = SGLangClient(engines[0].address, engines[0].host.config, stop_tokens=[], recording=Recording(routes=True))
    protocol = engines[0].faulty.protocol
    code, answer = protocol.do_update_weights_from_distributed({"names": []})
    assert code == 400 and "must run between" in answer["message"]
    assert protocol.do_end_weight_update({})[0] == 400
    assert protocol.do_begin_weight_update({})[0] == 200 and protocol.do_begin_weight_update({})[0] == 400
    protocol.do_end_weight_update({})
    asyncio.run(client.close())


def test_a_server_keeps_its_cache_while_it_works(hosts, engines):
    host, started, go = hosts[0], threading.Event(), threading.Event()
    original = host.run

    def slow(jobs):
        started.set()
        go.wait(10.0)
        original(jobs)

    host.run = slow  # type: ignore[method-assign]
    job = Job("a", (1, 2, 3), 2, 0)
    thread = threading.Thread(target=host.submit, args=(job,))
    thread.start()
    started.wait(10.0)
    assert not host.flush()
    go.set()
    thread.join()
    del host.run
    assert host.flush() and job.completion is not None and np.isfinite(job.completion.logprobs).all()
