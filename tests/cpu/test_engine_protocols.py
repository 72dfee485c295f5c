"""Both servers' protocols, through our clients, against the model itself; and what each of them gets wrong on purpose."""

import asyncio
import base64
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.name_map import model_tensors, on_disk
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.engines import payload
from glm5_next.launchers.engines.client import Request
from glm5_next.launchers.engines.publisher import EnginesFailed, Publisher
from glm5_next.launchers.engines.sglang import SGLangClient
from glm5_next.launchers.engines.tiny_host import ModelHost
from glm5_next.launchers.engines.tiny_sglang import SGLangProtocol
from glm5_next.launchers.engines.tiny_vllm import VllmProtocol, npy_base64
from glm5_next.launchers.engines.vllm import VllmClient
from glm5_next.launchers.engines.wire import Address, EngineError, Malformed, Refused, Unreachable
from glm5_next.launchers.replay_plan import Recording
from glm5_next.launchers.runtime.weight_sync import publish
from glm5_next.plugins.pick_coding import first_choice
from tests.support.engine_server import Engine, engine, status, strips

CONV = "model.language_model.layers.0.self_attn.k_conv1d.weight"
PROMPT = tuple(range(3, 40))  # longer than index_topk
PROTOCOLS: dict[str, Any] = {"sglang": (SGLangProtocol, SGLangClient), "vllm": (VllmProtocol, VllmClient)}
GENERATE = {"sglang": "/generate", "vllm": "/inference/v1/generate"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="module")
def host(folder) -> ModelHost:
    return ModelHost(folder, precision="fp32", batch_size=64)


@pytest.fixture(params=["sglang", "vllm"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def server(kind, host, folder) -> Iterator[Engine]:
    with started(kind, host, folder) as running:
        yield running


@contextmanager
def started(kind: str, host: ModelHost, folder: Path, **options: Any) -> Iterator[Engine]:
    host.load_folder(folder)
    host.version, host.paused = "0", False
    host.flush()
    protocol = PROTOCOLS[kind][0](host, **options)
    with engine("engine 0", protocol, kind) as running:
        yield running
    if kind == "vllm":
        protocol.merged.remove()


def client_of(server: Engine, **changes: Any) -> Any:
    options = {"stop_tokens": [2], "recording": Recording(routes=True)} | changes
    return PROTOCOLS[server.address.protocol][1](server.address, server.host.config, **options)


def ask(server: Engine, *calls: Any, **changes: Any) -> Any:
    """The answers of `call(client)`, one after the other."""

    async def run() -> list[Any]:
        client = client_of(server, **changes)
        try:
            return [await call(client) for call in calls]
        finally:
            await client.close()

    return asyncio.run(run())


def generate(client: Any) -> Any:
    return client.generate(Request("r-1", PROMPT, 5, 11), 30.0)


def weights_of(folder: Path, **add: float) -> list[tuple[str, torch.Tensor]]:
    checkpoint = Checkpoint(folder)
    names = [
        name for entry in model_tensors(checkpoint.config, mtp=False) for name in on_disk(entry, checkpoint.config)
    ]
    return [(name, checkpoint.read(name) + add.get(name, 0.0)) for name in names]


def test_tokens_come_with_the_models_own_log_probabilities_and_experts(server, host):
    (completion,) = ask(server, generate)
    tokens = np.array([*PROMPT, *completion.tokens.tolist()], dtype=np.int32)
    expected = host.score(tokens.tolist())[len(PROMPT) - 1 :]
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    moe = sum(layer == "moe" for layer in host.config.mlp_kinds)
    assert completion.routes.shape == (len(tokens) - 1, moe, host.config.num_experts_per_token)
    # the second half: what the model chooses for the same tokens in one pass
    again = host.engine.generate([tokens[:-1]], 1, max_new_tokens=1, seed=0)[0][0]
    assert np.array_equal(np.sort(completion.routes, -1), np.sort(again.routes, -1))
    assert completion.weights_version == 0


def test_scores_are_the_models(server, host):
    (scores,) = ask(server, lambda client: client.score(PROMPT, 30.0))
    np.testing.assert_allclose(scores, host.score(PROMPT), atol=1e-6)


def test_cached_tokens_are_told(server):
    cold, _, warm = ask(server, *3 * [lambda client: client.cached_tokens(PROMPT, 30.0)])
    assert cold == 0 and warm == len(PROMPT) - 1


def test_without_the_key_nothing_but_health_is_answered(server, kind):
    url = server.address.url
    for path in (GENERATE[kind], "/flush_cache", "/pause", "/update_weights", "/update_weights_from_distributed"):
        assert httpx2.post(url + path, json={}).status_code == 401
        assert httpx2.post(url + path, json={}, headers={"Authorization": "Bearer another"}).status_code == 401
    assert httpx2.get(url + "/health").status_code == 200


def test_a_router_that_strips_the_request_for_experts_is_noticed(server, kind, host):
    if kind == "sglang":
        server.fail(GENERATE[kind], strips("return_routed_experts"))
    else:  # vLLM returns them always; there the answer loses them
        server.fail(GENERATE[kind], lambda body, go_on: (200, without_routes(go_on(body)[1])))
    with pytest.raises(Malformed, match="'routed_experts' is missing"):
        ask(server, generate)
    (completion,) = ask(server, generate, recording=Recording())
    assert completion.routes is None


@pytest.mark.parametrize("routes", [True, False])
def test_picks_come_as_the_models_own_indexers_chose_them(kind, host, folder, routes):
    with started(kind, host, folder, picks="recorded") as server:
        (completion,) = ask(server, generate, recording=Recording(routes=routes, picks=True))
    tokens = np.array([*PROMPT, *completion.tokens.tolist()], dtype=np.int32)
    again = host.engine.generate([tokens[:-1]], 1, max_new_tokens=1, seed=0)[0][0].picks
    assert completion.picks.num_tokens == again.num_tokens == len(tokens) - 1 and not completion.picks.holes.any()
    for layer in again.layers:
        assert np.array_equal(completion.picks.decode(layer), again.decode(layer))
    assert (completion.routes is not None) is routes


NO_PICKS = {
    (
        "sglang",
        "stock",
    ): "as SGLang itself sends them, zeros for a pooled indexer; .* has not loaded this package's plugin",
    ("vllm", "stock"): "no indexer picks beside them, the server runs without this package's plugin",
    ("sglang", "zeros"): "is picked twice: the engine sent zeros",
    ("vllm", "zeros"): "is picked twice: the engine sent zeros",
}


@pytest.mark.parametrize("sent", ["stock", "zeros"])
def test_picks_that_nothing_recorded_are_refused(kind, host, folder, sent):
    with started(kind, host, folder, picks=sent) as server, pytest.raises(Malformed, match=NO_PICKS[kind, sent]):
        ask(server, generate, recording=Recording(picks=True))


def test_picks_that_nothing_wrote_are_holes_not_pool_0(kind, host, folder):
    with started(kind, host, folder, picks="unwritten") as server:
        (completion,) = ask(server, generate, recording=Recording(picks=True))
    picks = completion.picks
    first = first_choice(picks.kpool, picks.num_selected)
    assert picks.holes[first:].all() and len(picks.holes) > first


def test_picks_of_other_lengths_are_refused(host, routes):
    raw = base64.b64encode(bytes(2 * 3)).decode()
    with pytest.raises(Malformed, match=r"6 bytes of indexer picks, expected int16 or int32"):
        payload.picks_from_raw(raw, len(PROMPT), host.config, "here")
    with pytest.raises(Malformed, match="indexer picks are not base64"):
        payload.picks_from_raw("?", len(PROMPT), host.config, "here")


def without_routes(answer: Any) -> Any:
    return {**answer, "choices": [{**choice, "routed_experts": None} for choice in answer["choices"]]}


@pytest.mark.parametrize("code", [400, 502])
def test_an_error_of_a_gateway_has_a_name(server, kind, code):
    server.fail(GENERATE[kind], status(code))
    with pytest.raises(Refused, match=f"engine 0: {GENERATE[kind]}: status {code}") as error:
        ask(server, generate)
    assert error.value.status == code and server.address.key not in str(error.value)


def test_a_server_that_dies_is_unreachable(server, kind):
    server.fail(GENERATE[kind], lambda body, go_on: server.die() or (200, {}))
    with pytest.raises(Unreachable):
        ask(server, generate)
    assert ask(server, lambda client: client.healthy()) == [False]


def test_an_answer_that_is_no_answer_is_malformed(server, kind):
    server.fail(GENERATE[kind], lambda body, go_on: (200, {"text": "hello"}))
    with pytest.raises(Malformed):
        ask(server, generate)


def test_an_update_carries_every_bit_and_leaves_an_empty_cache(server, host, folder):
    made = Publisher([client_of(server)], host="127.0.0.1", deadline=30.0)
    made.fresh = {"engine 0"}
    ask(server, lambda client: client.cached_tokens(PROMPT, 30.0))
    publish(weights_of(folder), [made], 0)
    before = host.score(PROMPT)
    publish(weights_of(folder, **{CONV: 0.5}), [made], 1)
    made.close()
    assert ask(server, lambda client: client.weights_version()) == ["1"]
    assert ask(server, lambda client: client.cached_tokens(PROMPT, 30.0)) == [0]
    assert np.abs(host.score(PROMPT) - before).max() > 1e-3


def test_a_cached_merged_tensor_escapes_checksums_and_shows_in_a_probe(host, folder):
    """vLLM's open bug: without the rebuild every checksum is right and the scores are those of the old weights."""
    for rebuilds in (False, True):
        with started("vllm", host, folder, rebuilds=rebuilds) as server:
            made = Publisher([client_of(server)], host="127.0.0.1", deadline=30.0)
            (before,) = ask(server, lambda client: client.score(PROMPT, 30.0))
            publish(weights_of(folder, **{CONV: 0.5}), [made], 1)
            (after,) = ask(server, lambda client: client.score(PROMPT, 30.0))
            made.close()
            assert bool(np.abs(after - before).max() > 1e-3) is rebuilds


def test_vllm_refuses_a_name_that_it_does_not_know(host, folder):
    with started("vllm", host, folder) as server:
        made = Publisher([client_of(server)], host="127.0.0.1", deadline=30.0)
        with pytest.raises(EnginesFailed, match=r"KeyError: 'model\.nonsense'"):
            publish([("model.nonsense", torch.ones(3))], [made], 1)
        made.close()


def test_vllm_turns_requests_away_while_it_is_paused(host, folder):
    with started("vllm", host, folder) as server:
        host.pause()
        with pytest.raises(Refused, match="503"):
            ask(server, generate)
        host.resume()


def test_sglang_refuses_a_sampling_parameter_that_it_does_not_know_and_ignores_other_fields(host, folder):
    with started("sglang", host, folder) as server:
        protocol = server.faulty.protocol
        assert protocol.do_generate({"input_ids": [1], "sampling_params": {"max_tokens": 3}})[0] == 400
        assert protocol.do_generate({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}, "x": 1})[0] == 200


# payloads: what a server may send instead of experts


@pytest.fixture(scope="module")
def routes(host) -> np.ndarray:
    """[rows, all layers, topk], dense layers zero."""
    completion = host.engine.generate([np.array(PROMPT, dtype=np.int32)], 1, max_new_tokens=1, seed=0)[0][0]
    return host.all_layers(completion.routes)


def int32(array: np.ndarray) -> str:
    return base64.b64encode(array.astype("<i4").tobytes()).decode()


DECODERS = {"int32": (payload.routes_from_int32, int32), "npy": (payload.routes_from_npy, npy_base64)}


@pytest.mark.parametrize("coding", DECODERS)
def test_routes_come_back_as_they_were_sent(coding, routes, host):
    decode, encode = DECODERS[coding]
    got = decode(encode(routes.astype(np.uint16)), len(routes), host.config, "here")
    moe = [i for i, layer in enumerate(host.config.mlp_kinds) if layer == "moe"]
    assert got.dtype == np.int16 and np.array_equal(got, routes[:, moe])


BAD = {
    "all zero": (
        lambda routes: np.zeros_like(routes),
        "an expert twice in row 0, MoE layer 0 .* does not record routes",
    ),
    "one row zero": (lambda routes: np.concatenate([routes[:-1], 0 * routes[-1:]]), "an expert twice"),
    "a row short": (lambda routes: routes[:-1], "expected"),
    "a layer short": (lambda routes: routes[:, 1:], "expected"),
    "an expert too many": (lambda routes: routes + 8, "routed experts from"),
}


@pytest.mark.parametrize("fault", BAD)
@pytest.mark.parametrize("coding", DECODERS)
def test_routes_that_cannot_be_are_refused(coding, fault, routes, host):
    decode, encode = DECODERS[coding]
    change, message = BAD[fault]
    with pytest.raises(Malformed, match=message):
        decode(encode(change(routes).astype(np.int32)), len(routes), host.config, "here")


class Bomb:
    """Unpickling it would leave a mark."""

    exploded = False

    def __reduce__(self):
        return (_explode, ())


def _explode() -> None:
    Bomb.exploded = True


def test_a_pickle_is_not_opened(routes, host):
    array = np.empty(routes.shape, dtype=object)
    array[:] = Bomb()
    buffer = np.lib.format
    import io

    file = io.BytesIO()
    buffer.write_array(file, array, allow_pickle=True)
    bare = pickle.dumps(Bomb())
    for raw in (file.getvalue(), bare, b"\x93NUMPY\x01\x00", b""):
        with pytest.raises(Malformed):
            payload.routes_from_npy(base64.b64encode(raw).decode(), len(routes), host.config, "here")
        with pytest.raises(Malformed):
            payload.routes_from_int32(base64.b64encode(raw).decode(), len(routes), host.config, "here")
    assert not Bomb.exploded
    pickle.loads(bare)
    assert Bomb.exploded, "the bomb works"


def test_nothing_that_reads_from_a_server_can_unpickle():
    folder = Path(payload.__file__).parent
    banned = ("pickle.load", "Unpickler", "torch.load", "allow_pickle=True", "marshal", "np.load(", "shelve", "eval(")
    found = {
        (path.name, word) for path in folder.glob("*.py") for word in (*banned, "exec(") if word in path.read_text()
    }
    assert found == {("tiny_payload.py", "Unpickler")}, "the test servers' reader, which knows a list of names"


def test_a_key_is_in_no_text_of_an_address():
    assert "secret" not in f"{Address('a', 'sglang', 'http://x', 'secret')!r}"


def test_engine_errors_are_one_family():
    assert all(issubclass(kind, EngineError) for kind in (Malformed, Refused, Unreachable))
