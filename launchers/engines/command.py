"""The command that starts a real server for this model, and the flags that must not be in it.

Everything here was read in SGLang 0.5.23 and vLLM 0.33.0 (`models/glm5_next`, `state_capturer`, `moe` runners).
"""

import json
import os
from collections.abc import Iterator, Sequence

from glm5_next.launchers.config import RunConfig
from glm5_next.launchers.engines.shared_words import PICKS_OPTION, SHARE_OF_GPU
from glm5_next.launchers.replay_plan import Recording
from glm5_next.plugins.config import Glm5NextConfig

# MoE runners of SGLang that hand the chosen experts to the recorder; the others leave zeros in its place.
RECORDING_RUNNERS = ("deep_gemm", "triton", "flashinfer_trtllm_routed")
KPOOL_BACKENDS = ("tilelang", "fa3", "trtllm")  # sparse attention that knows pooled indexers
ENGINE_PYTHON = "GLM5_NEXT_ENGINE_PYTHON"  # set in our image, where SGLang has an environment of its own
EVERYWHERE = ("0.0.0.0", "::", "*")
# Of SGLang: KV that no pass of this server computed, or that moves; other tokens on every rank; two models, or two halves of
# a batch, on one recorder.
SPOIL_PICKS = (
    *("--enable-hierarchical-cache", "--enable-hisparse", "--disaggregation-mode", "--enable-unified-memory"),
    *("--attention-context-parallel-size", "--attn-cp-size"),
    *("--speculative-algorithm", "--enable-two-batch-overlap"),
)


def engine_command(run: RunConfig, model: Glm5NextConfig) -> tuple[str, ...]:
    """The words of `rollout.launch`, or those derived for the engine with `rollout.engine_flags` added.

    Raises ValueError that names flags which record nothing, fail for this model, or let others in.
    """
    rollout = run.rollout
    words = rollout.launch or (*(_sglang(run) if rollout.engine == "sglang" else _vllm(run)), *rollout.engine_flags)
    problems = list(problems_of(words, run, model))
    if problems:
        raise ValueError("\n".join(problems))
    return words


def problems_of(words: Sequence[str], run: RunConfig, model: Glm5NextConfig) -> Iterator[str]:
    """What is wrong with a server's command, one sentence each."""
    flags = _flags(words)
    recording = Recording.of(run.replay)
    if flags.get("--host") in EVERYWHERE:
        yield f"--host {flags['--host']} listens on every interface; use {{host}}"
    for flag in {"--api-key", "--admin-api-key"} & flags.keys():
        yield f"{flag} shows the key in the list of processes; it comes by {{key_config}} (SGLang) or VLLM_API_KEY (vLLM)"
    if "tiny_server" not in " ".join(words):
        yield from (_sglang_problems if run.rollout.engine == "sglang" else _vllm_problems)(flags, recording, model)
        if run.rollout.placement == "colocated":
            yield from _colocated_problems(run.rollout.engine, flags)


def _sglang(run: RunConfig) -> tuple[str, ...]:
    recording = Recording.of(run.replay)
    return (
        os.environ.get(ENGINE_PYTHON, "python3"),
        *("-m", "sglang.launch_server", "--model-path", "{checkpoint}", "--config", "{key_config}"),
        *("--host", "{host}", "--port", "{port}", "--tp-size", str(run.rollout.engine_tp)),
        *("--dsa-prefill-backend", "tilelang", "--dsa-decode-backend", "tilelang"),
        *("--kv-cache-dtype", "bf16", "--moe-runner-backend", "deep_gemm"),
        *("--max-running-requests", str(run.rollout.batch_size)),
        *(("--enable-return-routed-experts",) if recording.routes else ()),
        *(("--enable-return-indexer-topk",) if recording.picks else ()),
        *(("--enable-memory-saver", "--mem-fraction-static", str(SHARE_OF_GPU)) if _is_guest(run) else ()),
    )


def _vllm(run: RunConfig) -> tuple[str, ...]:
    recording = Recording.of(run.replay)
    return (
        *("vllm", "serve", "{checkpoint}", "--host", "{host}", "--port", "{port}"),
        *("--tensor-parallel-size", str(run.rollout.engine_tp), "--max-num-seqs", str(run.rollout.batch_size)),
        *("--middleware", "glm5_next.launchers.engines.vllm_middleware.RequireKey"),
        *("--weight-transfer-config", json.dumps({"backend": "ipc" if _is_guest(run) else "nccl"})),
        *("--logprobs-mode", "raw_logprobs", "--enable-prompt-tokens-details"),
        *(("--enable-return-routed-experts",) if recording.routes or recording.picks else ()),
        *(("--additional-config", json.dumps({PICKS_OPTION: True})) if recording.picks else ()),
        *(("--enable-sleep-mode", "--gpu-memory-utilization", str(SHARE_OF_GPU)) if _is_guest(run) else ()),
    )


def _is_guest(run: RunConfig) -> bool:
    return run.rollout.placement == "colocated"


def _colocated_problems(engine: str, flags: dict[str, str]) -> Iterator[str]:
    """Without these flags a server says that it has given its memory back, and keeps it."""
    wanted = "--enable-memory-saver" if engine == "sglang" else "--enable-sleep-mode"
    if wanted not in flags:
        yield f"rollout.placement = 'colocated' needs {wanted}"
    transfer = flags.get("--weight-transfer-config", "")
    if engine == "vllm" and '"ipc"' not in transfer:
        yield f"--weight-transfer-config {transfer}: rollout.placement = 'colocated' needs the backend \"ipc\""


def _sglang_problems(flags: dict[str, str], recording: Recording, model: Glm5NextConfig) -> Iterator[str]:
    runner = flags.get("--moe-runner-backend", "auto")
    if recording.routes and runner not in RECORDING_RUNNERS:
        yield (
            f"--moe-runner-backend {runner} returns zeros for routed experts (auto is flashinfer_trtllm on newer GPUs); "
            f"replay.routing = 'engine' needs one of {', '.join(RECORDING_RUNNERS)}"
        )
    if recording.routes and "--enable-return-routed-experts" not in flags:
        yield "replay.routing = 'engine' needs --enable-return-routed-experts"
    if recording.routes and any(flag.startswith("--speculative") for flag in flags):
        yield "speculative decoding overwrites the recorded experts with the draft model's; replay.routing must be 'off'"
    if model.index_kpool > 1:
        yield from _pick_problems(flags, recording.picks, model)
        for flag in ("--dsa-prefill-backend", "--dsa-decode-backend"):
            if flags.get(flag, "auto") not in KPOOL_BACKENDS:
                yield f"{flag} {flags.get(flag, 'auto')}: a pooled indexer needs one of {', '.join(KPOOL_BACKENDS)}"
        if flags.get("--kv-cache-dtype", "auto").startswith("fp8"):
            yield f"--kv-cache-dtype {flags['--kv-cache-dtype']} selects FlashMLA, which a pooled indexer refuses; use bf16"
    for flag in ("--pp-size", "--pipeline-parallel-size", "--dp-size", "--data-parallel-size"):
        if flags.get(flag, "1") != "1":
            yield f"{flag} {flags[flag]}: a server takes weights with tensor parallelism only"


def _pick_problems(flags: dict[str, str], wanted: bool, model: Glm5NextConfig) -> Iterator[str]:
    """Of SGLang with a pooled indexer."""
    asked = "--enable-return-indexer-topk" in flags
    if asked and not wanted:
        yield (
            f"--enable-return-indexer-topk returns zeros for a pooled indexer (index_kpool = {model.index_kpool}): "
            "IndexerKPool never calls the recorder; replay.indexer = 'engine' has our plugin record it"
        )
    if wanted and not asked:
        yield "replay.indexer = 'engine' needs --enable-return-indexer-topk"
    for flag in SPOIL_PICKS:
        if wanted and flags.get(flag, "1") not in ("1", "null"):
            yield f"{f'{flag} {flags[flag]}'.strip()}: the indexer's picks cannot be recorded with it; use replay.indexer = 'off'"


def _vllm_problems(flags: dict[str, str], recording: Recording, model: Glm5NextConfig) -> Iterator[str]:
    if not flags.get("--middleware", "").endswith("RequireKey"):
        yield "without --middleware glm5_next.launchers.engines.vllm_middleware.RequireKey anybody can change the weights"
    records = recording.routes or recording.picks  # vLLM sends picks in the file of the experts
    if records and "--enable-return-routed-experts" not in flags:
        yield "replay from the engine needs --enable-return-routed-experts"
    if recording.picks and PICKS_OPTION not in flags.get("--additional-config", ""):
        yield f"replay.indexer = 'engine' needs --additional-config {json.dumps({PICKS_OPTION: True})}, which our plugin reads"
    if recording.picks and any(flag.startswith("--speculative") for flag in flags):
        yield "speculative decoding: which of the drafted tokens' picks count is not known; use replay.indexer = 'off'"
    if records and "--no-enable-prefix-caching" in flags:
        yield "--no-enable-prefix-caching: vLLM returns routed experts with prefix caching only"
    parallel = ("--pipeline-parallel-size", "-pp", "--decode-context-parallel-size", "--prefill-context-parallel-size")
    for flag in parallel:
        if records and flags.get(flag, "1") != "1":
            yield f"{flag} {flags[flag]}: vLLM does not return routed experts with it"
    if flags.get("--logprobs-mode", "raw_logprobs") != "raw_logprobs":
        yield f"--logprobs-mode {flags['--logprobs-mode']}: the trainer compares raw log-probabilities"


def _flags(words: Sequence[str]) -> dict[str, str]:
    """Flag -> its value ("" for a switch), the last one where it is repeated; `--a=b` and `--a b` alike."""
    flags: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("-"):
            flag, equals, value = word.partition("=")
            flags[flag.replace("_", "-")] = value if equals else ("" if following.startswith("-") else following)
    return flags
