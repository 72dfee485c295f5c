"""Hyper-connections in Triton: mapping and collapse in one kernel, write-back in one, and their backward passes.

Everything is fp32 but the streams, the block's input and output, which are rounded once. Products with the mapping's fp32
weight are sums of three bf16 products, one per 8 bits of the weight's 24: as exact as fp32, on the matrix units.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from glm5_next.plugins.kernels import mhc_merge_kernels as merge_kernels
from glm5_next.plugins.kernels import mhc_site_backward as backward_kernels
from glm5_next.plugins.kernels import mhc_site_kernels as site_kernels

# Tokens of a program, channels of a step of its inner product, and the largest number of programs that share the channels.
PRODUCT_TOKENS, PRODUCT_CHANNELS, PRODUCT_SHARES = 64, 64, 4
COEFFICIENT_TOKENS = 8  # of a program of one warp
STREAM_TOKENS, STREAM_CHANNELS = 4, 512  # of a program
TOKEN_CHANNELS = 512  # of a step of a program that has one token
GRAD_TOKENS, GRAD_CHANNELS, GRAD_SHARES = 64, 64, 4


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
        pre = streams.new_empty(tokens, n, dtype=torch.float32)
        # Of each token, for the backward pass: the factor of the norm, and the products of its streams with the weight.
        rstd = streams.new_empty(tokens, dtype=torch.float32)
        products = streams.new_empty(tokens, n * (n + 2), dtype=torch.float32)
        if tokens:
            scales = (alpha_pre, alpha_post, alpha_res)
            of_shares = _products(streams, weight, tokens)
            site_kernels.site_coefficients[(triton.cdiv(tokens, COEFFICIENT_TOKENS),)](
                of_shares,
                bias,
                *scales,
                pre,
                post,
                mix,
                rstd,
                products,
                tokens,
                norm_eps,
                hc_eps,
                len(of_shares),
                n,
                width,
                iterations,
                COEFFICIENT_TOKENS,
                num_warps=1,
            )
            block = _block(width, STREAM_CHANNELS)
            site_kernels.site_collapse[(triton.cdiv(tokens, STREAM_TOKENS), width // block)](
                streams, pre, collapsed, tokens, n, width, STREAM_TOKENS, block, num_warps=4
            )
        ctx.save_for_backward(streams, weight, bias, alpha_pre, alpha_post, alpha_res, pre, rstd, products)
        ctx.settings = settings
        return collapsed, post, mix

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_post: Tensor, grad_mix: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        streams, weight, bias, alpha_pre, alpha_post, alpha_res, pre, rstd, products = ctx.saved_tensors
        n, _, hc_eps, iterations = ctx.settings
        tokens = products.shape[0]
        width = streams.shape[-1] // n
        grad, grad_post, grad_mix = grad.contiguous(), grad_post.contiguous(), grad_mix.contiguous()
        grad_streams = torch.empty_like(streams)
        # Gradients of the coefficients before their activations, scaled ones of the products, and what multiplies the
        # streams themselves (through the norm).
        grad_logits, grad_products = torch.empty_like(products), streams.new_zeros(tokens, 128)
        grad_pre, grad_norm = torch.empty_like(pre), torch.empty_like(rstd)
        of_weight = weight.new_zeros(GRAD_SHARES, *weight.shape)
        if tokens:
            backward_kernels.site_pre_backward[(tokens,)](
                streams, grad, grad_pre, n, width, _block(width, TOKEN_CHANNELS), num_warps=2
            )
            backward_kernels.site_coefficients_backward[(triton.cdiv(tokens, COEFFICIENT_TOKENS),)](
                bias,
                alpha_pre,
                alpha_post,
                alpha_res,
                rstd,
                products,
                grad_pre,
                grad_post,
                grad_mix,
                grad_logits,
                grad_products,
                grad_norm,
                tokens,
                hc_eps,
                n,
                width,
                iterations,
                COEFFICIENT_TOKENS,
                num_warps=1,
            )
            block = _block(width, GRAD_CHANNELS)
            backward_kernels.site_streams_backward[(n * width // block, GRAD_SHARES)](
                streams,
                weight,
                pre,
                grad,
                grad_products,
                grad_norm,
                grad_streams,
                of_weight,
                tokens,
                triton.cdiv(triton.cdiv(tokens, GRAD_SHARES), GRAD_TOKENS),
                n,
                width,
                GRAD_TOKENS,
                block,
                num_warps=8,
                num_stages=3,
            )
        of_scale = (grad_logits * products * rstd.unsqueeze(1)).sum(0).split([n, n, n * n])
        return (
            grad_streams,
            of_weight.sum(0),
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
        block = _block(width, STREAM_CHANNELS)
        if tokens:
            merge_kernels.merge_forward[(triton.cdiv(tokens, STREAM_TOKENS), width // block)](
                streams, output, post, mix, out, tokens, n, width, STREAM_TOKENS, block, num_warps=4
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
            merge_kernels.merge_backward[(tokens,)](
                streams,
                output,
                post,
                mix,
                grad.contiguous(),
                *grads,
                n,
                width,
                _block(width, TOKEN_CHANNELS),
                num_warps=2,
            )
        return grads  # type: ignore[return-value]


def _products(streams: Tensor, weight: Tensor, tokens: int) -> Tensor:
    """Sums of squares and products with the weight, of each share of the channels: [shares, tokens, 32]."""
    outputs, inputs = weight.shape
    block = _block(inputs, PRODUCT_CHANNELS)
    parts = streams.new_empty(96, inputs)
    site_kernels.split_weight[(inputs // block,)](weight, parts, outputs, inputs, block, num_warps=4)
    shares = _block(inputs // block, PRODUCT_SHARES)
    found = streams.new_empty(shares, tokens, 32, dtype=torch.float32)
    site_kernels.site_products[(triton.cdiv(tokens, PRODUCT_TOKENS), shares)](
        streams, parts, found, tokens, inputs, inputs // shares, PRODUCT_TOKENS, block, num_warps=4, num_stages=4
    )
    return found


def _block(width: int, largest: int) -> int:
    """The largest power of two up to `largest` that divides the width."""
    return min(largest, width & -width)
