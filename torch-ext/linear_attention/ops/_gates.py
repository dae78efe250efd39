"""Sums of gates over the tokens of a chunk, made once for all kernels that read them."""
from __future__ import annotations

import helion.language as hl
import torch

from ._aot import kernel
from ._tile import log2_gate


@kernel()
def gate_cumsum_kernel(g: torch.Tensor, C: hl.constexpr) -> tuple[torch.Tensor, torch.Tensor]:
    """gc, the log2 gate summed from the begin of each chunk of C tokens to a token, and gl, the sum over a chunk.

    g [B,T,H], natural logarithm, any strides -> gc fp32 [B,T,H], gl fp32 [B,NT,H].
    One program a chunk and a tile of heads.  The kernels with matrix products load these sums: a scan in a walk takes a
    dozen barriers a chunk.
    """
    B, T, H = g.size()
    gc = torch.empty([B, T, H], dtype=torch.float32, device=g.device)
    gl = torch.empty([B, (T + C - 1) // C, H], dtype=torch.float32, device=g.device)
    BH = hl.register_block_size(1, 64)
    for tile_b, tile_t, tile_h in hl.tile([B, T, H], block_size=[1, C, BH]):
        b_g = log2_gate(g[tile_b.begin, tile_t, tile_h])
        gc[tile_b.begin, tile_t, tile_h] = torch.cumsum(b_g, 0)
        gl[tile_b.begin, tile_t.begin // C, tile_h] = torch.sum(b_g, 0)
    return gc, gl


@kernel()
def channel_gate_cumsum_kernel(g: torch.Tensor, C: hl.constexpr) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_cumsum_kernel for a gate a channel: g [B,T,H,K] -> gc fp32 [B,T,H,K], gl fp32 [B,NT,H,K]."""
    B, T, H, K = g.size()
    K = hl.specialize(K)
    NT = (T + C - 1) // C
    gc = torch.empty([B, T, H, K], dtype=torch.float32, device=g.device)
    gl = torch.empty([B, NT, H, K], dtype=torch.float32, device=g.device)
    BK = hl.register_block_size(16, K)
    for tile_bh, tile_t, tile_k in hl.tile([B * H, T, K], block_size=[1, C, BK]):
        i_b = tile_bh.begin // H
        i_h = tile_bh.begin % H
        b_g = log2_gate(g[i_b, tile_t, i_h, tile_k])
        b_gc = torch.cumsum(b_g, 0)
        gc[i_b, tile_t, i_h, tile_k] = b_gc
        # the last row of gc, not a sum in another order: gl - gc is exactly 0 there, however strong the gates
        last = (tile_t.index == tile_t.end - 1)[:, None]
        gl[i_b, tile_t.begin // C, i_h, tile_k] = torch.sum(torch.where(last, b_gc, 0.0), 0)
    return gc, gl
