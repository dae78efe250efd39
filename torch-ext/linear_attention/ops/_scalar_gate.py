"""Attention with no gate, or one gate a head and token: the kernels of linear attention, retention and simple GLA.

The recurrence is `S_t = e^{g_t} S_{t-1} + k_t v_t^T`, `o_t = scale S_t^T q_t`.  In a chunk of C tokens, with `gc` the
log2 gate summed from the chunk's begin, `gl` its value at the chunk's end, and S the state at the chunk's begin:

    o_i = scale (2^gc_i S^T q_i + sum_{j<=i} 2^(gc_i - gc_j) (q_i . k_j) v_j)
    S'  = 2^gl S + sum_j k_j (2^(gl - gc_j) v_j)^T

and backwards, with D the gradient of the state at the chunk's end:

    D' = 2^gl D + scale sum_i q_i (2^gc_i do_i)^T

The forward walks along each sequence with the state on chip and writes no state, or with a large K writes the states
and takes all chunks at once.  The backward walks once each way to write S and D for every chunk; then all chunks are
independent.  `g` is a natural logarithm of any strides (retention expands one value a head over all tokens); without a
gate it is None.  `_gates.py` makes gc of it, for all kernels.
"""
from __future__ import annotations

import helion.language as hl
import torch

from ._aot import kernel
from ._gates import gate_cumsum_kernel
from ._host import WALK_K, last_contiguous, over_values
from ._sequences import Tables, all_chunks, chunk, chunk_count, sequence, sequence_count
from ._tile import decay_tile


@kernel(dot_precision="tf32x3")
def scalar_fwd_o_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gc: torch.Tensor | None, h0: torch.Tensor | None,
    sequences: torch.Tensor | None, scale: float, C: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o = scale (2^gc q S + (q k^T . decay) v);  S <- 2^gl S + k^T (2^(gl - gc) v).

    q, k [B,T,H,K], v [B,T,H,V], gc fp32 [B,T,H], h0 [N,H,K,V] -> o [B,T,H,V], ht fp32 [N,H,K,V].
    One program a sequence, head and V tile.
    """
    B, T, H, K = q.size()
    K, V = hl.specialize((K, v.size(3)))
    N = sequence_count(sequences, B)
    o = torch.empty([B, T, H, V], dtype=v.dtype, device=v.device)
    ht = torch.empty([N, H, K, V], dtype=torch.float32, device=v.device)
    BV = hl.register_block_size(16, V)
    for tile_nh, tile_v in hl.tile([N * H, V], block_size=[1, BV]):
        i_n = tile_nh.begin // H
        i_h = tile_nh.begin % H
        i_b, first, count, begin, end, fill = sequence(sequences, i_n, C, T)
        if h0 is None:
            b_S = hl.zeros([K, tile_v], dtype=torch.float32)
        else:
            b_S = h0[i_n, i_h, :, tile_v].to(torch.float32)
        for i_c in hl.grid(count):
            idx = hl.arange(C)
            i_t = idx + i_c * C + begin
            i_k = hl.arange(K)
            live = (i_t < end)[:, None]
            b_q = hl.load(q, [i_b, i_t, i_h, i_k], extra_mask=live)
            b_k = hl.load(k, [i_b, i_t, i_h, i_k], extra_mask=live)
            b_v = hl.load(v, [i_b, i_t, i_h, tile_v], extra_mask=live)
            lower = idx[:, None] >= idx[None, :]
            b_a = hl.dot(b_q, b_k.transpose(0, 1), out_dtype=torch.float32)
            b_o = hl.dot(b_q, b_S.to(b_q.dtype), out_dtype=torch.float32)
            if gc is None:
                b_a = torch.where(lower, b_a, 0.0)
            else:
                b_gc = hl.load(gc, [i_b, torch.clamp(i_t, max=fill - 1), i_h])
                b_gl = gc[i_b, min(begin + i_c * C + C, fill) - 1, i_h]
                b_a = b_a * decay_tile(b_gc, lower)
                b_o = b_o * torch.exp2(b_gc)[:, None]
                b_S = b_S * torch.exp2(b_gl)
            b_o = hl.dot(b_a.to(b_v.dtype), b_v, acc=b_o)
            hl.store(o, [i_b, i_t, i_h, tile_v], (b_o * scale).to(o.dtype), extra_mask=(i_t < fill)[:, None])
            if gc is not None:
                b_v = (b_v.to(torch.float32) * torch.exp2(torch.clamp(b_gl - b_gc, max=0.0))[:, None]).to(v.dtype)
            b_S = hl.dot(b_k.transpose(0, 1), b_v, acc=b_S)
        ht[i_n, i_h, :, tile_v] = b_S
    return o, ht


@kernel(dot_precision="tf32x3")
def scalar_fwd_state_kernel(
    k: torch.Tensor, v: torch.Tensor, gc: torch.Tensor | None, h0: torch.Tensor | None,
    sequences: torch.Tensor | None, C: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """S <- 2^gl S + k^T (2^(gl - gc) v), written before each chunk, and the final state.

    k [B,T,H,K], v [B,T,H,V], gc fp32 [B,T,H], h0 [N,H,K,V] -> S [B,NT,H,K,V] in k's dtype,
    ht fp32 [N,H,K,V].  One program a sequence, head, K tile and V tile.
    """
    B, T, H, K = k.size()
    K, V = hl.specialize((K, v.size(3)))
    N = sequence_count(sequences, B)
    S = torch.empty([B, all_chunks(sequences, C, T), H, K, V], dtype=k.dtype, device=k.device)
    ht = torch.empty([N, H, K, V], dtype=torch.float32, device=k.device)
    BK = hl.register_block_size(16, K)
    BV = hl.register_block_size(16, V)
    for tile_nh, tile_k, tile_v in hl.tile([N * H, K, V], block_size=[1, BK, BV]):
        i_n = tile_nh.begin // H
        i_h = tile_nh.begin % H
        i_b, first, count, begin, end, fill = sequence(sequences, i_n, C, T)
        if h0 is None:
            b_S = hl.zeros([tile_k, tile_v], dtype=torch.float32)
        else:
            b_S = h0[i_n, i_h, tile_k, tile_v].to(torch.float32)
        for i_c in hl.grid(count):
            S[i_b, first + i_c, i_h, tile_k, tile_v] = b_S.to(S.dtype)
            i_t = hl.arange(C) + i_c * C + begin
            live = (i_t < end)[:, None]
            b_k = hl.load(k, [i_b, i_t, i_h, tile_k], extra_mask=live)
            b_v = hl.load(v, [i_b, i_t, i_h, tile_v], extra_mask=live)
            if gc is not None:
                b_gl = gc[i_b, min(begin + i_c * C + C, fill) - 1, i_h]
                b_S = b_S * torch.exp2(b_gl)
                b_gc = hl.load(gc, [i_b, torch.clamp(i_t, max=fill - 1), i_h])
                b_rest = torch.exp2(torch.clamp(b_gl - b_gc, max=0.0))
                b_v = (b_v.to(torch.float32) * b_rest[:, None]).to(v.dtype)
            b_S = hl.dot(b_k.transpose(0, 1), b_v, acc=b_S)
        ht[i_n, i_h, tile_k, tile_v] = b_S
    return S, ht


@kernel(dot_precision="tf32x3")
def scalar_out_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gc: torch.Tensor | None, S: torch.Tensor,
    chunks: torch.Tensor | None, scale: float, C: hl.constexpr,
) -> torch.Tensor:
    """o = scale (2^gc q S + (q k^T . decay) v) from the states.

    q, k [B,T,H,K], v [B,T,H,V], gc fp32 [B,T,H], S [B,NT,H,K,V] -> o as v.  One program a head, chunk and V tile.
    """
    B, T, H, K = q.size()
    K, V = hl.specialize((K, v.size(3)))
    o = torch.empty([B, T, H, V], dtype=v.dtype, device=v.device)
    BK = hl.register_block_size(16, K)
    BV = hl.register_block_size(16, V)
    for tile_bh, tile_c, tile_v in hl.tile([B * H, chunk_count(chunks, C, T), V], block_size=[1, 1, BV]):
        i_b = tile_bh.begin // H
        i_h = tile_bh.begin % H
        begin, end, fill = chunk(chunks, tile_c.begin, C, T)
        idx = hl.arange(C)
        i_t = idx + begin
        live = (i_t < end)[:, None]
        b_a = hl.zeros([C, C], dtype=torch.float32)
        b_o = hl.zeros([C, tile_v], dtype=torch.float32)
        for tile_k in hl.tile(K, block_size=BK):
            b_q = hl.load(q, [i_b, i_t, i_h, tile_k], extra_mask=live)
            b_a = hl.dot(b_q, hl.load(k, [i_b, i_t, i_h, tile_k], extra_mask=live).transpose(0, 1), acc=b_a)
            b_o = hl.dot(b_q, S[i_b, tile_c.begin, i_h, tile_k, tile_v], acc=b_o)
        lower = idx[:, None] >= idx[None, :]
        if gc is None:
            b_a = torch.where(lower, b_a, 0.0)
        else:
            b_gc = hl.load(gc, [i_b, torch.clamp(i_t, max=fill - 1), i_h])
            b_a = b_a * decay_tile(b_gc, lower)
            b_o = b_o * torch.exp2(b_gc)[:, None]
        b_o = hl.dot(b_a.to(v.dtype), hl.load(v, [i_b, i_t, i_h, tile_v], extra_mask=live), acc=b_o)
        hl.store(o, [i_b, i_t, i_h, tile_v], (b_o * scale).to(o.dtype), extra_mask=(i_t < fill)[:, None])
    return o


@kernel(dot_precision="tf32x3")
def scalar_bwd_state_kernel(
    q: torch.Tensor, do: torch.Tensor, gc: torch.Tensor | None, dht: torch.Tensor | None,
    sequences: torch.Tensor | None, scale: float, C: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """D <- 2^gl D + q^T (scale 2^gc do), chunks in reverse, written before each.

    q [B,T,H,K], do [B,T,H,V], gc fp32 [B,T,H], dht [N,H,K,V] -> D [B,NT,H,K,V] in q's dtype,
    dh0 fp32 [N,H,K,V].  One program a sequence, head, K tile and V tile.
    """
    B, T, H, K = q.size()
    K, V = hl.specialize((K, do.size(3)))
    N = sequence_count(sequences, B)
    D = torch.empty([B, all_chunks(sequences, C, T), H, K, V], dtype=q.dtype, device=q.device)
    dh0 = torch.empty([N, H, K, V], dtype=torch.float32, device=q.device)
    BK = hl.register_block_size(16, K)
    BV = hl.register_block_size(16, V)
    for tile_nh, tile_k, tile_v in hl.tile([N * H, K, V], block_size=[1, BK, BV]):
        i_n = tile_nh.begin // H
        i_h = tile_nh.begin % H
        i_b, first, count, begin, end, fill = sequence(sequences, i_n, C, T)
        if dht is None:
            b_D = hl.zeros([tile_k, tile_v], dtype=torch.float32)
        else:
            b_D = dht[i_n, i_h, tile_k, tile_v].to(torch.float32)
        for i_r in hl.grid(count):
            i_c = count - 1 - i_r
            D[i_b, first + i_c, i_h, tile_k, tile_v] = b_D.to(D.dtype)
            i_t = hl.arange(C) + i_c * C + begin
            live = (i_t < end)[:, None]
            b_q = hl.load(q, [i_b, i_t, i_h, tile_k], extra_mask=live)
            b_do = hl.load(do, [i_b, i_t, i_h, tile_v], extra_mask=live).to(torch.float32) * scale
            if gc is not None:
                b_do = b_do * torch.exp2(hl.load(gc, [i_b, torch.clamp(i_t, max=fill - 1), i_h]))[:, None]
                b_D = b_D * torch.exp2(gc[i_b, min(begin + i_c * C + C, fill) - 1, i_h])
            b_D = hl.dot(b_q.transpose(0, 1), b_do.to(q.dtype), acc=b_D)
        dh0[i_n, i_h, tile_k, tile_v] = b_D
    return D, dh0


@kernel(dot_precision="tf32x3")
def scalar_bwd_qk_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gc: torch.Tensor | None, do: torch.Tensor, S: torch.Tensor,
    D: torch.Tensor, chunks: torch.Tensor | None, scale: float, C: hl.constexpr, with_dg: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With P = scale (do v^T . decay), lower triangular:

        dq = scale 2^gc do S^T + P k      dk = 2^(gl - gc) v D^T + P^T q
        dg_t = sum_{i >= t > j} P_ij q_i . k_j + sum_{i >= t} x_i + sum_{j < t} y_j + 2^gl sum(S . D)

    where x_i = q_i . dq_i and y_j = k_j . dk_j hold the terms through S and D alone.

    q, k [B,T,H,K], v, do [B,T,H,V], gc fp32 [B,T,H], S, D [B,NT,H,K,V] -> dq, dk as q, k, dg fp32
    [NK,B,T,H], a K tile each (written only with_dg, which takes a gate).  One program a head, chunk and K tile.
    """
    B, T, H, K = q.size()
    K, V = hl.specialize((K, v.size(3)))
    BK = hl.register_block_size(16, K)
    BV = hl.register_block_size(16, V)
    dq = torch.empty([B, T, H, K], dtype=q.dtype, device=q.device)
    dk = torch.empty([B, T, H, K], dtype=k.dtype, device=q.device)
    dg = torch.empty([(K + BK - 1) // BK, B, T, H], dtype=torch.float32, device=q.device)
    for tile_bh, tile_c, tile_k in hl.tile([B * H, chunk_count(chunks, C, T), K], block_size=[1, 1, BK]):
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
        b_p = torch.where(lower, b_p * scale, 0.0)
        b_dq = b_dq * scale
        if gc is not None:
            b_gc = hl.load(gc, [i_b, torch.clamp(i_t, max=fill - 1), i_h])
            b_gl = gc[i_b, min(begin + C, fill) - 1, i_h]
            b_p = b_p * decay_tile(b_gc, lower)
            b_dq = b_dq * torch.exp2(b_gc)[:, None]
            b_dk = b_dk * torch.exp2(torch.clamp(b_gl - b_gc, max=0.0))[:, None]
        if with_dg:
            b_x = torch.sum(b_dq * b_q.to(torch.float32), 1)
            b_y = torch.sum(b_dk * b_k.to(torch.float32), 1)
            strict = idx[:, None] > idx[None, :]
            b_w = hl.dot(b_q, b_k.transpose(0, 1), out_dtype=torch.float32)
            b_w = torch.where(strict, b_w * b_p, 0.0)
            b_x = b_x + (torch.sum(b_w, 1) - torch.sum(b_w, 0))
            upper = idx[:, None] <= idx[None, :]
            b_dg = torch.sum(torch.where(upper, b_x[None, :], b_y[None, :]), 1)
            b_dg = torch.where(i_t < end, b_dg + torch.sum(b_SD, 0) * torch.exp2(b_gl), 0.0)
            hl.store(dg, [tile_k.begin // BK, i_b, i_t, i_h], b_dg, extra_mask=i_t < fill)
        b_p = b_p.to(q.dtype)
        hl.store(dq, [i_b, i_t, i_h, tile_k], hl.dot(b_p, b_k, acc=b_dq).to(dq.dtype), extra_mask=written)
        b_dk = hl.dot(b_p.transpose(0, 1), b_q, acc=b_dk)
        hl.store(dk, [i_b, i_t, i_h, tile_k], b_dk.to(dk.dtype), extra_mask=written)
    return dq, dk, dg


@kernel(dot_precision="tf32x3")
def scalar_bwd_v_kernel(
    q: torch.Tensor, k: torch.Tensor, gc: torch.Tensor | None, do: torch.Tensor, D: torch.Tensor,
    chunks: torch.Tensor | None, scale: float, C: hl.constexpr,
) -> torch.Tensor:
    """dv = 2^(gl - gc) k D + A^T do with A = scale (q k^T . decay), lower triangular.

    q, k [B,T,H,K], gc fp32 [B,T,H], do [B,T,H,V], D [B,NT,H,K,V] -> dv as do.
    One program a head, chunk and V tile.
    """
    B, T, H, K = q.size()
    K, V = hl.specialize((K, do.size(3)))
    dv = torch.empty([B, T, H, V], dtype=do.dtype, device=q.device)
    BK = hl.register_block_size(16, K)
    BV = hl.register_block_size(16, V)
    for tile_bh, tile_c, tile_v in hl.tile([B * H, chunk_count(chunks, C, T), V], block_size=[1, 1, BV]):
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
        b_a = torch.where(upper, b_a * scale, 0.0)
        if gc is not None:
            b_gc = hl.load(gc, [i_b, torch.clamp(i_t, max=fill - 1), i_h])
            b_gl = gc[i_b, min(begin + C, fill) - 1, i_h]
            b_a = b_a * decay_tile(-b_gc, upper)
            b_dv = b_dv * torch.exp2(torch.clamp(b_gl - b_gc, max=0.0))[:, None]
        b_dv = hl.dot(b_a.to(do.dtype), hl.load(do, [i_b, i_t, i_h, tile_v], extra_mask=live), acc=b_dv)
        hl.store(dv, [i_b, i_t, i_h, tile_v], b_dv.to(dv.dtype), extra_mask=(i_t < fill)[:, None])
    return dv


def _chunk(q: torch.Tensor) -> int:
    """Tokens in a chunk: fp32 tiles of 64 spill more and lose more of a small gate that follows a strong one."""
    return 32 if q.dtype == torch.float32 else 64


def _gate_sums(g: torch.Tensor | None, q: torch.Tensor, tables: Tables) -> torch.Tensor | None:
    """gc fp32 [B,T,H], or None without a gate."""
    return None if g is None else gate_cumsum_kernel(g, tables.chunks, _chunk(q))[0]


def scalar_gate_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, h0: torch.Tensor | None, scale: float,
    tables: Tables,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [B,T,H,V] in v's dtype and ht fp32 [N,H,K,V]."""
    C = _chunk(q)
    gc = _gate_sums(g, q, tables)
    if q.size(-1) <= WALK_K:
        return scalar_fwd_o_kernel(q, k, v, gc, h0, tables.sequences, scale, C)
    S, ht = scalar_fwd_state_kernel(k, v, gc, h0, tables.sequences, C)
    return scalar_out_kernel(q, k, v, gc, S, tables.chunks, scale, C), ht


def scalar_gate_bwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, h0: torch.Tensor | None, scale: float,
    tables: Tables, do: torch.Tensor, dht: torch.Tensor | None, with_dg: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """dq, dk, dv in q's dtype, dg in g's (None unless with_dg), dh0 fp32 [N,H,K,V]."""
    C = _chunk(q)
    gc = _gate_sums(g, q, tables)
    S, _ = scalar_fwd_state_kernel(k, v, gc, h0, tables.sequences, C)
    D, dh0 = scalar_bwd_state_kernel(q, do, gc, dht, tables.sequences, scale, C)
    dq, dk, dg = scalar_bwd_qk_kernel(q, k, v, gc, do, S, D, tables.chunks, scale, C, with_dg)
    dv = scalar_bwd_v_kernel(q, k, gc, do, D, tables.chunks, scale, C)
    return dq, dk, dv, dg.sum(0).to(g.dtype) if with_dg else None, dh0


class _ScalarGate(torch.autograd.Function):
    """(q, k, v, g or None, h0 or None, scale, tables) -> o, ht.  Saves its inputs and recomputes the states."""

    @staticmethod
    def forward(ctx, q, k, v, g, h0, scale, tables):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, h0, *tables)
        ctx.scale = scale
        return scalar_gate_fwd(q, k, v, g, h0, scale, tables)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dht):
        q, k, v, g, h0, *tables = ctx.saved_tensors
        if do is None and dht is None:
            return (None,) * 7
        do = torch.zeros(v.shape, dtype=v.dtype, device=v.device) if do is None else last_contiguous(do)
        dq, dk, dv, dg, dh0 = scalar_gate_bwd(
            q, k, v, g, h0, ctx.scale, Tables(*tables), do, last_contiguous(dht), ctx.needs_input_grad[3])
        dh0 = dh0.to(h0.dtype) if ctx.needs_input_grad[4] else None
        return dq, dk, dv, dg, dh0, None, None


def scalar_gate(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, scale: float | None,
    initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, state_v_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the final state for checked arguments of any K and V, differentiable."""
    scale = q.size(-1) ** -0.5 if scale is None else float(scale)

    def run(q, k, v, initial_state, tables):
        return _ScalarGate.apply(q, k, v, g, initial_state, scale, tables)

    return over_values(run, q, k, v, initial_state, cu_seqlens, _chunk(q), state_v_first, (g,))
