"""The kernels of Kimi delta attention that work on one chunk at a time; the walks along a sequence are in `_delta.py`.

A gate has a value for each channel and token.  In a chunk of C tokens gc is the log2 gate summed from the chunk's begin
and gl its sum over the chunk; S is the state at the chunk's begin, D the gradient of the state at its end, and

    A_ij = sum_d q_id k_jd 2^(gc_id - gc_jd), i >= j                 qg = 2^gc q    kb = 2^gc k    kg = 2^(gl - gc) k
    M_ij = sum_d k_id k_jd 2^(gc_id - gc_jd), i > j                  L = beta M     X = (I + L)^-1

The written values n and r, the gradient of what goes into X, are those of `_delta.py`.
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
    block_key_gradients,
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
from ._sequences import chunk, chunk_count, row_values
from ._tile import in_range, two_parts, unit_lower_inverse


@kernel(dot_precision="tf32x3")
def kda_scores_kernel(
    q: torch.Tensor, k: torch.Tensor, gc: torch.Tensor, gl: torch.Tensor, chunks: torch.Tensor | None, C: hl.constexpr,
    G: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, M, qg, kb and kg.  A and M are without what the far kernel adds (`_channel_gate.py`).

    q, k [B,T,H,K], gc fp32 [B,T,HV,K], gl fp32 [B,NT,HV,K] -> A [B,T,HV,C], zero above the diagonal, and qg, kb, kg
    [B,T,HV,K] in q's dtype, M fp32 [B,T,HV,C], zero on and above the diagonal.
    One program a value head and chunk.
    """
    B, T, HV, K = gc.size()
    K = hl.specialize(K)
    NT = chunk_count(chunks, C, T)
    levels = C.bit_length() - 1
    A = torch.empty([B, T, HV, C], dtype=q.dtype, device=q.device)
    M = torch.empty([B, T, HV, C], dtype=torch.float32, device=q.device)
    qg = torch.empty([B, T, HV, K], dtype=q.dtype, device=q.device)
    kb = torch.empty([B, T, HV, K], dtype=q.dtype, device=q.device)
    kg = torch.empty([B, T, HV, K], dtype=q.dtype, device=q.device)
    BK = hl.register_block_size(16, K)
    for tile_bh, tile_c in hl.tile([B * HV, NT], block_size=[1, 1]):
        i_b = tile_bh.begin // HV
        i_h = tile_bh.begin % HV
        begin, end, fill = chunk(chunks, tile_c.begin, C, T)
        idx = hl.arange(C)
        i_t = idx + begin
        live = (i_t < end)[:, None]
        written = (i_t < fill)[:, None]
        b_A = hl.zeros([C, C], dtype=torch.float32)
        b_M = hl.zeros([C, C], dtype=torch.float32)
        for tile_k in hl.tile(K, block_size=BK):
            b_q = hl.load(q, [i_b, i_t, i_h // G, tile_k], extra_mask=live)
            b_k = hl.load(k, [i_b, i_t, i_h // G, tile_k], extra_mask=live)
            b_gc = hl.load(gc, [i_b, torch.clamp(i_t, max=fill - 1), i_h, tile_k])
            b_from = torch.exp2(b_gc)
            hl.store(qg, [i_b, i_t, i_h, tile_k], (b_q.to(torch.float32) * b_from).to(qg.dtype), extra_mask=written)
            hl.store(kb, [i_b, i_t, i_h, tile_k], (b_k.to(torch.float32) * b_from).to(kb.dtype), extra_mask=written)
            b_gl = gl[i_b, tile_c.begin, i_h, tile_k]
            b_kg = b_k.to(torch.float32) * torch.exp2(torch.clamp(b_gl[None, :] - b_gc, max=0.0))
            hl.store(kg, [i_b, i_t, i_h, tile_k], b_kg.to(kg.dtype), extra_mask=written)
            b_A = b_A + block_scores(b_q, b_k, b_gc, levels, C)
            b_M = b_M + block_scores(b_k, b_k, b_gc, levels, C)
        b_A = torch.where(idx[:, None] >= idx[None, :], b_A, 0.0)
        hl.store(A, [i_b, i_t, i_h, idx], in_range(b_A, A.dtype), extra_mask=written)
        hl.store(M, [i_b, i_t, i_h, idx], torch.where(idx[:, None] > idx[None, :], b_M, 0.0), extra_mask=written)
    return A, M, qg, kb, kg


@kernel(dot_precision="tf32x3")
def kda_far_scores_kernel(
    q: torch.Tensor, k: torch.Tensor, gc: torch.Tensor, gl: torch.Tensor, A: torch.Tensor, M: torch.Tensor,
    chunks: torch.Tensor | None, C: hl.constexpr, G: hl.constexpr,
) -> None:
    """Adds to A and M of kda_scores_kernel the rows and channels of q and k that are not near.  Most chunks have none.

    q, k [B,T,H,K], gc fp32 [B,T,HV,K], gl fp32 [B,NT,HV,K], A [B,T,HV,C], M fp32 [B,T,HV,C].
    One program a value head and 8 chunks.
    """
    B, T, HV, K = gc.size()
    K = hl.specialize(K)
    NT = chunk_count(chunks, C, T)
    levels = C.bit_length() - 1
    BK = hl.register_block_size(16, K)
    for tile_bh, tile_n in hl.tile([B * HV, NT], block_size=[1, FAR_CHUNKS]):
        i_b = tile_bh.begin // HV
        i_h = tile_bh.begin % HV
        for i_c in hl.grid(tile_n.begin, tile_n.end):
            if torch.amin(gl[i_b, i_c, i_h, :], 0) < -reach(q.dtype):
                begin, end, fill = chunk(chunks, i_c, C, T)
                i_t = hl.arange(C) + begin
                live = (i_t < end)[:, None]
                written = (i_t < fill)[:, None]
                b_A = hl.zeros([C, C], dtype=torch.float32)
                b_M = hl.zeros([C, C], dtype=torch.float32)
                for tile_k in hl.tile(K, block_size=BK):
                    if torch.amin(gl[i_b, i_c, i_h, tile_k], 0) < -reach(q.dtype):
                        b_k = hl.load(k, [i_b, i_t, i_h // G, tile_k], extra_mask=live)
                        b_gc = hl.load(gc, [i_b, torch.clamp(i_t, max=fill - 1), i_h, tile_k])
                        b_x = not_within(hl.load(q, [i_b, i_t, i_h // G, tile_k], extra_mask=live), b_gc, q.dtype)
                        b_y = not_within(b_k, b_gc, q.dtype)
                        i_e = torch.clamp(half_begin(BLOCK_LEVEL, C) + begin, max=fill) - 1
                        b_c = b_gc - hl.load(gc, [i_b, i_e, i_h, tile_k], extra_mask=(i_e >= begin)[:, None])
                        b_A = b_A + block_scores(b_x, b_k, b_c, BLOCK_LEVEL, C)
                        b_A = b_A + diagonal_scores(not_within(b_x, b_c, q.dtype), b_k, C)
                        b_M = b_M + block_scores(b_y, b_k, b_c, BLOCK_LEVEL, C)
                        for level in hl.grid(first_level(b_c, q.dtype), levels):
                            i_e = torch.clamp(border(level, C) + begin, max=fill - 1)
                            b_f = torch.exp2(-torch.abs(b_gc - hl.load(gc, [i_b, i_e, i_h, tile_k])))
                            b_A = level_scores(at_level(b_x, b_c, level, q.dtype), b_k, b_A, b_f, level, C)
                            b_M = level_scores(at_level(b_y, b_c, level, q.dtype), b_k, b_M, b_f, level, C)
                idx = hl.arange(C)
                b_A = torch.where(idx[:, None] >= idx[None, :], b_A, 0.0)
                b_A = b_A + hl.load(A, [i_b, i_t, i_h, idx], extra_mask=live).to(torch.float32)
                hl.store(A, [i_b, i_t, i_h, idx], in_range(b_A, A.dtype), extra_mask=written)
                b_M = torch.where(idx[:, None] > idx[None, :], b_M, 0.0)
                b_M = b_M + hl.load(M, [i_b, i_t, i_h, idx], extra_mask=live)
                hl.store(M, [i_b, i_t, i_h, idx], b_M, extra_mask=written)


@kernel(dot_precision="tf32x3")
def kda_solve_kernel(
    M: torch.Tensor, beta: torch.Tensor, A: torch.Tensor, chunks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """X = (I + beta M)^-1 in two parts, and beta as the walks want it (`_delta.py`).

    M fp32 [B,T,HV,C], beta [B,T,HV], A [B,T,HV,C], whose dtype alone matters -> X [B,T,HV,2C] in it, beta fp32
    [B,HV,T].
    One program a value head and chunk.
    """
    B, T, HV, C = M.size()
    C = hl.specialize(C)
    NT = chunk_count(chunks, C, T)
    X = torch.empty([B, T, HV, 2 * C], dtype=A.dtype, device=A.device)
    by_head = torch.empty([B, HV, T], dtype=torch.float32, device=A.device)
    for tile_bh, tile_c in hl.tile([B * HV, NT], block_size=[1, 1]):
        i_b = tile_bh.begin // HV
        i_h = tile_bh.begin % HV
        begin, end, fill = chunk(chunks, tile_c.begin, C, T)
        i_t = hl.arange(C) + begin
        written = (i_t < fill)[:, None]
        b_beta = row_values(beta, i_b, i_t, i_h, end, fill)
        hl.store(by_head, [i_b, i_h, i_t], b_beta, extra_mask=i_t < fill)
        b_L = hl.load(M, [i_b, i_t, i_h, hl.arange(C)], extra_mask=(i_t < end)[:, None]) * b_beta[:, None]
        # a product gives L the layout of the matrix unit: in a load's layout the substitution takes 4 times the
        # instructions
        b_0 = hl.zeros([C, C], dtype=torch.bfloat16)
        b_L = hl.dot(b_0, b_0, acc=b_L)
        b_X, b_low = two_parts(unit_lower_inverse(b_L, C, X.dtype), X.dtype)
        hl.store(X, [i_b, i_t, i_h, hl.arange(C)], b_X, extra_mask=written)
        hl.store(X, [i_b, i_t, i_h, hl.arange(C) + C], b_low, extra_mask=written)
    return X, by_head


@kernel(dot_precision="tf32x3")
def kda_bwd_v_kernel(
    v: torch.Tensor, n: torch.Tensor, do: torch.Tensor, r: torch.Tensor, M: torch.Tensor, chunks: torch.Tensor | None,
    scale: float, rest: float, C: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dA = scale do n^T and dL = -rest r n^T for i >= j, mirrored above;  dbeta_i = rest r_i . v_i + sum_j dL_ij M_ij.

    v, n, do, r [B,T,HV,V], M fp32 [B,T,HV,C] -> dA, dL [B,T,HV,C] in v's dtype, dbeta but for what comes through S
    fp32 [B,T,HV].  One program a value head and chunk.
    """
    B, T, HV, V = v.size()
    V = hl.specialize(V)
    NT = chunk_count(chunks, C, T)
    dA = torch.empty([B, T, HV, C], dtype=v.dtype, device=v.device)
    dL = torch.empty([B, T, HV, C], dtype=v.dtype, device=v.device)
    dbeta = torch.empty([B, T, HV], dtype=torch.float32, device=v.device)
    BV = hl.register_block_size(16, V)
    for tile_bh, tile_c in hl.tile([B * HV, NT], block_size=[1, 1]):
        i_b = tile_bh.begin // HV
        i_h = tile_bh.begin % HV
        begin, end, fill = chunk(chunks, tile_c.begin, C, T)
        i_t = hl.arange(C) + begin
        live = (i_t < end)[:, None]
        written = (i_t < fill)[:, None]
        b_dA = hl.zeros([C, C], dtype=torch.float32)
        b_dL = hl.zeros([C, C], dtype=torch.float32)
        b_dbeta = hl.zeros([C], dtype=torch.float32)
        for tile_v in hl.tile(V, block_size=BV):
            b_n = hl.load(n, [i_b, i_t, i_h, tile_v], extra_mask=live).transpose(0, 1)
            b_dA = hl.dot(hl.load(do, [i_b, i_t, i_h, tile_v], extra_mask=live), b_n, acc=b_dA)
            b_r = hl.load(r, [i_b, i_t, i_h, tile_v], extra_mask=live)
            b_dL = hl.dot(b_r, b_n, acc=b_dL)
            b_v = hl.load(v, [i_b, i_t, i_h, tile_v], extra_mask=live)
            b_dbeta = b_dbeta + torch.sum(b_r.to(torch.float32) * b_v.to(torch.float32), 1)
        b_dA = mirrored(in_range(b_dA * scale, dA.dtype), C)
        hl.store(dA, [i_b, i_t, i_h, hl.arange(C)], b_dA, extra_mask=written)
        b_dL = b_dL * -rest
        b_M = hl.load(M, [i_b, i_t, i_h, hl.arange(C)], extra_mask=live)
        b_dbeta = b_dbeta * rest + torch.sum(b_dL * b_M, 1)  # dL not yet rounded: these terms may cancel
        hl.store(dL, [i_b, i_t, i_h, hl.arange(C)], mirrored(in_range(b_dL, dL.dtype), C), extra_mask=written)
        hl.store(dbeta, [i_b, i_t, i_h], b_dbeta, extra_mask=i_t < fill)
    return dA, dL, dbeta


@kernel(dot_precision="tf32x3")
def kda_bwd_qk_kernel(
    q: torch.Tensor, k: torch.Tensor, gc: torch.Tensor, gl: torch.Tensor, beta: torch.Tensor, do: torch.Tensor,
    n: torch.Tensor, r: torch.Tensor, dA: torch.Tensor, dL: torch.Tensor, S: torch.Tensor, D: torch.Tensor,
    chunks: torch.Tensor | None, scale: float, rest: float, C: hl.constexpr, G: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """With x = scale 2^gc do S^T, y = rest 2^(gl - gc) n D^T, z = -rest 2^gc r S^T and e_ij = 2^(gc_i - gc_j):

    dq_i = x_i + sum_j dA_ij e_ij k_j
    dk_i = y_i + beta_i z_i + sum_j (dA_ji e_ji q_j + beta_j dL_ji e_ji k_j + beta_i dL_ij e_ij k_j)
    dbeta_i = k_i . z_i, what comes through S
    dg_t = sum_{i>=t>j} (q_i dA_ij + beta_i k_i dL_ij) e_ij k_j
         + sum_{i>=t} (q x + beta k z)_i + sum_{j<t} (k y)_j + rest 2^gl sum_V S D,
    with every sum of dg in each channel.

    q, k [B,T,H,K], gc fp32 [B,T,HV,K], gl fp32 [B,NT,HV,K], beta [B,T,HV], do, n, r [B,T,HV,V], dA, dL [B,T,HV,C],
    S, D [B,NT,HV,K,V] -> dq, dk [B,T,HV,K], of a value head each, in q's dtype, dg fp32, dbeta fp32 [NK,B,T,HV], of a
    K tile each.  G = HV / H.
    One program a value head, chunk and K tile.
    """
    B, T, HV, K = gc.size()
    K, V = hl.specialize((K, do.size(3)))
    NT = chunk_count(chunks, C, T)
    levels = C.bit_length() - 1
    BK = hl.register_block_size(16, K)
    BV = hl.register_block_size(16, V)
    dq = torch.empty([B, T, HV, K], dtype=q.dtype, device=q.device)
    dk = torch.empty([B, T, HV, K], dtype=q.dtype, device=q.device)
    dg = torch.empty([B, T, HV, K], dtype=torch.float32, device=q.device)
    dbeta = torch.empty([(K + BK - 1) // BK, B, T, HV], dtype=torch.float32, device=q.device)
    for tile_k, tile_bh, tile_c in hl.tile([K, B * HV, NT], block_size=[BK, 1, 1]):
        i_b = tile_bh.begin // HV
        i_h = tile_bh.begin % HV
        begin, end, fill = chunk(chunks, tile_c.begin, C, T)
        i_t = hl.arange(C) + begin
        live = (i_t < end)[:, None]
        written = (i_t < fill)[:, None]
        b_q = hl.load(q, [i_b, i_t, i_h // G, tile_k], extra_mask=live)
        b_k = hl.load(k, [i_b, i_t, i_h // G, tile_k], extra_mask=live)
        b_gc = hl.load(gc, [i_b, torch.clamp(i_t, max=fill - 1), i_h, tile_k])
        b_beta = row_values(beta, i_b, i_t, i_h, end, fill)[:, None]
        b_dA = hl.load(dA, [i_b, i_t, i_h, hl.arange(C)], extra_mask=live)
        b_dL = hl.load(dL, [i_b, i_t, i_h, hl.arange(C)], extra_mask=live)
        b_gl = gl[i_b, tile_c.begin, i_h, tile_k]
        b_x = hl.zeros([C, tile_k], dtype=torch.float32)
        b_y = hl.zeros([C, tile_k], dtype=torch.float32)
        b_z = hl.zeros([C, tile_k], dtype=torch.float32)
        b_SD = hl.zeros([tile_k], dtype=torch.float32)
        for tile_v in hl.tile(V, block_size=BV):
            b_S = S[i_b, tile_c.begin, i_h, tile_k, tile_v]
            b_D = D[i_b, tile_c.begin, i_h, tile_k, tile_v]
            b_x = hl.dot(hl.load(do, [i_b, i_t, i_h, tile_v], extra_mask=live), b_S.transpose(0, 1), acc=b_x)
            b_y = hl.dot(hl.load(n, [i_b, i_t, i_h, tile_v], extra_mask=live), b_D.transpose(0, 1), acc=b_y)
            b_z = hl.dot(hl.load(r, [i_b, i_t, i_h, tile_v], extra_mask=live), b_S.transpose(0, 1), acc=b_z)
            b_SD = b_SD + torch.sum(b_S.to(torch.float32) * b_D.to(torch.float32), 1)
        b_kb = b_k.to(torch.float32) * b_beta
        b_x = b_x * torch.exp2(b_gc) * scale
        b_y = b_y * torch.exp2(torch.clamp(b_gl[None, :] - b_gc, max=0.0)) * rest
        b_z = b_z * torch.exp2(b_gc) * -rest
        b_u, b_v, b_dw, b_p = block_key_gradients(b_q, b_kb, b_k, b_dA, b_dL, b_gc, levels, C)
        b_dq, b_dk = diagonal_gradients(b_q, b_k, b_dA, C)
        b_dq = b_dq + b_u + b_x
        b_dk = b_dk + b_v + b_y
        b_dg = block_gate_sums(b_p + b_q.to(torch.float32) * b_x + b_kb * b_z, levels, q.dtype, C)
        b_dg = b_dg + later_gate_sums(b_k.to(torch.float32) * b_y, q.dtype, C)
        b_dg = torch.where(live, b_dg + (b_SD * torch.exp2(b_gl) * rest)[None, :], 0.0)
        hl.store(dq, [i_b, i_t, i_h, tile_k], b_dq.to(dq.dtype), extra_mask=written)
        hl.store(dk, [i_b, i_t, i_h, tile_k], (b_dk + (b_dw + b_z) * b_beta).to(dk.dtype), extra_mask=written)
        hl.store(dg, [i_b, i_t, i_h, tile_k], b_dg, extra_mask=written)
        b_dbeta = torch.sum(b_k.to(torch.float32) * b_z, 1)
        hl.store(dbeta, [tile_k.begin // BK, i_b, i_t, i_h], b_dbeta, extra_mask=i_t < fill)
    return dq, dk, dg, dbeta


@kernel(dot_precision="tf32x3")
def kda_far_bwd_qk_kernel(
    q: torch.Tensor, k: torch.Tensor, gc: torch.Tensor, gl: torch.Tensor, beta: torch.Tensor, dA: torch.Tensor,
    dL: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor, dg: torch.Tensor, chunks: torch.Tensor | None,
    C: hl.constexpr, G: hl.constexpr,
) -> None:
    """Adds to dq, dk and dg of kda_bwd_qk_kernel what comes through kda_far_scores_kernel.

    q, k [B,T,H,K], dq, dk [B,T,HV,K], gc, dg fp32 [B,T,HV,K], gl fp32 [B,NT,HV,K], beta [B,T,HV], dA, dL [B,T,HV,C].
    One program a value head and 8 chunks.
    """
    B, T, HV, K = gc.size()
    K = hl.specialize(K)
    NT = chunk_count(chunks, C, T)
    levels = C.bit_length() - 1
    BK = hl.register_block_size(16, K)
    for tile_bh, tile_n in hl.tile([B * HV, NT], block_size=[1, FAR_CHUNKS]):
        i_b = tile_bh.begin // HV
        i_h = tile_bh.begin % HV
        for i_c in hl.grid(tile_n.begin, tile_n.end):
            if torch.amin(gl[i_b, i_c, i_h, :], 0) < -reach(q.dtype):
                begin, end, fill = chunk(chunks, i_c, C, T)
                i_t = hl.arange(C) + begin
                live = (i_t < end)[:, None]
                written = (i_t < fill)[:, None]
                b_beta = row_values(beta, i_b, i_t, i_h, end, fill)[:, None]
                for tile_k in hl.tile(K, block_size=BK):
                    if torch.amin(gl[i_b, i_c, i_h, tile_k], 0) < -reach(q.dtype):
                        b_dA = hl.load(dA, [i_b, i_t, i_h, hl.arange(C)], extra_mask=live)
                        b_dL = hl.load(dL, [i_b, i_t, i_h, hl.arange(C)], extra_mask=live)
                        b_k = hl.load(k, [i_b, i_t, i_h // G, tile_k], extra_mask=live)
                        b_gc = hl.load(gc, [i_b, torch.clamp(i_t, max=fill - 1), i_h, tile_k])
                        b_x = not_within(hl.load(q, [i_b, i_t, i_h // G, tile_k], extra_mask=live), b_gc, q.dtype)
                        b_z = not_within(b_k, b_gc, q.dtype) * b_beta
                        i_e = torch.clamp(half_begin(BLOCK_LEVEL, C) + begin, max=fill) - 1
                        b_c = b_gc - hl.load(gc, [i_b, i_e, i_h, tile_k], extra_mask=(i_e >= begin)[:, None])
                        b_dq, b_dk, b_dw, b_p = block_key_gradients(b_x, b_z, b_k, b_dA, b_dL, b_c, BLOCK_LEVEL, C)
                        b_dg = block_gate_sums(b_p, BLOCK_LEVEL, q.dtype, C)
                        for level in hl.grid(first_level(b_c, q.dtype), levels):
                            i_e = torch.clamp(border(level, C) + begin, max=fill - 1)
                            b_f = torch.exp2(-torch.abs(b_gc - hl.load(gc, [i_b, i_e, i_h, tile_k])))
                            upper = upper_half(level, C)
                            b_u, b_s = level_gradients(at_level(b_x, b_c, level, q.dtype), b_k, b_dA, b_f, level, C)
                            b_v, b_t = level_gradients(at_level(b_z, b_c, level, q.dtype), b_k, b_dL, b_f, level, C)
                            b_dq = b_dq + torch.where(upper, at_level(b_u, b_c, level, q.dtype), 0.0)
                            b_dw = b_dw + torch.where(upper, at_level(b_v, b_c, level, q.dtype), 0.0)
                            b_dk = b_dk + torch.where(upper, 0.0, b_u + b_v)
                            b_dg = b_dg + level_gate_sums(b_s + b_t, level, q.dtype, C)
                        b_dq = not_within(b_dq, b_gc, q.dtype)
                        b_dw = not_within(b_dw, b_gc, q.dtype)
                        b_dq = b_dq + hl.load(dq, [i_b, i_t, i_h, tile_k], extra_mask=live).to(torch.float32)
                        hl.store(dq, [i_b, i_t, i_h, tile_k], b_dq.to(dq.dtype), extra_mask=written)
                        b_dk = b_dk + b_dw * b_beta
                        b_dk = b_dk + hl.load(dk, [i_b, i_t, i_h, tile_k], extra_mask=live).to(torch.float32)
                        hl.store(dk, [i_b, i_t, i_h, tile_k], b_dk.to(dk.dtype), extra_mask=written)
                        b_dg = b_dg + hl.load(dg, [i_b, i_t, i_h, tile_k], extra_mask=live)
                        hl.store(dg, [i_b, i_t, i_h, tile_k], b_dg, extra_mask=written)
