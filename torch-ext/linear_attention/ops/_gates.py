"""Sums of gates over the tokens of a chunk, made once for all kernels that read them."""
from __future__ import annotations

import helion.language as hl
import torch

from ._aot import kernel
from ._sequences import chunk, chunk_count
from ._tile import LOG2_E, log2_gate


def last_row(b_x, C):
    """The last row of a [C, D] tile: [D]."""
    return torch.sum(torch.where((hl.arange(C) == C - 1)[:, None], b_x, 0.0), 0)


@kernel()
def gate_cumsum_kernel(g: torch.Tensor, chunks: torch.Tensor | None, C: hl.constexpr) -> torch.Tensor:
    """gc, the log2 gate summed from the begin of each chunk of C tokens to a token; the last sum after a sequence.

    g [B,T,H], natural logarithm, any strides, chunks: `_sequences.py` -> gc fp32 [B,H,T].
    One program a chunk and a tile of heads.  The kernels with matrix products load these sums: a scan in a walk takes a
    dozen barriers a chunk.
    """
    B, T, H = g.size()
    NT = chunk_count(chunks, C, T)
    gc = torch.empty([B, H, T], dtype=torch.float32, device=g.device)
    BH = hl.register_block_size(1, 64)
    for tile_h, tile_b, tile_c in hl.tile([H, B, NT], block_size=[BH, 1, 1]):
        begin, end, fill = chunk(chunks, tile_c.begin, C, T)
        i_t = hl.arange(C) + begin
        b_g = log2_gate(hl.load(g, [tile_b.begin, i_t, tile_h], extra_mask=(i_t < end)[:, None]))
        b_gc = torch.cumsum(b_g, 0)
        hl.store(gc, [tile_b.begin, tile_h, i_t], b_gc.transpose(0, 1), extra_mask=(i_t < fill)[None, :])
    return gc


@kernel()
def head_decay_kernel(q: torch.Tensor, chunks: torch.Tensor | None, C: hl.constexpr) -> torch.Tensor:
    """gc of gate_cumsum_kernel where head h decays by 1 - 2^(-5 - h) a token: fp32 [B,H,T] for q [B,T,H,K]."""
    B, T, H, K = q.size()
    NT = chunk_count(chunks, C, T)
    gc = torch.empty([B, H, T], dtype=torch.float32, device=q.device)
    BH = hl.register_block_size(1, 64)
    for tile_h, tile_b, tile_c in hl.tile([H, B, NT], block_size=[BH, 1, 1]):
        begin, end, fill = chunk(chunks, tile_c.begin, C, T)
        i_t = hl.arange(C) + begin
        b_n = torch.clamp(torch.clamp(i_t, max=end - 1) - begin + 1, min=0).to(torch.float32)  # tokens that count
        b_g = torch.log1p(-torch.exp2(-5.0 - tile_h.index.to(torch.float32))) * LOG2_E
        hl.store(gc, [tile_b.begin, tile_h, i_t], b_g[:, None] * b_n[None, :], extra_mask=(i_t < fill)[None, :])
    return gc


def natural_gate(b_x, b_rate, lower_bound):
    """The natural-log gate of x, which is g + dt_bias, fp32 [C, BK]; the rate is exp(A_log) of the head."""
    if lower_bound is None:
        return -b_rate * (torch.clamp(b_x, min=0.0) + torch.log1p(torch.exp(-torch.abs(b_x))))
    return lower_bound * torch.sigmoid(b_rate * b_x)


def gate_slopes(b_x, b_rate, lower_bound):
    """What natural_gate gains for each unit of x, and for each of A_log."""
    if lower_bound is None:
        return -b_rate * torch.sigmoid(b_x), natural_gate(b_x, b_rate, None)
    b_s = torch.sigmoid(b_rate * b_x)
    b_slope = lower_bound * b_s * (1.0 - b_s) * b_rate
    return b_slope, b_slope * b_x


@kernel()
def channel_gate_cumsum_kernel(
    g: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, chunks: torch.Tensor | None,
    lower_bound: float | None, C: hl.constexpr, activate: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_cumsum_kernel for a gate a channel: g [B,T,H,K] -> gc fp32 [B,T,H,K], gl fp32 [B,NT,H,K].

    With activate g is natural_gate(g + dt_bias, A_log, lower_bound); A_log [H], dt_bias [H,K].
    """
    B, T, H, K = g.size()
    K = hl.specialize(K)
    NT = chunk_count(chunks, C, T)
    gc = torch.empty([B, T, H, K], dtype=torch.float32, device=g.device)
    gl = torch.empty([B, NT, H, K], dtype=torch.float32, device=g.device)
    BK = hl.register_block_size(16, K)
    for tile_k, tile_bh, tile_c in hl.tile([K, B * H, NT], block_size=[BK, 1, 1]):
        i_b = tile_bh.begin // H
        i_h = tile_bh.begin % H
        begin, end, fill = chunk(chunks, tile_c.begin, C, T)
        i_t = hl.arange(C) + begin
        live = (i_t < end)[:, None]
        b_g = hl.load(g, [i_b, i_t, i_h, tile_k], extra_mask=live).to(torch.float32)
        if activate:
            if dt_bias is not None:
                b_g = b_g + dt_bias[i_h, tile_k].to(torch.float32)[None, :]
            if A_log is None:
                b_g = natural_gate(b_g, 1.0, lower_bound)
            else:
                b_g = natural_gate(b_g, torch.exp(A_log[i_h].to(torch.float32)), lower_bound)
            b_g = torch.where(live, b_g, 0.0)
        b_gc = torch.cumsum(log2_gate(b_g), 0)
        hl.store(gc, [i_b, i_t, i_h, tile_k], b_gc, extra_mask=(i_t < fill)[:, None])
        gl[i_b, tile_c.begin, i_h, tile_k] = last_row(b_gc, C)
    return gc, gl


@kernel()
def channel_gate_bwd_kernel(
    g: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, dgate: torch.Tensor,
    lower_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Back through natural_gate: dg, and the gradients of A_log and dt_bias in parts, of 64 tokens and a channel each.

    g [B,T,H,K], A_log [H], dt_bias [H,K], dgate fp32 [B,T,H,K] -> dg as g, two fp32 [B,NP,H,K].
    Where dgate is 0 so is what comes of it, whatever g.  One program a head, 64 tokens and a K tile.
    """
    B, T, H, K = g.size()
    K = hl.specialize(K)
    NP = (T + 63) // 64
    dg = torch.empty([B, T, H, K], dtype=g.dtype, device=g.device)
    dA_log = torch.empty([B, NP, H, K], dtype=torch.float32, device=g.device)
    ddt_bias = torch.empty([B, NP, H, K], dtype=torch.float32, device=g.device)
    BK = hl.register_block_size(16, K)
    for tile_k, tile_bh, tile_p in hl.tile([K, B * H, NP], block_size=[BK, 1, 1]):
        i_b = tile_bh.begin // H
        i_h = tile_bh.begin % H
        i_t = tile_p.begin * 64 + hl.arange(64)
        rows = (i_t < T)[:, None]
        b_x = hl.load(g, [i_b, i_t, i_h, tile_k], extra_mask=rows).to(torch.float32)
        if dt_bias is not None:
            b_x = b_x + dt_bias[i_h, tile_k].to(torch.float32)[None, :]
        b_dgate = hl.load(dgate, [i_b, i_t, i_h, tile_k], extra_mask=rows)
        if A_log is None:
            b_dx, b_drate = gate_slopes(b_x, 1.0, lower_bound)
        else:
            b_dx, b_drate = gate_slopes(b_x, torch.exp(A_log[i_h].to(torch.float32)), lower_bound)
        b_dx = torch.where(b_dgate == 0.0, 0.0, b_dgate * b_dx)
        b_drate = torch.where(b_dgate == 0.0, 0.0, b_dgate * b_drate)
        hl.store(dg, [i_b, i_t, i_h, tile_k], b_dx.to(dg.dtype), extra_mask=rows)
        dA_log[i_b, tile_p.begin, i_h, tile_k] = torch.sum(b_drate, 0)
        ddt_bias[i_b, tile_p.begin, i_h, tile_k] = torch.sum(b_dx, 0)
    return dg, dA_log, ddt_bias
