"""An engine's process reads weights through handles of the trainer's memory on the same GPU."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from glm5_next.launchers.engines.shared_bucket import sglang_payload, share, vllm_payload
from glm5_next.launchers.engines.weight_group import described, flattened, in_order
from glm5_next.launchers.runtime.engine import Bucket
from glm5_next.launchers.runtime.weight_digest import weight_digest

# An engine's process in a few lines. A GPU is found by its UUID, as SGLang (`srt/utils/patch_torch.py`) and vLLM
# (`distributed/weight_transfer/ipc_engine.py`) do.
READER = """
import base64, json, pickle, sys
import torch
from torch.multiprocessing import reductions
from glm5_next.launchers.runtime.weight_digest import weight_digest

def index_of(uuid):
    return next(i for i in range(torch.cuda.device_count()) if str(torch.cuda.get_device_properties(i).uuid) == uuid)

original = reductions.rebuild_cuda_tensor
def rebuild(*args):
    return original(*args[:6], args[6] if isinstance(args[6], int) else index_of(args[6]), *args[7:])
reductions.rebuild_cuda_tensor = rebuild

def parts(flat, job):
    pieces = flat[: sum(job["sizes"])].split(job["sizes"])
    kinds = [getattr(torch, dtype) for dtype in job["dtypes"]]
    return [(n, p.view(k).view(s)) for n, p, k, s in zip(job["names"], pieces, kinds, job["shapes"])]

for line in sys.stdin:
    job = json.loads(line)
    got = pickle.loads(base64.b64decode(job["raw"]))
    if job["kind"] == "sglang":
        flat = got["flattened_tensor"]
        assert [item.name for item in got["metadata"]] == job["names"]
    else:
        ((uuid, args),) = got.items()
        flat = rebuild(*args[:6], uuid, *args[7:])
    digests = {name: weight_digest(tensor, tensor.dtype) for name, tensor in parts(flat, job)}
    flat = got = None
    print(json.dumps(digests), flush=True)
"""


class Engine:
    """The process, which sees the GPUs named."""

    def __init__(self, gpus: str):
        words = [sys.executable, "-c", READER]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=environment)

    def tell(self, **job: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@contextmanager
def engine(gpus: str) -> Iterator[Engine]:
    made = Engine(gpus)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


def bucket(seed: int) -> Bucket:
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = [((300, 701), torch.float32), ((1001, 33), torch.bfloat16), ((5,), torch.float32)]
    made = [torch.randn(size, generator=generator, device="cuda").to(kind) for size, kind in sizes]
    return in_order([(f"t{number}", tensor) for number, tensor in enumerate(made)])


def digests(these: Bucket) -> dict[str, str]:
    return {name: weight_digest(tensor, tensor.dtype) for name, tensor in these}


def fields(these: Bucket) -> dict[str, Any]:
    tensors = described(these)
    return {"names": tensors.names, "dtypes": tensors.dtypes, "shapes": tensors.shapes, "sizes": tensors.sizes}


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_another_process_reads_a_bucket_in_our_memory_and_lets_go_of_it(kind):
    gpus = ",".join(map(str, reversed(range(torch.cuda.device_count()))))  # under other numbers than here
    before = torch.cuda.memory_allocated()
    with engine(gpus) as reader:
        for seed in range(4):
            these = bucket(seed)
            flat = flattened(these, torch.device("cuda"))
            shared = share(flat)
            raw = sglang_payload(shared, described(these)) if kind == "sglang" else vllm_payload([shared])
            reader.tell(kind=kind, raw=base64.b64encode(raw).decode(), **fields(these))
            assert reader.answer() == digests(these) != digests(bucket(seed + 1))
            del these, flat, shared
            torch.cuda.ipc_collect()
            assert torch.cuda.memory_allocated() == before, "the reader's count of the handle"
