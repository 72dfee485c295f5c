"""The multi-token-prediction layer as an oracle: transformers has none, so its parts are put together by the equations.

    u_t = W_eh [ norm_e(E[token_{t+1}]) ; norm_h(h_t) ],   u += attention(norm(u)),   u += MoE(norm(u)),
    logits for token_{t+2} = W_head norm_s(u_t)

h_t is the trunk's output after its last norm. Attention, MoE and norms are transformers' own modules.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm5_next.bridge.reference import import_modeling
from tests.support import tiny
from tests.support.tiny import Case

CASE = Case(layers=5, dsa_layers=(3,), mtp=True)
LOSS_SCALE = 0.1  # Megatron's default


def reference_with_mtp(case: Case) -> Any:
    """transformers' model with one layer more, whose attention and MoE are the multi-token-prediction layer's.

    The names of its state are those on disk.
    """
    model = tiny.reference_model(replace(case, layers=case.layers + 1, dsa_layers=(3, case.layers), mtp=False))
    norm, trunk = import_modeling().Glm5NextTextRMSNorm, model.model.language_model
    layer, width, eps = trunk.layers[case.layers], trunk.config.hidden_size, trunk.config.rms_norm_eps
    layer.enorm, layer.hnorm, layer.shared_head = norm(width, eps), norm(width, eps), nn.Module()
    layer.shared_head.norm = norm(width, eps)
    layer.eh_proj = nn.Linear(2 * width, width, bias=False)
    del layer.attn_hc, layer.ffn_hc
    tiny.randomize(model, case)
    trunk.config.num_hidden_layers = case.layers
    return model


def reference_logits(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """`[1, T]` -> logits of the next and of the second next token, `[T, vocab]` each."""
    trunk = model.model.language_model
    layer = trunk.layers[trunk.config.num_hidden_layers]
    hidden = trunk(input_ids=ids).last_hidden_state
    following = F.pad(ids[:, 1:], (0, 1))
    u = layer.eh_proj(torch.cat([layer.enorm(trunk.embed_tokens(following)), layer.hnorm(hidden)], dim=-1))
    visible = torch.ones_like(ids, dtype=torch.bool)
    u = u + layer.self_attn(hidden_states=layer.input_layernorm(u), attention_mask=visible)[0]
    u = u + layer.mlp(layer.post_attention_layernorm(u))
    return model.lm_head(hidden)[0], model.lm_head(layer.shared_head.norm(u))[0]


def total_loss(logits: Tensor, second: Tensor, ids: Tensor) -> Tensor:
    """Summed over tokens; the second loss counts as if it had as many tokens as the first."""
    first = F.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum")
    other = F.cross_entropy(second[:-2], ids[0, 2:], reduction="mean")
    return first + LOSS_SCALE * other * (ids.shape[1] - 1)
