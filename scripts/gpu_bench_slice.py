"""The speed of both layer kinds and of the four-layer slice beside transformers' with FLA, on the same weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers.models.glm5_next.modeling_glm5_next as modeling
from gpu_timing import Report, free
from megatron.core import parallel_state
from torch import Tensor

from glm5_next.launchers.operator_cases import row_of
from glm5_next.plugins.expert_products import choose_expert_products
from glm5_next.plugins.logprobs import token_logprobs
from tests.support.released import (
    ROW,
    logits_processor,
    our_outputs,
    our_slice,
    random_tokens,
    reference_slice,
    row_for,
    slice_config,
)


def run_slice(report: Report) -> None:
    """Ours and transformers' with FLA, on the same weights."""
    tokens = random_tokens(report.tokens, slice_config().vocab_size)
    reference = reference_slice(modeling)
    ours = our_slice(reference)
    experts = choose_expert_products(ours.module.config, ROW)
    report.facts["backends"] = {"experts": experts, **ours.module.config.kernels.chosen}
    print("backends:", report.facts["backends"], flush=True)
    report.facts["parameters"] = sum(p.numel() for p in ours.parameters())
    measure_sites(report, reference, ours)
    measure_layers(report, reference, ours)
    ours.zero_grad(set_to_none=True)
    reference.zero_grad(set_to_none=True)
    compare_logits(report, reference, ours, tokens)
    measure_models(report, reference, ours, tokens)


def layers_of(reference: Any, ours: Any, number: int) -> tuple[Any, Any]:
    return reference.model.language_model.layers[number], ours.module.decoder.layers[number]


def differentiated(call: Callable[..., Any], module: torch.nn.Module, *inputs: Tensor) -> Callable[[], None]:
    """Forward and backward to the inputs and the module's parameters, gradients dropped."""

    def both() -> None:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = call(*leaves)
        out.backward(torch.ones_like(out))
        module.zero_grad(set_to_none=True)

    return both


def measure_pair(report: Report, name: str, ours: tuple[Any, Any, list], theirs: tuple[Any, Any, list]) -> None:
    for path, (call, module, inputs) in {"ours": ours, "transformers": theirs}.items():
        report.measure(name, path, partial(call, *inputs), differentiated(call, module, *inputs))
        free()


def measure_sites(report: Report, reference: Any, ours: Any) -> None:
    """A hyper-connection (mapping, collapse, write-back), and the indexer from projections to token ids."""
    model, tokens = slice_config(), report.tokens
    theirs, mine = layers_of(reference, ours, 3)
    streams = torch.randn(tokens, 1, model.num_streams * model.hidden_size, device="cuda", dtype=torch.bfloat16)
    site = mine.self_attention_hyper_connection

    def our_site(x: Tensor) -> Tensor:
        collapsed, post, mix = site(x)
        return site.merge(x, collapsed, post, mix)

    def their_site(x: Tensor) -> Tensor:
        post, mix, out = theirs.attn_hc(x)
        mixed = torch.matmul(mix.to(x.dtype).transpose(-1, -2), x)
        return post.to(x.dtype).unsqueeze(-1) * out.unsqueeze(-2) + mixed

    split = streams.transpose(0, 1).unflatten(-1, (model.num_streams, -1)).contiguous()
    measure_pair(report, "mHC site", (our_site, site, [streams]), (their_site, theirs.attn_hc, [split]))

    attention = mine.self_attention
    hidden = torch.randn(tokens, 1, model.hidden_size, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(tokens, 1, model.q_lora_rank, device="cuda", dtype=torch.bfloat16)
    mask = torch.ones(1, tokens, dtype=torch.bool, device="cuda")
    indexer, expand = attention.core_attention.indexer, attention.core_attention.kernels.expand_pools
    row = row_of((tokens,), torch.device("cuda"))
    report.measure("indexer", "ours", lambda: expand(indexer(hidden, q, row), row, model.index_kpool), None)
    swapped = hidden.transpose(0, 1), q.transpose(0, 1)
    report.measure("indexer", "transformers", lambda: theirs.self_attn.indexer(*swapped, mask, None), None)
    free()
    long = row_of((131072,), torch.device("cuda"))
    hidden, q = (x.repeat(16, 1, 1)[:131072] if tokens == 8192 else x for x in (hidden, q))
    if len(hidden) == 131072:
        report.measure(
            "indexer 131072", "ours", lambda: expand(indexer(hidden, q, long), long, model.index_kpool), None
        )
    free()


def measure_layers(report: Report, reference: Any, ours: Any) -> None:

    model, tokens = slice_config(), report.tokens
    mask = torch.ones(1, tokens, dtype=torch.bool, device="cuda")
    positions = torch.arange(tokens, device="cuda")[None]
    row = row_for((tokens,))
    streams = torch.randn(tokens, 1, model.num_streams * model.hidden_size, device="cuda", dtype=torch.bfloat16)
    split = streams.transpose(0, 1).unflatten(-1, (model.num_streams, -1)).contiguous()
    for number, name in ((1, "KDA + dense layer"), (3, "DSA + MoE layer")):
        theirs, mine = layers_of(reference, ours, number)
        measure_pair(
            report,
            name,
            (lambda x, mine=mine: mine(x, packed_seq_params=row)[0], mine, [streams]),
            (lambda x, theirs=theirs: theirs(x, attention_mask=mask, position_ids=positions)[0], theirs, [split]),
        )


def compare_logits(report: Report, reference: Any, ours: Any, tokens: Tensor) -> None:
    """KL of our distribution from transformers', per token, both bf16; share of equal best tokens."""

    with torch.no_grad():
        theirs = reference(input_ids=tokens).logits[0]
        mine = our_outputs(ours, tokens, (tokens.shape[1],), logits_processor)[0]
        kls, same = [], []
        for p, q in zip(theirs.split(1024), mine.split(1024)):
            p, q = p.float().log_softmax(-1), q.float().log_softmax(-1)
            kls.append((p.exp() * (p - q)).sum(-1))
            same.append(p.argmax(-1) == q.argmax(-1))
    report.facts["logits_mean_kl"] = torch.cat(kls).mean().item()
    report.facts["logits_top1_agreement"] = torch.cat(same).float().mean().item()
    print({name: value for name, value in report.facts.items() if name.startswith("logits")}, flush=True)
    del theirs, mine
    free()


def measure_models(report: Report, reference: Any, ours: Any, tokens: Tensor) -> None:
    """Log-probabilities of the next tokens and the gradient of their sum, with and without recomputation."""
    labels, length = tokens[0].roll(-1), tokens.shape[1]
    vocab = slice_config().vocab_size
    group = parallel_state.get_tensor_model_parallel_group()

    def processor(*, hidden_states: Tensor, output_layer: Any, **unused: Any) -> Tensor:
        logits, _ = output_layer(hidden_states)
        return token_logprobs(logits.squeeze(1), labels, vocab_size=vocab, tp_group=group)[0]

    def our_loss() -> Tensor:
        return our_outputs(ours, tokens, (length,), processor).sum()

    def their_loss() -> Tensor:
        logits = reference(input_ids=tokens).logits[0]
        return -torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")

    def with_backward(loss: Callable[[], Tensor], model: torch.nn.Module) -> Callable[[], None]:
        def both() -> None:
            loss().backward()
            model.zero_grad(set_to_none=True)

        return both

    ours.train()
    reference.train()
    report.measure("slice", "ours", our_loss, with_backward(our_loss, ours))
    free()
    with full_recompute(ours):
        report.measure("slice", "ours, recompute", our_loss, with_backward(our_loss, ours))
    free()
    report.measure("slice", "transformers", their_loss, with_backward(their_loss, reference))
    free()


@contextmanager
def full_recompute(model: Any) -> Iterator[None]:
    config = model.module.decoder.config
    settings = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    before = {name: getattr(config, name) for name in settings}
    for name, value in settings.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
