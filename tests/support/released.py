"""The first layers of the released model on a GPU: transformers' model with random bf16 weights, and ours with the same."""

import json
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from glm5_next.bridge.reference import disk_views
from glm5_next.launchers.presets import RELEASED_CONFIG
from glm5_next.plugins.chunks import build_chunks
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.expert_products import choose_expert_products
from glm5_next.plugins.megatron_config import TRANSFORMER_ENGINE, megatron_config
from glm5_next.plugins.packed_row import packed_row
from glm5_next.plugins.topology import Topology
from tests.support import tiny

ROW = 8192  # tokens, the default of a training run
LAYERS = 4  # three KDA layers with dense MLPs, a DSA layer with all experts
NO_VISION = {"depth": 1, "hidden_size": 8, "num_heads": 1, "intermediate_size": 8, "projection_intermediate_size": 8}
LAYER_LISTS = ("layer_types", "mlp_layer_types", "indexer_types")


def slice_config() -> Glm5NextConfig:
    return Glm5NextConfig.from_hf(RELEASED_CONFIG).first_layers(LAYERS)


def reference_slice(modeling: ModuleType) -> Any:
    """transformers' model as it would be loaded in bf16: what it keeps in fp32 is created so."""
    raw = json.loads(RELEASED_CONFIG.read_text())
    text = raw.get("text_config", raw) | {"num_hidden_layers": LAYERS}
    text |= {name: text[name][:LAYERS] for name in LAYER_LISTS if name in text}
    config = modeling.Glm5NextConfig(
        text_config=text, vision_config=NO_VISION | {"out_hidden_size": text["hidden_size"]}, dtype="bfloat16"
    )
    config._attn_implementation = config.text_config._attn_implementation = "sdpa"
    config._experts_implementation = config.text_config._experts_implementation = "grouped_mm"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = modeling.Glm5NextForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(before)
    model.model.visual = None
    tiny.randomize(model, tiny.Case())
    return model


def our_slice(reference: torch.nn.Module, **overrides: Any) -> torch.nn.Module:
    """Our model with Transformer Engine's linear layers, behind Megatron's cast module."""
    tiny.start_single_process()
    settings = {"transformer_impl": TRANSFORMER_ENGINE, "perform_initialization": False} | overrides
    config = megatron_config(slice_config(), Topology(), dtype=torch.bfloat16, on_cpu=False, **settings)
    choose_expert_products(config, ROW)
    (chunk,) = build_chunks(config)
    tiny.copy_weights([chunk], slice_config(), disk_views(reference))
    return chunk


def random_tokens(length: int, vocab: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randint(vocab, (1, length), generator=generator, device="cuda")


def row_for(lengths: tuple[int, ...]) -> Any:
    """A packed row of documents of these lengths."""
    return packed_row(torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32))


def our_outputs(chunk: torch.nn.Module, tokens: Tensor, lengths: tuple[int, ...], output_processor: Any) -> Tensor:
    """What the output hook of a training step makes of the last hidden states."""
    positions = torch.arange(tokens.shape[1], device="cuda")[None]
    return chunk(
        tokens,
        positions,
        None,
        packed_seq_params=row_for(lengths),
        output_processor=output_processor,
        output_processor_context=None,
    )


def logits_processor(*, hidden_states: Tensor, output_layer: Any, **unused: Any) -> Tensor:
    """bf16 `[1, T, vocab]`."""
    return output_layer(hidden_states)[0].transpose(0, 1)
