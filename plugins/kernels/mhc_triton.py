"""Hyper-connections in Triton: mapping and collapse in one kernel, write-back in one, and their backward passes.

Everything is fp32 but the streams, the block's input and output, which are rounded once. Products with the mapping's fp32
weight are sums of three bf16 products, one per 8 bits of the weight's 24: as exact as fp32, on the matrix units.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from glm5_next.plugins.kernels import mhc_kernels as kernels

SITE_TOKENS, SITE_CHANNELS = 32, 128  # per program, and per step of the mapping's inner product
MERGE_TOKENS, MERGE_CHANNELS = 4, 512
GRAD_TOKENS, GRAD_CHANNELS, GRAD_SPLITS = 32, 128, 4


def mhc_site(
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
    """`kernels.mhc_site`."""
    settings = (num_streams, norm_eps, hc_eps, iterations)
    return _Site.apply(streams, weight, bias, *scales, settings)


def mhc_merge(streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """`kernels.mhc_merge`."""
    return _Merge.apply(streams, output, post, mix)


class _Site(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        streams: Tensor,
        weight: Tensor,
        bias: Tensor,
        alpha_pre: Tensor,
        alpha_post: Tensor,
        alpha_res: Tensor,
        settings: tuple[int, float, float, int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        n, norm_eps, hc_eps, iterations = settings
        streams, weight = streams.contiguous(), weight.contiguous()
        shape, width = streams.shape[:-1], streams.shape[-1] // n
        tokens = streams.numel() // (n * width)
        collapsed = streams.new_empty(*shape, width)
        post, mix = (streams.new_empty(*shape, *size, dtype=torch.float32) for size in ((n,), (n, n)))
        # Of each token, for the backward pass: the factor of the norm, and the products of its streams with the weight.
        rstd = streams.new_empty(tokens, dtype=torch.float32)
        products = streams.new_empty(tokens, n * (n + 2), dtype=torch.float32)
        if tokens:
            kernels.site_forward[(triton.cdiv(tokens, SITE_TOKENS),)](
                streams,
                weight,
                bias,
                alpha_pre,
                alpha_post,
                alpha_res,
                collapsed,
                post,
                mix,
                rstd,
                products,
                tokens,
                norm_eps,
                hc_eps,
                n,
                width,
                iterations,
                SITE_TOKENS,
                _block(width, SITE_CHANNELS),
                num_warps=4,
                num_stages=3,
            )
        ctx.save_for_backward(streams, weight, bias, alpha_pre, alpha_post, alpha_res, rstd, products)
        ctx.settings = settings
        return collapsed, post, mix

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_post: Tensor, grad_mix: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        streams, weight, bias, alpha_pre, alpha_post, alpha_res, rstd, products = ctx.saved_tensors
        n, _, hc_eps, iterations = ctx.settings
        tokens = products.shape[0]
        width = streams.shape[-1] // n
        grad, grad_post, grad_mix = grad.contiguous(), grad_post.contiguous(), grad_mix.contiguous()
        grad_streams = torch.empty_like(streams)
        # Gradients of the coefficients before their activations, scaled ones of the products, and what multiplies the
        # streams themselves (through the norm).
        grad_logits, grad_products = torch.empty_like(products), torch.empty_like(products)
        pre, grad_norm = products.new_empty(tokens, n), torch.empty_like(rstd)
        parts = weight.new_zeros(GRAD_SPLITS, *weight.shape)
        if tokens:
            kernels.site_coefficients_backward[(triton.cdiv(tokens, MERGE_TOKENS),)](
                streams,
                bias,
                alpha_pre,
                alpha_post,
                alpha_res,
                rstd,
                products,
                grad,
                grad_post,
                grad_mix,
                pre,
                grad_logits,
                grad_products,
                grad_norm,
                tokens,
                hc_eps,
                n,
                width,
                iterations,
                MERGE_TOKENS,
                _block(width, MERGE_CHANNELS),
                num_warps=4,
            )
            block = _block(width, GRAD_CHANNELS)
            kernels.site_streams_backward[(n * width // block, GRAD_SPLITS)](
                streams,
                weight,
                pre,
                grad,
                grad_products,
                grad_norm,
                grad_streams,
                parts,
                tokens,
                triton.cdiv(triton.cdiv(tokens, GRAD_SPLITS), GRAD_TOKENS),
                n,
                width,
                GRAD_TOKENS,
                block,
                num_warps=4,
                num_stages=2,
            )
        of_scale = (grad_logits * products * rstd.unsqueeze(1)).sum(0).split([n, n, n * n])
        return (
            grad_streams,
            parts.sum(0),
            grad_logits.sum(0).to(bias.dtype),
            *(part.sum().view(1) for part in of_scale),
            None,
        )


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        streams, output, post, mix = (x.contiguous() for x in (streams, output, post, mix))
        n, width = post.shape[-1], output.shape[-1]
        out, tokens = torch.empty_like(streams), output.numel() // width
        block = _block(width, MERGE_CHANNELS)
        if tokens:
            kernels.merge_forward[(triton.cdiv(tokens, MERGE_TOKENS), width // block)](
                streams, output, post, mix, out, tokens, n, width, MERGE_TOKENS, block, num_warps=4
            )
        ctx.save_for_backward(streams, output, post, mix)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # type: ignore[override]
        streams, output, post, mix = ctx.saved_tensors
        n, width = post.shape[-1], output.shape[-1]
        tokens = output.numel() // width
        grads = tuple(torch.empty_like(x) for x in (streams, output, post, mix))
        if tokens:
            kernels.merge_backward[(triton.cdiv(tokens, MERGE_TOKENS),)](
                streams,
                output,
                post,
                mix,
                grad.contiguous(),
                *grads,
                tokens,
                n,
                width,
                MERGE_TOKENS,
                _block(width, MERGE_CHANNELS),
                num_warps=4,
            )
        return grads  # type: ignore[return-value]


def _block(width: int, largest: int) -> int:
    """The largest power of two up to `largest` that divides the width."""
    return min(largest, width & -width)
