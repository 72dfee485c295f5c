"""The KDA layers' operators from flash-linear-attention (0.6.0)."""

import os

import torch
from torch import Tensor

from glm5_next.plugins.documents import Documents
from glm5_next.plugins.kernels.fla_tuning import use_tuned_configurations

# With TileLang installed, FLA would take another backward kernel than the one tested here, compiled on first use.
os.environ.setdefault("FLA_TILELANG", "0")
if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    use_tuned_configurations()

from fla.modules.causal_conv1d import causal_conv1d
from fla.modules.norm.fused_norm_gate import rms_norm_gated
from fla.ops.kda import chunk_kda


def short_convolution(x: Tensor, weight: Tensor, documents: Documents) -> Tensor:
    """`naive.short_convolution`. x may be a slice of wider rows; the result is contiguous."""
    out, _ = causal_conv1d(
        x=x.unsqueeze(0),
        weight=weight.contiguous(),
        activation="silu",
        cu_seqlens=documents.unchanged_cu_seqlens(),
        cu_seqlens_cpu=documents.cu_seqlens_cpu,
    )
    return out.squeeze(0)


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
    """`kernels.kda`; q and k are rounded to their dtype once they are normalised."""
    out, _ = chunk_kda(
        *(x.unsqueeze(0) for x in (q, k, v, gate, beta)),
        A_log=A_log,
        dt_bias=dt_bias,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=lower_bound,
        cu_seqlens=documents.unchanged_cu_seqlens(),
        cu_seqlens_cpu=documents.cu_seqlens_cpu,
    )
    return out.squeeze(0)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`naive.gated_rms_norm`."""
    return rms_norm_gated(x, gate, weight, None, activation="sigmoid", eps=eps)
