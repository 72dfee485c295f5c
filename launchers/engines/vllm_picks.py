"""Has vLLM 0.33 hand over the pools that its indexer chose, beside the experts of every token. Loaded by `vllm_plugin`.

vLLM keeps what it records by block hash, so that rows of cached prefixes are right, copies it while the next step runs, and
lets the first tensor-parallel rank answer (`distributed/aux_output_connector`). With `--additional-config
'{"glm5_next_picks": true}'` each token's row grows from [layers, experts] to one line: experts, then pools by layer. The
selection (`models/glm5next/nvidia/sparse_indexer.py`) runs between CUDA graphs or in one; what is copied stays in place.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from glm5_next.launchers.engines.chosen_pools import chosen_pools, narrowest
from glm5_next.launchers.engines.shared_words import PICKS_OPTION

INDEXER, SELECT = "SparseAttnIndexerKpool", "sparse_attn_indexer_kpool"  # a module, and what it calls by this name
NEEDED = ("hidden_states", "k_cache_prefix", "topk_indices_buffer", "positions")  # of its arguments


def patch(worker: Any) -> None:
    """`worker`: vllm.distributed.aux_output_connector.worker, which makes a recorder and binds it to the model."""
    stock, bind = worker.RoutedExpertsCapturer, worker.bind_routed_experts_capturer
    if issubclass(stock, PoolsBeside):
        return

    def bind_both(model: torch.nn.Module, recorder: Any) -> None:
        bind(model, recorder)
        if recorder.records_picks:
            recorder.watch(model)

    worker.RoutedExpertsCapturer = type("RoutedExpertsCapturer", (PoolsBeside, stock), {})
    worker.bind_routed_experts_capturer = bind_both


class PoolsBeside:
    """In front of vLLM's `RoutedExpertsCapturer`, whose rows it makes longer once it watches a model."""

    device_buffer: Tensor  # int32 [most tokens of a step, layers, experts]
    snapshot_routing_data: Callable[[int], Tensor]

    def __init__(self, max_num_batched_tokens: int, vllm_config: Any):
        super().__init__(max_num_batched_tokens=max_num_batched_tokens, vllm_config=vllm_config)  # type: ignore[call-arg]
        self.records_picks = bool((vllm_config.additional_config or {}).get(PICKS_OPTION))
        self.longest = vllm_config.model_config.max_model_len

    def watch(self, model: torch.nn.Module) -> None:
        """Raises RuntimeError for a model without pooled indexers, or with another selection than the one known here."""
        indexers: list[Any] = [module for module in model.modules() if type(module).__name__ == INDEXER]
        if not indexers:
            raise RuntimeError(
                f"--additional-config {PICKS_OPTION}: the model has no pooled indexer whose picks could be recorded"
            )
        home = sys.modules[type(indexers[0]).__module__]
        self.columns = {indexer.k_cache.prefix: column for column, indexer in enumerate(indexers)}
        self.kpool = indexers[0].k_cache._index_kpool
        self.num_selected = indexers[0].topk_tokens // self.kpool
        dtype = narrowest(self.longest, self.kpool)
        shape = (len(self.device_buffer), len(indexers), self.num_selected)
        self.pools = torch.full(shape, -1, dtype=dtype, device=self.device_buffer.device)
        self.shape_per_token = (self.device_buffer[0].numel() + self.pools[0].numel(),)
        self.output_dtype, self.output_dtype_name = dtype, str(dtype).removeprefix("torch.")
        self.snapshot_routing_data = self.snapshot
        _listen(home, self)

    def record(self, layer_name: str, tokens: Tensor, positions: Tensor, offset: int) -> None:
        """`[T, topk + kpool - 1]` positions of tokens that a layer selected for T tokens of this step."""
        pools = chosen_pools(tokens, positions, self.kpool, self.num_selected)
        self.pools[offset : offset + len(tokens), self.columns[layer_name]] = pools.to(self.pools.dtype)

    def snapshot(self, num_tokens: int) -> Tensor:
        experts, pools = self.device_buffer[:num_tokens].flatten(1), self.pools[:num_tokens].flatten(1)
        rows = torch.cat([experts.to(pools.dtype), pools], dim=1)
        self.pools.fill_(-1)  # a layer that does not run in the next step must not repeat this one
        return rows


def _listen(home: Any, recorder: PoolsBeside) -> None:
    """From now on `recorder` notes every selection in `home`, the module with the function."""
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture
    from vllm.utils.torch_utils import _resolve_layer_name
    from vllm.v1.worker.ubatching import dbo_current_ubatch_token_offset

    select = getattr(home, SELECT)
    select = getattr(select, "__wrapped__", select)  # without the break between graphs, which is put around all of it
    select = getattr(select, "unrecorded", select)
    names = tuple(inspect.signature(select).parameters)
    if not set(NEEDED) <= set(names):
        raise RuntimeError(
            f"{home.__name__}.{SELECT} takes {names}, glm5-next's plugin needs {NEEDED}: this is no vLLM 0.33"
        )

    def and_record(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args)) | kwargs
        answer = select(*args, **kwargs)
        count, layer = len(given["hidden_states"]), _resolve_layer_name(given["k_cache_prefix"])
        if layer in recorder.columns:  # not a draft model's
            tokens, positions = given["topk_indices_buffer"][:count], given["positions"][:count]
            recorder.record(layer, tokens, positions, dbo_current_ubatch_token_offset())
        return answer

    and_record.unrecorded = select  # type: ignore[attr-defined]
    setattr(home, SELECT, eager_break_during_capture(and_record))
