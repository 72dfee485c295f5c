"""What we load into SGLang, on stand-ins with the code of its 0.5.23 that matters, and pools from the rows that attention reads."""

import base64
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5_next.launchers.engines import sglang_plugin
from glm5_next.launchers.engines.chosen_pools import chosen_pools, narrowest
from glm5_next.launchers.engines.payload import picks_from_raw
from glm5_next.plugins.pick_coding import PickRecord
from tests.support.engine_picks import FIRST, KPOOL, LONGEST, MODEL, SELECTED, SPARSE, assert_chosen, pools_at, rows_of


@pytest.mark.parametrize("tail_at_end", [True, False])
def test_pools_come_back_from_the_tokens_of_a_row(tail_at_end):
    positions = torch.arange(LONGEST)
    pools = chosen_pools(rows_of(3, positions, tail_at_end=tail_at_end), positions, KPOOL, SELECTED)
    assert pools.shape == (LONGEST, SELECTED)
    assert [set(row) - {-1} for row in pools.tolist()] == [set(pools_at(3, at)) for at in range(LONGEST)]


def test_without_a_choice_the_order_of_tokens_does_not_matter():
    """Both engines skip the scoring of short sequences and list all tokens, the incomplete pool among them."""
    positions = torch.tensor([0, 2, 3, FIRST - 1])
    causal = torch.arange(KPOOL * SELECTED + KPOOL - 1).expand(4, -1)
    for tokens in (torch.where(causal > positions[:, None], -1, causal), causal.flip(1)):
        pools = chosen_pools(tokens, positions, KPOOL, SELECTED)
        assert pools.tolist() == [[-1, -1, -1], [-1, -1, -1], [0, -1, -1], [0, 1, 2]]


def test_what_is_no_start_of_a_visible_pool_is_no_pick():
    tokens = torch.tensor([[1, 0, 0, 0, 80, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0]])
    assert chosen_pools(tokens, torch.tensor([FIRST]), KPOOL, SELECTED).tolist() == [[-1, -1, 1]]


def test_pools_are_kept_in_integers_that_hold_them():
    assert narrowest(131071, 4) is torch.int16 and narrowest(131072, 4) is torch.int32


SGLANG = ("sglang", "sglang.srt", "sglang.srt.environ", "sglang.srt.runtime_context", "sglang.srt.state_capturer",
          "sglang.srt.state_capturer.base", "sglang.srt.state_capturer.indexer_topk", "sglang.srt.layers",
          "sglang.srt.layers.attention", "sglang.srt.layers.attention.dsa",
          "sglang.srt.layers.attention.dsa.dsa_indexer_kpool")  # fmt: skip


@dataclass
class TopkCaptureOutput:
    """`state_capturer/base.py`, lines 107-125."""

    out_cache_loc: Tensor
    topk: Tensor
    host_cache: Any

    def map_device_tensors(self, fn: Any) -> None:
        self.out_cache_loc, self.topk = fn(self.out_cache_loc), fn(self.topk)

    def finalize(self) -> None:
        self.host_cache.buffer[self.out_cache_loc] = self.topk


class SGLang:
    """Its modules, and steps of a model runner (`model_executor/model_runner.py:1888`) on paged KV slots."""

    def __init__(self, patch: pytest.MonkeyPatch, **given: Any):
        options = {"version": "0.5.23", "fused": True, "rank": 0, "asked": True} | given
        modules = {name: ModuleType(name) for name in SGLANG}
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)

        engine = self

        class IndexerKPool:
            def _forward_cuda_impl(  # type: ignore[no-untyped-def]
                self, x, q_lora, positions, forward_batch, layer_id, return_indices=True
            ):
                if not return_indices:
                    return None
                tokens = rows_of(layer_id, positions, tail_at_end=False).long()
                table = engine.table[torch.tensor(forward_batch.requests)]
                return torch.where(tokens < 0, -1, table.gather(1, tokens.clamp(min=0))).int()

        modules["sglang"].__version__ = options["version"]  # type: ignore[attr-defined]
        settings: dict[str, dict[str, Any]] = {
            "environ": {"envs": SimpleNamespace(SGLANG_DSA_FUSE_TOPK=SimpleNamespace(get=lambda: options["fused"]))},
            "runtime_context": {
                "get_exec": lambda: SimpleNamespace(
                    features=SimpleNamespace(enable_return_indexer_topk=options["asked"])
                ),
                "get_parallel": lambda: SimpleNamespace(attn_tp_rank=options["rank"]),
                "get_schedule": lambda: SimpleNamespace(chunked_prefill_size=64),
            },
            "state_capturer.base": {"TopkCaptureOutput": TopkCaptureOutput},
            "state_capturer.indexer_topk": {"get_global_indexer_capturer": lambda: self.recorder},
            "layers.attention.dsa.dsa_indexer_kpool": {"IndexerKPool": IndexerKPool},
        }
        for name, values in settings.items():
            vars(modules[f"sglang.srt.{name}"]).update(values)
        self.recorder: Any = None
        self.indexer = IndexerKPool()
        self.table = torch.zeros(4, LONGEST, dtype=torch.int32)  # req_to_token

    def start(self, **config: Any) -> Any:
        text = {"index_kpool": KPOOL, "index_topk": KPOOL * SELECTED, "full_attention_layer_ids": list(SPARSE)} | config
        self.recorder = sglang_plugin.create(
            lambda **_: "stock",
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**text), context_len=LONGEST),
            num_tokens=400,
            max_running_requests=4,
            device="cpu",
        )
        return self.recorder

    def step(self, *work: tuple[int, int, int], overlap: bool = True, layers: tuple[int, ...] = SPARSE) -> None:
        """Of each request: its row in the table, first position and number of tokens."""
        positions = torch.cat([torch.arange(first, first + count) for _, first, count in work])
        requests = [request for request, _, count in work for _ in range(count)]
        slots = self.table[torch.tensor(requests), positions]
        batch = SimpleNamespace(out_cache_loc=slots, out_cache_loc_virtual=None, requests=requests)
        for layer in layers:
            self.indexer._forward_cuda_impl(None, None, positions, batch, layer)
        output = self.recorder.on_forward_end(batch, False, None, no_copy_to_cpu=overlap)
        if overlap:
            output.map_device_tensors(lambda tensor: tensor.cpu())
            output.finalize()

    def answer(self, request: int, length: int) -> PickRecord:
        pool = SimpleNamespace(req_to_token=self.table)
        rows = self.recorder.get_topk(req_pool_idx=request, seqlen=length + 1, req_to_token_pool=pool)
        return picks_from_raw(base64.b64encode(rows.numpy().tobytes()).decode(), length, MODEL, "here")


@pytest.fixture
def sglang(monkeypatch) -> SGLang:
    made = SGLang(monkeypatch)
    made.start()
    made.table[0] = torch.randperm(300)[:LONGEST] + 1
    made.table[1, :32], made.table[1, 32:] = made.table[0, :32], torch.arange(301, 365)
    return made


@pytest.mark.parametrize("overlap", [True, False])
def test_sglang_hands_over_what_was_chosen_in_chunks_in_a_batch_and_behind_a_cached_prefix(sglang, overlap):
    sglang.step((0, 0, 40), overlap=overlap)
    sglang.step((0, 40, 20), (1, 32, 17), overlap=overlap)  # request 1 shares 32 slots with request 0
    for position in range(60, 70):
        sglang.step((0, position, 1), (1, position - 11, 1), overlap=overlap)
    assert_chosen(sglang.answer(0, 70), 70)
    assert_chosen(sglang.answer(1, 59), 59)


def test_sglang_computes_a_retracted_request_again_in_other_slots(sglang):
    sglang.step((0, 0, 60))
    sglang.table[0] = torch.arange(200, 200 + LONGEST)
    sglang.step((0, 0, 60))
    assert_chosen(sglang.answer(0, 60), 60)


def test_sglang_sends_nothing_for_a_sequence_without_choices(sglang):
    sglang.step((0, 0, FIRST))
    assert len(sglang.recorder.get_topk(0, FIRST + 1, SimpleNamespace(req_to_token=sglang.table))) == 0
    assert_chosen(sglang.answer(0, FIRST), FIRST)


def test_sglang_a_row_that_nothing_wrote_is_a_hole_not_pool_0(sglang):
    sglang.step((0, 0, 40))
    sglang.step((0, 40, 20), layers=(3,))  # layer 7 does not run; what it chose a step ago must not come again
    holes = sglang.answer(0, 60).holes
    assert holes[40:, 1].all() and not holes[:40].any() and not holes[:, 0].any()
    assert sglang.answer(2, 60).holes[FIRST:].all()


def test_sglang_a_layer_that_only_writes_keys_still_tells_where_its_tokens_are(sglang):
    positions = torch.arange(40)
    batch = SimpleNamespace(out_cache_loc=sglang.table[0, :40], out_cache_loc_virtual=None, requests=[0] * 40)
    assert sglang.indexer._forward_cuda_impl(None, None, positions, batch, 3, return_indices=False) is None
    assert torch.equal(sglang.recorder.position_of[sglang.table[0, :40]].long(), positions)


def test_sglang_virtual_slots_are_refused(sglang):
    batch = SimpleNamespace(out_cache_loc=sglang.table[0, :4], out_cache_loc_virtual=torch.zeros(4), requests=[0] * 4)
    with pytest.raises(RuntimeError, match="virtual KV slots"):
        sglang.indexer._forward_cuda_impl(None, None, torch.arange(4), batch, 3)


def test_sglang_keeps_its_own_recorder_where_ours_is_not_asked_for(monkeypatch):
    assert SGLang(monkeypatch, asked=False).start() == "stock"
    assert SGLang(monkeypatch).start(index_kpool=1) == "stock"


def test_sglang_records_on_one_rank(monkeypatch):
    assert SGLang(monkeypatch, rank=1).start() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [({"version": "0.5.24"}, r"in SGLang 0\.5\.23; this is 0\.5\.24"), ({"fused": False}, "SGLANG_DSA_FUSE_TOPK=0")],
)
def test_sglang_that_cannot_record_does_not_start(monkeypatch, options, message):
    with pytest.raises(RuntimeError, match=message):
        SGLang(monkeypatch, **options).start()


def test_sglang_with_another_signature_does_not_start(monkeypatch):
    made = SGLang(monkeypatch)
    monkeypatch.setattr(type(made.indexer), "_forward_cuda_impl", lambda self, x: None)
    with pytest.raises(RuntimeError, match=r"_forward_cuda_impl takes \('self', 'x'\): use replay.indexer = 'off'"):
        made.start()


def test_sglangs_entry_point_leads_to_the_plugin(monkeypatch):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sglang.srt.plugins"]["glm5_next"] == f"{sglang_plugin.__name__}:register"
    registered: list[tuple[Any, ...]] = []
    registry = SimpleNamespace(register=lambda *args: registered.append(args))
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.plugins.hook_registry"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    hooks = vars(sys.modules["sglang.srt.plugins.hook_registry"])
    hooks.update(HookRegistry=registry, HookType=SimpleNamespace(AROUND="around"))
    sglang_plugin.register()
    assert registered == [(sglang_plugin.CREATE, sglang_plugin.create, "around")]
