"""Speed on one GPU, in one run: every operator, both layer kinds and the four-layer slice at 8192 tokens.

    python scripts/bench_gpu.py [--out FILE.json] [--tokens N] [--only operators|slice|OPERATOR ...]

Medians of at least five runs after warm-up. Ratios are against what a user would otherwise run: transformers with FLA on
the same weights, FLA's and Megatron-Core's TileLang kernels alone, plain torch; and against the copy and matrix rates of
the same card. The first run on a machine compiles and tunes kernels, which takes minutes.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("FLA_TILELANG", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from glm5_next.launchers.gpu_check import released_place
from glm5_next.launchers.operator_cases import Problem, problem, row_of
from glm5_next.plugins.kernels.registry import NAIVE, OPERATORS, load

MIB, GIB = 2**20, 2**30
FEWEST, MOST, SECONDS = 5, 30, 0.6
HEAD_START = 4_000_000  # cycles (2 ms) in which the host queues a call, so that launches are not what is timed


@dataclass
class Row:
    """One path: milliseconds of forward, and of forward and backward (None: not differentiable); peak GiB on top of inputs.

    `of_copy` and `of_matrix`: what the forward pass reaches of the rates that a copy and a product of matrices had in the
    same run, counting what has to be moved and multiplied at least (None: not counted).
    """

    name: str
    path: str
    forward_ms: float
    both_ms: float | None
    extra_gib: float
    of_copy: float | None = None
    of_matrix: float | None = None


@dataclass
class Report:
    tokens: int
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def measure(self, name: str, path: str, forward: Callable[[], Any], both: Callable[[], Any] | None) -> Row:
        """Prints as it goes: compilation and tuning of the first call can take long."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            forward_ms = median_ms(forward)
        both_ms = None if both is None else median_ms(both)
        extra = (torch.cuda.max_memory_allocated() - before) / GIB
        self.rows.append(Row(name, path, forward_ms, both_ms, extra))
        shown = "       -" if both_ms is None else f"{both_ms:8.3f}"
        seconds = time.monotonic() - self.started
        print(f"{seconds:6.0f} s  {name:20} {path:22} {forward_ms:8.3f} {shown} ms {extra:7.2f} GiB", flush=True)
        return self.rows[-1]

    def compare_with_card(self, row: Row, moved_bytes: float, flops: float) -> None:
        """Of a row that was just measured; see `Row`."""
        row.of_copy = moved_bytes / row.forward_ms / 1e9 / self.facts["copy_tb_per_s"]
        row.of_matrix = flops / row.forward_ms / 1e9 / self.facts["matrix_tflop_per_s"]
        print(f"{'':10}of the card's rates: copy {row.of_copy:.0%}, matrix {row.of_matrix:.0%}", flush=True)

    def ratio(self, name: str, ours: str, other: str) -> dict[str, float]:
        """How many times as fast ours is; {} unless both were measured."""
        rows = {row.path: row for row in self.rows if row.name == name}
        if ours not in rows or other not in rows:
            return {}
        out = {"forward": rows[other].forward_ms / rows[ours].forward_ms}
        if rows[ours].both_ms and rows[other].both_ms:
            out["both"] = rows[other].both_ms / rows[ours].both_ms
        return out


def median_ms(call: Callable[[], Any]) -> float:
    """By the GPU's clock, with a cold L2 each time."""
    call()
    call()
    torch.cuda.synchronize()
    flush = torch.empty(256 * MIB, dtype=torch.int8, device="cuda")
    times, start = [], time.monotonic()
    while len(times) < FEWEST or (len(times) < MOST and time.monotonic() - start < SECONDS):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def measure_card(report: Report) -> None:
    x = torch.randn(2 * GIB // 2, device="cuda", dtype=torch.bfloat16)
    report.facts["copy_tb_per_s"] = 2 * x.nbytes / median_ms(x.clone) / 1e9
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    report.facts["matrix_tflop_per_s"] = 2 * 8192**3 / median_ms(lambda: a @ a) / 1e9
    print({name: round(value, 2) for name, value in report.facts.items()}, flush=True)


def run_operators(report: Report, operators: list[str]) -> None:
    """Every backend of these operators; the naive one in bf16 is plain torch, mostly what transformers computes."""
    place, row = released_place(), row_of((report.tokens,), torch.device("cuda"))
    for operator in operators:
        backends = OPERATORS[operator]
        case = problem(operator, place, row)
        if operator == "sparse_attention":  # slots as the model's own expansion leaves them
            pools = problem("expand_pools", place, row).tensors["pools"]
            case.tensors["indices"] = load("expand_pools", "triton")(pools, row, place.model.index_kpool)
        for name in (*(backend.name for backend in backends if not backend.refusal(place)), NAIVE):
            measure_operator(report, case, name)
        del case
        free()


def measure_operator(report: Report, case: Problem, name: str) -> None:
    function = load(case.operator, name)
    plain = {key: x.detach() for key, x in case.tensors.items()}
    leaves = {key: x.detach().requires_grad_(x.is_floating_point() and case.trains) for key, x in plain.items()}
    with torch.set_grad_enabled(case.trains):
        outputs = list(case.call(function, leaves).values())
    moved = sum(x.nbytes for x in (*plain.values(), *outputs))
    grads = [torch.randn_like(out) for out in outputs if out.requires_grad]
    del outputs

    def both() -> None:
        outputs = [out for out in case.call(function, leaves).values() if out.requires_grad]
        torch.autograd.grad(outputs, [x for x in leaves.values() if x.requires_grad], grads)

    row = report.measure(case.operator, name, lambda: case.call(function, plain), both if case.trains else None)
    report.compare_with_card(row, moved, multiplications(case.operator, plain))


def multiplications(operator: str, inputs: dict[str, Tensor]) -> float:
    """Floating-point operations of the forward pass in products of matrices; 0 for operators without any.

    KDA: the recurrence, token by token (S k, the update, S q); chunked kernels do more.
    """
    if operator == "kda":
        tokens, heads, width = inputs["q"].shape
        return 2 * 3 * tokens * heads * width * width
    if operator == "sparse_attention":
        return 2 * 2 * int((inputs["indices"] >= 0).sum()) * inputs["q"].shape[1] * inputs["q"].shape[2]
    if operator == "select_pools":  # a query scores the pools before it
        return 2 * inputs["q"].numel() * len(inputs["pooled"]) / 2
    if operator == "mhc_site":
        return 2 * inputs["streams"].numel() * len(inputs["weight"])
    return 0.0


def run_slice(report: Report) -> None:
    """Ours and transformers' with FLA, on the same weights."""
    import transformers.models.glm5_next.modeling_glm5_next as modeling

    from tests.support import released

    tokens = released.random_tokens(report.tokens, released.slice_config().vocab_size)
    reference = released.reference_slice(modeling)
    ours = released.our_slice(reference)
    print("backends:", ours.module.config.kernels.chosen, flush=True)
    report.facts["backends"] = ours.module.config.kernels.chosen
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
    from tests.support.released import slice_config

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
    from tests.support.released import row_for, slice_config

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
    from tests.support.released import logits_processor, our_outputs

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
    from glm5_next.plugins.logprobs import token_logprobs
    from tests.support.released import our_outputs, slice_config

    labels, length = tokens[0].roll(-1), tokens.shape[1]
    vocab = slice_config().vocab_size
    from megatron.core import parallel_state

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


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


# Name, ours, what it replaces, and the least ratio asked for (of forward and backward, or of the forward if it is all).
TARGETS = (
    ("slice", "ours", "transformers", 2.0),
    ("KDA + dense layer", "ours", "transformers", 1.0),
    ("DSA + MoE layer", "ours", "transformers", 1.0),
    ("mHC site", "ours", "transformers", 4.0),
    ("indexer", "ours", "transformers", 8.0),
    ("sparse_attention", "flash_mla", "tilelang", 4.0),
    ("kda", "cudnn", "fla", 1.0),
    ("select_pools", "cudnn", "triton", 1.0),
    *((operator, backends[0].name, NAIVE, 1.0) for operator, backends in OPERATORS.items()),
)


def ratios(report: Report) -> list[dict[str, Any]]:
    found = []
    for name, ours, other, wanted in TARGETS:
        ratio = report.ratio(name, ours, other)
        if ratio:
            value = ratio.get("both", ratio["forward"])
            found.append({"name": name, "ours": ours, "other": other, "wanted": wanted, **ratio, "ok": value >= wanted})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--tokens", type=int, default=8192, help="length of the one document (default: 8192)")
    parts = ("operators", "slice", *OPERATORS)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts[:2], metavar="PART", help=", ".join(parts))
    options = parser.parse_args()
    torch.manual_seed(0)
    report = Report(options.tokens)
    measure_card(report)
    operators = [name for name in OPERATORS if name in options.only or "operators" in options.only]
    run_operators(report, operators)
    if "slice" in options.only:
        run_slice(report)
    found = ratios(report)
    for entry in found:
        both = f"{entry['both']:7.2f}" if "both" in entry else "      -"
        verdict = "ok" if entry["ok"] else f"BELOW {entry['wanted']}"
        print(f"{entry['name']:20} {entry['ours']:10} vs {entry['other']:13} {entry['forward']:7.2f} {both}  {verdict}")
    if options.out:
        content = {"tokens": report.tokens, "facts": report.facts, "ratios": found}
        options.out.write_text(json.dumps(content | {"rows": [asdict(row) for row in report.rows]}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
