"""A model behind a server: requests in batches, a prefix cache that is only bookkeeping, weights that change while paused.

The arithmetic is the embedded engine's. What real engines do around it is kept: requests wait while generation is paused,
a cache is not freed while requests run, aborted requests come back unfinished.
"""

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.launchers.replay_plan import Recording
from glm5_next.launchers.runtime.engine import Completion
from glm5_next.launchers.runtime.transformers_engine import TransformersEngine
from glm5_next.plugins.pick_coding import PickRecord

SECONDS_TO_GATHER = 0.01  # so long a batch waits for requests that are on their way
MEMORY = ("weights", "kv_cache")
NOT_WEIGHTS = ("cos_sin_cache", "inv_freq", "freqs_cis")


@dataclass(eq=False)
class Job:
    """One response in the making."""

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    seed: int
    cached_tokens: int = 0
    aborted: bool = False
    completion: Completion | None = None
    error: str | None = None
    done: threading.Event = field(default_factory=threading.Event)


class ModelHost:
    """Serves a checkpoint folder; every method may be called from any thread."""

    def __init__(self, checkpoint: Path, *, precision: str, batch_size: int = 512):
        self.engine = TransformersEngine(
            checkpoint, precision=precision, recording=Recording(routes=True, picks=True), batch_size=batch_size
        )
        self.checkpoint = Checkpoint(checkpoint)
        self.config = self.checkpoint.config
        self.batch_size = batch_size
        self.version = "default"
        self.paused = False
        self.released: set[str] = set()  # of `MEMORY`
        self.model_lock = threading.Lock()
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._cached: list[tuple[int, ...]] = []
        threading.Thread(target=self._schedule, daemon=True).start()

    def submit(self, job: Job) -> Job:
        """Waits until the response is there, or the job was aborted."""
        with self._changed:
            self._waiting.append(job)
            self._changed.notify_all()
        job.done.wait()
        return job

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        self.check_memory(*MEMORY)
        with self.model_lock:
            return self.engine.score([np.array(tokens, dtype=np.int32)])[0]

    def abort(self, job_id: str | None) -> None:
        """Every job if None. Jobs that run come back unfinished, jobs that wait at once."""
        with self._changed:
            for job in [*self._waiting, *self._running]:
                if job_id is None or job.id == job_id:
                    job.aborted = True
            for job in [job for job in self._waiting if job.aborted]:
                self._waiting.remove(job)
                job.done.set()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        with self._changed:
            self.paused = False
            self._changed.notify_all()

    def wait_until_idle(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._running)

    def flush(self) -> bool:
        """Empties the prefix cache unless a request holds it."""
        with self._changed:
            if self._running or (self._waiting and not self.paused):
                return False
            self._cached.clear()
            return True

    def check_memory(self, *memory: str) -> None:
        """Raises RuntimeError unless the host has it; a real engine would read memory that is not there."""
        for name in memory:
            if name in self.released:
                raise RuntimeError(f"the memory of {name} has been released")

    def release(self, memory: Iterable[str]) -> None:
        """Raises RuntimeError while requests run. Parameters are lost, buffers are kept, as on real engines."""
        with self._changed:
            if self._running or (self._waiting and not self.paused):
                raise RuntimeError("memory can be released only when the server is idle")
            self.released.update(memory)
            self._cached.clear()
        if "weights" in self.released:
            self.forget(skip=[name for name, _ in self.engine.model.named_buffers()])

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Takes whole tensors by their names on disk; returns the names it does not know."""
        self.check_memory("weights")
        unknown = []
        with self.model_lock:
            for name, tensor in tensors:
                if name in self.engine.views:
                    self.engine.views[name].copy_(tensor)
                else:
                    unknown.append(name)
        return unknown

    def load_folder(self, folder: Path) -> None:
        checkpoint = Checkpoint(folder)
        names = [name for name in checkpoint.tensors if name in self.engine.views]
        self.load((name, checkpoint.read(name)) for name in names)

    def checksums(self, skip: Sequence[str] = ()) -> dict[str, str]:
        """By the model's own names: stacked experts, merged convolutions."""
        with self.model_lock:
            return {name: _checksum(tensor) for name, tensor in self._tensors(skip)}

    @torch.no_grad()
    def forget(self, skip: Sequence[str] = ()) -> None:
        with self.model_lock:
            for _, tensor in self._tensors(skip):
                tensor.copy_(torch.rand(tensor.shape).to(tensor.dtype))

    def all_layers(self, routes: np.ndarray) -> np.ndarray:
        """Rows of all decoder layers from those of the MoE layers; dense ones are zero."""
        moe = [number for number, kind in enumerate(self.config.mlp_kinds) if kind == "moe"]
        rows = np.zeros((len(routes), self.config.num_layers, routes.shape[-1]), dtype=np.int32)
        rows[:, moe] = routes
        return rows

    def pools(self, picks: PickRecord, sent: str) -> np.ndarray:
        """int16 `[tokens, sparse-attention layers, pools]`, -1 unused: what our plugins hold in an engine where `sent` is "recorded", and
        what broken ones would."""
        pools = np.stack([picks.decode(layer) for layer in picks.layers], axis=1).astype(np.int16)
        return {"recorded": pools, "unwritten": np.full_like(pools, -1), "zeros": np.zeros_like(pools)}[sent]

    def run(self, jobs: Sequence[Job]) -> None:
        """One batch. Responses to equal prompts share a prefill where every prompt has as many."""
        self.check_memory(*MEMORY)
        counts = Counter(job.prompt for job in jobs)
        copies = len(jobs) // len(counts) if len(set(counts.values())) == 1 else 1
        prompts = list(counts) if copies > 1 else [job.prompt for job in jobs]
        seed = sum(job.seed for job in jobs) % 2**32
        with self.model_lock:
            groups = self.engine.generate(
                [np.array(prompt, dtype=np.int32) for prompt in prompts],
                copies,
                max_new_tokens=jobs[0].max_new_tokens,
                seed=seed,
            )
        left = {prompt: list(group) for prompt, group in zip(prompts, groups)} if copies > 1 else {}
        for number, job in enumerate(jobs):
            job.completion = left[job.prompt].pop() if copies > 1 else groups[number][0]

    def _schedule(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting and not self.paused)
            time.sleep(SECONDS_TO_GATHER)
            with self._changed:
                if self.paused or not self._waiting:
                    continue
                size = self._waiting[0].max_new_tokens
                jobs = [job for job in self._waiting if job.max_new_tokens == size][: self.batch_size]
                for job in jobs:
                    self._waiting.remove(job)
                    job.cached_tokens = self._prefix(job.prompt)
                self._running = jobs
            try:
                self.run(jobs)
            except (RuntimeError, ValueError) as error:  # the server goes on, as real ones do
                for job in jobs:
                    job.error = f"{type(error).__name__}: {error}"
            with self._changed:
                self._running = []
                self._cached += [(*job.prompt, *job.completion.tokens.tolist()) for job in jobs if job.completion]
                self._changed.notify_all()
            for job in jobs:
                job.done.set()

    def _prefix(self, prompt: tuple[int, ...]) -> int:
        """Tokens of the prompt that an earlier sequence begins with; the last is always computed."""
        lengths = [0]
        for sequence in self._cached:
            same = (a == b for a, b in zip(prompt[:-1], sequence))
            lengths.append(next((number for number, equal in enumerate(same) if not equal), len(prompt) - 1))
        return max(lengths)

    def _tensors(self, skip: Sequence[str]) -> Iterable[tuple[str, Tensor]]:
        model = self.engine.model
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not any(part in name for part in (*NOT_WEIGHTS, *skip)):
                yield name, tensor.data


def _checksum(tensor: Tensor) -> str:
    """SGLang's on a CPU (`managers/mm_utils.py`, tensor_hash): the first 8 bytes of a SHA-256, in hexadecimal."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw.tobytes()).digest()[:8].hex()
