"""What a model computes inside, stage by stage, under the same names for transformers' model and for ours."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from glm5_next.bridge.local_tensors import unwrapped
from glm5_next.bridge.reference import import_modeling
from glm5_next.plugins.dsa import DsaAttention
from glm5_next.plugins.kernels import expand_pools

# Stages of one layer in the order in which they are computed. Sets are compared as sets, everything else by value.
LAYER_STAGES = (
    "attention mHC mapping",
    "attention norm",
    "indexer set",
    "attention",
    "streams after attention",
    "MLP mHC mapping",
    "MLP norm",
    "router set",
    "MLP",
    "streams after MLP",
)
SET_STAGES = ("indexer set", "router set")


@dataclass(frozen=True, order=True)
class Stage:
    """A place in the model: `layer` is -1 for what comes before the first layer and `num_layers` after the last."""

    layer: int
    order: int
    name: str


Record = dict[Stage, Tensor]


def layer_stage(layer: int, name: str) -> Stage:
    return Stage(layer, LAYER_STAGES.index(name), name)


@contextmanager
def reference_record(model: Any) -> Iterator[Record]:
    """Fills the record during a forward pass of transformers' model on one sequence; `[T, ...]` fp32 tensors."""
    modeling = import_modeling()
    record: Record = {}
    text = model.model.language_model
    with ExitStack() as hooks:

        def note(module: torch.nn.Module, stage: Stage, take: Callable[[Any], Tensor]) -> None:
            def hook(module: torch.nn.Module, args: tuple, out: Any) -> None:
                record[stage] = take(out)

            hooks.callback(module.register_forward_hook(hook).remove)

        last = len(text.layers)
        note(text.embed_tokens, Stage(-1, 0, "embedding"), lambda out: out[0].float())
        for number, layer in enumerate(text.layers):
            for site, mapping, norm, name in (
                (layer.attn_hc, "attention mHC mapping", layer.input_layernorm, "attention norm"),
                (layer.ffn_hc, "MLP mHC mapping", layer.post_attention_layernorm, "MLP norm"),
            ):
                note(site, layer_stage(number, mapping), lambda out: _coefficients(out[0][0], out[1][0]))
                note(norm, layer_stage(number, name), lambda out: out[0].float())
            if isinstance(layer.self_attn, modeling.Glm5NextTextAttention):
                note(layer.self_attn.indexer, layer_stage(number, "indexer set"), lambda out: out[0].sort(-1).values)
            note(layer.self_attn, layer_stage(number, "attention"), lambda out: _first(out)[0].float())
            if hasattr(layer.mlp, "gate"):
                note(layer.mlp.gate, layer_stage(number, "router set"), lambda out: out[2].sort(-1).values)
            note(layer.mlp, layer_stage(number, "MLP"), lambda out: out[0].float())
            note(layer, layer_stage(number, "streams after MLP"), lambda out: out[0][0].flatten(1).float())
            _note_streams_after_attention(hooks, layer, layer_stage(number, "streams after attention"), record)
        note(text.norm, Stage(last, 0, "final norm"), lambda out: out[0].float())
        note(model.lm_head, Stage(last, 1, "logits"), lambda out: out[0].float())
        yield record


@contextmanager
def our_record(chunks: Sequence[torch.nn.Module], num_layers: int) -> Iterator[Record]:
    """Fills the record on this rank: its own layers, its own tokens under sequence parallelism, its own logit columns."""
    record: Record = {}
    with ExitStack() as hooks:

        def note(module: torch.nn.Module, stage: Stage, take: Callable[[tuple, Any], Tensor]) -> None:
            def hook(module: torch.nn.Module, args: tuple, out: Any) -> None:
                record[stage] = take(args, out)

            hooks.callback(module.register_forward_hook(hook).remove)

        def rows(args: tuple, out: Any) -> Tensor:
            return _first(out).squeeze(1).float()

        for chunk in map(unwrapped, chunks):
            if chunk.pre_process:
                note(chunk.embedding, Stage(-1, 0, "embedding"), rows)
            for layer in chunk.decoder.layers:
                number = layer.layer_number - 1
                for site, mapping, norm, name in (
                    (
                        layer.self_attention_hyper_connection,
                        "attention mHC mapping",
                        layer.input_layernorm,
                        "attention norm",
                    ),
                    (layer.mlp_hyper_connection, "MLP mHC mapping", layer.pre_mlp_layernorm, "MLP norm"),
                ):
                    note(
                        site,
                        layer_stage(number, mapping),
                        lambda args, out: _coefficients(out[1].squeeze(1), out[2].squeeze(1)),
                    )
                    note(norm, layer_stage(number, name), rows)
                if isinstance(layer.self_attention, DsaAttention):
                    core = layer.self_attention.core_attention
                    sets = partial(_token_sets, core.kpool)
                    note(core.indexer, layer_stage(number, "indexer set"), sets)
                note(layer.self_attention, layer_stage(number, "attention"), rows)
                if layer.is_moe_layer:
                    note(
                        layer.mlp.router,
                        layer_stage(number, "router set"),
                        lambda args, out: _expert_sets(out[1]),
                    )
                note(layer.mlp, layer_stage(number, "MLP"), rows)
                note(layer, layer_stage(number, "streams after MLP"), rows)
                _note_input(hooks, layer.mlp_hyper_connection, layer_stage(number, "streams after attention"), record)
            if chunk.post_process:
                note(chunk.decoder.final_layernorm, Stage(num_layers, 0, "final norm"), rows)
                note(chunk.output_layer, Stage(num_layers, 1, "logits"), rows)
        yield record


def gather_record(record: Record, *, sequence_parallel: bool, vocab_size: int) -> Record:
    """The whole record on every rank: tokens and logit columns from TP ranks, layers from pipeline stages."""
    tp, pp = mpu.get_tensor_model_parallel_group(), mpu.get_pipeline_model_parallel_group()
    whole: Record = {}
    for stage, value in sorted(record.items()):
        shards: list[Any] = [None] * tp.size()
        torch.distributed.all_gather_object(shards, value, group=tp)
        if stage.name == "logits":
            whole[stage] = torch.cat(shards, dim=-1)[:, :vocab_size]
        elif stage.name == "indexer set" or not sequence_parallel:
            whole[stage] = value
        else:
            whole[stage] = torch.cat(shards)
    stages: list[Any] = [None] * pp.size()
    torch.distributed.all_gather_object(stages, whole, group=pp)
    return {stage: value for part in stages for stage, value in part.items()}


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def _coefficients(post: Tensor, mix: Tensor) -> Tensor:
    return torch.cat([post.float(), mix.flatten(1).float()], dim=1)


def _token_sets(kpool: int, args: tuple, pools: Tensor) -> Tensor:
    return expand_pools(pools, args[2], kpool).sort(-1).values


def _expert_sets(routing_map: Tensor) -> Tensor:
    return routing_map.nonzero()[:, 1].view(routing_map.shape[0], -1)


def _note_input(hooks: ExitStack, module: torch.nn.Module, stage: Stage, record: Record) -> None:
    def hook(module: torch.nn.Module, args: tuple) -> None:
        record[stage] = args[0].squeeze(1).float()

    hooks.callback(module.register_forward_pre_hook(hook).remove)


def _note_streams_after_attention(hooks: ExitStack, layer: Any, stage: Stage, record: Record) -> None:
    def hook(module: torch.nn.Module, args: tuple) -> None:
        record[stage] = args[0][0].flatten(1).float()

    hooks.callback(layer.ffn_hc.register_forward_pre_hook(hook).remove)
