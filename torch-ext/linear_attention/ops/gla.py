"""Gated linear attention: `S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T`, `o_t = scale S_t^T q_t`.

A gate has a value for each channel and token.
In a chunk of C tokens, with `gc` the log2 gates summed from the chunk's begin, `gl` their sum over the chunk, S the
state at the chunk's begin and D the gradient of the state at its end:

    qg = unit 2^gc q     kg = 2^(gl - gc) k    A_ij = unit sum_d q_id k_jd 2^(gc_id - gc_jd),  i >= j
    o  = rest (qg S + A v)                     S' = 2^gl S + kg^T v
    dv = rest (A^T do + kg D)                  D' = 2^gl D + qg^T do
    dA = scale tril(do v^T)                    dq, dk, dg: gla_bwd_qk_kernel

scale is unit times rest (`split_scale`), and D is kept without rest.

The forward turns q, k and g into what a walk along the sequence needs and walks with the state on chip, writing no
state, or with a large K writes the states and takes all chunks at once.  The backward walks once each way to write S
and D for every chunk; then all chunks are independent.  `_segments.py` says what a walk is along.
"""
from __future__ import annotations

import helion.language as hl
import torch

from ._aot import kernel
from ._channel_gate import (
    BLOCK_LEVEL,
    FAR_CHUNKS,
    at_level,
    block_gate_sums,
    block_gradients,
    block_scores,
    border,
    diagonal_gradients,
    diagonal_scores,
    first_level,
    half_begin,
    later_gate_sums,
    level_gate_sums,
    level_gradients,
    level_scores,
    mirrored,
    not_within,
    reach,
    upper_half,
)
from ._checks import check_flags, check_gate, check_qkv, check_scale, check_sequences, check_state
from ._gates import channel_gate_cumsum_kernel
from ._host import WALK_K, last_contiguous, output_gradients, over_values, pad_to_16, split_scale
from ._segments import joined_count, segment, segment_count, segment_length, segment_table
from ._sequences import Tables, chunk, chunk_count, sequence_count, unless_empty
from ._tile import in_range


@kernel(dot_precision="tf32x3")
def gla_scores_kernel(
    q: torch.Tensor, k: torch.Tensor, gc: torch.Tensor, gl: torch.Tensor, chunks: torch.Tensor | None, unit: float,
    C: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A_ij = unit sum_d q_id k_jd 2^(gc_id - gc_jd), i >= j;  qg = unit 2^gc q;  kg = 2^(gl - gc) k.

    A without what the far kernel adds (`_channel_gate.py`).
    q, k [B,T,H,K], gc fp32 [B,T,H,K], gl fp32 [B,NT,H,K] -> A [B,T,H,C], zero above the diagonal, qg, kg [B,T,H,K], all
    in q's dtype.  One program a head and chunk.
    """
    B, T, H, K = q.size()
    K = hl.specialize(K)
    A = torch.empty([B, T, H, C], dtype=q.dtype, device=q.device)
    qg = torch.empty([B, T, H, K], dtype=q.dtype, device=q.device)
    kg = torch.empty([B, T, H, K], dtype=q.dtype, device=q.device)
    NT = chunk_count(chunks, C, T)
    levels = C.bit_length() - 1
    BK = hl.register_block_size(16, K)
    for tile_bh, tile_c in hl.tile([B * H, NT], block_size=[1, 1]):
        i_b = tile_bh.begin // H
        i_h = tile_bh.begin % H
        begin, end, fill = chunk(chunks, tile_c.begin, C, T)
        i_t = hl.arange(C) + begin
        live = (i_t < end)[:, None]
        written = (i_t < fill)[:, None]
        b_A = hl.zeros([C, C], dtype=torch.float32)
        for tile_k in hl.tile(K, block_size=BK):
            b_q = hl.load(q, [i_b, i_t, i_h, tile_k], extra_mask=live)
            b_k = hl.load(k, [i_b, i_t, i_h, tile_k], extra_mask=live)
            b_gc = hl.load(gc, [i_b, torch.clamp(i_t, max=fill - 1), i_h, tile_k])
            b_qg = b_q.to(torch.float32) * (torch.exp2(b_gc) * unit)
            hl.store(qg, [i_b, i_t, i_h, tile_k], b_qg.to(q.dtype), extra_mask=written)
            b_gl = gl[i_b, tile_c.begin, i_h, tile_k]
            b_kg = b_k.to(torch.float32) * torch.exp2(torch.clamp(b_gl[None, :] - b_gc, max=0.0))
            hl.store(kg, [i_b, i_t, i_h, tile_k], b_kg.to(q.dtype), extra_mask=written)
            b_A = b_A + block_scores(b_q, b_k, b_gc, levels, C)
        idx = hl.arange(C)
        b_A = torch.where(idx[:, None] >= idx[None, :], b_A * unit, 0.0)
        hl.store(A, [i_b, i_t, i_h, idx], in_range(b_A, A.dtype), extra_mask=written)
    return A, qg, kg


@kernel(dot_precision="tf32x3")
def gla_far_scores_kernel(
    q: torch.Tensor, k: torch.Tensor, gc: torch.Tensor, gl: torch.Tensor, A: torch.Tensor,
    chunks: torch.Tensor | None, unit: float, C: hl.constexpr,
) -> None:
    """Adds to A of gla_scores_kernel the rows and channels of q that are not near.  Most chunks have none.

    q, k [B,T,H,K], gc fp32 [B,T,H,K], gl fp32 [B,NT,H,K], A [B,T,H,C].  One program a head and 8 chunks.
    """
    B, T, H, K = q.size()
    K = hl.specialize(K)
    NT = chunk_count(chunks, C, T)
    levels = C.bit_length() - 1
    BK = hl.register_block_size(16, K)
    for tile_bh, tile_n in hl.tile([B * H, NT], block_size=[1, FAR_CHUNKS]):
        i_b = tile_bh.begin // H
        i_h = tile_bh.begin % H
        for i_c in hl.grid(tile_n.begin, tile_n.end):
            if torch.amin(gl[i_b, i_c, i_h, :], 0) < -reach(q.dtype):
                begin, end, fill = chunk(chunks, i_c, C, T)
                i_t = hl.arange(C) + begin
                live = (i_t < end)[:, None]
                written = (i_t < fill)[:, None]
                b_A = hl.zeros([C, C], dtype=torch.float32)
                for tile_k in hl.tile(K, block_size=BK):
                    if torch.amin(gl[i_b, i_c, i_h, tile_k], 0) < -reach(q.dtype):
                        b_q = hl.load(q, [i_b, i_t, i_h, tile_k], extra_mask=live)
                        b_k = hl.load(k, [i_b, i_t, i_h, tile_k], extra_mask=live)
                        b_gc = hl.load(gc, [i_b, torch.clamp(i_t, max=fill - 1), i_h, tile_k])
                        b_x = not_within(b_q, b_gc, q.dtype)
                        i_e = torch.clamp(half_begin(BLOCK_LEVEL, C) + begin, max=fill) - 1
                        b_c = b_gc - hl.load(gc, [i_b, i_e, i_h, tile_k], extra_mask=(i_e >= begin)[:, None])
                        b_A = b_A + block_scores(b_x, b_k, b_c, BLOCK_LEVEL, C)
                        b_A = b_A + diagonal_scores(not_within(b_x, b_c, q.dtype), b_k, C)
                        for level in hl.grid(first_level(b_c, q.dtype), levels):
                            i_e = torch.clamp(border(level, C) + begin, max=fill - 1)
                            b_f = torch.exp2(-torch.abs(b_gc - hl.load(gc, [i_b, i_e, i_h, tile_k])))
                            b_A = level_scores(at_level(b_x, b_c, level, q.dtype), b_k, b_A, b_f, level, C)
                idx = hl.arange(C)
                b_A = torch.where(idx[:, None] >= idx[None, :], b_A * unit, 0.0)
                b_A = b_A + hl.load(A, [i_b, i_t, i_h, idx], extra_mask=live).to(torch.float32)
                hl.store(A, [i_b, i_t, i_h, idx], in_range(b_A, A.dtype), extra_mask=written)


@kernel(dot_precision="tf32x3")
def gla_fwd_o_kernel(
    qg: torch.Tensor, kg: torch.Tensor, v: torch.Tensor, A: torch.Tensor, gl: torch.Tensor, h0: torch.Tensor | None,
    S: torch.Tensor | None, gs: torch.Tensor | None, sequences: torch.Tensor | None, segments: torch.Tensor | None,
    rest: float, L: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o = rest (qg S + A v);  S <- 2^gl S + kg^T v.

    qg, kg [B,T,H,K], v [B,T,H,V], A [B,T,H,C], gl fp32 [B,NT,H,K], h0 [N,H,K,V], S and gs of gla_segment_kernel, needed
    where a sequence has several segments -> o [B,T,H,V] in v's dtype, ht fp32 [N,H,K,V].
    One program a segment, head and V tile, the state transposed on chip, [BV, K].
    """
    B, T, H, K = qg.size()
    K, V, C = hl.specialize((K, v.size(3), A.size(3)))
    o = torch.empty([B, T, H, V], dtype=v.dtype, device=v.device)
    N = sequence_count(sequences, B)
    ht = torch.empty([N, H, K, V], dtype=torch.float32, device=v.device)
    BV = hl.register_block_size(16, V)
    for tile_v, tile_sh in hl.tile([V, segment_count(segments, L, T, B) * H], block_size=[BV, 1]):
        i_s = tile_sh.begin // H
        i_h = tile_sh.begin % H
        i_b, i_n, first, stop, i_first, count, begin, end, fill = segment(segments, i_s, C, L, T)
        if h0 is None:
            b_S = hl.zeros([tile_v, K], dtype=torch.float32)
        else:
            b_S = h0[i_n, i_h, :, tile_v].to(torch.float32).transpose(0, 1)
        if S is not None:
            for i_p in hl.grid(i_s - first):
                i_j = first + i_p - i_n
                b_S = b_S * torch.exp2(gs[i_j, i_h, :])[None, :] + S[i_j, i_h, :, tile_v].transpose(0, 1)
        for i_c in hl.grid(count):
            i_t = hl.arange(C) + i_c * C + begin
            live = (i_t < end)[:, None]
            written = (i_t < fill)[:, None]
            b_v = hl.load(v, [i_b, i_t, i_h, tile_v], extra_mask=live).transpose(0, 1)
            b_q = hl.load(qg, [i_b, i_t, i_h, hl.arange(K)], extra_mask=live)
            b_A = hl.load(A, [i_b, i_t, i_h, hl.arange(C)], extra_mask=live)
            b_o = hl.dot(in_range(b_S, v.dtype), b_q.transpose(0, 1), out_dtype=torch.float32)
            b_o = hl.dot(b_v, b_A.transpose(0, 1), acc=b_o) * rest
            hl.store(o, [i_b, i_t, i_h, tile_v], b_o.to(o.dtype).transpose(0, 1), extra_mask=written)
            b_S = b_S * torch.exp2(gl[i_b, i_first + i_c, i_h, :])[None, :]
            b_S = hl.dot(b_v, hl.load(kg, [i_b, i_t, i_h, hl.arange(K)], extra_mask=live), acc=b_S)
        if i_s == stop - 1:
            ht[i_n, i_h, :, tile_v] = b_S.transpose(0, 1)
    return o, ht


@kernel(dot_precision="tf32x3")
def gla_segment_kernel(
    x: torch.Tensor, y: torch.Tensor, gl: torch.Tensor, segments: torch.Tensor | None, C: hl.constexpr, L: int,
    backwards: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each segment but the last of gla_state_kernel's walk adds to the state, from zero; and its log2 gates.

    x, y, gl as there -> S fp32 [NJ,H,K,V], gs fp32 [NJ,H,K].  One program a segment, head, K tile and V tile.
    """
    B, T, H, K = x.size()
    K, V = hl.specialize((K, y.size(3)))
    NJ = joined_count(segments, L, T, B)
    S = torch.empty([NJ, H, K, V], dtype=torch.float32, device=y.device)
    gs = torch.empty([NJ, H, K], dtype=torch.float32, device=y.device)
    BK = hl.register_block_size(16, K)
    BV = hl.register_block_size(16, V)
    for tile_k, tile_v, tile_sh in hl.tile([K, V, segment_count(segments, L, T, B) * H], block_size=[BK, BV, 1]):
        i_s = tile_sh.begin // H
        i_h = tile_sh.begin % H
        i_b, i_n, first, stop, i_first, count, begin, end, fill = segment(segments, i_s, C, L, T)
        after = i_s - first if backwards else stop - 1 - i_s
        if after > 0:
            b_S = hl.zeros([tile_k, tile_v], dtype=torch.float32)
            b_gs = hl.zeros([tile_k], dtype=torch.float32)
            for i_r in hl.grid(count):
                i_c = count - 1 - i_r if backwards else i_r
                i_t = hl.arange(C) + i_c * C + begin
                live = (i_t < end)[:, None]
                b_x = hl.load(x, [i_b, i_t, i_h, tile_k], extra_mask=live)
                b_y = hl.load(y, [i_b, i_t, i_h, tile_v], extra_mask=live)
                b_gl = gl[i_b, i_first + i_c, i_h, tile_k]
                b_gs = b_gs + b_gl
                b_S = hl.dot(b_x.transpose(0, 1), b_y, acc=b_S * torch.exp2(b_gl)[:, None])
            i_j = i_s - i_n - (1 if backwards else 0)
            S[i_j, i_h, tile_k, tile_v] = b_S
            if tile_v.begin == 0:
                gs[i_j, i_h, tile_k] = b_gs
    return S, gs


@kernel(dot_precision="tf32x3")
def gla_state_kernel(
    x: torch.Tensor, y: torch.Tensor, gl: torch.Tensor, s0: torch.Tensor | None, S: torch.Tensor | None,
    gs: torch.Tensor | None, sequences: torch.Tensor | None, chunks: torch.Tensor | None, segments: torch.Tensor | None,
    rest: float, C: hl.constexpr, L: int, backwards: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """S <- 2^gl S + x^T y, written before each chunk, from the first chunk on or from the last one back; s0 and the
    state after the walk are rest S.

    x [B,T,H,K], y [B,T,H,V], gl fp32 [B,NT,H,K], s0 [N,H,K,V], S and gs of gla_segment_kernel, needed where a sequence
    has several segments -> states [B,NT,H,K,V] in y's dtype, the state after the walk fp32 [N,H,K,V].
    With kg, v it gives the states, backwards with qg, do their gradients D.
    One program a segment, head, K tile and V tile.
    """
    B, T, H, K = x.size()
    K, V = hl.specialize((K, y.size(3)))
    N = sequence_count(sequences, B)
    states = torch.empty([B, chunk_count(chunks, C, T), H, K, V], dtype=y.dtype, device=y.device)
    s1 = torch.empty([N, H, K, V], dtype=torch.float32, device=y.device)
    BK = hl.register_block_size(16, K)
    BV = hl.register_block_size(16, V)
    for tile_k, tile_v, tile_sh in hl.tile([K, V, segment_count(segments, L, T, B) * H], block_size=[BK, BV, 1]):
        i_s = tile_sh.begin // H
        i_h = tile_sh.begin % H
        i_b, i_n, first, stop, i_first, count, begin, end, fill = segment(segments, i_s, C, L, T)
        before = stop - 1 - i_s if backwards else i_s - first
        after = i_s - first if backwards else stop - 1 - i_s
        if s0 is None:
            b_S = hl.zeros([tile_k, tile_v], dtype=torch.float32)
        else:
            b_S = s0[i_n, i_h, tile_k, tile_v].to(torch.float32) / unless_empty(rest, segments, begin, end)
        if S is not None:
            for i_r in hl.grid(before):
                i_j = (stop - 2 - i_r if backwards else first + i_r) - i_n
                b_S = b_S * torch.exp2(gs[i_j, i_h, tile_k])[:, None] + S[i_j, i_h, tile_k, tile_v]
        for i_r in hl.grid(count):
            i_c = count - 1 - i_r if backwards else i_r
            states[i_b, i_first + i_c, i_h, tile_k, tile_v] = in_range(b_S, states.dtype)
            i_t = hl.arange(C) + i_c * C + begin
            live = (i_t < end)[:, None]
            b_x = hl.load(x, [i_b, i_t, i_h, tile_k], extra_mask=live)
            b_y = hl.load(y, [i_b, i_t, i_h, tile_v], extra_mask=live)
            b_gl = gl[i_b, i_first + i_c, i_h, tile_k]
            b_S = hl.dot(b_x.transpose(0, 1), b_y, acc=b_S * torch.exp2(b_gl)[:, None])
        if after == 0:
            s1[i_n, i_h, tile_k, tile_v] = b_S * unless_empty(rest, segments, begin, end)
    return states, s1


@kernel(dot_precision="tf32x3")
def gla_out_kernel(
    qg: torch.Tensor, v: torch.Tensor, A: torch.Tensor, S: torch.Tensor, chunks: torch.Tensor | None, rest: float
) -> torch.Tensor:
    """o = rest (qg S + A v) from the states.

    qg [B,T,H,K], v [B,T,H,V], A [B,T,H,C], S [B,NT,H,K,V] -> o as v.  One program a head, chunk and V tile.
    """
    B, T, H, K = qg.size()
    K, V, C = hl.specialize((K, v.size(3), A.size(3)))
    o = torch.empty([B, T, H, V], dtype=v.dtype, device=v.device)
    BK = hl.register_block_size(16, K)
    BV = hl.register_block_size(16, V)
    for tile_v, tile_bh, tile_c in hl.tile([V, B * H, chunk_count(chunks, C, T)], block_size=[BV, 1, 1]):
        i_b = tile_bh.begin // H
        i_h = tile_bh.begin % H
        begin, end, fill = chunk(chunks, tile_c.begin, C, T)
        i_t = hl.arange(C) + begin
        live = (i_t < end)[:, None]
        written = (i_t < fill)[:, None]
        b_A = hl.load(A, [i_b, i_t, i_h, hl.arange(C)], extra_mask=live)
        b_o = hl.dot(b_A, hl.load(v, [i_b, i_t, i_h, tile_v], extra_mask=live), out_dtype=torch.float32)
        for tile_k in hl.tile(K, block_size=BK):
            b_q = hl.load(qg, [i_b, i_t, i_h, tile_k], extra_mask=live)
            b_o = hl.dot(b_q, S[i_b, tile_c.begin, i_h, tile_k, tile_v], acc=b_o)
        hl.store(o, [i_b, i_t, i_h, tile_v], (b_o * rest).to(o.dtype), extra_mask=written)
    return o


@kernel(dot_precision="tf32x3")
def gla_bwd_v_kernel(
    A: torch.Tensor, kg: torch.Tensor, v: torch.Tensor, do: torch.Tensor, D: torch.Tensor,
    chunks: torch.Tensor | None, scale: float, rest: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dA = scale do v^T for i >= j, mirrored above;  dv = rest (A^T do + kg D).

    A [B,T,H,C], kg [B,T,H,K], v, do [B,T,H,V], D [B,NT,H,K,V] -> dA [B,T,H,C], dv [B,T,H,V], in v's dtype.
    One program a head and chunk.
    """
    B, T, H, K = kg.size()
    K, V, C = hl.specialize((K, v.size(3), A.size(3)))
    dA = torch.empty([B, T, H, C], dtype=v.dtype, device=v.device)
    dv = torch.empty([B, T, H, V], dtype=v.dtype, device=v.device)
    NT = chunk_count(chunks, C, T)
    BV = hl.register_block_size(16, V)
    for tile_bh, tile_c in hl.tile([B * H, NT], block_size=[1, 1]):
        i_b = tile_bh.begin // H
        i_h = tile_bh.begin % H
        begin, end, fill = chunk(chunks, tile_c.begin, C, T)
        i_t = hl.arange(C) + begin
        live = (i_t < end)[:, None]
        written = (i_t < fill)[:, None]
        b_A = hl.load(A, [i_b, i_t, i_h, hl.arange(C)], extra_mask=live).transpose(0, 1)
        b_k = hl.load(kg, [i_b, i_t, i_h, hl.arange(K)], extra_mask=live)
        b_dA = hl.zeros([C, C], dtype=torch.float32)
        for tile_v in hl.tile(V, block_size=BV):
            b_do = hl.load(do, [i_b, i_t, i_h, tile_v], extra_mask=live)
            b_dA = hl.dot(b_do, hl.load(v, [i_b, i_t, i_h, tile_v], extra_mask=live).transpose(0, 1), acc=b_dA)
            b_dv = hl.dot(b_A, b_do, out_dtype=torch.float32)
            b_dv = hl.dot(b_k, D[i_b, tile_c.begin, i_h, :, tile_v], acc=b_dv)
            hl.store(dv, [i_b, i_t, i_h, tile_v], (b_dv * rest).to(dv.dtype), extra_mask=written)
        b_dA = mirrored(in_range(b_dA * scale, dA.dtype), C)
        hl.store(dA, [i_b, i_t, i_h, hl.arange(C)], b_dA, extra_mask=written)
    return dA, dv


@kernel(dot_precision="tf32x3")
def gla_bwd_qk_kernel(
    q: torch.Tensor, k: torch.Tensor, gc: torch.Tensor, gl: torch.Tensor, v: torch.Tensor, do: torch.Tensor,
    dA: torch.Tensor, S: torch.Tensor, D: torch.Tensor, chunks: torch.Tensor | None, scale: float, rest: float,
    C: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With x = scale 2^gc do S^T, y = rest 2^(gl - gc) v D^T and e_ij = 2^(gc_i - gc_j):

    dq_i = x_i + sum_j dA_ij e_ij k_j
    dk_i = y_i + sum_j dA_ji e_ji q_j
    dg_t = sum_{i>=t>j} q_i dA_ij e_ij k_j + sum_{i>=t} (q x)_i + sum_{j<t} (k y)_j + rest 2^gl sum_V S D,
    with every sum of dg in each channel.

    q, k [B,T,H,K], gc fp32 [B,T,H,K], gl fp32 [B,NT,H,K], v, do [B,T,H,V], dA [B,T,H,C], S, D [B,NT,H,K,V]
    -> dq, dk in q's dtype, dg fp32.
    One program a head, chunk and K tile.
    """
    B, T, H, K = q.size()
    K, V = hl.specialize((K, v.size(3)))
    dq = torch.empty([B, T, H, K], dtype=q.dtype, device=q.device)
    dk = torch.empty([B, T, H, K], dtype=q.dtype, device=q.device)
    dg = torch.empty([B, T, H, K], dtype=torch.float32, device=q.device)
    NT = chunk_count(chunks, C, T)
    levels = C.bit_length() - 1
    BK = hl.register_block_size(16, K)
    BV = hl.register_block_size(16, V)
    for tile_k, tile_bh, tile_c in hl.tile([K, B * H, NT], block_size=[BK, 1, 1]):
        i_b = tile_bh.begin // H
        i_h = tile_bh.begin % H
        begin, end, fill = chunk(chunks, tile_c.begin, C, T)
        i_t = hl.arange(C) + begin
        live = (i_t < end)[:, None]
        written = (i_t < fill)[:, None]
        b_q = hl.load(q, [i_b, i_t, i_h, tile_k], extra_mask=live)
        b_k = hl.load(k, [i_b, i_t, i_h, tile_k], extra_mask=live)
        b_gc = hl.load(gc, [i_b, torch.clamp(i_t, max=fill - 1), i_h, tile_k])
        b_dA = hl.load(dA, [i_b, i_t, i_h, hl.arange(C)], extra_mask=live)
        b_gl = gl[i_b, tile_c.begin, i_h, tile_k]
        b_x = hl.zeros([C, tile_k], dtype=torch.float32)
        b_y = hl.zeros([C, tile_k], dtype=torch.float32)
        b_z = hl.zeros([tile_k], dtype=torch.float32)
        for tile_v in hl.tile(V, block_size=BV):
            b_S = S[i_b, tile_c.begin, i_h, tile_k, tile_v]
            b_D = D[i_b, tile_c.begin, i_h, tile_k, tile_v]
            b_x = hl.dot(hl.load(do, [i_b, i_t, i_h, tile_v], extra_mask=live), b_S.transpose(0, 1), acc=b_x)
            b_y = hl.dot(hl.load(v, [i_b, i_t, i_h, tile_v], extra_mask=live), b_D.transpose(0, 1), acc=b_y)
            b_z = b_z + torch.sum(b_S.to(torch.float32) * b_D.to(torch.float32), 1)
        b_x = b_x * torch.exp2(b_gc) * scale
        b_y = b_y * torch.exp2(torch.clamp(b_gl[None, :] - b_gc, max=0.0)) * rest
        b_u, b_v, b_w = block_gradients(b_q, b_k, b_dA, b_gc, levels, C)
        b_dq, b_dk = diagonal_gradients(b_q, b_k, b_dA, C)
        b_dq = b_dq + b_u + b_x
        b_dk = b_dk + b_v + b_y
        b_dg = block_gate_sums(b_w + b_q.to(torch.float32) * b_x, levels, q.dtype, C)
        b_dg = b_dg + later_gate_sums(b_k.to(torch.float32) * b_y, q.dtype, C)
        b_dg = torch.where(live, b_dg + (b_z * torch.exp2(b_gl) * rest)[None, :], 0.0)
        hl.store(dq, [i_b, i_t, i_h, tile_k], b_dq.to(dq.dtype), extra_mask=written)
        hl.store(dk, [i_b, i_t, i_h, tile_k], b_dk.to(dk.dtype), extra_mask=written)
        hl.store(dg, [i_b, i_t, i_h, tile_k], b_dg, extra_mask=written)
    return dq, dk, dg


@kernel(dot_precision="tf32x3")
def gla_far_bwd_qk_kernel(
    q: torch.Tensor, k: torch.Tensor, gc: torch.Tensor, gl: torch.Tensor, dA: torch.Tensor, dq: torch.Tensor,
    dk: torch.Tensor, dg: torch.Tensor, chunks: torch.Tensor | None, C: hl.constexpr,
) -> None:
    """Adds to dq, dk and dg of gla_bwd_qk_kernel what comes through gla_far_scores_kernel.

    q, k, dq, dk [B,T,H,K], gc, dg fp32 [B,T,H,K], gl fp32 [B,NT,H,K], dA [B,T,H,C].
    One program a head, 8 chunks and a K tile.
    """
    B, T, H, K = q.size()
    K = hl.specialize(K)
    NT = chunk_count(chunks, C, T)
    levels = C.bit_length() - 1
    BK = hl.register_block_size(16, K)
    for tile_k, tile_bh, tile_n in hl.tile([K, B * H, NT], block_size=[BK, 1, FAR_CHUNKS]):
        i_b = tile_bh.begin // H
        i_h = tile_bh.begin % H
        for i_c in hl.grid(tile_n.begin, tile_n.end):
            if torch.amin(gl[i_b, i_c, i_h, tile_k], 0) < -reach(q.dtype):
                begin, end, fill = chunk(chunks, i_c, C, T)
                i_t = hl.arange(C) + begin
                live = (i_t < end)[:, None]
                written = (i_t < fill)[:, None]
                b_k = hl.load(k, [i_b, i_t, i_h, tile_k], extra_mask=live)
                b_gc = hl.load(gc, [i_b, torch.clamp(i_t, max=fill - 1), i_h, tile_k])
                b_dA = hl.load(dA, [i_b, i_t, i_h, hl.arange(C)], extra_mask=live)
                b_x = not_within(hl.load(q, [i_b, i_t, i_h, tile_k], extra_mask=live), b_gc, q.dtype)
                i_e = torch.clamp(half_begin(BLOCK_LEVEL, C) + begin, max=fill) - 1
                b_c = b_gc - hl.load(gc, [i_b, i_e, i_h, tile_k], extra_mask=(i_e >= begin)[:, None])
                b_dq, b_dk, b_w = block_gradients(b_x, b_k, b_dA, b_c, BLOCK_LEVEL, C)
                b_dg = block_gate_sums(b_w, BLOCK_LEVEL, q.dtype, C)
                for level in hl.grid(first_level(b_c, q.dtype), levels):
                    i_e = torch.clamp(border(level, C) + begin, max=fill - 1)
                    b_f = torch.exp2(-torch.abs(b_gc - hl.load(gc, [i_b, i_e, i_h, tile_k])))
                    b_y, b_w = level_gradients(at_level(b_x, b_c, level, q.dtype), b_k, b_dA, b_f, level, C)
                    b_dq = b_dq + torch.where(upper_half(level, C), at_level(b_y, b_c, level, q.dtype), 0.0)
                    b_dk = b_dk + torch.where(upper_half(level, C), 0.0, b_y)
                    b_dg = b_dg + level_gate_sums(b_w, level, q.dtype, C)
                b_dq = not_within(b_dq, b_gc, q.dtype)
                b_dq = b_dq + hl.load(dq, [i_b, i_t, i_h, tile_k], extra_mask=live).to(torch.float32)
                hl.store(dq, [i_b, i_t, i_h, tile_k], b_dq.to(dq.dtype), extra_mask=written)
                b_dk = b_dk + hl.load(dk, [i_b, i_t, i_h, tile_k], extra_mask=live).to(torch.float32)
                hl.store(dk, [i_b, i_t, i_h, tile_k], b_dk.to(dk.dtype), extra_mask=written)
                b_dg = b_dg + hl.load(dg, [i_b, i_t, i_h, tile_k], extra_mask=live)
                hl.store(dg, [i_b, i_t, i_h, tile_k], b_dg, extra_mask=written)


def _chunk(q: torch.Tensor) -> int:
    """Tokens in a chunk: fewer in fp32, whose tiles and products are several times as large."""
    return 32 if q.dtype == torch.float32 else 64


def chunk_gla_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, h0: torch.Tensor | None, scale: float,
    tables: Tables,
) -> tuple[torch.Tensor, ...]:
    """o [B,T,H,V] in v's dtype, ht fp32 [N,H,K,V]; for the backward the segments' states, gates and table, or None."""
    C, (unit, rest) = _chunk(q), split_scale(scale)
    sequences, chunks = tables
    gc, gl = channel_gate_cumsum_kernel(g, None, None, chunks, None, C, False)
    A, qg, kg = gla_scores_kernel(q, k, gc, gl, chunks, unit, C)
    gla_far_scores_kernel(q, k, gc, gl, A, chunks, unit, C)
    del gc
    L = segment_length(v, C)
    segments = segment_table(sequences, q.size(1), C, L)
    S, gs = (None, None) if L >= q.size(1) else gla_segment_kernel(kg, v, gl, segments, C, L, False)
    if q.size(-1) <= WALK_K:
        o, ht = gla_fwd_o_kernel(qg, kg, v, A, gl, h0, S, gs, sequences, segments, rest, L)
    else:
        states, ht = gla_state_kernel(kg, v, gl, h0, S, gs, sequences, chunks, segments, 1.0, C, L, False)
        o = gla_out_kernel(qg, v, A, states, chunks, rest)
    return o, ht, S, gs, segments


def chunk_gla_bwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, h0: torch.Tensor | None,
    S: torch.Tensor | None, gs: torch.Tensor | None, segments: torch.Tensor | None, scale: float, tables: Tables,
    do: torch.Tensor, dht: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, dg in their inputs' dtypes and dh0 in fp32.  Temporaries go as early as they can."""
    C, (unit, rest) = _chunk(q), split_scale(scale)
    sequences, chunks = tables
    L = segment_length(v, C)
    gc, gl = channel_gate_cumsum_kernel(g, None, None, chunks, None, C, False)
    A, qg, kg = gla_scores_kernel(q, k, gc, gl, chunks, unit, C)
    gla_far_scores_kernel(q, k, gc, gl, A, chunks, unit, C)
    D, gd = (None, None) if L >= q.size(1) else gla_segment_kernel(qg, do, gl, segments, C, L, True)
    D, dh0 = gla_state_kernel(qg, do, gl, dht, D, gd, sequences, chunks, segments, rest, C, L, True)
    del qg
    dA, dv = gla_bwd_v_kernel(A, kg, v, do, D, chunks, scale, rest)
    del A
    S, _ = gla_state_kernel(kg, v, gl, h0, S, gs, sequences, chunks, segments, 1.0, C, L, False)
    del kg
    dq, dk, dg = gla_bwd_qk_kernel(q, k, gc, gl, v, do, dA, S, D, chunks, scale, rest, C)
    del S, D
    gla_far_bwd_qk_kernel(q, k, gc, gl, dA, dq, dk, dg, chunks, C)
    return dq, dk, dv, dg.to(g.dtype), dh0


class _GLA(torch.autograd.Function):
    """(q, k, v, g, h0 or None, scale, tables) -> o, ht.  Saves its inputs and the states that segments add, in the
    shortest segments as much as an input.
    """

    @staticmethod
    def forward(ctx, q, k, v, g, h0, scale, tables):
        ctx.set_materialize_grads(False)
        o, ht, *small = chunk_gla_fwd(q, k, v, g, h0, scale, tables)
        ctx.save_for_backward(q, k, v, g, h0, *small, *tables)
        ctx.scale = scale
        return o, ht

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dht):
        q, k, v, g, h0, S, gs, segments, *tables = ctx.saved_tensors
        if do is None and dht is None:
            return (None,) * 7
        do, dht = output_gradients(do, dht, v)
        dq, dk, dv, dg, dh0 = chunk_gla_bwd(q, k, v, g, h0, S, gs, segments, ctx.scale, Tables(*tables), do, dht)
        return dq, dk, dv, dg, dh0.to(h0.dtype) if ctx.needs_input_grad[4] else None, None, None


def chunk_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chunked attention with a gate for each channel and token, differentiable in q, k, v, g and initial_state.

    Args:
        q, k: queries and keys, [B, T, H, K] with K in 1..256; bf16, fp16 or fp32, any strides.
        v: values, [B, T, H, V] in q's dtype.
        g: natural-log decay of each token and channel, [B, T, H, K], at most 0, -inf allowed.
        scale: factor of the output; K**-0.5 if None.
        initial_state: S_0, [N, H, K, V], or [N, H, V, K] with state_v_first; zero if None.
        output_final_state: whether to return S_T.
        state_v_first: states have their last two dimensions in the order V, K.
        cu_seqlens: where sequences of any lengths begin and end in the one batch row, [N+1], int32 or int64 on q's
            device, from 0 and not falling (which is not checked on a GPU): sequence n is tokens cu_seqlens[n] to
            cu_seqlens[n+1] - 1. Results for tokens after the last one, and their gradients, are zero. None for B
            sequences of T tokens; then N is B.
        cu_seqlens_cpu: the same on the CPU, only checked; or None.

    Returns:
        o, [B, T, H, V] in q's dtype, and S_T, fp32, with the shape of S_0, or None.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape or device is not as above.

    Paper: Gated Linear Attention Transformers with Hardware-Efficient Training, https://arxiv.org/abs/2312.06635
    """
    check_flags(output_final_state=output_final_state, state_v_first=state_v_first)
    check_qkv(q, k, v)
    check_gate(g, q.shape, q)
    check_scale(scale)
    N = check_sequences(cu_seqlens, cu_seqlens_cpu, q)
    check_state(initial_state, N, q, v, state_v_first)
    scale = q.size(-1) ** -0.5 if scale is None else float(scale)
    g = last_contiguous(pad_to_16(g))

    def run(q, k, v, initial_state, tables):
        return _GLA.apply(q, k, v, g, initial_state, scale, tables)

    o, final_state = over_values(run, q, k, v, initial_state, cu_seqlens, _chunk(q), state_v_first, (g,))
    return o, final_state if output_final_state else None
