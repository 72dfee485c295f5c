"""What is loaded into SGLang 0.5.23 through its `sglang.srt.plugins` entry point (see pyproject.toml).

`--enable-return-indexer-topk` has a recorder, but pooled indexers (`layers/attention/dsa/dsa_indexer_kpool.py`) never call
it: a client gets zeros. For models with one the flag gets our recorder, which keeps pool ids. The selection itself names
KV slots; a slot holds a token of one position, whichever sequences share it, so positions are noted by slot and looked up.
Rows of cached prefixes are those of the pass that computed them.
"""

import functools
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glm5_next.launchers.engines.chosen_pools import chosen_pools, narrowest
from glm5_next.plugins.pick_coding import first_choice

logger = logging.getLogger(__name__)
VERSION = "0.5.23"
CREATE = "sglang.srt.state_capturer.indexer_topk.create_indexer_capturer"
SELECT = "_forward_cuda_impl"  # of IndexerKPool; every way into the indexer goes through it
PARAMETERS = ("self", "x", "q_lora", "positions", "forward_batch", "layer_id", "return_indices")


def register() -> None:
    """Called by SGLang in each of its processes. It swallows errors here, so everything is checked in `create`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(CREATE, create, HookType.AROUND)


def create(stock: Callable[..., Any], *, model_config: Any, num_tokens: int, device: str, **others: Any) -> Any:
    """In place of `create_indexer_capturer`. Raises RuntimeError, which ends the server, where recording cannot work."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_exec as execution
    from sglang.srt.runtime_context import get_parallel, get_schedule

    text = model_config.hf_text_config
    if not execution().features.enable_return_indexer_topk or getattr(text, "index_kpool", 1) <= 1:
        return stock(model_config=model_config, num_tokens=num_tokens, device=device, **others)
    if not envs.SGLANG_DSA_FUSE_TOPK.get():
        raise RuntimeError(
            "SGLANG_DSA_FUSE_TOPK=0 hands over positions in place of KV slots; leave it on to record picks"
        )
    watch()
    if get_parallel().attn_tp_rank:
        return None  # every rank selects the same, the first one answers
    return PoolRecorder(
        layers=text.full_attention_layer_ids,
        kpool=text.index_kpool,
        num_selected=text.index_topk // text.index_kpool,
        dtype=narrowest(model_config.context_len, text.index_kpool),
        num_slots=num_tokens,
        max_rows=max(get_schedule().chunked_prefill_size, others["max_running_requests"]),
        device=device,
    )


def watch() -> None:
    """Has every selection of a pooled indexer noted. Raises RuntimeError for code that this was not written for."""
    import sglang
    from sglang.srt.layers.attention.dsa.dsa_indexer_kpool import IndexerKPool

    select: Any = getattr(IndexerKPool, SELECT, None)
    if getattr(select, "records", False):
        return
    found = tuple(inspect.signature(select).parameters) if select else None
    if sglang.__version__ != VERSION or found != PARAMETERS:
        raise RuntimeError(
            f"glm5-next's plugin records picks in SGLang {VERSION}; this is {sglang.__version__}, whose "
            f"IndexerKPool.{SELECT} takes {found}: use replay.indexer = 'off', without --enable-return-indexer-topk"
        )
    setattr(IndexerKPool, SELECT, _recording(select))


def _recording(select: Callable[..., Any]) -> Callable[..., Any]:
    from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer

    @functools.wraps(select)
    def and_record(
        self: Any,
        x: Any,
        q_lora: Any,
        positions: Tensor,
        forward_batch: Any,
        layer_id: int,
        return_indices: bool = True,
    ) -> Any:
        slots = select(self, x, q_lora, positions, forward_batch, layer_id, return_indices)
        recorder = get_global_indexer_capturer()
        if recorder is not None:
            if forward_batch.out_cache_loc_virtual is not None:
                raise RuntimeError("picks cannot be recorded with virtual KV slots (unified memory pools)")
            recorder.note(forward_batch.out_cache_loc, positions)
            if slots is not None:
                recorder.record(layer_id, slots, positions)
        return slots

    and_record.records = True  # type: ignore[attr-defined]
    return and_record


@dataclass
class HostRows:
    """What SGLang's `TopkCaptureOutput` writes to: a row for every KV slot."""

    buffer: Tensor


class PoolRecorder:
    """Takes the place of SGLang's `IndexerTopkCapturer`; its answer has pools in place of tokens and starts at the first
    token that has a choice. -1 in every slot of a row: nothing was recorded."""

    def __init__(
        self,
        *,
        layers: Sequence[int],
        kpool: int,
        num_selected: int,
        dtype: torch.dtype,
        num_slots: int,
        max_rows: int,
        device: str,
    ):
        self.columns = {layer: column for column, layer in enumerate(layers)}
        self.kpool, self.num_selected = kpool, num_selected
        shape = (len(layers), num_selected)
        size = num_slots * math.prod(shape) * dtype.itemsize / 2**30
        logger.info("picks of the indexer: %.1f GiB of host memory, a row for each of %d KV slots", size, num_slots)
        self.step = torch.full((max_rows, *shape), -1, dtype=dtype, device=device)
        self.position_of = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.host_cache = HostRows(torch.full((num_slots, *shape), -1, dtype=dtype))

    def note(self, slots: Tensor, positions: Tensor) -> None:
        """Of the tokens of this step: their KV slots and their positions. Both may be padded, in the same way."""
        count = min(len(slots), len(positions))
        self.position_of[slots[:count]] = positions[:count].to(torch.int32)

    def record(self, layer: int, slots: Tensor, positions: Tensor) -> None:
        """`[T, topk + kpool - 1]` KV slots that a layer selected for the first T tokens of this step, -1 unused."""
        tokens = torch.where(slots < 0, -1, self.position_of[slots.clamp(min=0)])
        pools = chosen_pools(tokens, positions[: len(slots)], self.kpool, self.num_selected)
        self.step[: len(slots), self.columns[layer]] = pools.to(self.step.dtype)

    def on_forward_end(
        self, forward_batch: Any, can_run_graph: bool, cuda_graph_batch: int | None, no_copy_to_cpu: bool = False
    ) -> Any:
        """The step's rows on their way to the host, where the caller copies them; else they are copied here."""
        from sglang.srt.state_capturer.base import TopkCaptureOutput

        slots = forward_batch.out_cache_loc
        output = TopkCaptureOutput(slots.clone(), self.step[: len(slots)].clone(), self.host_cache)
        self.step.fill_(-1)  # a layer that does not run in the next step must not repeat this one
        if no_copy_to_cpu:
            return output
        output.map_device_tensors(lambda tensor: tensor.cpu())
        output.finalize()
        return None

    def get_topk(self, req_pool_idx: int, seqlen: int, req_to_token_pool: Any, start_len: int = 0) -> Tensor:
        """`[tokens from the first choice on, layers, pools]` of a sequence; the last token was never fed."""
        start = max(start_len, first_choice(self.kpool, self.num_selected))
        slots = req_to_token_pool.req_to_token[req_pool_idx][start : seqlen - 1].cpu()
        return self.host_cache.buffer[slots.long()]

    def destroy(self) -> None:
        del self.step, self.position_of, self.host_cache
