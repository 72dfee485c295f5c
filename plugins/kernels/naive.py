"""Every operator of the model in plain torch: the definitions that all other backends are tested against.

Shape letters: T tokens of a packed row (see `Documents`), H heads, K key and V value width, C latent width,
D hidden size, N residual streams, P pool size, I indexer heads. Arithmetic is fp32 where the model says so, whatever
the dtype that comes in. Source: transformers 5.24 `models/glm5_next`, restated for packed rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5_next.plugins.documents import Documents


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm that rounds to the input dtype BEFORE the weight multiplies, as the reference does."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def clamped_swiglu(gate_up: Tensor, limit: float, weights: Tensor | None = None) -> Tensor:
    """`[..., 2F]` (gate first) -> `[..., F]`: the gate is clipped from above only, up on both sides.

    `weights` (fp32 `[...]`) multiplies each row: a routed expert's combine weight, which Megatron puts before fc2.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    out = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return out if weights is None else (out * weights.unsqueeze(-1)).to(out.dtype)


# --- hyper-connections (mHC) ---


def mhc_mapping(
    streams: Tensor,
    weight: Tensor,
    bias: Tensor,
    scales: tuple[Tensor, Tensor, Tensor],
    *,
    num_streams: int,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing coefficients of one site, all fp32.

    streams `[..., N * D]` stream-major, weight `[N(N+2), N * D]`, bias `[N(N+2)]`, scales (pre, post, res) `[1]` each.
    Returns pre `[..., N]`, post `[..., N]` and mix `[..., N, N]` whose entry [j, k] carries old stream j to new
    stream k. `norm_eps` is inside the root. The softmax is the first row step of Sinkhorn; columns come last.
    """
    x = streams.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)
    n = num_streams
    z_pre, z_post, z_res = F.linear(x, weight.float()).split([n, n, n * n], dim=-1)
    b_pre, b_post, b_res = bias.float().split([n, n, n * n])
    alpha_pre, alpha_post, alpha_res = (scale.float() for scale in scales)
    pre = torch.sigmoid(alpha_pre * z_pre + b_pre) + hc_eps
    post = 2 * torch.sigmoid(alpha_post * z_post + b_post)
    mix = (alpha_res * z_res + b_res).unflatten(-1, (n, n)).softmax(-1) + hc_eps
    mix = mix / (mix.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + hc_eps)
        mix = mix / (mix.sum(-2, keepdim=True) + hc_eps)
    return pre, post, mix


def mhc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """`[..., N * D]` and `[..., N]` -> the block's input `[..., D]`: fp32 sum, rounded once."""
    split = streams.unflatten(-1, (pre.shape[-1], -1)).float()
    return (pre.unsqueeze(-1) * split).sum(-2).to(streams.dtype)


def mhc_merge(streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """Writes a block's output `[..., D]` back: stream k becomes post[k] * output + sum_j mix[j, k] stream[j].

    fp32 mixing, rounded once: what serving engines do (the reference rounds three times in bf16).
    """
    split = streams.unflatten(-1, (post.shape[-1], -1)).float()
    mixed = mix.transpose(-1, -2) @ split
    return (mixed + post.unsqueeze(-1) * output.float().unsqueeze(-2)).flatten(-2).to(streams.dtype)


# --- Kimi delta attention (KDA) ---


def short_convolution(x: Tensor, weight: Tensor, documents: Documents) -> Tensor:
    """Depthwise causal convolution and silu, in fp32: x `[T, channels]`, weight `[channels, taps]`.

    The last tap meets the current token; before a document's first token there are zeros.
    """
    x32, taps = x.float(), weight.shape[-1]
    out = weight[:, -1].float() * x32
    for back in range(1, taps):
        seen = (documents.positions >= back).unsqueeze(-1)
        out = out + weight[:, -1 - back].float() * torch.where(seen, x32.roll(back, 0), 0)
    return F.silu(out).to(x.dtype)


def kda_gate(gate: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """Log decay in (lower_bound, 0), fp32: gate `[T, H, K]`, A_log `[H]`, dt_bias `[H * K]`."""
    bias = dt_bias.float().view(gate.shape[-2:])
    return lower_bound * torch.sigmoid(A_log.float().exp().unsqueeze(-1) * (gate.float() + bias))


def l2_norm(x: Tensor) -> Tensor:
    """Per-head normalisation of q and k, fp32; eps is inside the root."""
    x32 = x.float()
    return x32 / torch.sqrt(x32.square().sum(-1, keepdim=True) + 1e-6)


def kda_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Documents) -> Tensor:
    """The delta rule one token at a time: the definition of KDA.

    q, k `[T, H, K]` normalised and not yet scaled, v `[T, H, V]`, g `[T, H, K]` log decay, beta `[T, H]` in (0, 1).
    Returns `[T, H, V]` in fp32. The state starts at zero in every document.
    """
    slots, counts = documents.chunk_table(1)
    q, k, v, g, beta = (x.float()[slots[:, 0]] for x in (q, k, v, g, beta))
    state = q.new_zeros(counts[0] if counts else 0, *k.shape[1:], v.shape[-1])
    outputs = []
    for q_t, k_t, v_t, g_t, beta_t in zip(*(x.split(counts) for x in (q, k, v, g, beta))):
        state = state[: len(q_t)] * g_t.exp().unsqueeze(-1)
        recalled = torch.einsum("dhk,dhkv->dhv", k_t, state)
        state = state + torch.einsum("dhk,dhv->dhkv", k_t, beta_t.unsqueeze(-1) * (v_t - recalled))
        outputs.append(torch.einsum("dhk,dhkv->dhv", q_t, state))
    return _unchunk(torch.cat(outputs).unsqueeze(1), slots, documents) * q.shape[-1] ** -0.5


def kda_chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Documents, chunk: int = 16
) -> Tensor:
    """The same function, `chunk` tokens at a time: within a chunk the delta rule is one triangular solve.

    16 tokens of decay no stronger than e^-5 keep every factor inside fp32's range (e^80), so the decays can be split
    into a factor for the query and one for the key.
    """
    slots, counts = documents.chunk_table(chunk)
    q, k, v, g, beta = (_chunk(x.float(), slots) for x in (q, k, v, g, beta.unsqueeze(-1)))
    decay = g.double().cumsum(-2)  # fp64: an fp32 sum near -80 would cost five digits of its exponential
    total = decay[..., -1:, :]
    q_in, k_in = q * decay.exp().float(), k * decay.exp().float()
    k_out, k_last = k * (-decay).exp().float(), k * (total - decay).exp().float()
    overlap = (beta * (k_in @ k_out.transpose(-1, -2))).tril(-1)
    solved = torch.linalg.solve_triangular(
        overlap, torch.cat([beta * v, beta * k_in], -1), upper=False, unitriangular=True
    )
    v_own, k_seen = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within = (q_in @ k_out.transpose(-1, -2)).tril()
    keep = total.exp().float().transpose(-1, -2)

    state = q.new_zeros(counts[0] if counts else 0, q.shape[1], q.shape[-1], v.shape[-1])
    outputs = []
    steps = zip(*(x.split(counts) for x in (q_in, k_last, k_seen, v_own, within, keep)))
    for q_in_c, k_last_c, k_seen_c, v_own_c, within_c, keep_c in steps:
        state = state[: len(q_in_c)]
        v_new = v_own_c - k_seen_c @ state
        outputs.append(q_in_c @ state + within_c @ v_new)
        state = keep_c * state + k_last_c.transpose(-1, -2) @ v_new
    return _unchunk(torch.cat(outputs).transpose(1, 2), slots, documents) * q.shape[-1] ** -0.5


def _chunk(x: Tensor, slots: Tensor) -> Tensor:
    """`[T, H, X]` -> `[chunks, H, chunk, X]`, zeros where a chunk runs past its document."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[slots].transpose(1, 2)


def _unchunk(x: Tensor, slots: Tensor, documents: Documents) -> Tensor:
    """`[chunks, chunk, H, X]` -> `[T, H, X]`."""
    out = x.new_zeros(documents.num_tokens + 1, *x.shape[2:])
    return out.index_copy(0, slots.flatten().clamp(max=documents.num_tokens), x.flatten(0, 1))[:-1]


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """KDA's output norm: fp32 to the end, weight and SIGMOID gate included. x, gate `[T, H, V]`, weight `[V]`."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * normed * torch.sigmoid(gate.float())).to(gate.dtype)


# --- sparse latent attention (DSA) ---


def sparse_attention(q: Tensor, latent: Tensor, indices: Tensor, scale: float, block: int = 512) -> Tensor:
    """Attention of absorbed queries over selected latents, which are key and value at once.

    q `[T, H, C]`, latent `[S, C]`, indices `[T, W]` int (-1: unused slot), returns `[T, H, C]`. Softmax in fp32. A row
    without any index gives zeros. `block` queries at a time bound the memory of the gathered latents.
    """
    outputs = []
    for q_b, indices_b in zip(q.split(block), indices.split(block)):
        used = (indices_b >= 0).unsqueeze(1)
        selected = latent[indices_b.clamp(min=0).long()].float()
        scores = torch.einsum("thc,twc->thw", q_b.float(), selected) * scale
        weights = scores.masked_fill(~used, float("-inf")).softmax(-1).nan_to_num(0.0)
        outputs.append(torch.einsum("thw,twc->thc", weights, selected).to(q.dtype))
    return torch.cat(outputs)


# --- k-pool indexer (never differentiated) ---


def pool_keys(keys: Tensor, gate: Tensor, ape: Tensor, documents: Documents) -> Tensor:
    """One key per complete pool: keys, gate `[T, E]`, ape `[P, E]` -> `[pools, E]` fp32.

    The softmax over a pool's members is separate for every channel.
    """
    kpool = ape.shape[0]
    members = documents.pool_starts(kpool)[:, None] + torch.arange(kpool, device=keys.device)
    weights = (gate.float()[members] + ape.float()).softmax(dim=1)
    return (weights * keys.float()[members]).sum(1)


def pool_scores(q: Tensor, head_weights: Tensor, pooled: Tensor) -> Tensor:
    """q `[T, I, E]`, head_weights `[T, I]`, pooled `[pools, E]` -> fp32 `[T, pools]`, of all pools of the row."""
    scores = F.relu(torch.einsum("tie,pe->tip", q.float(), pooled.float()) * q.shape[-1] ** -0.5)
    return torch.einsum("ti,tip->tp", head_weights.float() * q.shape[1] ** -0.5, scores)


def select_pools(scores: Tensor, queries: Tensor, documents: Documents, kpool: int, num_selected: int) -> Tensor:
    """The best complete pools that end at or before each query: int32 `[Tq, num_selected]`, -1 where there are fewer.

    Pools are numbered within their document. `queries` `[Tq]` are the row indices that the rows of `scores` stand for.
    """
    first = documents.first_pools(kpool)[queries].unsqueeze(1)
    visible = (documents.positions[queries].unsqueeze(1) + 1) // kpool
    pool = torch.arange(scores.shape[1], device=scores.device) - first
    scores = scores.masked_fill((pool < 0) | (pool >= visible), float("-inf"))
    best = scores.topk(min(num_selected, scores.shape[1]), dim=-1)
    chosen = (best.indices - first).masked_fill(best.values == float("-inf"), -1)
    return F.pad(chosen, (0, num_selected - chosen.shape[1]), value=-1).int()


def expand_pools(pools: Tensor, documents: Documents, kpool: int) -> Tensor:
    """Pools of each query -> row indices of its tokens: int32 `[T, num_selected * P + P - 1]`, -1 unused.

    The query's own incomplete pool (the tail, itself included) is always selected.
    """
    starts, position = documents.starts[:, None], documents.positions[:, None]
    member = torch.arange(kpool, device=pools.device)
    tokens = (starts + pools.long() * kpool)[..., None] + member
    tokens = tokens.masked_fill((pools < 0)[..., None], -1).flatten(1)
    tail = (position + 1) // kpool * kpool + member[:-1]
    tail = torch.where(tail <= position, starts + tail, -1)
    return torch.cat([tokens, tail], dim=1).int()
