"""The indexer's choices in few bytes: pool ids of every token and sparse-attention layer of one sample. Needs no torch.

A token at position p of its sample sees n = (p + 1) // kpool complete pools and attends to the best `num_selected` of
them. As long as n <= num_selected that is all of them, and nothing is stored. Beyond, the ids are sorted and stored as
gaps, one byte each (255: 255 more), and each chunk of tokens is Huffman-coded, layer by layer, so that a pipeline stage
decodes only its own layers. The incomplete pool at the end (the tail) is always attended to and never stored.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

CHUNK = 128  # tokens that are coded together
UNUSED = np.int32(np.iinfo(np.int32).max)  # sorts behind every pool


@dataclass(frozen=True, eq=False)
class Chunk:
    """`holes` bool `[tokens, layers]`: where nothing was recorded. `data`: one layer's coded gaps each."""

    holes: np.ndarray
    data: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class PickRecord:
    """Pool ids for the tokens `first` to `first + num_tokens` - 1 of a sample, numbered from the sample's first pool.

    layers: global 0-based numbers of the layers that were recorded.
    """

    layers: tuple[int, ...]
    num_selected: int
    kpool: int
    first: int
    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.holes) for chunk in self.chunks)

    @property
    def num_bytes(self) -> int:
        return sum(chunk.holes.nbytes + sum(map(len, chunk.data)) for chunk in self.chunks)

    @property
    def holes(self) -> np.ndarray:
        """bool `[num_tokens, layers]`: tokens that had a choice to make and have no record of it."""
        return np.concatenate([np.zeros((0, len(self.layers)), dtype=bool), *(chunk.holes for chunk in self.chunks)])

    def decode(self, layer: int) -> np.ndarray:
        """int32 `[num_tokens, num_selected]` of one global layer: ascending, then -1; -1 in every slot of a hole."""
        index = self.layers.index(layer)
        starts = accumulate((len(chunk.holes) for chunk in self.chunks), initial=self.first)
        parts = [
            _decode(chunk.data[index], visible_pools(start, len(chunk.holes), self.kpool), chunk.holes[:, index], self)
            for start, chunk in zip(starts, self.chunks)
        ]
        return np.concatenate([np.zeros((0, self.num_selected), dtype=np.int32), *parts])

    def cut(self, num_tokens: int) -> "PickRecord":
        """The record of the first `num_tokens`; only the chunk that is cut through is decoded."""
        kept, left = [], num_tokens
        for chunk in self.chunks:
            if not left:
                break
            if len(chunk.holes) > left:
                chunk = self._shortened(chunk, num_tokens - left, left)
            kept.append(chunk)
            left -= len(chunk.holes)
        if left:
            raise ValueError(f"a record of {self.num_tokens} tokens cannot be cut to {num_tokens}")
        return replace(self, chunks=tuple(kept))

    def _shortened(self, chunk: Chunk, start: int, length: int) -> Chunk:
        whole = replace(self, first=self.first + start, chunks=(chunk,))
        pools = np.stack([whole.decode(layer)[:length] for layer in self.layers], axis=1)
        return _encode_chunk(pools, visible_pools(whole.first, length, self.kpool), chunk.holes[:length])


def visible_pools(first: int, length: int, kpool: int) -> np.ndarray:
    """`[length]`: complete pools that each of the tokens from position `first` on sees."""
    return (np.arange(first, first + length) + 1) // kpool


def first_choice(kpool: int, num_selected: int) -> int:
    """Position of the first token that sees more pools than it takes; before it there is nothing to record."""
    return (num_selected + 1) * kpool - 1


def encode_picks(pools: np.ndarray, *, layers: tuple[int, ...], kpool: int, first: int = 0, name: str) -> PickRecord:
    """Codes pool ids of any integer type `[tokens, layers, num_selected]`, in any order, -1 in unused slots.

    `first` is the position of the first token in its sample. All slots -1 means that nothing was recorded. `name` says
    whose record it is in the ValueError for anything else that is not a choice of that many distinct visible pools.
    """
    _check_form(pools, layers, name)
    num_tokens, _, num_selected = pools.shape
    visible = visible_pools(first, num_tokens, kpool)
    ordered = np.sort(np.where(pools < 0, UNUSED, pools), axis=-1).astype(np.int32)
    holes = (pools < 0).all(-1)
    _check_choices(ordered, visible, holes, layers, first, name)
    holes &= (visible > num_selected)[:, None]
    chunks = [
        _encode_chunk(ordered[start : start + CHUNK], visible[start : start + CHUNK], holes[start : start + CHUNK])
        for start in range(0, num_tokens, CHUNK)
    ]
    return PickRecord(layers=layers, num_selected=num_selected, kpool=kpool, first=first, chunks=tuple(chunks))


def no_picks(num_tokens: int, layers: tuple[int, ...], num_selected: int, kpool: int) -> PickRecord:
    """The record of padding: holes wherever there is a choice."""
    pools = np.full((num_tokens, len(layers), num_selected), -1, dtype=np.int32)
    return encode_picks(pools, layers=layers, kpool=kpool, name="padding")


def joined(records: Sequence[PickRecord]) -> PickRecord:
    """The record of consecutive pieces of one sample, as chunked prefill and decoding make them."""
    head, end = records[0], records[0].first
    for record in records:
        same = (record.layers, record.num_selected, record.kpool) == (head.layers, head.num_selected, head.kpool)
        if not same or record.first != end:
            raise ValueError(f"a piece that starts at token {record.first} does not continue one that ends at {end}")
        end += record.num_tokens
    return replace(head, chunks=tuple(chunk for record in records for chunk in record.chunks))


def most_bytes(num_tokens: int, num_layers: int, num_selected: int, kpool: int) -> float:
    """Upper bound of the size of a record from position 0: a byte per gap, one more for every 255 pools in all gaps,
    and what framing adds."""
    visible = visible_pools(0, num_tokens, kpool)
    gaps = (num_selected + visible // 255)[visible > num_selected].sum()
    chunks = -(-num_tokens // CHUNK)
    return float(num_layers * (gaps + gaps // 1000 + num_tokens + 32 * chunks))


def _check_form(pools: np.ndarray, layers: tuple[int, ...], name: str) -> None:
    if not isinstance(pools, np.ndarray) or pools.dtype.kind not in "iu":
        kind = getattr(pools, "dtype", type(pools).__name__)
        raise ValueError(
            f"{name}: indexer picks are {kind}, expected integers: the payload was decoded as another type"
        )
    if pools.ndim != 3 or pools.shape[1] != len(layers):
        raise ValueError(
            f"{name}: indexer picks have shape {pools.shape}, expected [tokens, {len(layers)} sparse-attention layers, "
            "pools]: the engine records another set of layers"
        )


def _check_choices(
    ordered: np.ndarray, visible: np.ndarray, holes: np.ndarray, layers: tuple[int, ...], first: int, name: str
) -> None:
    wanted = np.minimum(visible, ordered.shape[-1])[:, None]
    used = ordered != UNUSED
    problems = {
        "is picked twice: the engine sent zeros or token positions": (
            (ordered[..., 1:] == ordered[..., :-1]) & used[..., 1:]
        ).any(-1),
        "is not visible yet: the ids are cache slots or belong to another sample": (
            np.where(used, ordered, -1).max(-1, initial=-1) >= visible[:, None]
        ),
        "picks are too few: the engine's record was cut": ~holes & (used.sum(-1) != wanted),
    }
    for problem, wrong in problems.items():
        if wrong.any():
            token, layer = np.argwhere(wrong)[0].tolist()
            found = ordered[token, layer][used[token, layer]]
            raise ValueError(
                f"{name}: token {first + token}, layer {layers[layer]}: a pool of {found[:8].tolist()} (of "
                f"{len(found)}, {visible[token]} pools are visible) {problem}"
            )


def _encode_chunk(ordered: np.ndarray, visible: np.ndarray, holes: np.ndarray) -> Chunk:
    stored = (visible > ordered.shape[-1])[:, None] & ~holes
    data = [_encode(ordered[stored[:, layer], layer]) for layer in range(ordered.shape[1])]
    return Chunk(holes.copy(), tuple(data))


def _encode(rows: np.ndarray) -> bytes:
    """Ascending ids `[rows, num_selected]` -> coded gaps."""
    if not len(rows):
        return b""
    gaps = (np.diff(rows, axis=-1, prepend=-1) - 1).ravel()
    escapes = gaps // 255
    out = np.full(len(gaps) + int(escapes.sum()), 255, dtype=np.uint8)
    out[np.cumsum(escapes + 1) - 1] = gaps % 255
    # Gaps hardly repeat in runs, so looking for matches would only take time.
    packer = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    return packer.compress(out.tobytes()) + packer.flush()


def _decode(data: bytes, visible: np.ndarray, holes: np.ndarray, record: PickRecord) -> np.ndarray:
    count = record.num_selected
    pool = np.arange(count, dtype=np.int32)
    pools = np.where(pool < visible[:, None], pool, np.int32(-1))
    pools[holes] = -1
    if data:
        raw = np.frombuffer(zlib.decompress(data), dtype=np.uint8)
        ends = np.flatnonzero(raw < 255)
        gaps = raw[ends] + 255 * (np.diff(ends, prepend=-1) - 1)
        rows = (gaps.reshape(-1, count) + 1).cumsum(-1, dtype=np.int32) - 1
        stored = (visible > count) & ~holes
        assert len(rows) == stored.sum() and (rows[:, -1] < visible[stored]).all(), "a record of other tokens"
        pools[stored] = rows
    return pools
