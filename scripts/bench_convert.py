#!/usr/bin/env python3
"""How fast a conversion is, against `cp` of the same bytes on the same disk in the same run.

    python scripts/bench_convert.py FOLDER [--gb 4] [--rounds 3] [--fp8] [--workers N]
    python scripts/bench_convert.py FOLDER --load [--gb 2] [--ranks 2]

Writes a checkpoint of random values with the released model's dimensions into FOLDER (which must be new), then takes
turns: cp, Hugging Face -> Megatron, cp, Megatron -> Hugging Face. Every copy ends when its bytes are on disk: the
conversions flush their files, cp is followed by `sync` of its files. All read from the page cache, except where it is too
small. Prints GB/s, the mean of what is read and what is written (the same but for FP8), and the ratio to cp; the median
over rounds counts. FOLDER is removed at the end.

With --load it compares the two ways in which ranks of one node can read one checkpoint at start, from a cold cache:
every rank reads what it needs, or one reads and broadcasts (gloo).
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from glm5_next.bridge.checkpoint import Checkpoint, as_bytes
from glm5_next.bridge.conversion import Options
from glm5_next.bridge.hf_folder import write_index, write_json
from glm5_next.bridge.name_map import inventory
from glm5_next.bridge.shards import ShardWriter, create_shards, plan_shards
from glm5_next.bridge.tiny_config import RELEASED_WIDTHS, TinyModel, composite_config
from glm5_next.launchers.runtime.convert import hf_to_megatron, megatron_to_hf
from glm5_next.plugins.config import Glm5NextConfig

EXPERT_GB = 0.0503
BLOCK = 2**24  # random values, written again and again
VOCAB = 32768  # the released one would be half of a small checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    try:
        size = write_checkpoint(arguments.folder / "hf", arguments.gb, fp8=arguments.fp8)
        if arguments.load:
            bench_load(arguments.folder / "hf", arguments.ranks)
        else:
            bench_conversion(arguments.folder, size, arguments.rounds, Options(workers=arguments.workers))
    finally:
        shutil.rmtree(arguments.folder)


def write_checkpoint(out: Path, gigabytes: float, *, fp8: bool) -> int:
    """One KDA layer with a dense MLP, one DSA layer with as many experts as make up the size."""
    experts = max(2, round((gigabytes - 1.4) / EXPERT_GB * (2 if fp8 else 1)))
    raw = composite_config(
        TinyModel(
            layers=2,
            dense_layers=1,
            experts=experts,
            fp8=fp8,
            mtp=False,
            vision=False,
            **RELEASED_WIDTHS | {"vocab": VOCAB},
        )
    )
    raw["text_config"]["layer_types"] = ["linear_attention", "deepseek_sparse_attention"]
    plans = plan_shards(inventory(Glm5NextConfig.from_hf(raw)), 5)
    out.mkdir()
    create_shards(out, plans)
    shards = ShardWriter(out, plans)
    normal = torch.from_numpy(np.random.default_rng(0).standard_normal(BLOCK, dtype=np.float32))
    values = {"BF16": normal.bfloat16(), "F32": normal.abs(), "F8_E4M3": normal.to(torch.float8_e4m3fn)}
    for name, stored in shards.tensors.items():
        block = as_bytes(values[stored.dtype])
        shards.write(name, repeated(block, stored.end - stored.begin))
    write_index(out, dict(sorted(shards.tensors.items())), {})
    write_json(out / "config.json", raw)
    sync(out)
    return sum(stored.end - stored.begin for stored in shards.tensors.values())


def repeated(block: memoryview, size: int) -> Iterator[memoryview]:
    for begin in range(0, size, len(block)):
        yield block[: min(len(block), size - begin)]


def bench_conversion(folder: Path, size: int, rounds: int, options: Options) -> None:
    hf, megatron, back, copy = (folder / name for name in ("hf", "megatron", "back", "copy"))

    def copied(source: Path) -> None:
        subprocess.run(["cp", "-r", source, copy], check=True)
        sync(copy)

    # name -> what it does, what it reads, what it writes
    steps: dict[str, tuple[Callable[[], object], Path, Path]] = {
        "cp of the Hugging Face folder": (lambda: copied(hf), hf, copy),
        "Hugging Face -> Megatron": (lambda: hf_to_megatron(hf, megatron, options), hf, megatron),
        "cp of the Megatron checkpoint": (lambda: copied(megatron), megatron, copy),
        "Megatron -> Hugging Face": (lambda: megatron_to_hf(megatron, back, None, options=options), megatron, back),
    }
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name, (step, source, target) in steps.items():
            start = time.perf_counter()
            step()
            seconds = time.perf_counter() - start
            rates[name].append((size_of(source) + size_of(target)) / 2e9 / seconds)
            print(f"round {number + 1}: {name}: {rates[name][-1]:.3f} GB/s", flush=True)
            shutil.rmtree(copy, ignore_errors=True)
        for output in (megatron, back):
            shutil.rmtree(output)
    print(f"{size / 1e9:.2f} GB, {rounds} rounds, {len(os.sched_getaffinity(0))} cores; baseline: cp on the same disk")
    names = list(steps)
    for baseline, conversion in zip(names[::2], names[1::2]):
        ratios = [b / a for a, b in zip(rates[baseline], rates[conversion])]
        listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{conversion}: {statistics.median(ratios):.0%} of cp (rounds: {listed})")


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def sync(folder: Path) -> None:
    subprocess.run(["sync", *(path for path in folder.iterdir() if path.is_file())], check=True)


def bench_load(hf: Path, num_ranks: int) -> None:
    from glm5_next.launchers.runtime.local_ranks import run_ranks

    for name, way in {"every rank reads": each_reads, "one reads and broadcasts": one_reads}.items():
        for path in hf.glob("*.safetensors"):  # out of the page cache
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        results = run_ranks(way, num_ranks, hf, timeout=1200)
        slowest, size = max(result[0] for result in results), results[0][1]
        print(
            f"{num_ranks} replicas, {name}: {size / 1e9:.2f} GB each in {slowest:.2f} s, {size / 1e9 / slowest:.3f} GB/s"
        )


def each_reads(hf: Path) -> tuple[float, int]:
    checkpoint, size = Checkpoint(hf), 0
    dist.barrier()
    start = time.perf_counter()
    for name in checkpoint.tensors:
        size += checkpoint.read(name).nbytes
    dist.barrier()
    return time.perf_counter() - start, size


def one_reads(hf: Path) -> tuple[float, int]:
    checkpoint, size = Checkpoint(hf), 0
    dist.barrier()
    start = time.perf_counter()
    for name in checkpoint.tensors:
        if dist.get_rank() == 0:
            tensor = checkpoint.read(name).view(-1).view(torch.uint8)
        else:
            tensor = torch.empty(checkpoint.tensors[name].end - checkpoint.tensors[name].begin, dtype=torch.uint8)
        dist.broadcast(tensor, 0)
        size += tensor.nbytes
    dist.barrier()
    return time.perf_counter() - start, size


if __name__ == "__main__":
    sys.exit(main())
