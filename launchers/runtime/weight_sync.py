"""A new policy goes to the rollout engines, and is proved to have arrived."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Protocol

from torch import Tensor

from glm5_next.bridge.name_map import together
from glm5_next.launchers.runtime.engine import Bucket
from glm5_next.launchers.runtime.weight_digest import weight_digest

BUCKET_BYTES = 256 * 2**20


class WeightSink(Protocol):
    """What takes weights: one embedded engine, all servers together, or a dict in tests."""

    def begin_update(self, version: int) -> None: ...

    def put_weights(self, bucket: Bucket) -> None: ...

    def commit_update(self, digests: Mapping[str, str]) -> None:
        """Closes the update; raises RuntimeError unless what is held now is what `digests` (by name) say was sent."""
        ...


def publish(weights: Iterable[tuple[str, Tensor]], sinks: Sequence[WeightSink], version: int) -> int:
    """Streams whole HF tensors to every sink and compares the bits each of them holds afterwards. Returns the bytes.

    Raises RuntimeError that names tensors which differ, are missing or were never sent; the engine is then unusable.
    """
    return publish_buckets(buckets(weights), sinks, version)


def publish_buckets(stream: Iterable[Bucket], sinks: Sequence[WeightSink], version: int) -> int:
    """The same for a stream that is cut already."""
    for sink in sinks:
        sink.begin_update(version)
    digests, sent = {}, 0
    for bucket in stream:
        for name, tensor in bucket:
            digests[name] = weight_digest(tensor, tensor.dtype)
            sent += tensor.nbytes
        for sink in sinks:
            sink.put_weights(bucket)
    for sink in sinks:
        sink.commit_update(digests)
    return sent


def check_digests(sent: Mapping[str, str], held: Mapping[str, str], where: str) -> None:
    """Raises RuntimeError unless both sides have the same tensors with the same bits."""
    wrong = sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
    if wrong:
        raise RuntimeError(
            f"{where}: {len(wrong)} of {len(sent)} tensors are not what the trainer sent, first {wrong[:5]}"
        )


def buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
    """Cuts the stream into pieces of about `BUCKET_BYTES`, never inside a tensor or a group that servers fuse.

    The same on every rank that exports the same weights.
    """
    bucket: Bucket = []
    size = 0
    for _, group in groupby(weights, key=lambda item: together(item[0])):
        tensors = list(group)
        added = sum(tensor.nbytes for _, tensor in tensors)
        if bucket and size + added > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket += tensors
        size += added
    if bucket:
        yield bucket
