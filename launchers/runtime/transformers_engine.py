"""The embedded rollout engine: transformers' own model in this process, with its KV, state and indexer caches."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from glm5_next.bridge.name_map import VISION
from glm5_next.bridge.reference import disk_views, load_reference
from glm5_next.launchers.runtime.engine import Bucket, Completion
from glm5_next.launchers.runtime.weight_digest import weight_digest


class TransformersEngine:
    """Serves a checkpoint folder; see `RolloutEngine`.

    Prompts of different lengths are left-padded into one batch and prefilled once each; their samples share the
    prefilled cache. A sequence that ends leaves the batch.
    """

    def __init__(self, checkpoint: Path, *, precision: str, record_routes: bool, batch_size: int, num_threads: int = 1):
        torch.set_num_threads(num_threads)
        self.model = load_reference(checkpoint, "float32" if precision == "fp32" else "bfloat16")
        self.views = disk_views(self.model)
        self.record_routes, self.batch_size = record_routes, batch_size
        self.stop_tokens = stop_tokens(checkpoint)
        self.pad_token = self.model.config.text_config.pad_token_id
        self._version = 0
        self._update: tuple[int, dict[str, torch.dtype]] | None = None

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[np.ndarray], samples_per_prompt: int, *, max_new_tokens: int, seed: int
    ) -> list[list[Completion]]:
        assert self._update is None, "generate() during a weight update"
        generator = torch.Generator().manual_seed(seed)
        per_batch = max(1, self.batch_size // samples_per_prompt)
        completions: list[list[Completion]] = []
        for first in range(0, len(prompts), per_batch):
            batch = prompts[first : first + per_batch]
            flat = self._generate_batch(batch, samples_per_prompt, max_new_tokens, generator)
            completions += [flat[i : i + samples_per_prompt] for i in range(0, len(flat), samples_per_prompt)]
        return completions

    @torch.no_grad()
    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        scores = []
        for sequence in sequences:
            tokens = torch.from_numpy(sequence.astype(np.int64)).unsqueeze(0)
            logprobs = self.model(input_ids=tokens).logits[0, :-1].float().log_softmax(-1)
            scores.append(logprobs.gather(-1, tokens[0, 1:, None]).squeeze(-1).numpy())
        return scores

    def begin_update(self, version: int) -> None:
        assert self._update is None, "begin_update() while an update is open"
        self._update = (version, {})

    @torch.no_grad()
    def put_weights(self, bucket: Bucket) -> None:
        assert self._update is not None, "put_weights() outside an update"
        for name, tensor in bucket:
            if name not in self.views:
                raise ValueError(f"weight update: the engine holds no tensor named {name!r}")
            if self.views[name].shape != tensor.shape:
                raise ValueError(
                    f"weight update: {name} has shape {tuple(tensor.shape)}, the engine's {tuple(self.views[name].shape)}"
                )
            self.views[name].copy_(tensor)
            self._update[1][name] = tensor.dtype

    def commit_update(self) -> dict[str, str]:
        assert self._update is not None, "commit_update() outside an update"
        version, dtypes = self._update
        # Also of tensors that were not sent: a policy without them is not the trainer's. The vision tower is never sent.
        held = dtypes.keys() | {name for name in self.views if not name.startswith(VISION)}
        digests = {name: weight_digest(self.views[name], dtypes.get(name, self.views[name].dtype)) for name in held}
        self._version, self._update = version, None
        return digests

    def weights_version(self) -> int:
        return self._version

    def _generate_batch(
        self, prompts: Sequence[np.ndarray], copies: int, max_new_tokens: int, generator: torch.Generator
    ) -> list[Completion]:
        tokens, mask = _left_padded(prompts, self.pad_token)
        with self._recorder() as record:
            out = self.model(input_ids=tokens, attention_mask=mask, use_cache=True, logits_to_keep=1)
            prompt_routes = _rows_of_prompts(record.take(tokens.shape), mask)
            sequences = [_Sequence(prompt_routes[i // copies]) for i in range(len(prompts) * copies)]
            alive = torch.arange(len(sequences))
            cache, logits = out.cache, out.logits[:, -1]
            origin = alive // copies
            cache.reorder_cache(origin)
            logits, mask = logits[origin], mask[origin]
            for step in range(max_new_tokens):
                chosen, logprobs = _sample(logits, generator)
                going = [
                    not sequences[index].add(int(token), float(logprob), self.stop_tokens)
                    for index, token, logprob in zip(alive.tolist(), chosen, logprobs)
                ]
                keep = torch.tensor(going).nonzero().squeeze(-1)
                if step + 1 == max_new_tokens or len(keep) == 0:
                    break
                if len(keep) < len(alive):
                    cache.reorder_cache(keep)
                    alive, chosen, mask = alive[keep], chosen[keep], mask[keep]
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
                out = self.model(input_ids=chosen.unsqueeze(-1), attention_mask=mask, cache=cache, use_cache=True)
                logits = out.logits[:, -1]
                for index, routes in zip(alive.tolist(), _split(record.take((len(alive), 1)))):
                    sequences[index].routes.append(routes)
        return [sequence.completion(self.record_routes) for sequence in sequences]

    @contextmanager
    def _recorder(self) -> Iterator["_RouteRecorder"]:
        routers = [layer.mlp.gate for layer in self.model.model.language_model.layers if hasattr(layer.mlp, "gate")]
        recorder = _RouteRecorder(len(routers) if self.record_routes else 0)
        handles = [router.register_forward_hook(recorder.hook) for router in routers] if self.record_routes else []
        try:
            yield recorder
        finally:
            for handle in handles:
                handle.remove()


class _RouteRecorder:
    """Collects the experts of one forward pass, layer by layer."""

    def __init__(self, num_layers: int):
        self.num_layers = num_layers
        self.layers: list[Tensor] = []

    def hook(self, module: torch.nn.Module, inputs: tuple, output: tuple) -> None:
        self.layers.append(output[2])

    def take(self, shape: Sequence[int]) -> np.ndarray | None:
        """int16 `[batch, tokens, MoE layers, topk]` of the pass that just ended."""
        layers, self.layers = self.layers, []
        assert len(layers) == self.num_layers, f"{len(layers)} routers ran, the model has {self.num_layers}"
        if not layers:
            return None
        return torch.stack(layers, dim=1).unflatten(0, tuple(shape)).to(torch.int16).numpy()


class _Sequence:
    """A response in the making. `routes` has one array per forward pass the sequence took part in."""

    def __init__(self, prompt_routes: np.ndarray | None):
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.routes: list[np.ndarray | None] = [prompt_routes]
        self.stopped = False

    def add(self, token: int, logprob: float, stop_tokens: frozenset[int]) -> bool:
        """Appends a token; True if it ends the sequence."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.stopped = token in stop_tokens
        return self.stopped

    def completion(self, with_routes: bool) -> Completion:
        return Completion(
            tokens=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            routes=np.concatenate([rows for rows in self.routes if rows is not None]) if with_routes else None,
            finish_reason="stop" if self.stopped else "length",
        )


def _left_padded(prompts: Sequence[np.ndarray], pad_token: int) -> tuple[Tensor, Tensor]:
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.full((len(prompts), longest), pad_token)
    mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, longest - len(prompt) :] = 1
    return tokens, mask


def _rows_of_prompts(routes: np.ndarray | None, mask: Tensor) -> list[np.ndarray | None]:
    """The record of each prompt's real tokens."""
    if routes is None:
        return [None] * len(mask)
    return [rows[keep] for rows, keep in zip(routes, mask.bool().numpy())]


def _split(routes: np.ndarray | None) -> Iterator[np.ndarray | None]:
    while routes is None:
        yield None
    yield from routes


def _sample(logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    logprobs = logits.float().log_softmax(-1)
    chosen = torch.multinomial(logprobs.exp(), 1, generator=generator)
    return chosen.squeeze(-1), logprobs.gather(-1, chosen).squeeze(-1)


def stop_tokens(checkpoint: Path) -> frozenset[int]:
    """The tokens that end a response; raises ValueError where the checkpoint does not say."""
    path = checkpoint / "generation_config.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; it names the end-of-turn tokens (eos_token_id)")
    stop = json.loads(path.read_text()).get("eos_token_id")
    if stop is None:
        raise ValueError(f"{path}: eos_token_id is missing; without it no response would ever end")
    return frozenset([stop] if isinstance(stop, int) else stop)
