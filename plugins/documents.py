"""Where the documents of a packed row begin and end, in the forms the operators need.

Every operator of this model restarts at a document's first token: convolution history, KDA state, attention and the
indexer's pools. One object per micro-batch is shared by all layers, forward and recompute.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


class QuerySegments(NamedTuple):
    """Consecutive queries of a row by document: int32 tensors, `[segments + 1]` bounds of queries and of pools, each
    segment's first query's position in its document `[segments]`, the complete pools each query sees `[queries]`; and
    the largest number of pools of a document."""

    cu_queries: Tensor
    cu_pools: Tensor
    offsets: Tensor
    visible: Tensor
    longest: int


@dataclass(frozen=True, eq=False)
class Documents:
    """A row of T tokens cut into D documents.

    cu_seqlens (Tensor): int32 `[D + 1]`, 0 first and T last. Never edited in place: GPU kernels cache by identity.
    lengths (tuple[int, ...]): tokens per document, on the host. Empty documents are dropped.
    """

    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    _tables: dict = field(default_factory=dict, repr=False)
    _version: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_version", self._current_version())

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, num_tokens: int) -> "Documents":
        """Takes `PackedSeqParams.cu_seqlens_q` (or its padded form); raises ValueError unless it covers the row."""
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != num_tokens or bounds != sorted(bounds):
            raise ValueError(
                f"cu_seqlens must rise from 0 to the row's {num_tokens} tokens, got {bounds[:4]}...{bounds[-2:]}; "
                "padding at the end of a row has to be a document of its own or part of the last one"
            )
        lengths = tuple(end - start for start, end in pairwise(bounds) if end > start)
        if len(lengths) + 1 != len(bounds):
            cu_seqlens = torch.tensor([0, *lengths], device=cu_seqlens.device).cumsum(0, dtype=torch.int32)
        return cls(cu_seqlens.to(torch.int32), lengths)

    @classmethod
    def of_equal_length(cls, num_documents: int, length: int, device: torch.device) -> "Documents":
        """The documents of an unpacked `[s, b]` batch, laid out one after another."""
        return _equal_documents(num_documents, length, device)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def device(self) -> torch.device:
        return self.cu_seqlens.device

    @cached_property
    def starts(self) -> Tensor:
        """`[T]` int64: the row index of the first token of each token's document."""
        lengths = torch.tensor(self.lengths, device=self.device)
        return self.cu_seqlens[:-1].long().repeat_interleave(lengths, output_size=self.num_tokens)

    @cached_property
    def positions(self) -> Tensor:
        """`[T]` int64: each token's position within its document."""
        return torch.arange(self.num_tokens, device=self.device) - self.starts

    @cached_property
    def cu_seqlens_cpu(self) -> Tensor:
        """`cu_seqlens` as int64 on the host: kernels plan their launches with it and need not ask the GPU."""
        return torch.tensor([0, *self.lengths]).cumsum(0)

    def unchanged_cu_seqlens(self) -> Tensor:
        """`cu_seqlens` for kernels that cache what they derive from this object; RuntimeError if it was edited."""
        if self._current_version() != self._version:
            raise RuntimeError(
                "cu_seqlens was edited in place: kernels have cached what they derived from its old content; "
                "make a new tensor for every row"
            )
        return self.cu_seqlens

    def _current_version(self) -> int:
        return 0 if self.cu_seqlens.is_inference() else self.cu_seqlens._version

    def groups(self, size: int) -> "list[Documents]":
        """The row cut into parts of at most `size` documents, for operators whose memory grows with their number."""
        if len(self.lengths) <= size:
            return [self]
        return self._once(("groups", size), lambda: self._build_groups(size))

    def pool_starts(self, kpool: int) -> Tensor:
        """`[N]` int64: the row index of the first token of each complete pool, document by document."""
        return self._once(("pool_starts", kpool), lambda: self._build_pool_starts(kpool))

    def first_pools(self, kpool: int) -> Tensor:
        """`[T]` int64: the number (in `pool_starts`) of the first pool of each token's document."""
        return self._once(("first_pools", kpool), lambda: self._build_first_pools(kpool))

    def pool_range(self, begin: int, end: int, kpool: int) -> tuple[int, int]:
        """The complete pools, as numbered in `pool_starts`, of all documents that tokens `begin` to `end` - 1 are in."""
        first = last = pools = offset = 0
        for length in self.lengths:
            if offset <= begin:
                first = pools
            pools += length // kpool
            if offset < end:
                last = pools
            offset += length
        return first, last

    def query_segments(self, begin: int, end: int, kpool: int) -> "QuerySegments":
        """Tokens `begin` to `end` - 1 cut at document boundaries, each part with the pools of its document."""
        return self._once(("segments", begin, end, kpool), lambda: self._build_segments(begin, end, kpool))

    def chunk_table(self, chunk: int) -> tuple[Tensor, list[int]]:
        """Token slots of every chunk of `chunk` tokens, ordered by step: all first chunks, all second ones, ...

        Returns `[N, chunk]` int64 (T where a chunk runs past its document) and the number of chunks in each step.
        Longer documents come first, so step i + 1 continues the first rows of step i.
        """
        return self._once(("chunks", chunk), lambda: self._build_chunk_table(chunk))

    def _once(self, key: tuple, build: Callable[[], Any]) -> Any:
        if key not in self._tables:
            self._tables[key] = build()
        return self._tables[key]

    def _build_groups(self, size: int) -> "list[Documents]":
        lengths = [self.lengths[i : i + size] for i in range(0, len(self.lengths), size)]
        bounds = (torch.tensor([0, *part]).cumsum(0, dtype=torch.int32) for part in lengths)
        return [Documents(bound.to(self.device), part) for bound, part in zip(bounds, lengths)]

    def _build_segments(self, begin: int, end: int, kpool: int) -> "QuerySegments":
        queries, pools, offsets, start = [0], [0], [], 0
        for length in self.lengths:
            first, last = max(begin, start), min(end, start + length)
            if first < last:
                queries.append(queries[-1] + last - first)
                pools.append(pools[-1] + length // kpool)
                offsets.append(first - start)
            start += length
        visible = (self.positions[begin:end] + 1) // kpool
        cu_queries, cu_pools, at = (
            torch.tensor(values, dtype=torch.int32, device=self.device) for values in (queries, pools, offsets)
        )
        longest = max((b - a for a, b in pairwise(pools)), default=0)
        return QuerySegments(cu_queries, cu_pools, at, visible.int(), longest)

    def _build_pool_starts(self, kpool: int) -> Tensor:
        starts: list[int] = []
        offset = 0
        for length in self.lengths:
            starts.extend(range(offset, offset + length // kpool * kpool, kpool))
            offset += length
        return torch.tensor(starts, dtype=torch.int64, device=self.device)

    def _build_first_pools(self, kpool: int) -> Tensor:
        counts = torch.tensor([length // kpool for length in self.lengths], device=self.device)
        lengths = torch.tensor(self.lengths, device=self.device)
        return (counts.cumsum(0) - counts).repeat_interleave(lengths, output_size=self.num_tokens)

    def _build_chunk_table(self, chunk: int) -> tuple[Tensor, list[int]]:
        order = sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i])
        bounds = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        rows, counts = [], []
        for begin in range(0, max(self.lengths, default=0), chunk):
            active = [i for i in order if self.lengths[i] > begin]
            counts.append(len(active))
            rows += [(bounds[i] + begin, bounds[i + 1]) for i in active]
        first, end = torch.tensor(rows, device=self.device).unbind(1)
        slots = first[:, None] + torch.arange(chunk, device=self.device)
        return slots.masked_fill(slots >= end[:, None], self.num_tokens), counts


@lru_cache(maxsize=16)
def _equal_documents(num_documents: int, length: int, device: torch.device) -> Documents:
    cu_seqlens = torch.arange(num_documents + 1, dtype=torch.int32, device=device) * length
    return Documents(cu_seqlens, (length,) * num_documents)
