"""How vLLM hands over picks with our plugin, on stand-ins with the code of its 0.33.0 that matters."""

import functools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from glm5_next.launchers.engines import vllm_picks
from glm5_next.launchers.engines.payload import routes_and_picks_from_npy
from glm5_next.launchers.engines.tiny_vllm import npy_base64
from glm5_next.launchers.engines.wire import Malformed
from tests.support.engine_picks import EXPERTS, KPOOL, LAYERS, LONGEST, MODEL, SELECTED, SPARSE, assert_chosen, rows_of


class RoutedExpertsCapturer:
    """`model_executor/layers/fused_moe/routed_experts_capturer.py`, lines 47-203."""

    def __init__(self, max_num_batched_tokens: int, vllm_config: Any):
        self.shape_per_token = (LAYERS, EXPERTS)
        self.output_dtype_name = "uint16"
        self.device_buffer = torch.zeros((max_num_batched_tokens, LAYERS, EXPERTS), dtype=torch.int32)

    def snapshot_routing_data(self, num_tokens: int) -> Tensor:
        return self.device_buffer[:num_tokens].to(torch.uint16)


class SparseAttnIndexerKpool(nn.Module):
    """`models/glm5next/nvidia/sparse_indexer.py`, lines 698-841: it calls the module's function by its name."""

    def __init__(self, layer: int, buffer: Tensor):
        super().__init__()
        self.k_cache = SimpleNamespace(prefix=f"model.layers.{layer}.self_attn.indexer.k_cache", _index_kpool=KPOOL)
        self.topk_tokens, self.topk_indices_buffer = KPOOL * SELECTED, buffer

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        select = sys.modules[__name__].sparse_attn_indexer_kpool  # type: ignore[attr-defined]
        return select(hidden_states, self.k_cache.prefix, None, self.topk_indices_buffer, False, positions=positions)


def select_on_cpu(
    hidden_states: Tensor,
    k_cache_prefix: str,
    kv_cache: Any,
    topk_indices_buffer: Tensor,
    skip: bool,
    positions: Any = None,
) -> Tensor:
    topk_indices_buffer[: len(hidden_states)] = -1
    rows = rows_of(int(k_cache_prefix.split(".")[2]), positions, tail_at_end=True)
    topk_indices_buffer[: len(rows), : rows.shape[1]] = rows
    return topk_indices_buffer


def eager_break_during_capture(function: Any) -> Any:
    """`compilation/breakable_cudagraph.py`, lines 72-117, outside a capture."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Vllm:
    """A worker with a model of two sparse layers whose recorder is bound as `AuxOutputWorkerConnector` does it."""

    def __init__(self, patch: pytest.MonkeyPatch, *, asked: bool = True, layers: tuple[int, ...] = SPARSE):
        for name in ("vllm", "vllm.compilation", "vllm.compilation.breakable_cudagraph", "vllm.utils",
                     "vllm.utils.torch_utils", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.ubatching"):  # fmt: skip
            patch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules["vllm.compilation.breakable_cudagraph"])["eager_break_during_capture"] = (
            eager_break_during_capture
        )
        vars(sys.modules["vllm.utils.torch_utils"])["_resolve_layer_name"] = lambda name: name
        vars(sys.modules["vllm.v1.worker.ubatching"])["dbo_current_ubatch_token_offset"] = lambda: 0
        patch.setattr(
            sys.modules[__name__], vllm_picks.SELECT, eager_break_during_capture(select_on_cpu), raising=False
        )
        self.bound: list[Any] = []
        self.worker: Any = SimpleNamespace(
            RoutedExpertsCapturer=RoutedExpertsCapturer,
            bind_routed_experts_capturer=lambda model, recorder: self.bound.append(recorder),
        )
        vllm_picks.patch(self.worker)
        vllm_picks.patch(self.worker)  # vLLM calls plugins in every process, perhaps twice
        buffer = torch.empty(64, KPOOL * SELECTED + KPOOL + 4, dtype=torch.int32)
        self.model = nn.ModuleList([nn.Linear(1, 1), *(SparseAttnIndexerKpool(layer, buffer) for layer in layers)])
        config = SimpleNamespace(
            additional_config={vllm_picks.PICKS_OPTION: True} if asked else {},
            model_config=SimpleNamespace(max_model_len=LONGEST),
        )
        self.recorder = self.worker.RoutedExpertsCapturer(max_num_batched_tokens=64, vllm_config=config)
        self.worker.bind_routed_experts_capturer(self.model, self.recorder)

    def step(self, first: int, count: int, padding: int = 0) -> np.ndarray:
        """The rows of `count` tokens of one sequence; graphs are padded."""
        positions = torch.cat([torch.arange(first, first + count), torch.zeros(padding, dtype=torch.long)])
        for module in list(self.model)[1:]:
            module(torch.zeros(len(positions), 1), positions)
        self.recorder.device_buffer[:count] = torch.arange(EXPERTS)
        return self.recorder.snapshot_routing_data(count).numpy()


def test_vllm_hands_over_what_was_chosen_beside_the_experts(monkeypatch):
    made = Vllm(monkeypatch)
    assert made.bound == [made.recorder], "the engine's own binding still happens"
    assert made.recorder.shape_per_token == (LAYERS * EXPERTS + len(SPARSE) * SELECTED,)
    rows = np.concatenate([made.step(0, 40), made.step(40, 13, padding=3), *(made.step(at, 1) for at in range(53, 60))])
    assert str(rows.dtype) == made.recorder.output_dtype_name == "int16"
    routes, picks = routes_and_picks_from_npy(npy_base64(rows), 60, MODEL, "here")
    assert_chosen(picks, 60)
    assert (routes == np.arange(EXPERTS)).all() and routes.shape == (60, LAYERS - 1, EXPERTS)


def test_vllm_a_layer_that_does_not_run_leaves_a_hole(monkeypatch):
    made = Vllm(monkeypatch)
    first = made.step(0, 40)
    del made.model[2]
    picks = routes_and_picks_from_npy(npy_base64(np.concatenate([first, made.step(40, 20)])), 60, MODEL, "here")[1]
    assert picks.holes[40:, 1].all() and not picks.holes[:40].any() and not picks.holes[:, 0].any()


def test_vllm_sends_its_own_rows_where_picks_are_not_asked_for(monkeypatch):
    made = Vllm(monkeypatch, asked=False)
    rows = made.step(0, 60)
    assert rows.shape == (60, LAYERS, EXPERTS) and not hasattr(
        sys.modules[__name__].sparse_attn_indexer_kpool, "unrecorded"
    )
    with pytest.raises(Malformed, match="no indexer picks beside them, the server runs without this package's plugin"):
        routes_and_picks_from_npy(npy_base64(rows), 60, MODEL, "here")


def test_vllm_a_model_without_pooled_indexers_does_not_start(monkeypatch):
    with pytest.raises(RuntimeError, match="has no pooled indexer"):
        Vllm(monkeypatch, layers=())


def test_vllm_with_another_signature_does_not_start(monkeypatch):
    monkeypatch.setitem(globals(), "select_on_cpu", lambda hidden_states: None)
    with pytest.raises(
        RuntimeError, match=r"takes \('hidden_states',\), glm5-next's plugin needs .* this is no vLLM 0\.33"
    ):
        Vllm(monkeypatch)


def test_vllm_a_second_recorder_takes_the_place_of_the_first(monkeypatch):
    made = Vllm(monkeypatch)
    select = sys.modules[__name__].sparse_attn_indexer_kpool.__wrapped__.unrecorded
    made.recorder.watch(made.model)
    assert sys.modules[__name__].sparse_attn_indexer_kpool.__wrapped__.unrecorded is select is select_on_cpu
