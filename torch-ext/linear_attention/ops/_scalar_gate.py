"""Attention with no gate, or one gate a head and token: the kernels of linear attention, retention and simple GLA.

The recurrence is `S_t = e^{g_t} S_{t-1} + k_t v_t^T`, `o_t = scale S_t^T q_t`.  In a chunk of C tokens, with `gc` the
log2 gate summed from the chunk's begin, `gl` its value at the chunk's end, and S the state at the chunk's begin:

    o_i = scale (2^gc_i S^T q_i + sum_{j<=i} 2^(gc_i - gc_j) (q_i . k_j) v_j)
    S'  = 2^gl S + sum_j k_j (2^(gl - gc_j) v_j)^T

and backwards, with D the gradient of the state at the chunk's end:

    dv_j = 2^(gl - gc_j) D^T k_j + scale sum_{i>=j} 2^(gc_i - gc_j) (k_j . q_i) do_i
    D'   = 2^gl D + scale sum_i q_i (2^gc_i do_i)^T

One kernel walks along a sequence with S or D on chip, and gives o and every gradient but a gate's: dq_i is o_i with do,
v, k for q, k, v and S^T for S, dk_j is dv_j with v, do, q for k, q, do and D^T for D.  The gradient of a gate needs S
and D of every chunk in one place: then the backward walks once each way to write them, and all chunks are independent.
So it does with a gate and a large K or V too, where walks spill.
In kernels scale is unit times rest (`split_scale`), and D is kept without rest.
`g` is a natural logarithm of any strides, or None where there is no gate, or one that is the head's (retention).
`_gates.py` makes gc of it, `_segments.py` says what a walk is along.
"""
from __future__ import annotations

import helion.language as hl
import torch

from ._aot import kernel
from ._gates import gate_cumsum_kernel, head_decay_kernel
from ._host import output_gradients, over_values, split_scale
from ._segments import joined_count, segment, segment_count, segment_length, segment_table
from ._sequences import Tables, chunk, chunk_count, sequence_count, unless_empty
from ._tile import decayed, in_range


@kernel(dot_precision="tf32x3")
def scalar_segment_kernel(
    y: torch.Tensor, z: torch.Tensor, gc: torch.Tensor | None, segments: torch.Tensor | None, unit: float,
    C: hl.constexpr, L: int, backwards: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each segment but the last of a walk adds to the state: S <- 2^gl S + y^T (2^(gl - gc) z), from zero.

    Backwards, chunks in reverse, 2^gc unit for 2^(gl - gc).  y [B,T,H,K], z [B,T,H,V], gc fp32 [B,H,T]
    -> S fp32 [NJ,H,K,V], and the segment's log2 gate fp32 [NJ,H].  One program a segment, head, K tile and V tile.
    """
    B, T, H, K = y.size()
    K, V = hl.specialize((K, z.size(3)))
    NJ = joined_count(segments, L, T, B)
    S = torch.empty([NJ, H, K, V], dtype=torch.float32, device=y.device)
    gs = torch.empty([NJ, H], dtype=torch.float32, device=y.device)
    BK = hl.register_block_size(16, K)
    BV = hl.register_block_size(16, V)
    for tile_k, tile_v, tile_sh in hl.tile([K, V, segment_count(segments, L, T, B) * H], block_size=[BK, BV, 1]):
        i_s = tile_sh.begin // H
        i_h = tile_sh.begin % H
        i_b, i_n, first, stop, i_first, count, begin, end, fill = segment(segments, i_s, C, L, T)
        after = i_s - first if backwards else stop - 1 - i_s
        if after > 0:
            b_S = hl.zeros([tile_k, tile_v], dtype=torch.float32)
            b_gs = hl.zeros([1], dtype=torch.float32)
            for i_r in hl.grid(count):
                i_c = count - 1 - i_r if backwards else i_r
                i_t = hl.arange(C) + i_c * C + begin
                live = (i_t < end)[:, None]
                b_y = hl.load(y, [i_b, i_t, i_h, tile_k], extra_mask=live)
                b_z = hl.load(z, [i_b, i_t, i_h, tile_v], extra_mask=live)
                if gc is not None:
                    b_gl = gc[i_b, i_h, min(begin + i_c * C + C, fill) - 1]
                    b_gc = hl.load(gc, [i_b, i_h, torch.clamp(i_t, max=fill - 1)])
                    b_f = torch.exp2(b_gc) * unit if backwards else torch.exp2(torch.clamp(b_gl - b_gc, max=0.0))
                    b_z = in_range(b_z.to(torch.float32) * b_f[:, None], z.dtype)
                    b_S = b_S * torch.exp2(b_gl)
                    b_gs = b_gs + b_gl
                elif backwards:
                    b_z = in_range(b_z.to(torch.float32) * unit, z.dtype)
                b_S = hl.dot(b_y.transpose(0, 1), b_z, acc=b_S)
            i_j = i_s - i_n - (1 if backwards else 0)
            S[i_j, i_h, tile_k, tile_v] = b_S
            if tile_k.begin + tile_v.begin == 0:
                gs[i_j, i_h] = torch.sum(b_gs, 0)
    return S, gs


@kernel(dot_precision="tf32x3")
def scalar_walk_kernel(
    x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, gc: torch.Tensor | None, s0: torch.Tensor | None,
    S: torch.Tensor | None, gs: torch.Tensor | None, sequences: torch.Tensor | None, segments: torch.Tensor | None,
    unit: float, rest: float, C: hl.constexpr, L: int, backwards: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o = scale (2^gc x S + (x y^T . decay) z), lower triangular, with S <- 2^gl S + y^T (2^(gl - gc) z) from s0 on.

    Backwards, chunks in reverse: o = 2^(gl - gc) x S + scale (x y^T . decay) z, upper triangular, with
    S <- 2^gl S + scale y^T (2^gc z), kept without rest, as S of scalar_segment_kernel is.

    x, y [B,T,H,K], z [B,T,H,V], gc fp32 [B,H,T], s0 [N,H,K,V], S and gs as of scalar_segment_kernel, needed where a
    sequence has several segments -> o as z, the state after the walk fp32 [N,H,K,V].
    One program a segment, head and V tile.  The state lies transposed: so its product takes it from registers.
    """
    B, T, H, K = x.size()
    K, V = hl.specialize((K, z.size(3)))
    NS = segment_count(segments, L, T, B)
    N = sequence_count(sequences, B)
    o = torch.empty([B, T, H, V], dtype=z.dtype, device=z.device)
    s1 = torch.empty([N, H, K, V], dtype=torch.float32, device=z.device)
    # fp16 has not the range for scores without their scale; else, forwards, scaling the output takes fewer registers
    early = backwards or z.dtype == torch.float16
    BV = hl.register_block_size(16, V)
    for tile_v, tile_sh in hl.tile([V, NS * H], block_size=[BV, 1]):
        i_s = tile_sh.begin // H
        i_h = tile_sh.begin % H
        i_b, i_n, first, stop, i_first, count, begin, end, fill = segment(segments, i_s, C, L, T)
        before = stop - 1 - i_s if backwards else i_s - first
        after = i_s - first if backwards else stop - 1 - i_s
        if s0 is None:
            b_S = hl.zeros([tile_v, K], dtype=torch.float32)
        else:
            b_S = s0[i_n, i_h, :, tile_v].to(torch.float32).transpose(0, 1)
            if backwards:
                b_S = b_S / unless_empty(rest, segments, begin, end)
        if S is not None:
            for i_r in hl.grid(before):
                i_j = (stop - 2 - i_r if backwards else first + i_r) - i_n
                if gc is not None:
                    b_S = b_S * torch.exp2(gs[i_j, i_h])
                b_S = b_S + S[i_j, i_h, :, tile_v].transpose(0, 1)
        for i_r in hl.grid(count):
            i_c = count - 1 - i_r if backwards else i_r
            idx = hl.arange(C)
            i_t = idx + i_c * C + begin
            i_k = hl.arange(K)
            live = (i_t < end)[:, None]
            if gc is not None:  # before the products, whose time hides the load's
                b_gc = hl.load(gc, [i_b, i_h, torch.clamp(i_t, max=fill - 1)])
                b_gl = gc[i_b, i_h, min(begin + i_c * C + C, fill) - 1]
            b_x = hl.load(x, [i_b, i_t, i_h, i_k], extra_mask=live)
            b_y = hl.load(y, [i_b, i_t, i_h, i_k], extra_mask=live)
            b_z = hl.load(z, [i_b, i_t, i_h, tile_v], extra_mask=live).transpose(0, 1)
            b_a = hl.dot(b_y, b_x.transpose(0, 1), out_dtype=torch.float32)
            pairs = idx[:, None] >= idx[None, :] if backwards else idx[:, None] <= idx[None, :]
            if gc is None:
                b_a = torch.where(pairs, b_a, 0.0)
            else:
                b_a = decayed(b_a, b_gc if backwards else -b_gc, pairs)
            if early:
                b_a = b_a * unit
            b_a = in_range(b_a, z.dtype)
            b_o = hl.dot(in_range(b_S, x.dtype), b_x.transpose(0, 1), out_dtype=torch.float32)
            if gc is not None:
                b_f = torch.clamp(b_gl - b_gc, max=0.0) if backwards else b_gc
                b_o = b_o * torch.exp2(b_f)[None, :]
            if early and not backwards:
                b_o = b_o * unit
            b_o = hl.dot(b_z, b_a, acc=b_o)
            b_o = b_o * (rest if early else unit * rest)
            hl.store(o, [i_b, i_t, i_h, tile_v], b_o.to(o.dtype).transpose(0, 1), extra_mask=(i_t < fill)[:, None])
            if gc is not None:
                b_f = torch.exp2(b_gc) * unit if backwards else torch.exp2(torch.clamp(b_gl - b_gc, max=0.0))
                b_z = in_range(b_z.to(torch.float32) * b_f[None, :], z.dtype)
                b_S = b_S * torch.exp2(b_gl)
            elif backwards:
                b_z = in_range(b_z.to(torch.float32) * unit, z.dtype)
            b_S = hl.dot(b_z, b_y, acc=b_S)
        if after == 0:
            if backwards:
                b_S = b_S * unless_empty(rest, segments, begin, end)
            s1[i_n, i_h, :, tile_v] = b_S.transpose(0, 1)
    return o, s1


@kernel(dot_precision="tf32x3")
def scalar_state_kernel(
    y: torch.Tensor, z: torch.Tensor, gc: torch.Tensor, s0: torch.Tensor | None, S: torch.Tensor | None,
    gs: torch.Tensor | None, sequences: torch.Tensor | None, chunks: torch.Tensor | None, segments: torch.Tensor | None,
    unit: float, rest: float, C: hl.constexpr, L: int, backwards: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states of a walk, S <- 2^gl S + y^T (2^(gl - gc) z), written before each chunk.

    Backwards, chunks in reverse, S <- 2^gl S + scale y^T (2^gc z): with q, do the gradients D of the states of k, v,
    which are written without rest; forwards unit and rest are 1.
    y [B,T,H,K], z [B,T,H,V], gc fp32 [B,H,T], s0 [N,H,K,V], S and gs of scalar_segment_kernel, needed where a sequence
    has several segments -> states [B,NT,H,K,V] in z's dtype, the state after the walk fp32 [N,H,K,V].
    One program a segment, head, K tile and V tile.
    """
    B, T, H, K = y.size()
    K, V = hl.specialize((K, z.size(3)))
    N = sequence_count(sequences, B)
    states = torch.empty([B, chunk_count(chunks, C, T), H, K, V], dtype=z.dtype, device=z.device)
    s1 = torch.empty([N, H, K, V], dtype=torch.float32, device=z.device)
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
                b_S = b_S * torch.exp2(gs[i_j, i_h]) + S[i_j, i_h, tile_k, tile_v]
        for i_r in hl.grid(count):
            i_c = count - 1 - i_r if backwards else i_r
            states[i_b, i_first + i_c, i_h, tile_k, tile_v] = in_range(b_S, states.dtype)
            i_t = hl.arange(C) + i_c * C + begin
            live = (i_t < end)[:, None]
            b_gc = hl.load(gc, [i_b, i_h, torch.clamp(i_t, max=fill - 1)])
            b_gl = gc[i_b, i_h, min(begin + i_c * C + C, fill) - 1]
            b_y = hl.load(y, [i_b, i_t, i_h, tile_k], extra_mask=live)
            b_z = hl.load(z, [i_b, i_t, i_h, tile_v], extra_mask=live)
            b_f = torch.exp2(b_gc) * unit if backwards else torch.exp2(torch.clamp(b_gl - b_gc, max=0.0))
            b_z = in_range(b_z.to(torch.float32) * b_f[:, None], z.dtype)
            b_S = hl.dot(b_y.transpose(0, 1), b_z, acc=b_S * torch.exp2(b_gl))
        if after == 0:
            s1[i_n, i_h, tile_k, tile_v] = b_S * unless_empty(rest, segments, begin, end)
    return states, s1


@kernel(dot_precision="tf32x3")
def scalar_bwd_qk_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gc: torch.Tensor, do: torch.Tensor, S: torch.Tensor,
    D: torch.Tensor, chunks: torch.Tensor | None, scale: float, rest: float, C: hl.constexpr, with_dg: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With P = scale (do v^T . decay), lower triangular:

        dq = scale 2^gc do S^T + P k      dk = rest 2^(gl - gc) v D^T + P^T q
        dg_t = sum_{i >= t > j} P_ij q_i . k_j + sum_{i >= t} x_i + sum_{j < t} y_j + rest 2^gl sum(S . D)

    where x_i = q_i . dq_i and y_j = k_j . dk_j hold the terms through S and D alone.

    q, k [B,T,H,K], v, do [B,T,H,V], gc fp32 [B,H,T], S, D [B,NT,H,K,V] -> dq, dk as q, k, dg fp32
    [NK,B,T,H], a K tile each, written only with_dg.  One program a head, chunk and K tile.
    """
    B, T, H, K = q.size()
    K, V = hl.specialize((K, v.size(3)))
    BK = hl.register_block_size(16, K)
    BV = hl.register_block_size(16, V)
    dq = torch.empty([B, T, H, K], dtype=q.dtype, device=q.device)
    dk = torch.empty([B, T, H, K], dtype=k.dtype, device=q.device)
    dg = torch.empty([(K + BK - 1) // BK, B, T, H], dtype=torch.float32, device=q.device)
    for tile_k, tile_bh, tile_c in hl.tile([K, B * H, chunk_count(chunks, C, T)], block_size=[BK, 1, 1]):
        i_b = tile_bh.begin // H
        i_h = tile_bh.begin % H
        begin, end, fill = chunk(chunks, tile_c.begin, C, T)
        idx = hl.arange(C)
        i_t = idx + begin
        live = (i_t < end)[:, None]
        written = (i_t < fill)[:, None]
        b_p = hl.zeros([C, C], dtype=torch.float32)
        b_dq = hl.zeros([C, tile_k], dtype=torch.float32)
        b_dk = hl.zeros([C, tile_k], dtype=torch.float32)
        b_SD = hl.zeros([tile_k], dtype=torch.float32)
        for tile_v in hl.tile(V, block_size=BV):
            b_do = hl.load(do, [i_b, i_t, i_h, tile_v], extra_mask=live)
            b_v = hl.load(v, [i_b, i_t, i_h, tile_v], extra_mask=live)
            b_S = S[i_b, tile_c.begin, i_h, tile_k, tile_v]
            b_D = D[i_b, tile_c.begin, i_h, tile_k, tile_v]
            b_p = hl.dot(b_do, b_v.transpose(0, 1), acc=b_p)
            b_dq = hl.dot(b_do, b_S.transpose(0, 1), acc=b_dq)
            b_dk = hl.dot(b_v, b_D.transpose(0, 1), acc=b_dk)
            if with_dg:
                b_SD = b_SD + torch.sum(b_S.to(torch.float32) * b_D.to(torch.float32), 1)
        b_q = hl.load(q, [i_b, i_t, i_h, tile_k], extra_mask=live)
        b_k = hl.load(k, [i_b, i_t, i_h, tile_k], extra_mask=live)
        lower = idx[:, None] >= idx[None, :]
        b_gc = hl.load(gc, [i_b, i_h, torch.clamp(i_t, max=fill - 1)])
        b_gl = gc[i_b, i_h, min(begin + C, fill) - 1]
        b_p = decayed(b_p * scale, b_gc, lower)
        b_dq = b_dq * (torch.exp2(b_gc) * scale)[:, None]
        b_dk = b_dk * (torch.exp2(torch.clamp(b_gl - b_gc, max=0.0)) * rest)[:, None]
        if with_dg:
            b_x = torch.sum(b_dq * b_q.to(torch.float32), 1)
            b_y = torch.sum(b_dk * b_k.to(torch.float32), 1)
            b_w = hl.dot(b_q, b_k.transpose(0, 1), out_dtype=torch.float32)
            b_w = torch.where(idx[:, None] > idx[None, :], b_w * b_p, 0.0)
            b_x = b_x + (torch.sum(b_w, 1) - torch.sum(b_w, 0))
            b_dg = torch.sum(torch.where(idx[:, None] <= idx[None, :], b_x[None, :], b_y[None, :]), 1)
            b_dg = torch.where(i_t < end, b_dg + torch.sum(b_SD, 0) * (torch.exp2(b_gl) * rest), 0.0)
            hl.store(dg, [tile_k.begin // BK, i_b, i_t, i_h], b_dg, extra_mask=i_t < fill)
        b_p = in_range(b_p, q.dtype)
        hl.store(dq, [i_b, i_t, i_h, tile_k], hl.dot(b_p, b_k, acc=b_dq).to(dq.dtype), extra_mask=written)
        b_dk = hl.dot(b_p.transpose(0, 1), b_q, acc=b_dk)
        hl.store(dk, [i_b, i_t, i_h, tile_k], b_dk.to(dk.dtype), extra_mask=written)
    return dq, dk, dg


@kernel(dot_precision="tf32x3")
def scalar_bwd_v_kernel(
    q: torch.Tensor, k: torch.Tensor, gc: torch.Tensor, do: torch.Tensor, D: torch.Tensor,
    chunks: torch.Tensor | None, scale: float, rest: float, C: hl.constexpr,
) -> torch.Tensor:
    """dv = rest 2^(gl - gc) k D + A^T do with A = scale (q k^T . decay), lower triangular.

    q, k [B,T,H,K], gc fp32 [B,H,T], do [B,T,H,V], D [B,NT,H,K,V] -> dv as do.
    One program a head, chunk and V tile.
    """
    B, T, H, K = q.size()
    K, V = hl.specialize((K, do.size(3)))
    dv = torch.empty([B, T, H, V], dtype=do.dtype, device=q.device)
    BK = hl.register_block_size(16, K)
    BV = hl.register_block_size(16, V)
    for tile_v, tile_bh, tile_c in hl.tile([V, B * H, chunk_count(chunks, C, T)], block_size=[BV, 1, 1]):
        i_b = tile_bh.begin // H
        i_h = tile_bh.begin % H
        begin, end, fill = chunk(chunks, tile_c.begin, C, T)
        idx = hl.arange(C)
        i_t = idx + begin
        live = (i_t < end)[:, None]
        b_a = hl.zeros([C, C], dtype=torch.float32)
        b_dv = hl.zeros([C, tile_v], dtype=torch.float32)
        for tile_k in hl.tile(K, block_size=BK):
            b_k = hl.load(k, [i_b, i_t, i_h, tile_k], extra_mask=live)
            b_a = hl.dot(b_k, hl.load(q, [i_b, i_t, i_h, tile_k], extra_mask=live).transpose(0, 1), acc=b_a)
            b_dv = hl.dot(b_k, D[i_b, tile_c.begin, i_h, tile_k, tile_v], acc=b_dv)
        upper = idx[:, None] <= idx[None, :]
        b_gc = hl.load(gc, [i_b, i_h, torch.clamp(i_t, max=fill - 1)])
        b_gl = gc[i_b, i_h, min(begin + C, fill) - 1]
        b_a = decayed(b_a * scale, -b_gc, upper)
        b_dv = b_dv * (torch.exp2(torch.clamp(b_gl - b_gc, max=0.0)) * rest)[:, None]
        b_dv = hl.dot(in_range(b_a, do.dtype), hl.load(do, [i_b, i_t, i_h, tile_v], extra_mask=live), acc=b_dv)
        hl.store(dv, [i_b, i_t, i_h, tile_v], b_dv.to(dv.dtype), extra_mask=(i_t < fill)[:, None])
    return dv


def _chunk(q: torch.Tensor, gated: bool) -> int:
    """Tokens in a chunk: fp32 tiles of 64 spill more and lose more of a small gate that follows a strong one, and walks
    with a large K have no room for loads ahead.  With a gate it stays 64 there: shorter chunks walk no faster, and
    their states, which the backward writes, would be twice as many.
    """
    return 32 if q.dtype == torch.float32 or not gated and q.size(-1) > 128 else 64


def scalar_gate_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, h0: torch.Tensor | None, scale: float,
    tables: Tables, head_decay: bool,
) -> tuple[torch.Tensor, ...]:
    """o [B,T,H,V] in v's dtype, ht fp32 [N,H,K,V], and for the backward gc, the segments' states and gates (each may be
    None) and their table.
    """
    C, sequences, split = _chunk(q, g is not None or head_decay), tables.sequences, split_scale(scale)
    gc = None if g is None else gate_cumsum_kernel(g, tables.chunks, C)
    if head_decay:
        gc = head_decay_kernel(q, tables.chunks, C)
    L = segment_length(v, C)
    segments = segment_table(sequences, q.size(1), C, L)
    S, gs = (None, None) if L >= q.size(1) else scalar_segment_kernel(k, v, gc, segments, 1.0, C, L, False)
    o, ht = scalar_walk_kernel(q, k, v, gc, h0, S, gs, sequences, segments, *split, C, L, False)
    return o, ht, gc, S, gs, segments


def scalar_gate_bwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, h0: torch.Tensor | None, gc: torch.Tensor | None,
    S: torch.Tensor | None, gs: torch.Tensor | None, segments: torch.Tensor | None, scale: float, tables: Tables,
    do: torch.Tensor, dht: torch.Tensor | None, with_dg: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """dq, dk, dv in q's dtype, dg fp32 [B,T,H] (None unless with_dg), dh0 fp32 [N,H,K,V]."""
    C, (sequences, chunks) = _chunk(q, gc is not None), tables
    L, split = segment_length(v, C), split_scale(scale)
    D, gd = (None, None) if L >= q.size(1) else scalar_segment_kernel(q, do, gc, segments, split[0], C, L, True)
    if with_dg or gc is not None and max(q.size(-1), v.size(-1)) > 128:  # walks with a gate spill there
        S, _ = scalar_state_kernel(k, v, gc, h0, S, gs, sequences, chunks, segments, 1.0, 1.0, C, L, False)
        D, dh0 = scalar_state_kernel(q, do, gc, dht, D, gd, sequences, chunks, segments, *split, C, L, True)
        dq, dk, dg = scalar_bwd_qk_kernel(q, k, v, gc, do, S, D, chunks, scale, split[1], C, with_dg)
        dv = scalar_bwd_v_kernel(q, k, gc, do, D, chunks, scale, split[1], C)
        return dq, dk, dv, dg.sum(0) if with_dg else None, dh0
    dv, dh0 = scalar_walk_kernel(k, q, do, gc, dht, D, gd, sequences, segments, *split, C, L, True)
    h0, S, dht, D = (x if x is None else x.mT for x in (h0, S, dht, D))  # views: dq and dk walk with S^T, D^T
    dq, _ = scalar_walk_kernel(do, v, k, gc, h0, S, gs, sequences, segments, *split, C, L, False)
    dk, _ = scalar_walk_kernel(v, do, q, gc, dht, D, gd, sequences, segments, *split, C, L, True)
    return dq, dk, dv, None, dh0


class _ScalarGate(torch.autograd.Function):
    """(q, k, v, g or None, h0 or None, scale, tables, head_decay) -> o, ht.  Saves q, k, v, h0, gc and the states that
    segments add, in the shortest segments as much as an input.
    """

    @staticmethod
    def forward(ctx, q, k, v, g, h0, scale, tables, head_decay):
        ctx.set_materialize_grads(False)
        o, ht, *small = scalar_gate_fwd(q, k, v, g, h0, scale, tables, head_decay)
        ctx.save_for_backward(q, k, v, h0, *small, *tables)
        ctx.scale, ctx.gate = scale, None if g is None else g.dtype
        return o, ht

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dht):
        q, k, v, h0, gc, S, gs, segments, *tables = ctx.saved_tensors
        if do is None and dht is None:
            return (None,) * 8
        do, dht = output_gradients(do, dht, v)
        dq, dk, dv, dg, dh0 = scalar_gate_bwd(
            q, k, v, h0, gc, S, gs, segments, ctx.scale, Tables(*tables), do, dht, ctx.needs_input_grad[3])
        dg = None if dg is None else dg.to(ctx.gate)
        return dq, dk, dv, dg, dh0.to(h0.dtype) if ctx.needs_input_grad[4] else None, None, None, None


def scalar_gate(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, scale: float | None,
    initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, state_v_first: bool = False,
    head_decay: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the final state for checked arguments of any K and V, differentiable.

    With head_decay and g None head h decays by 1 - 2^(-5 - h) a token.
    """
    scale = q.size(-1) ** -0.5 if scale is None else float(scale)

    def run(q, k, v, initial_state, tables):
        return _ScalarGate.apply(q, k, v, g, initial_state, scale, tables, head_decay)

    C = _chunk(q, g is not None or head_decay)
    return over_values(run, q, k, v, initial_state, cu_seqlens, C, state_v_first, (g,))
