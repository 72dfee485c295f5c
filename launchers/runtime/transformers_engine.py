"""The embedded rollout engine: transformers' own model in this process, with its KV, state and indexer caches."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from glm5_next.bridge.name_map import VISION
from glm5_next.bridge.reference import disk_views, load_reference
from glm5_next.launchers.replay_plan import Recording
from glm5_next.launchers.runtime.engine import Bucket, Completion
from glm5_next.launchers.runtime.transformers_recorder import Recorder, Rows
from glm5_next.launchers.runtime.weight_digest import weight_digest


class TransformersEngine:
    """Serves a checkpoint folder; see `RolloutEngine`.

    Prompts of different lengths are left-padded into one batch and prefilled once each; their samples share the
    prefilled cache. A sequence that ends leaves the batch.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        precision: str,
        recording: Recording,
        batch_size: int,
        num_threads: int = 1,
        device: str = "cpu",
    ):
        torch.set_num_threads(num_threads)
        self.device = torch.device(device)
        self.model = load_reference(checkpoint, "float32" if precision == "fp32" else "bfloat16").to(self.device)
        self.views = disk_views(self.model)
        self.recorder, self.batch_size = Recorder(self.model, recording), batch_size
        self.stop_tokens = stop_tokens(checkpoint)
        self.pad_token = self.model.config.text_config.pad_token_id
        self._version = 0
        self._update: tuple[int, dict[str, torch.dtype]] | None = None

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[np.ndarray], samples_per_prompt: int, *, max_new_tokens: int, seed: int
    ) -> list[list[Completion]]:
        assert self._update is None, "generate() during a weight update"
        generator = torch.Generator(self.device).manual_seed(seed)
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
            tokens = torch.from_numpy(sequence.astype(np.int64)).unsqueeze(0).to(self.device)
            logprobs = self.model(input_ids=tokens).logits[0, :-1].float().log_softmax(-1)
            scores.append(logprobs.gather(-1, tokens[0, 1:, None]).squeeze(-1).cpu().numpy())
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
        tokens, mask = (x.to(self.device) for x in _left_padded(prompts, self.pad_token))
        with self.recorder.listening():
            out = self.model(input_ids=tokens, attention_mask=mask, use_cache=True, logits_to_keep=1)
            of_prompts = self.recorder.take(mask, tokens.shape[1])
            sequences = [_Sequence(of_prompts[i // copies]) for i in range(len(prompts) * copies)]
            alive = torch.arange(len(sequences), device=self.device)
            cache, logits = out.cache, out.logits[:, -1]
            origin = alive // copies
            cache.reorder_cache(origin)
            logits, mask = logits[origin], mask[origin]
            for step in range(max_new_tokens):
                chosen, logprobs = _sample(logits, generator)
                going = [
                    not sequences[index].add(token, logprob, self.stop_tokens)
                    for index, token, logprob in zip(alive.tolist(), chosen.tolist(), logprobs.tolist())
                ]
                keep = torch.tensor(going, device=self.device).nonzero().squeeze(-1)
                if step + 1 == max_new_tokens or len(keep) == 0:
                    break
                if len(keep) < len(alive):
                    cache.reorder_cache(keep)
                    alive, chosen, mask = alive[keep], chosen[keep], mask[keep]
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
                out = self.model(input_ids=chosen.unsqueeze(-1), attention_mask=mask, cache=cache, use_cache=True)
                logits = out.logits[:, -1]
                for index, rows in zip(alive.tolist(), self.recorder.take(mask, 1)):
                    sequences[index].rows.append(rows)
        return [sequence.completion(self.recorder, f"sequence {i}") for i, sequence in enumerate(sequences)]


class _Sequence:
    """A response in the making. `rows` has the record of every forward pass the sequence took part in."""

    def __init__(self, of_prompt: Rows):
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.rows = [of_prompt]
        self.stopped = False

    def add(self, token: int, logprob: float, stop_tokens: frozenset[int]) -> bool:
        """Appends a token; True if it ends the sequence."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.stopped = token in stop_tokens
        return self.stopped

    def completion(self, recorder: Recorder, name: str) -> Completion:
        routes, weights, picks = recorder.joined(self.rows, name)
        return Completion(
            tokens=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            routes=routes,
            route_weights=weights,
            picks=picks,
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
