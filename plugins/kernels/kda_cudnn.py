"""Kimi delta attention on Hopper with the cuDNN frontend's kernels (1.32.0), which take activated inputs."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5_next.plugins.documents import Documents
from glm5_next.plugins.kernels.kda_triton import activate

PLAN = "kda_hopper_cuda"  # by name: another engine of the frontend would be an error, not a quiet replacement
# The kernels read and write an fp32 state per document and head, 4 MiB a document of 64 heads: rows of many documents
# are computed some documents at a time.
MAX_DOCUMENTS = 64
MAX_PLANS = 64  # one per (tokens, documents); the frontend never forgets one by itself


def missing() -> str | None:
    """What the kernels' compilation on first use would lack, or None."""
    try:
        from cudnn.linear_attention.cake.compiler import CakeCompileError, cuda_include_dirs
    except ImportError as error:
        return f"{error}; install a complete nvidia-cudnn-frontend[cutedsl]==1.32.0"
    try:
        folders = [Path(folder) for folder in cuda_include_dirs()]
    except CakeCompileError as error:
        return str(error)
    if any((folder / "crt/mma.h").is_file() for folder in folders):
        return None
    return f"crt/mma.h is not in {folders[0]}; install nvidia-cuda-crt or set CUDA_HOME to a CUDA toolkit"


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    beta: Tensor,
    documents: Documents,
    *,
    lower_bound: float,
) -> Tensor:
    """`kernels.kda`.

    The gate's gradient is a difference of sums rounded to bf16. Where decays are near their bound it is small against them
    and loses digits: relative error 2e-2 at a mean decay of e^-2.5 a token (FLA: 4e-3), 7e-3 at e^-0.1 (FLA: 7e-3), unbiased.
    """
    q, k, decay, beta = activate(q, k, gate, beta, A_log, dt_bias, lower_bound)
    groups = documents.groups(MAX_DOCUMENTS)
    if len(groups) == 1:
        return _DeltaRule.apply(q, k, v, decay, beta, groups[0].cu_seqlens)
    sizes = [group.num_tokens for group in groups]
    parts = zip(*(x.split(sizes) for x in (q, k, v, decay, beta)), groups)
    return torch.cat([_DeltaRule.apply(*part, group.cu_seqlens) for *part, group in parts])


class _DeltaRule(torch.autograd.Function):
    """States go in and out explicitly: for those it makes itself, the frontend keeps buffers for every shape it ever saw."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor) -> Tensor:
        from cudnn.linear_attention.ops import kda as frontend

        v = v.contiguous()
        _forget(frontend.fprop_cache)
        out, _, _ = torch.ops.cudnn.kimi_delta_attention_fwd(
            q,
            k,
            v,
            g,
            beta,
            cu_seqlens,
            q.shape[-1] ** -0.5,
            initial_state=_empty_states(q, cu_seqlens),
            output_final_state=True,
            plan_name=PLAN,
        )
        ctx.save_for_backward(q, k, v, g, beta, cu_seqlens)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from cudnn.linear_attention.ops import kda as frontend

        q, k, v, g, beta, cu_seqlens = ctx.saved_tensors
        _forget(frontend.bprop_cache)
        states = _empty_states(q, cu_seqlens)
        grads = torch.ops.cudnn.kimi_delta_attention_bwd(
            grad.contiguous(),
            q,
            k,
            v,
            g,
            beta,
            cu_seqlens,
            q.shape[-1] ** -0.5,
            initial_state=states,
            d_final_state=states,
            plan_name=PLAN,
        )
        return *grads[:5], None


def _empty_states(q: Tensor, cu_seqlens: Tensor) -> Tensor:
    heads, width = q.shape[1:]
    return q.new_zeros(len(cu_seqlens) - 1, heads, width, width, dtype=torch.float32)


def _forget(plans: dict) -> None:
    if len(plans) >= MAX_PLANS:
        plans.clear()
