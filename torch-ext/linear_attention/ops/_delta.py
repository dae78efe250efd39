"""The walks of the delta family along the chunks of a sequence.

A chunk of C tokens has, from its preparation, the scores A and X, the inverse of its unit lower triangular matrix.
With gc the log2 gate summed from the chunk's begin, gl its last value, S the state at the chunk's begin and D the
gradient of the state at its end, in rows of tokens:

    e = beta (v - 2^gc k S)      n = X e          o = scale (2^gc q S + A n)      S' = 2^gl S + k^T (2^(gl - gc) n)
    dn = scale A^T do + 2^(gl - gc) k D           r = X^T dn                      dv = beta r
    D' = 2^gl D + q^T (scale 2^gc do) - k^T (2^gc dv)

e is what the keys do not yet give back of the values, n the values that are written, r the gradient of e.  Keys that
are alike make of n and r differences that nearly cancel over a chunk, and of X numbers whose sums nearly do: so X
[B,T,HV,2C] is the sum of two parts, each an operand of a product (`two_parts`).  The walk back keeps D, dn and r
without rest, where scale is unit times rest (`split_scale`).  A gate of a value a head stays a factor of rows, gc fp32
[B,HV,T].  One of a value a channel is in q, k and kg already, 2^gc q, 2^gc k and 2^(gl - gc) k, and gl is fp32
[B,NT,HV,K].  Otherwise kg is None, for k; without a gate gc and gl are None.  beta lies as gc does: of 16-bit numbers
that are HV apart the compiler makes no asynchronous copy, and each chunk would wait for them.

Each kernel runs one program for a sequence, value head and tile of V, with the state transposed on chip, [BV, K] in
fp32: so the state, e and n are first operands, which stay in registers.
"""
from __future__ import annotations

import helion.language as hl
import torch

from ._aot import kernel
from ._sequences import all_chunks, sequence, sequence_count, unless_empty
from ._tile import in_range


@kernel(dot_precision="tf32x3")
def delta_fwd_o_kernel(
    q: torch.Tensor, k: torch.Tensor, kg: torch.Tensor | None, v: torch.Tensor, A: torch.Tensor, X: torch.Tensor,
    beta: torch.Tensor, gc: torch.Tensor | None, gl: torch.Tensor | None, h0: torch.Tensor | None,
    sequences: torch.Tensor | None, scale: float, G: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o = scale (2^gc q S + A n) and the final state, in one walk.

    q, k [B,T,HV/G,K], kg [B,T,HV,K], v [B,T,HV,V], A [B,T,HV,C], beta fp32 [B,HV,T], h0 [N,HV,K,V]
    -> o as v, ht fp32 [N,HV,K,V].
    """
    B, T, HV, V = v.size()
    K, V, C = hl.specialize((k.size(3), V, A.size(3)))
    o = torch.empty([B, T, HV, V], dtype=v.dtype, device=v.device)
    N = sequence_count(sequences, B)
    ht = torch.empty([N, HV, K, V], dtype=torch.float32, device=v.device)
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
            b_beta = hl.load(beta, [i_b, i_h, torch.clamp(i_t, max=fill - 1)])
            b_k = hl.load(k, [i_b, i_t, i_h // G, i_k], extra_mask=live)
            b_s = in_range(b_S, k.dtype)
            b_e = hl.dot(b_s, b_k.transpose(0, 1), out_dtype=torch.float32)
            if gc is not None:
                b_gc = hl.load(gc, [i_b, i_h, torch.clamp(i_t, max=fill - 1)])
                b_e = b_e * torch.exp2(b_gc)[None, :]
            b_v = hl.load(v, [i_b, i_t, i_h, tile_v], extra_mask=live).transpose(0, 1).to(torch.float32)
            b_e = in_range((b_v - b_e) * b_beta[None, :], k.dtype)
            b_X = hl.load(X, [i_b, i_t, i_h, hl.arange(C)], extra_mask=live)
            b_n = hl.dot(b_e, b_X.transpose(0, 1), out_dtype=torch.float32)
            b_X = hl.load(X, [i_b, i_t, i_h, hl.arange(C) + C], extra_mask=live)
            b_n = in_range(hl.dot(b_e, b_X.transpose(0, 1), acc=b_n), k.dtype)
            b_q = hl.load(q, [i_b, i_t, i_h // G, i_k], extra_mask=live)
            b_o = hl.dot(b_s, b_q.transpose(0, 1), out_dtype=torch.float32)
            if gc is not None:
                b_o = b_o * torch.exp2(b_gc)[None, :]
            b_A = hl.load(A, [i_b, i_t, i_h, hl.arange(C)], extra_mask=live)
            b_o = hl.dot(b_n, b_A.transpose(0, 1), acc=b_o) * scale
            hl.store(o, [i_b, i_t, i_h, tile_v], b_o.to(o.dtype).transpose(0, 1), extra_mask=written)
            if gc is not None:
                b_gl = gc[i_b, i_h, min(begin + i_c * C + C, fill) - 1]
                b_f = torch.exp2(torch.clamp(b_gl - b_gc, max=0.0))
                b_n = (b_n.to(torch.float32) * b_f[None, :]).to(k.dtype)
                b_S = b_S * torch.exp2(b_gl)
            if gl is not None:
                b_S = b_S * torch.exp2(gl[i_b, first + i_c, i_h, :])[None, :]
            if kg is not None:
                b_k = hl.load(kg, [i_b, i_t, i_h, i_k], extra_mask=live)
            b_S = hl.dot(b_n, b_k, acc=b_S)
        ht[i_n, i_h, :, tile_v] = b_S.transpose(0, 1)
    return o, ht


@kernel(dot_precision="tf32x3")
def delta_fwd_state_kernel(
    k: torch.Tensor, kg: torch.Tensor | None, v: torch.Tensor, X: torch.Tensor, beta: torch.Tensor,
    gc: torch.Tensor | None, gl: torch.Tensor | None, h0: torch.Tensor | None, sequences: torch.Tensor | None,
    G: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state S at every chunk's begin and the written values n, for the backward.

    k [B,T,HV/G,K], kg [B,T,HV,K], v [B,T,HV,V], beta fp32 [B,HV,T], h0 [N,HV,K,V]
    -> S [B,NT,HV,K,V] in v's dtype, n as v.
    """
    B, T, HV, V = v.size()
    K, V, C2 = hl.specialize((k.size(3), V, X.size(3)))
    C = C2 // 2
    N = sequence_count(sequences, B)
    S = torch.empty([B, all_chunks(sequences, C, T), HV, K, V], dtype=v.dtype, device=v.device)
    n = torch.empty([B, T, HV, V], dtype=v.dtype, device=v.device)
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
            b_beta = hl.load(beta, [i_b, i_h, torch.clamp(i_t, max=fill - 1)])
            b_k = hl.load(k, [i_b, i_t, i_h // G, i_k], extra_mask=live)
            b_s = in_range(b_S, k.dtype)
            S[i_b, first + i_c, i_h, :, tile_v] = b_s.transpose(0, 1)
            b_e = hl.dot(b_s, b_k.transpose(0, 1), out_dtype=torch.float32)
            if gc is not None:
                b_gc = hl.load(gc, [i_b, i_h, torch.clamp(i_t, max=fill - 1)])
                b_e = b_e * torch.exp2(b_gc)[None, :]
            b_v = hl.load(v, [i_b, i_t, i_h, tile_v], extra_mask=live).transpose(0, 1).to(torch.float32)
            b_e = in_range((b_v - b_e) * b_beta[None, :], k.dtype)
            b_X = hl.load(X, [i_b, i_t, i_h, hl.arange(C)], extra_mask=live)
            b_n = hl.dot(b_e, b_X.transpose(0, 1), out_dtype=torch.float32)
            b_X = hl.load(X, [i_b, i_t, i_h, hl.arange(C) + C], extra_mask=live)
            b_n = in_range(hl.dot(b_e, b_X.transpose(0, 1), acc=b_n), k.dtype)
            hl.store(n, [i_b, i_t, i_h, tile_v], b_n.transpose(0, 1), extra_mask=written)
            if gc is not None:
                b_gl = gc[i_b, i_h, min(begin + i_c * C + C, fill) - 1]
                b_f = torch.exp2(torch.clamp(b_gl - b_gc, max=0.0))
                b_n = (b_n.to(torch.float32) * b_f[None, :]).to(k.dtype)
                b_S = b_S * torch.exp2(b_gl)
            if gl is not None:
                b_S = b_S * torch.exp2(gl[i_b, first + i_c, i_h, :])[None, :]
            if kg is not None:
                b_k = hl.load(kg, [i_b, i_t, i_h, i_k], extra_mask=live)
            b_S = hl.dot(b_n, b_k, acc=b_S)
    return S, n


@kernel(dot_precision="tf32x3")
def delta_bwd_state_kernel(
    q: torch.Tensor, k: torch.Tensor, kg: torch.Tensor | None, A: torch.Tensor, X: torch.Tensor, beta: torch.Tensor,
    do: torch.Tensor, gc: torch.Tensor | None, gl: torch.Tensor | None, dht: torch.Tensor | None,
    sequences: torch.Tensor | None, unit: float, rest: float, G: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient D of the state at every chunk's end, r, dv and dh0, in one walk back.

    q, k [B,T,HV/G,K], kg [B,T,HV,K], A [B,T,HV,C], beta fp32 [B,HV,T], do [B,T,HV,V], dht [N,HV,K,V]
    -> D [B,NT,HV,K,V] in do's dtype and r as do, both without rest, dv as do, dh0 fp32 [N,HV,K,V].
    """
    B, T, HV, V = do.size()
    K, V, C = hl.specialize((k.size(3), V, A.size(3)))
    N = sequence_count(sequences, B)
    D = torch.empty([B, all_chunks(sequences, C, T), HV, K, V], dtype=do.dtype, device=do.device)
    r = torch.empty([B, T, HV, V], dtype=do.dtype, device=do.device)
    dv = torch.empty([B, T, HV, V], dtype=do.dtype, device=do.device)
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
            b_beta = hl.load(beta, [i_b, i_h, torch.clamp(i_t, max=fill - 1)])
            if gc is not None:  # gl is no asynchronous copy: early, so that the products hide it
                b_gc = hl.load(gc, [i_b, i_h, torch.clamp(i_t, max=fill - 1)])
                b_gl = gc[i_b, i_h, min(begin + i_c * C + C, fill) - 1]
            b_k = hl.load(k, [i_b, i_t, i_h // G, i_k], extra_mask=live)
            b_d = in_range(b_D, do.dtype)
            D[i_b, first + i_c, i_h, :, tile_v] = b_d.transpose(0, 1)
            if kg is None:
                b_dn = hl.dot(b_d, b_k.transpose(0, 1), out_dtype=torch.float32)
            else:
                b_kg = hl.load(kg, [i_b, i_t, i_h, i_k], extra_mask=live)
                b_dn = hl.dot(b_d, b_kg.transpose(0, 1), out_dtype=torch.float32)
            if gc is not None:
                b_dn = b_dn * torch.exp2(torch.clamp(b_gl - b_gc, max=0.0))[None, :]
                b_D = b_D * torch.exp2(b_gl)
            if gl is not None:
                b_D = b_D * torch.exp2(gl[i_b, first + i_c, i_h, :])[None, :]
            b_do = hl.load(do, [i_b, i_t, i_h, tile_v], extra_mask=live).transpose(0, 1)
            b_ds = in_range(b_do.to(torch.float32) * unit, do.dtype)
            b_A = hl.load(A, [i_b, i_t, i_h, hl.arange(C)], extra_mask=live)
            b_dn = hl.dot(b_ds, b_A, acc=b_dn)
            b_q = hl.load(q, [i_b, i_t, i_h // G, i_k], extra_mask=live)
            if gc is None:
                b_D = hl.dot(b_ds, b_q, acc=b_D)
            elif do.dtype == torch.float16:  # which may be out of range with a scale on top of a decay
                b_do = (b_do.to(torch.float32) * torch.exp2(b_gc)[None, :]).to(do.dtype)
                b_D = b_D + hl.dot(b_do, b_q, out_dtype=torch.float32) * unit
            else:
                b_do = (b_ds.to(torch.float32) * torch.exp2(b_gc)[None, :]).to(do.dtype)
                b_D = hl.dot(b_do, b_q, acc=b_D)
            b_dn = in_range(b_dn, do.dtype)
            b_X = hl.load(X, [i_b, i_t, i_h, hl.arange(C)], extra_mask=live)
            b_r = hl.dot(b_dn, b_X, out_dtype=torch.float32)
            b_X = hl.load(X, [i_b, i_t, i_h, hl.arange(C) + C], extra_mask=live)
            b_r = hl.dot(b_dn, b_X, acc=b_r)
            hl.store(r, [i_b, i_t, i_h, tile_v], in_range(b_r, r.dtype).transpose(0, 1), extra_mask=written)
            b_r = b_r * b_beta[None, :]
            hl.store(dv, [i_b, i_t, i_h, tile_v], (b_r * rest).to(dv.dtype).transpose(0, 1), extra_mask=written)
            if gc is not None:
                b_r = b_r * torch.exp2(b_gc)[None, :]
            b_D = hl.dot(in_range(-b_r, do.dtype), b_k, acc=b_D)
        dh0[i_n, i_h, :, tile_v] = b_D.transpose(0, 1) * unless_empty(rest, sequences, begin, end)
    return D, r, dv, dh0
