"""A new policy reaches every engine whole, or the step fails and names what did not."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from glm5_next.launchers.runtime import weight_sync
from glm5_next.launchers.runtime.engine import Bucket
from glm5_next.launchers.runtime.weight_digest import weight_digest
from glm5_next.launchers.runtime.weight_sync import check_digests, publish

GIGABYTE = 10**9


class DictSink:
    """An engine that is a dict. `hold` decides what is kept of a tensor that comes in."""

    def __init__(self, hold=lambda name, tensor: (name, tensor)):
        self.hold = hold
        self.held: dict[str, Tensor] = {}
        self.buckets: list[Bucket] = []
        self.calls: list[tuple[str, int | None]] = []

    def begin_update(self, version: int) -> None:
        self.calls.append(("begin", version))

    def put_weights(self, bucket: Bucket) -> None:
        self.calls.append(("put", None))
        self.buckets.append(list(bucket))
        for name, tensor in bucket:
            kept = self.hold(name, tensor.clone())
            if kept is not None:
                self.held[kept[0]] = kept[1]

    def commit_update(self, digests: Mapping[str, str]) -> None:
        version = self.calls[0][1]
        self.calls.append(("commit", None))
        held = {name: weight_digest(tensor, tensor.dtype) for name, tensor in self.held.items()}
        check_digests(digests, held, f"sink, weights version {version}")


def stream() -> list[tuple[str, Tensor]]:
    """Tensors of several sizes and dtypes, one of them a view that is not contiguous, one of them empty."""
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(64, 48, generator=generator)
    return [
        ("norm", torch.randn(16, generator=generator)),
        ("large", large),
        ("half", large.bfloat16()),
        ("view", large.T[3:9]),
        ("bias", torch.randn(1, generator=generator)),
        ("empty", torch.zeros(0, 4)),
    ]


@pytest.mark.parametrize("size", [1, 64, 100, 6144, 10_000, 100_000, GIGABYTE])
def test_buckets_of_any_size_hold_whole_tensors_in_order(monkeypatch, size):
    monkeypatch.setattr(weight_sync, "BUCKET_BYTES", size)
    sink, weights = DictSink(), stream()
    assert publish(iter(weights), [sink], 4) == sum(tensor.nbytes for _, tensor in weights)
    arrived = [item for bucket in sink.buckets for item in bucket]
    assert [name for name, _ in arrived] == [name for name, _ in weights]
    for (_, got), (_, sent) in zip(arrived, weights, strict=True):
        assert got.dtype == sent.dtype and torch.equal(got, sent)
    for bucket in sink.buckets:
        assert bucket, "an empty bucket"
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= size
    if size == GIGABYTE:
        assert len(sink.buckets) == 1
    if size == 1:
        assert len(sink.buckets) >= len(weights) - 1


def test_what_servers_fuse_is_never_cut(monkeypatch):
    """Every tensor alone is larger than a bucket."""
    monkeypatch.setattr(weight_sync, "BUCKET_BYTES", 1)
    layer, fp8 = "model.language_model.layers.3.self_attn.", "_scale_inv"
    groups = [
        [layer + "q_a_proj.weight", layer + f"q_a_proj.weight{fp8}", layer + "kv_a_proj_with_mqa.weight"],
        [layer + "o_proj.weight", layer + f"o_proj.weight{fp8}"],
        [layer.replace("self_attn", f"mlp.experts.{7}") + f"{part}_proj.weight" for part in ("gate", "up")],
        [layer.replace("self_attn", f"mlp.experts.{8}") + f"{part}_proj.weight" for part in ("gate", "up")],
        [layer.replace("3", "4") + f"{part}_conv1d.weight" for part in "qkv"],
    ]
    sink = DictSink()
    publish(((name, torch.ones(2)) for group in groups for name in group), [sink], 1)
    assert [[name for name, _ in bucket] for bucket in sink.buckets] == groups


def test_every_engine_is_opened_once_filled_and_closed_under_the_new_version(monkeypatch):
    monkeypatch.setattr(weight_sync, "BUCKET_BYTES", 1)
    sinks = [DictSink(), DictSink()]
    publish(iter(stream()), sinks, 12)
    for sink in sinks:
        assert sink.calls[0] == ("begin", 12) and sink.calls[-1] == ("commit", None)
        assert [name for name, _ in sink.calls[1:-1]] == ["put"] * len(sink.buckets)
    assert [name for name, _ in sinks[0].buckets[0]] == [name for name, _ in sinks[1].buckets[0]]


def one_bit(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    if name == "large":
        tensor.view(torch.int32)[5, 7] ^= 1
    return name, tensor


def rounded(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    return name, tensor.bfloat16() if name == "norm" else tensor


FAULTS = {
    "dropped": (lambda name, tensor: None if name == "bias" else (name, tensor), ["bias"]),
    "changed in one bit": (one_bit, ["large"]),
    "rounded": (rounded, ["norm"]),
    "renamed": (lambda name, tensor: ("halved" if name == "half" else name, tensor), ["half", "halved"]),
    "turned round": (lambda name, tensor: (name, tensor.T.contiguous() if name == "view" else tensor), ["view"]),
    "all zero": (lambda name, tensor: (name, torch.zeros_like(tensor)), ["bias", "half", "large", "norm", "view"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_that_does_not_hold_what_was_sent_is_named_with_the_tensors(fault):
    hold, names = FAULTS[fault]
    with pytest.raises(RuntimeError) as error:
        publish(iter(stream()), [DictSink(), DictSink(hold)], 9)
    assert "sink, weights version 9" in str(error.value)
    assert f"{len(names)} of 6 tensors are not what the trainer sent, first {names}" in str(error.value)


def test_a_tensor_that_the_trainer_never_sends_is_named():
    sink = DictSink()
    sink.held["routing_table"] = torch.ones(3)
    with pytest.raises(RuntimeError, match="routing_table"):
        publish(iter(stream()), [sink], 1)


def test_an_engine_that_fails_while_it_is_filled_ends_the_publication():
    class Failing(DictSink):
        def put_weights(self, bucket: Bucket) -> None:
            raise ValueError("engine: no tensor named 'norm'")

    whole = DictSink()
    with pytest.raises(ValueError, match="no tensor named 'norm'"):
        publish(iter(stream()), [whole, Failing()], 1)
    assert ("commit", None) not in whole.calls


def test_many_wrong_tensors_are_counted_and_five_are_named():
    sent = {f"tensor-{number}": "a" for number in range(8)}
    with pytest.raises(RuntimeError) as error:
        check_digests(sent, {}, "engine 0")
    assert (
        "8 of 8 tensors" in str(error.value) and "tensor-4" in str(error.value) and "tensor-5" not in str(error.value)
    )


def test_a_digest_is_of_dtype_shape_and_bits():
    value = torch.randn(4, 6)
    digests = [
        weight_digest(value, torch.float32),
        weight_digest(value.reshape(6, 4), torch.float32),
        weight_digest(value.bfloat16(), torch.bfloat16),
        weight_digest(-value, torch.float32),
    ]
    assert len(set(digests)) == 4
    assert weight_digest(value.T.contiguous().T, torch.float32) == digests[0]
    assert weight_digest(value.bfloat16().float(), torch.bfloat16) == digests[2], "the same bits in a wider tensor"


def test_a_digest_tells_minus_zero_from_zero_and_refuses_nan():
    zero = torch.zeros(2)
    assert weight_digest(zero, torch.float32) != weight_digest(-zero, torch.float32)
    assert weight_digest(torch.tensor([float("nan")]), torch.float32) == "not a torch.float32 tensor"
