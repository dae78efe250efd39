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


def input_gradient(b_x, b_dy):
    """r (dy - r^2 (x . dy) x) of rows x, dy [BT, K], in x's dtype; zero where dy is, whatever x."""
    b_x32, b_d = b_x.to(torch.float32), b_dy.to(torch.float32)
    b_r = torch.rsqrt(torch.sum(b_x32 * b_x32, 1) + 1e-6)
    b_p = b_r * b_r * torch.sum(b_x32 * b_d, 1)
    b_dx = (b_d - b_p.unsqueeze(1) * b_x32) * b_r.unsqueeze(1)
    none = torch.amax(torch.abs(b_d), 1) == 0.0
    return torch.where(none.unsqueeze(1), 0.0, b_dx).to(b_x.dtype)


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
        dq[i_b, tile_t, i_h, :] = input_gradient(q[i_b, tile_t, i_h, :], dyq[i_b, tile_t, i_h, :])
        dk[i_b, tile_t, i_h, :] = input_gradient(k[i_b, tile_t, i_h, :], dyk[i_b, tile_t, i_h, :])
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
    if not q.numel():
        return q, k
    return _L2Norm.apply(last_contiguous(q), last_contiguous(k))
