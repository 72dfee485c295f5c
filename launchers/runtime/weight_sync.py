"""A new policy goes to the rollout engines, and is proved to have arrived."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from glm5_next.launchers.runtime.engine import Bucket
from glm5_next.launchers.runtime.weight_digest import weight_digest

BUCKET_BYTES = 256 * 2**20


class WeightSink(Protocol):
    """The part of a rollout engine that takes weights; a dict in tests."""

    def begin_update(self, version: int) -> None: ...

    def put_weights(self, bucket: Bucket) -> None: ...

    def commit_update(self) -> dict[str, str]: ...


def publish(weights: Iterable[tuple[str, Tensor]], sinks: Sequence[WeightSink], version: int) -> int:
    """Streams whole HF tensors to every sink and compares the bits each of them holds afterwards. Returns the bytes.

    Raises RuntimeError that names tensors which differ, are missing or were never sent; the engine is then unusable.
    """
    for sink in sinks:
        sink.begin_update(version)
    digests, sent = {}, 0
    for bucket in _buckets(weights):
        for name, tensor in bucket:
            digests[name] = weight_digest(tensor, tensor.dtype)
            sent += tensor.nbytes
        for sink in sinks:
            sink.put_weights(bucket)
    for number, sink in enumerate(sinks):
        check_digests(digests, sink.commit_update(), f"engine {number}, weights version {version}")
    return sent


def check_digests(sent: dict[str, str], held: dict[str, str], where: str) -> None:
    """Raises RuntimeError unless both sides have the same tensors with the same bits."""
    wrong = sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
    if wrong:
        raise RuntimeError(
            f"{where}: {len(wrong)} of {len(sent)} tensors are not what the trainer sent, first {wrong[:5]}"
        )


def _buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
    """Cuts the stream into pieces of about `BUCKET_BYTES`; a tensor is never cut."""
    bucket: Bucket = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.cpu()))
        size += tensor.nbytes
    if bucket:
        yield bucket
