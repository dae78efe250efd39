"""q and k of unit length: y = x / sqrt(sum x^2 + 1e-6) over the channels, summed in fp32, both in one launch."""
from __future__ import annotations

import helion.language as hl
import torch

from ._aot import kernel
from ._host import last_contiguous


@kernel()
def l2norm_fwd_kernel(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """y = r x with r = 1 / sqrt(sum x^2 + 1e-6), for q and k.

    q, k [B,T,H,K] -> y of each, contiguous, same shape and dtype.  One program a tile of tokens of one head.
    """
    B, T, H, K = q.size()
    K = hl.specialize(K)
    yq = torch.empty([B, T, H, K], dtype=q.dtype, device=q.device)
    yk = torch.empty([B, T, H, K], dtype=k.dtype, device=k.device)
    BT = hl.register_block_size(1, 64)
    for tile_bh, tile_t in hl.tile([B * H, T], block_size=[1, BT]):
        i_b = tile_bh.begin // H
        i_h = tile_bh.begin % H
        b_q = q[i_b, tile_t, i_h, :].to(torch.float32)
        b_k = k[i_b, tile_t, i_h, :].to(torch.float32)
        yq[i_b, tile_t, i_h, :] = (b_q * torch.rsqrt(torch.sum(b_q * b_q, 1) + 1e-6)[:, None]).to(yq.dtype)
        yk[i_b, tile_t, i_h, :] = (b_k * torch.rsqrt(torch.sum(b_k * b_k, 1) + 1e-6)[:, None]).to(yk.dtype)
    return yq, yk


@kernel()
def l2norm_bwd_kernel(
    q: torch.Tensor, k: torch.Tensor, dyq: torch.Tensor, dyk: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx = r (dy - r^2 (x . dy) x) with r = 1 / sqrt(sum x^2 + 1e-6), for q and k.

    q, k, dyq, dyk [B,T,H,K] -> dq, dk, contiguous, same shape and dtype.  One program a tile of tokens of one head.
    """
    B, T, H, K = q.size()
    K = hl.specialize(K)
    dq = torch.empty([B, T, H, K], dtype=q.dtype, device=q.device)
    dk = torch.empty([B, T, H, K], dtype=k.dtype, device=k.device)
    BT = hl.register_block_size(1, 64)
    for tile_bh, tile_t in hl.tile([B * H, T], block_size=[1, BT]):
        i_b = tile_bh.begin // H
        i_h = tile_bh.begin % H
        b_q = q[i_b, tile_t, i_h, :].to(torch.float32)
        b_dq = dyq[i_b, tile_t, i_h, :].to(torch.float32)
        b_r = torch.rsqrt(torch.sum(b_q * b_q, 1) + 1e-6)
        b_dq = b_dq - (b_r * b_r * torch.sum(b_q * b_dq, 1))[:, None] * b_q
        dq[i_b, tile_t, i_h, :] = (b_dq * b_r[:, None]).to(dq.dtype)
        b_k = k[i_b, tile_t, i_h, :].to(torch.float32)
        b_dk = dyk[i_b, tile_t, i_h, :].to(torch.float32)
        b_r = torch.rsqrt(torch.sum(b_k * b_k, 1) + 1e-6)
        b_dk = b_dk - (b_r * b_r * torch.sum(b_k * b_dk, 1))[:, None] * b_k
        dk[i_b, tile_t, i_h, :] = (b_dk * b_r[:, None]).to(dk.dtype)
    return dq, dk


class _L2Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k):
        ctx.save_for_backward(q, k)
        return l2norm_fwd_kernel(q, k)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dyq, dyk):
        return l2norm_bwd_kernel(*ctx.saved_tensors, last_contiguous(dyq), last_contiguous(dyk))


@torch.compiler.disable
def l2norm(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k [B, T, H, K], any strides, over sqrt(sum x^2 + 1e-6) of their channels; differentiable."""
    return _L2Norm.apply(last_contiguous(q), last_contiguous(k))
