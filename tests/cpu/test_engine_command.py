"""Commands of servers: those derived are accepted, and flags that record zeros or let others in are refused by name."""

import pytest

from glm5_next.launchers.config import RunConfig, load_run_config
from glm5_next.launchers.engines.command import engine_command
from glm5_next.launchers.engines.keys import find_key, read_key
from glm5_next.launchers.presets import RELEASED_CONFIG, preset
from glm5_next.plugins.config import Glm5NextConfig

MODEL = Glm5NextConfig.from_hf(RELEASED_CONFIG)


def settings(engine: str, *flags: str, **changes: str) -> RunConfig:
    values = {"model": {"checkpoint": "/none"}, "data": {"prompts": "tiny"}, "rollout": {"engine": engine}}
    values["rollout"] |= {"engine_flags": list(flags), "engine_tp": 8}
    return load_run_config(None, values, [f"{key}={value}" for key, value in changes.items()])


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_derived_command_is_accepted_holds_no_key_and_listens_where_it_is_told(engine):
    words = engine_command(settings(engine), MODEL)
    assert "8" in words and "--enable-return-routed-experts" in words
    assert words[words.index("--host") + 1] == "{host}" and "--api-key" not in words
    off = engine_command(settings(engine, **{"replay.routing": "off"}), MODEL)
    assert "--enable-return-routed-experts" not in off


PICKS = {"replay.indexer": "engine"}


def test_picks_are_asked_for_in_each_engines_own_way():
    assert "--enable-return-indexer-topk" in engine_command(settings("sglang", **PICKS), MODEL)
    assert "--enable-return-indexer-topk" not in engine_command(settings("sglang"), MODEL)
    words = engine_command(settings("vllm", **PICKS, **{"replay.routing": "off"}), MODEL)
    assert words[words.index("--additional-config") + 1] == '{"glm5_next_picks": true}'
    assert "--enable-return-routed-experts" in words, "picks come in the same file"
    assert "--additional-config" not in engine_command(settings("vllm"), MODEL)


@pytest.mark.parametrize(
    ("engine", "flags", "message"),
    [
        (
            "sglang",
            ["--enable-hierarchical-cache"],
            "--enable-hierarchical-cache: the indexer's picks cannot be recorded",
        ),
        ("sglang", ["--disaggregation-mode=decode"], "--disaggregation-mode decode: the indexer's picks cannot"),
        ("sglang", ["--enable-unified-memory"], "--enable-unified-memory: the indexer's picks cannot"),
        ("sglang", ["--enable-two-batch-overlap"], "--enable-two-batch-overlap: the indexer's picks cannot"),
        ("sglang", ["--attn-cp-size", "2"], "--attn-cp-size 2: the indexer's picks cannot"),
        ("sglang", ["--speculative-algorithm", "EAGLE"], "--speculative-algorithm EAGLE: the indexer's picks cannot"),
        ("vllm", ["--speculative-config", "{}"], "drafted tokens' picks"),
        ("vllm", ["--additional-config", "{}"], r"needs --additional-config {\"glm5_next_picks\": true}"),
        ("vllm", ["--no-enable-prefix-caching"], "with prefix caching only"),
    ],
)
def test_what_would_spoil_picks_is_refused_where_they_are_replayed(engine, flags, message):
    with pytest.raises(ValueError, match=message):
        engine_command(settings(engine, *flags, **PICKS), MODEL)
    if flags[0] != "--no-enable-prefix-caching":
        assert engine_command(settings(engine, *flags, **{"replay.routing": "off"}), MODEL)


def test_a_server_of_the_users_own_has_to_record_picks_as_well():
    launch = {"rollout.launch": '["python3", "-m", "sglang.launch_server"]'}
    with pytest.raises(ValueError, match=r"replay\.indexer = 'engine' needs --enable-return-indexer-topk"):
        engine_command(settings("sglang", **PICKS, **launch), MODEL)


REFUSED = {
    "flashinfer_trtllm": ("sglang", ["--moe-runner-backend", "flashinfer_trtllm"], "returns zeros for routed experts"),
    "triton_kernel": ("sglang", ["--moe-runner-backend=triton_kernel"], "triton_kernel returns zeros"),
    "auto": ("sglang", ["--moe-runner-backend", "auto"], "auto is flashinfer_trtllm on newer GPUs"),
    "indexer": ("sglang", ["--enable-return-indexer-topk"], r"zeros for a pooled indexer \(index_kpool = 4\)"),
    "dsa": ("sglang", ["--dsa-decode-backend", "flashmla_sparse"], "--dsa-decode-backend flashmla_sparse"),
    "fp8": ("sglang", ["--kv-cache-dtype", "fp8_e4m3"], "use bf16"),
    "draft": ("sglang", ["--speculative-algorithm", "EAGLE"], "overwrites the recorded experts"),
    "pp": ("sglang", ["--pp-size", "2"], "tensor parallelism only"),
    "everywhere": ("sglang", ["--host", "0.0.0.0"], "every interface"),
    "key": ("sglang", ["--api-key", "hunter2"], "--api-key shows the key in the list of processes"),
    "vllm key": ("vllm", ["--api-key=hunter2"], "--api-key shows the key"),
    "vllm pp": ("vllm", ["--pipeline-parallel-size", "2"], "does not return routed experts"),
    "vllm prefix": ("vllm", ["--no-enable-prefix-caching"], "with prefix caching only"),
    "vllm logprobs": ("vllm", ["--logprobs-mode", "processed_logprobs"], "raw log-probabilities"),
    "vllm middleware": ("vllm", ["--middleware", "other"], "anybody can change the weights"),
}


@pytest.mark.parametrize(("engine", "flag"), [("sglang", "--enable-memory-saver"), ("vllm", "--enable-sleep-mode")])
def test_a_colocated_server_has_to_be_able_to_give_its_memory_back(engine, flag):
    here = {"rollout.placement": "colocated", "parallel.ranks": "8"}
    run = settings(engine, "--dtype", "bfloat16", **here)
    words = engine_command(run, MODEL)
    assert flag in words and flag not in engine_command(settings(engine), MODEL)
    for missing in (flag, *(['{"backend": "ipc"}'] if engine == "vllm" else [])):
        own = run.rollout.model_copy(update={"launch": tuple(word for word in words if word != missing)})
        with pytest.raises(ValueError, match=r"rollout\.placement = 'colocated' needs"):
            engine_command(run.model_copy(update={"rollout": own}), MODEL)


@pytest.mark.parametrize("case", REFUSED)
def test_a_flag_that_cannot_work_is_refused_by_name(case):
    engine, flags, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as error:
        engine_command(settings(engine, *flags), MODEL)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("case", ["flashinfer_trtllm", "auto", "draft", "vllm pp", "vllm prefix"])
def test_without_replay_nothing_has_to_be_recorded(case):
    engine, flags, _ = REFUSED[case]
    assert engine_command(settings(engine, *flags, **{"replay.routing": "off"}), MODEL)


def test_a_command_of_the_users_own_is_checked_as_well():
    values = preset("tiny-http")
    assert engine_command(load_run_config(None, values, []), MODEL)[0] == "{python}"
    own = 'rollout.launch=["python3", "-m", "sglang.launch_server", "--host", "0.0.0.0"]'
    with pytest.raises(ValueError, match="every interface") as error:
        engine_command(load_run_config(None, values, [own]), MODEL)
    assert "--moe-runner-backend auto" in str(error.value)


CONFLICTS = {
    "urls of none": (["rollout.urls=['http://a']"], "rollout.engine is 'transformers'"),
    "key of none": (["rollout.engine=sglang", "rollout.urls=['http://a']"], "cannot know; give env:NAME or file:PATH"),
    "no address": (["rollout.engine=sglang", "rollout.urls=['a:1']"], "start with http"),
    "twice": (["rollout.engine=sglang", "rollout.urls=['http://a', 'http://a']"], "must be different"),
    "m of n": (["rollout.min_samples=9"], r"min_samples \(9\) exceeds"),
    "deadlines": (["rollout.request_deadline=5000.0"], "must not decrease"),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_settings_that_cannot_be_together_are_refused(case):
    changes, message = CONFLICTS[case]
    with pytest.raises(ValueError, match=message):
        load_run_config(None, {"model": {"checkpoint": "/none"}, "data": {"prompts": "tiny"}}, changes)


def test_a_key_is_new_every_time_or_comes_from_where_only_its_owner_reads(tmp_path, monkeypatch):
    assert len(find_key("generated")) > 30 and find_key("generated") != find_key("generated")
    monkeypatch.setenv("ENGINE_KEY", "from-env")
    assert find_key("env:ENGINE_KEY") == "from-env"
    with pytest.raises(ValueError, match="environment has no NOTHING"):
        find_key("env:NOTHING")
    path = tmp_path / "key"
    path.write_text("from-file\n")
    path.chmod(0o644)
    with pytest.raises(ValueError, match="others can read this key; make it mode 600"):
        read_key(path)
    path.chmod(0o600)
    assert find_key(f"file:{path}") == "from-file"
    path.write_text("")
    with pytest.raises(ValueError, match="empty"):
        read_key(path)
