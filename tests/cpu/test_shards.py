"""A safetensors file whose header does not describe it exactly is refused by name before anything is allocated."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from glm5_next.bridge.name_map import TensorInfo
from glm5_next.bridge.shards import ShardWriter, create_shards, plan_shard, read_tensors

FILE = "x.safetensors"


def write_raw(path: Path, header: str | bytes, data: bytes = b"") -> None:
    header = header.encode() if isinstance(header, str) else header
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(ValueError) as error:
        read_tensors(path, path.name)
    assert all(part in str(error.value) for part in (FILE, *parts)), str(error.value)


def test_any_truncation_is_named_with_both_sizes(tmp_path):
    content = save({"a": torch.arange(5.0), "b": torch.ones(3, 2, dtype=torch.bfloat16)})
    for size in range(len(content)):
        (tmp_path / FILE).write_bytes(content[:size])
        refused(tmp_path / FILE, "truncated", f"has {size} bytes, needs")
    (tmp_path / FILE).write_bytes(content + b"\0")
    refused(tmp_path / FILE, f"has {len(content) + 1} bytes but its header describes {len(content)}")
    (tmp_path / FILE).write_bytes(content)
    assert list(read_tensors(tmp_path / FILE, FILE)[0]) == ["a", "b"]


def test_a_header_of_absurd_length_is_refused_before_it_is_read(tmp_path):
    (tmp_path / FILE).write_bytes((2**63).to_bytes(8, "little") + b"{}")
    refused(tmp_path / FILE, "claims a header of 9223372036854775808 bytes")


def entry(dtype="BF16", shape=(2,), offsets=(0, 4)) -> str:
    return json.dumps({"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)})


@pytest.mark.parametrize(
    ("header", "data", "problem"),
    [
        (f'{{"x": {entry()}, "x": {entry()}}}', 4, "'x' appears twice"),
        (f'{{"x": {entry()}, "y": {entry(offsets=(2, 6))}}}', 6, "overlaps 'x' (ends at 136)"),
        (f'{{"x": {entry()}, "y": {entry()}}}', 4, "overlaps"),
        (f'{{"x": {entry()}, "y": {entry(offsets=(6, 10))}}}', 10, "leaves a gap after 'x'"),
        (f'{{"x": {entry(offsets=(2, 6))}}}', 6, "leaves a gap after the header"),
        (f'{{"x": {entry(offsets=(0, 6))}}}', 6, "do not hold the 4 bytes"),
        (f'{{"x": {entry(offsets=(4, 0))}}}', 4, "do not hold"),
        (f'{{"x": {entry(offsets=(-4, 0))}}}', 4, "non-negative"),
        (f'{{"x": {entry(offsets=(0, 4, 8))}}}', 8, "do not hold"),
        (f'{{"x": {entry(shape=(10**15,), offsets=(0, 2 * 10**15))}}}', 4, "truncated"),
        (f'{{"x": {entry(shape=(-1, -2))}}}', 4, "non-negative"),
        (f'{{"x": {entry(shape=(True, 2))}}}', 4, "non-negative"),
        (f'{{"x": {entry(shape=(2.0,))}}}', 4, "non-negative"),
        (f'{{"x": {entry(shape=[1] * 17 + [2])}}}', 4, "more than 16"),
        (f'{{"x": {entry(dtype="F3")}}}', 4, "dtype 'F3' is unknown"),
        (f'{{"x": {entry(dtype=["BF16"])}}}', 4, "is unknown"),
        ('{"x": {"dtype": "BF16", "shape": [2]}}', 4, "needs exactly"),
        ('{"x": 3}', 4, "needs exactly"),
        ('{"__metadata__": {"a": 1}}', 0, "__metadata__"),
        ("[]", 0, "expected a JSON object"),
        ("{'x': 1}", 0, "not valid JSON"),
        ("[" * 200_000, 0, "not valid JSON"),
        (b"\xff{}", 0, "not valid JSON"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, data, problem):
    write_raw(tmp_path / FILE, header, bytes(data))
    refused(tmp_path / FILE, problem)


def test_a_planned_shard_has_the_bytes_that_safetensors_writes(tmp_path):
    tensors = {"a": torch.arange(5.0), "b": torch.ones(3, 2, dtype=torch.bfloat16), "c": torch.tensor(2.0).bfloat16()}
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    infos = {name: TensorInfo({4: "F32", 2: "BF16"}[t.element_size()], tuple(t.shape)) for name, t in tensors.items()}
    (tmp_path / "ours").mkdir()
    plans = [plan_shard(FILE, infos, {"format": "pt"})]
    create_shards(tmp_path / "ours", plans)
    writer = ShardWriter(tmp_path / "ours", plans)
    for name in ("c", "a", "b"):
        writer.write(name, [tensors[name].reshape(-1).view(torch.uint8).numpy()])
    writer.check_complete()
    assert (tmp_path / "ours" / FILE).read_bytes() == (tmp_path / FILE).read_bytes()


@pytest.mark.parametrize(
    ("pieces", "match"), [([b"123"], "a: 3 of 4 bytes"), ([b"123", b"45"], "more than the planned 4")]
)
def test_a_tensor_of_another_size_is_refused(tmp_path, pieces, match):
    plans = [plan_shard(FILE, {"a": TensorInfo("BF16", (2,))}, {})]
    create_shards(tmp_path, plans)
    writer = ShardWriter(tmp_path, plans)
    with pytest.raises(ValueError, match=match):
        writer.write("a", pieces)
    with pytest.raises(ValueError, match="1 tensors were never written: a"):
        writer.check_complete()


def test_creating_shards_again_keeps_their_tensors_and_repairs_headers(tmp_path):
    plans = [plan_shard(FILE, {"a": TensorInfo("BF16", (2,)), "b": TensorInfo("BF16", (2,))}, {})]
    create_shards(tmp_path, plans)
    ShardWriter(tmp_path, plans).write("a", [b"1234"])
    complete = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(b"torn" + complete[4:-2])
    create_shards(tmp_path, plans)
    assert (tmp_path / FILE).read_bytes() == complete
