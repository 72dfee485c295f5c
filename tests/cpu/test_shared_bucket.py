"""A bucket that another process reads in our memory: what is sent for it, and what the test servers' reader takes."""

import base64
import io
import os
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm5_next.launchers.engines import tiny_payload
from glm5_next.launchers.engines.client import Shared
from glm5_next.launchers.engines.shared_bucket import sglang_payload, share, vllm_payload
from glm5_next.launchers.engines.tiny_payload import bucket_of_sglang, buckets_of_vllm
from glm5_next.launchers.engines.weight_group import described, flattened
from tests.support import tiny


def bucket() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [("a", torch.randn(3, 5, generator=generator)), ("b", torch.randn(7, generator=generator).bfloat16())]


def test_a_bucket_comes_back_from_both_payloads_and_only_known_names_are_in_them(monkeypatch):
    tiny.start_single_process()
    tensors, flat = described(bucket()), flattened(bucket(), torch.device("cpu"))
    got = [
        bucket_of_sglang(sglang_payload(share(flat), tensors)),
        *buckets_of_vllm(vllm_payload([share(flat)]), tensors),
    ]
    for items in got:
        assert [name for name, _ in items] == ["a", "b"]
        assert all(one.dtype == two.dtype and torch.equal(one, two) for (_, one), (_, two) in zip(items, bucket()))
    assert got[0][0][1].data_ptr() != bucket()[0][1].data_ptr()
    flat[0] += 1
    assert not torch.equal(got[0][0][1], bucket()[0][1]), "the same memory, no copy"
    monkeypatch.setattr(tiny_payload, "MEANINGS", {})
    with pytest.raises(ValueError, match="refused"):
        bucket_of_sglang(sglang_payload(share(flat), tensors))


def test_a_handle_of_a_gpu_names_it_by_its_uuid_and_calls_nothing_that_sglang_would_not_let_through():
    """Its reader (SafeUnpickler) has a list; these were on it in 0.5.23, and one more name would be refused."""
    args = (torch.Tensor, torch.Size((134,)), (1,), 0, torch.storage.TypedStorage, torch.uint8, 3, b"handle")
    rest = (2097152, 512, False, b"counter", 0, b"event", True)
    raw = sglang_payload(Shared("GPU-1234", (*args, *rest)), described(bucket()))
    seen: list[tuple[str, str]] = []
    called: list[Any] = []

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            seen.append((module, name))
            if name == "rebuild_cuda_tensor":
                return lambda *given: called.append(given)
            return super().find_class(module, name)

    Reader(io.BytesIO(raw)).load()
    assert called[0][6] == "GPU-1234" and called[0][7:] == (b"handle", *rest)
    assert set(seen) == {
        ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
        *(("torch", name) for name in ("Tensor", "Size", "uint8", "float32", "bfloat16")),
        ("torch.storage", "TypedStorage"),
        ("types", "SimpleNamespace"),
    }


class Hostile:
    """A pickle that would leave a mark."""

    def __init__(self, *call: Any):
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def test_a_hostile_payload_is_refused_before_anything_runs(tmp_path):
    mark = tmp_path / "mark"
    good = {"metadata": [], "flattened_tensor": None}
    hostile = [
        Hostile(os.mkdir, str(mark)),
        {**good, "flattened_tensor": Hostile(os.system, f"touch {mark}")},
        {**good, "metadata": [Hostile(getattr, Hostile, "call")]},
        {**good, "metadata": [SimpleNamespace(name=Hostile(eval, "1"))]},
        Hostile(torch.load, str(mark)),
    ]
    for thing in hostile:
        raw = pickle.dumps(thing)
        with pytest.raises(ValueError, match=r"refused (posix|nt|builtins|torch)"):
            bucket_of_sglang(raw)
        with pytest.raises(ValueError, match="refused"):
            list(buckets_of_vllm(raw, described(bucket())))
    for raw in (b"", b"\x80\x04", pickle.dumps(3), pickle.dumps(good), base64.b64decode("AAAA")):
        with pytest.raises(ValueError):
            bucket_of_sglang(raw)
    assert not mark.exists()
    pickle.loads(pickle.dumps(hostile[0]))
    assert mark.exists(), "the first of them works"


@pytest.mark.parametrize("change", ["size", "file", "places"])
def test_a_payload_of_known_names_is_checked_too(change):
    tiny.start_single_process()
    tensors, flat = described(bucket()), flattened(bucket(), torch.device("cpu"))
    shared = share(flat)
    if change == "places":
        raw = sglang_payload(shared, tensors).replace(b"end_idx", b"end_id_", 1)
    else:
        manager, _, size = shared.args[1:]
        args = (shared.args[0], manager, b"/etc/passwd", size) if change == "file" else (*shared.args[:3], size + 1)
        raw = sglang_payload(type(shared)(shared.device, args), tensors)
    with pytest.raises(ValueError, match=r"no file in shared memory|no flattened bucket"):
        bucket_of_sglang(raw)
