"""The walks of the delta family along the chunks of a sequence, over operands that carry their gates already.

A chunk of C tokens has, from its preparation, qg = 2^gc q, kg = 2^(gl - gc) k, [w, u] = X beta [2^gc k, v] and the
scores A, where gc is the cumulative log2 gate in the chunk, gl its last value and X the inverse of the chunk's unit
lower triangular matrix.  With S the state at the chunk's begin and D the gradient of the state at its end:

    n = u - w S            o = scale (qg S + A n)                S' = 2^gl S + kg^T n
    dn = scale A^T do + kg D                                     D' = 2^gl D + scale qg^T do - w^T dn

The walk back keeps D and dn without rest, where scale is unit times rest (`split_scale`).
Each kernel runs one program for a sequence, value head and tile of V, with the state transposed on chip, [BV, K] in
fp32: so the state and the corrected values n are first operands, which stay in registers.  Without a gate gl is None.
"""
from __future__ import annotations

import helion.language as hl
import torch

from ._aot import kernel
from ._sequences import all_chunks, sequence, sequence_count, unless_empty
from ._tile import in_range


@kernel(dot_precision="tf32x3")
def delta_fwd_o_kernel(
    qg: torch.Tensor, kg: torch.Tensor, w: torch.Tensor, u: torch.Tensor, A: torch.Tensor,
    gl: torch.Tensor | None, h0: torch.Tensor | None, sequences: torch.Tensor | None, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o = scale (qg S + A n) with n = u - w S, and the final state, in one walk.

    qg, kg, w [B,T,HV,K], u [B,T,HV,V], A [B,T,HV,C], gl fp32 [B,NT,HV,K], h0 [N,HV,K,V]
    -> o as u, ht fp32 [N,HV,K,V].
    """
    B, T, HV, K = w.size()
    K, V, C = hl.specialize((K, u.size(3), A.size(3)))
    o = torch.empty([B, T, HV, V], dtype=u.dtype, device=u.device)
    N = sequence_count(sequences, B)
    ht = torch.empty([N, HV, K, V], dtype=torch.float32, device=u.device)
    BV = hl.register_block_size(16, V)
    for tile_v, tile_nh in hl.tile([V, N * HV], block_size=[BV, 1]):
        i_n = tile_nh.begin // HV
        i_h = tile_nh.begin % HV
        i_b, first, count, begin, end, fill = sequence(sequences, i_n, C, T)
        if h0 is None:
            b_S = hl.zeros([tile_v, K], dtype=torch.float32)
        else:
            b_S = h0[i_n, i_h, :, tile_v].to(torch.float32).transpose(0, 1)
        for i_c in hl.grid(count):
            i_t = hl.arange(C) + i_c * C + begin
            i_k = hl.arange(K)
            live = (i_t < end)[:, None]
            written = (i_t < fill)[:, None]
            b_w = hl.load(w, [i_b, i_t, i_h, i_k], extra_mask=live)
            b_s = in_range(b_S, w.dtype)
            b_n = hl.load(u, [i_b, i_t, i_h, tile_v], extra_mask=live).transpose(0, 1).to(torch.float32)
            b_n = in_range(b_n - hl.dot(b_s, b_w.transpose(0, 1), out_dtype=torch.float32), w.dtype)
            b_q = hl.load(qg, [i_b, i_t, i_h, i_k], extra_mask=live)
            b_o = hl.dot(b_s, b_q.transpose(0, 1), out_dtype=torch.float32)
            b_A = hl.load(A, [i_b, i_t, i_h, hl.arange(C)], extra_mask=live)
            b_o = hl.dot(b_n, b_A.transpose(0, 1), acc=b_o) * scale
            hl.store(o, [i_b, i_t, i_h, tile_v], b_o.to(o.dtype).transpose(0, 1), extra_mask=written)
            if gl is not None:
                b_S = b_S * torch.exp2(gl[i_b, first + i_c, i_h, :])[None, :]
            b_k = hl.load(kg, [i_b, i_t, i_h, i_k], extra_mask=live)
            b_S = hl.dot(b_n, b_k, acc=b_S)
        ht[i_n, i_h, :, tile_v] = b_S.transpose(0, 1)
    return o, ht


@kernel(dot_precision="tf32x3")
def delta_fwd_state_kernel(
    kg: torch.Tensor, w: torch.Tensor, u: torch.Tensor, gl: torch.Tensor | None, h0: torch.Tensor | None,
    sequences: torch.Tensor | None, C: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state S at every chunk's begin and the corrected values n = u - w S, for the backward.

    kg, w [B,T,HV,K], u [B,T,HV,V], gl fp32 [B,NT,HV,K], h0 [N,HV,K,V] -> S [B,NT,HV,K,V] in u's dtype, n as u.
    """
    B, T, HV, K = w.size()
    K, V = hl.specialize((K, u.size(3)))
    N = sequence_count(sequences, B)
    S = torch.empty([B, all_chunks(sequences, C, T), HV, K, V], dtype=u.dtype, device=u.device)
    n = torch.empty([B, T, HV, V], dtype=u.dtype, device=u.device)
    BV = hl.register_block_size(16, V)
    for tile_v, tile_nh in hl.tile([V, N * HV], block_size=[BV, 1]):
        i_n = tile_nh.begin // HV
        i_h = tile_nh.begin % HV
        i_b, first, count, begin, end, fill = sequence(sequences, i_n, C, T)
        if h0 is None:
            b_S = hl.zeros([tile_v, K], dtype=torch.float32)
        else:
            b_S = h0[i_n, i_h, :, tile_v].to(torch.float32).transpose(0, 1)
        for i_c in hl.grid(count):
            i_t = hl.arange(C) + i_c * C + begin
            i_k = hl.arange(K)
            live = (i_t < end)[:, None]
            written = (i_t < fill)[:, None]
            b_w = hl.load(w, [i_b, i_t, i_h, i_k], extra_mask=live)
            b_s = in_range(b_S, w.dtype)
            S[i_b, first + i_c, i_h, :, tile_v] = b_s.transpose(0, 1)
            b_n = hl.load(u, [i_b, i_t, i_h, tile_v], extra_mask=live).transpose(0, 1).to(torch.float32)
            b_n = in_range(b_n - hl.dot(b_s, b_w.transpose(0, 1), out_dtype=torch.float32), w.dtype)
            hl.store(n, [i_b, i_t, i_h, tile_v], b_n.transpose(0, 1), extra_mask=written)
            if gl is not None:
                b_S = b_S * torch.exp2(gl[i_b, first + i_c, i_h, :])[None, :]
            b_k = hl.load(kg, [i_b, i_t, i_h, i_k], extra_mask=live)
            b_S = hl.dot(b_n, b_k, acc=b_S)
    return S, n


@kernel(dot_precision="tf32x3")
def delta_bwd_state_kernel(
    qg: torch.Tensor, kg: torch.Tensor, w: torch.Tensor, A: torch.Tensor, do: torch.Tensor,
    gl: torch.Tensor | None, dht: torch.Tensor | None, sequences: torch.Tensor | None, unit: float, rest: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient D of the state at every chunk's end, dn = scale A^T do + kg D, and dh0, in one walk back.

    qg, kg, w [B,T,HV,K], A [B,T,HV,C], do [B,T,HV,V], gl fp32 [B,NT,HV,K], dht [N,HV,K,V]
    -> D [B,NT,HV,K,V] without rest in do's dtype, dn as do, dh0 fp32 [N,HV,K,V].
    """
    B, T, HV, K = w.size()
    K, V, C = hl.specialize((K, do.size(3), A.size(3)))
    N = sequence_count(sequences, B)
    D = torch.empty([B, all_chunks(sequences, C, T), HV, K, V], dtype=do.dtype, device=do.device)
    dn = torch.empty([B, T, HV, V], dtype=do.dtype, device=do.device)
    dh0 = torch.empty([N, HV, K, V], dtype=torch.float32, device=do.device)
    BV = hl.register_block_size(16, V)
    for tile_v, tile_nh in hl.tile([V, N * HV], block_size=[BV, 1]):
        i_n = tile_nh.begin // HV
        i_h = tile_nh.begin % HV
        i_b, first, count, begin, end, fill = sequence(sequences, i_n, C, T)
        if dht is None:
            b_D = hl.zeros([tile_v, K], dtype=torch.float32)
        else:
            b_D = dht[i_n, i_h, :, tile_v].to(torch.float32).transpose(0, 1)
            b_D = b_D / unless_empty(rest, sequences, begin, end)
        for i_r in hl.grid(count):
            i_c = count - 1 - i_r
            i_t = hl.arange(C) + i_c * C + begin
            i_k = hl.arange(K)
            live = (i_t < end)[:, None]
            written = (i_t < fill)[:, None]
            b_d = in_range(b_D, do.dtype)
            D[i_b, first + i_c, i_h, :, tile_v] = b_d.transpose(0, 1)
            b_do = hl.load(do, [i_b, i_t, i_h, tile_v], extra_mask=live).transpose(0, 1)
            b_do = in_range(b_do.to(torch.float32) * unit, do.dtype)
            b_A = hl.load(A, [i_b, i_t, i_h, hl.arange(C)], extra_mask=live)
            b_k = hl.load(kg, [i_b, i_t, i_h, i_k], extra_mask=live)
            b_dn = hl.dot(b_do, b_A, out_dtype=torch.float32)
            b_dn = hl.dot(b_d, b_k.transpose(0, 1), acc=b_dn)
            hl.store(dn, [i_b, i_t, i_h, tile_v], in_range(b_dn * rest, dn.dtype).transpose(0, 1), extra_mask=written)
            b_dn = in_range(b_dn, do.dtype)
            if gl is not None:
                b_D = b_D * torch.exp2(gl[i_b, first + i_c, i_h, :])[None, :]
            b_D = hl.dot(b_do, hl.load(qg, [i_b, i_t, i_h, i_k], extra_mask=live), acc=b_D)
            b_w = hl.load(w, [i_b, i_t, i_h, i_k], extra_mask=live)
            b_D = b_D - hl.dot(b_dn, b_w, out_dtype=torch.float32)
        dh0[i_n, i_h, :, tile_v] = b_D.transpose(0, 1) * unless_empty(rest, sequences, begin, end)
    return D, dn, dh0
