"""The delta rule without a gate, or with one gate a head and token: kernels, pipelines and the autograd function.

The recurrence is `S' = e^{g_t} S_{t-1}`, `S_t = S' + beta_t k_t (v_t - S'^T k_t)^T`, `o_t = scale S_t^T q_t`.  In a
chunk of C tokens, with gc the log2 gate summed from the chunk's begin and gl its value at the chunk's end:

    L_ij = beta_i 2^(gc_i - gc_j) k_i . k_j, i > j          A_ij = 2^(gc_i - gc_j) q_i . k_j, i >= j
    X = (I + L)^-1          w = X (beta 2^gc k)          u = X (beta v)          qg = 2^gc q          kg = 2^(gl - gc) k

`_delta.py` says how these walk along the chunks and what n, S, dn and D are.  The forward prepares all chunks at once
and walks, writing no state.  The backward prepares again, walks once each way to write S, n and D, dn for every chunk,
then takes all chunks at once.  Without a gate g is None, and q and k stand for qg and kg.

Parallelizing Linear Transformers with the Delta Rule over Sequence Length (https://arxiv.org/abs/2406.06484);
Gated Delta Networks: Improving Mamba2 with Delta Rule (https://arxiv.org/abs/2412.06464).
"""
from __future__ import annotations

import helion.language as hl
import torch

from ._aot import kernel
from ._delta import delta_bwd_state_kernel, delta_fwd_o_kernel, delta_fwd_state_kernel
from ._gates import gate_cumsum_kernel
from ._host import output_gradients, over_values, split_scale, sum_of_group
from ._l2norm import l2norm
from ._sequences import Tables, chunk, chunk_count, row_values
from ._tile import decayed, in_range, unit_lower_inverse


@kernel(dot_precision="tf32x3", fp32_precision="ieee")
def scalar_delta_prepare_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gc: torch.Tensor | None, gl: torch.Tensor | None,
    beta: torch.Tensor, chunks: torch.Tensor | None, C: hl.constexpr, G: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """[w, u] = X beta [2^gc k, v] with X = (I + L)^-1, the scores A, and qg = 2^gc q, kg = 2^(gl - gc) k.

    q, k [B,T,H,K], v [B,T,HV,V], gc fp32 [B,HV,T], gl fp32 [B,NT,HV], beta [B,T,HV] -> qg, kg, w [B,T,HV,K],
    u [B,T,HV,V], A, X [B,T,HV,C], all in q's dtype.  G = HV / H.  Without a gate qg and kg are not written.
    One program a value head and chunk.
    """
    B, T, HV, V = v.size()
    K, V = hl.specialize((k.size(3), V))
    qg = torch.empty([B, T, HV, K], dtype=k.dtype, device=k.device)
    kg = torch.empty([B, T, HV, K], dtype=k.dtype, device=k.device)
    w = torch.empty([B, T, HV, K], dtype=k.dtype, device=k.device)
    u = torch.empty([B, T, HV, V], dtype=k.dtype, device=k.device)
    A = torch.empty([B, T, HV, C], dtype=k.dtype, device=k.device)
    X = torch.empty([B, T, HV, C], dtype=k.dtype, device=k.device)
    for i_bh, i_c in hl.grid([B * HV, chunk_count(chunks, C, T)]):
        i_b = i_bh // HV
        i_h = i_bh % HV
        begin, end, fill = chunk(chunks, i_c, C, T)
        idx = hl.arange(C)
        i_t = idx + begin
        i_k = hl.arange(K)
        i_v = hl.arange(V)
        live = (i_t < end)[:, None]
        written = (i_t < fill)[:, None]
        b_k = hl.load(k, [i_b, i_t, i_h // G, i_k], extra_mask=live)
        b_q = hl.load(q, [i_b, i_t, i_h // G, i_k], extra_mask=live)
        b_beta = row_values(beta, i_b, i_t, i_h, end, fill)
        b_A = hl.dot(b_q, b_k.transpose(0, 1), out_dtype=torch.float32)
        b_L = hl.dot(b_k, b_k.transpose(0, 1), out_dtype=torch.float32) * b_beta[:, None]
        lower = idx[:, None] >= idx[None, :]
        strict = idx[:, None] > idx[None, :]
        if gc is None:
            b_A = torch.where(lower, b_A, 0.0)
            b_L = torch.where(strict, b_L, 0.0)
        else:
            b_gc = hl.load(gc, [i_b, i_h, torch.clamp(i_t, max=fill - 1)])
            b_gl = gl[i_b, i_c, i_h]
            b_A = decayed(b_A, b_gc, lower)
            b_L = decayed(b_L, b_gc, strict)
            b_from = torch.exp2(b_gc)
            b_rest = torch.exp2(torch.clamp(b_gl - b_gc, max=0.0))
            b_qg = (b_q.to(torch.float32) * b_from[:, None]).to(q.dtype)
            hl.store(qg, [i_b, i_t, i_h, i_k], b_qg, extra_mask=written)
            b_kg = (b_k.to(torch.float32) * b_rest[:, None]).to(k.dtype)
            hl.store(kg, [i_b, i_t, i_h, i_k], b_kg, extra_mask=written)
        hl.store(A, [i_b, i_t, i_h, idx], in_range(b_A, A.dtype), extra_mask=written)
        b_X = unit_lower_inverse(b_L, C, k.dtype)
        hl.store(X, [i_b, i_t, i_h, idx], in_range(b_X, X.dtype), extra_mask=written)
        b_v = hl.load(v, [i_b, i_t, i_h, i_v], extra_mask=live)
        b_Xb = b_X * b_beta[None, :]
        b_u = hl.dot(in_range(b_Xb, v.dtype), b_v, out_dtype=torch.float32)
        hl.store(u, [i_b, i_t, i_h, i_v], in_range(b_u, u.dtype), extra_mask=written)
        if gc is not None:
            b_Xb = b_Xb * b_from[None, :]
        b_w = hl.dot(in_range(b_Xb, k.dtype), b_k, out_dtype=torch.float32)
        hl.store(w, [i_b, i_t, i_h, i_k], in_range(b_w, w.dtype), extra_mask=written)
    return qg, kg, w, u, A, X


@kernel(dot_precision="tf32x3")
def scalar_delta_bwd_v_kernel(
    v: torch.Tensor, beta: torch.Tensor, X: torch.Tensor, dn: torch.Tensor, chunks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """r = X^T dn, the gradient of beta v;  dv = beta r;  rv_i = r_i . v_i, that part of dbeta.

    v, dn [B,T,H,V], beta [B,T,H], X [B,T,H,C] -> r, dv as v, rv fp32 [B,T,H].
    One program a head and chunk, in tiles of V.
    """
    B, T, H, V = v.size()
    V, C = hl.specialize((V, X.size(3)))
    r = torch.empty([B, T, H, V], dtype=v.dtype, device=v.device)
    dv = torch.empty([B, T, H, V], dtype=v.dtype, device=v.device)
    rv = torch.empty([B, T, H], dtype=torch.float32, device=v.device)
    BV = hl.register_block_size(16, V)
    for i_bh, i_c in hl.grid([B * H, chunk_count(chunks, C, T)]):
        i_b = i_bh // H
        i_h = i_bh % H
        begin, end, fill = chunk(chunks, i_c, C, T)
        i_t = hl.arange(C) + begin
        live = (i_t < end)[:, None]
        written = (i_t < fill)[:, None]
        b_beta = row_values(beta, i_b, i_t, i_h, end, fill)
        b_X = hl.load(X, [i_b, i_t, i_h, hl.arange(C)], extra_mask=live).transpose(0, 1)
        b_rv = hl.zeros([C], dtype=torch.float32)
        for tile_v in hl.tile(V, block_size=BV):
            b_dn = hl.load(dn, [i_b, i_t, i_h, tile_v], extra_mask=live)
            b_r = hl.dot(b_X, b_dn, out_dtype=torch.float32)
            hl.store(r, [i_b, i_t, i_h, tile_v], in_range(b_r, r.dtype), extra_mask=written)
            hl.store(dv, [i_b, i_t, i_h, tile_v], (b_r * b_beta[:, None]).to(dv.dtype), extra_mask=written)
            b_v = hl.load(v, [i_b, i_t, i_h, tile_v], extra_mask=live).to(torch.float32)
            b_rv = b_rv + torch.sum(b_r * b_v, 1)
        hl.store(rv, [i_b, i_t, i_h], b_rv, extra_mask=i_t < fill)
    return r, dv, rv


@kernel(dot_precision="tf32x3")
def scalar_delta_bwd_kernel(
    q: torch.Tensor, k: torch.Tensor, gc: torch.Tensor | None, gl: torch.Tensor | None, beta: torch.Tensor,
    n: torch.Tensor, S: torch.Tensor, do: torch.Tensor, D: torch.Tensor, r: torch.Tensor, rv: torch.Tensor,
    chunks: torch.Tensor | None, scale: float, rest: float, C: hl.constexpr, G: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of a chunk but dv.  With decay_ij = 2^(gc_i - gc_j) and db the gradient of beta k through w and S:

        P = scale tril(do n^T) . decay        G = -beta stril(r n^T) . decay        db = -2^gc r S^T
        dq = scale 2^gc do S^T + P k
        dk = rest 2^(gl - gc) n D^T + beta db + P^T q + (G + G^T) k
        dbeta_i = rv_i + db_i . k_i + sum_j G_ij k_i . k_j / beta_i
        dg_t = sum_{i >= t} sum_{j < t} W_ij + sum_{i >= t} x_i + sum_{j < t} y_j + rest 2^gl sum(S . D)

    W_ij = P_ij q_i . k_j + G_ij k_i . k_j for i > j; x and y hold the terms of dq . q + beta db . k through S and those
    of dk . k through D.  The sum of W is taken as that of its row sums less its column sums over i >= t, exactly zero
    where no gradient comes in.  The division by beta is only notation.

    q, k [B,T,H,K], n, do, r [B,T,HV,V], gc fp32 [B,HV,T], rv fp32 [B,T,HV], gl fp32 [B,NT,HV], beta [B,T,HV],
    S, D [B,NT,HV,K,V] -> dq, dk [B,T,HV,K], of a value head each, in q's dtype, dg fp32 [B,T,HV], not written without a
    gate, dbeta as beta.  G = HV / H.  One program a value head and chunk, in tiles of K and V: whole rows of do, n and
    r would not fit the registers.
    """
    B, T, HV, V = n.size()
    K, V = hl.specialize((k.size(3), V))
    dq = torch.empty([B, T, HV, K], dtype=q.dtype, device=q.device)
    dk = torch.empty([B, T, HV, K], dtype=q.dtype, device=q.device)
    dbeta = torch.empty([B, T, HV], dtype=beta.dtype, device=q.device)
    dg = torch.empty([B, T, HV], dtype=torch.float32, device=q.device)
    BK = hl.register_block_size(16, K)
    BV = hl.register_block_size(16, V)
    for i_bh, i_c in hl.grid([B * HV, chunk_count(chunks, C, T)]):
        i_b = i_bh // HV
        i_h = i_bh % HV
        begin, end, fill = chunk(chunks, i_c, C, T)
        idx = hl.arange(C)
        i_t = idx + begin
        live = (i_t < end)[:, None]
        written = (i_t < fill)[:, None]
        lower = idx[:, None] >= idx[None, :]
        strict = idx[:, None] > idx[None, :]
        b_beta = row_values(beta, i_b, i_t, i_h, end, fill)
        b_dbeta = row_values(rv, i_b, i_t, i_h, end, fill)
        b_P = hl.zeros([C, C], dtype=torch.float32)
        b_G = hl.zeros([C, C], dtype=torch.float32)
        for tile_v in hl.tile(V, block_size=BV):
            b_nt = hl.load(n, [i_b, i_t, i_h, tile_v], extra_mask=live).transpose(0, 1)
            b_P = hl.dot(hl.load(do, [i_b, i_t, i_h, tile_v], extra_mask=live), b_nt, acc=b_P)
            b_G = hl.dot(hl.load(r, [i_b, i_t, i_h, tile_v], extra_mask=live), b_nt, acc=b_G)
        b_P = b_P * scale
        b_G = -b_G
        if gc is None:
            b_P = torch.where(lower, b_P, 0.0)
            b_G = torch.where(strict, b_G, 0.0)
        else:
            b_gc = hl.load(gc, [i_b, i_h, torch.clamp(i_t, max=fill - 1)])
            b_gl = gl[i_b, i_c, i_h]
            b_from = torch.exp2(b_gc)
            b_rest = torch.exp2(torch.clamp(b_gl - b_gc, max=0.0))
            b_P = decayed(b_P, b_gc, lower)
            b_G = decayed(b_G, b_gc, strict)
            b_qk = hl.zeros([C, C], dtype=torch.float32)
            b_y = hl.zeros([C], dtype=torch.float32)
            b_z = hl.zeros([C], dtype=torch.float32)
        b_kk = hl.zeros([C, C], dtype=torch.float32)
        for tile_k in hl.tile(K, block_size=BK):
            b_k = hl.load(k, [i_b, i_t, i_h // G, tile_k], extra_mask=live)
            b_kk = hl.dot(b_k, b_k.transpose(0, 1), acc=b_kk)
            if gc is not None:
                b_q = hl.load(q, [i_b, i_t, i_h // G, tile_k], extra_mask=live)
                b_qk = hl.dot(b_q, b_k.transpose(0, 1), acc=b_qk)
        b_kk = b_kk * b_G
        b_dbeta = b_dbeta + torch.sum(b_kk, 1)
        if gc is not None:
            b_W = b_kk * b_beta[:, None] + torch.where(strict, b_P * b_qk, 0.0)
            b_x = torch.sum(b_W, 1) - torch.sum(b_W, 0)
        b_p = in_range(b_P, q.dtype)
        b_G = b_G * b_beta[:, None]
        b_gg = in_range(b_G + b_G.transpose(0, 1), q.dtype)
        for tile_k in hl.tile(K, block_size=BK):
            b_k = hl.load(k, [i_b, i_t, i_h // G, tile_k], extra_mask=live)
            b_q = hl.load(q, [i_b, i_t, i_h // G, tile_k], extra_mask=live)
            b_dq = hl.zeros([C, tile_k], dtype=torch.float32)
            b_dk = hl.zeros([C, tile_k], dtype=torch.float32)
            b_dkD = hl.zeros([C, tile_k], dtype=torch.float32)
            for tile_v in hl.tile(V, block_size=BV):
                b_S = S[i_b, i_c, i_h, tile_k, tile_v]
                b_r = hl.load(r, [i_b, i_t, i_h, tile_v], extra_mask=live)
                b_dk = hl.dot(b_r, b_S.transpose(0, 1), acc=b_dk)
                b_do = hl.load(do, [i_b, i_t, i_h, tile_v], extra_mask=live)
                b_dq = hl.dot(b_do, b_S.transpose(0, 1), acc=b_dq)
                b_D = D[i_b, i_c, i_h, tile_k, tile_v]
                b_n = hl.load(n, [i_b, i_t, i_h, tile_v], extra_mask=live)
                b_dkD = hl.dot(b_n, b_D.transpose(0, 1), acc=b_dkD)
                if gc is not None:
                    b_z = b_z + torch.sum(torch.sum(b_S.to(torch.float32) * b_D.to(torch.float32), 1), 0)
            b_dq = b_dq * scale
            b_dk = -b_dk
            b_dkD = b_dkD * rest
            if gc is not None:
                b_dq = b_dq * b_from[:, None]
                b_dk = b_dk * b_from[:, None]
                b_dkD = b_dkD * b_rest[:, None]
                b_x = b_x + torch.sum(b_dq * b_q.to(torch.float32), 1)
                b_y = b_y + torch.sum(b_dkD * b_k.to(torch.float32), 1)
            b_dbk = torch.sum(b_dk * b_k.to(torch.float32), 1)
            b_dbeta = b_dbeta + b_dbk
            if gc is not None:
                b_x = b_x + b_beta * b_dbk
            b_dq = hl.dot(b_p, b_k, acc=b_dq)
            hl.store(dq, [i_b, i_t, i_h, tile_k], b_dq.to(dq.dtype), extra_mask=written)
            b_dk = hl.dot(b_gg, b_k, acc=b_dk * b_beta[:, None] + b_dkD)
            b_dk = hl.dot(b_p.transpose(0, 1), b_q, acc=b_dk)
            hl.store(dk, [i_b, i_t, i_h, tile_k], b_dk.to(dk.dtype), extra_mask=written)
        hl.store(dbeta, [i_b, i_t, i_h], b_dbeta.to(dbeta.dtype), extra_mask=i_t < fill)
        if gc is not None:
            upper = idx[:, None] <= idx[None, :]
            b_dg = torch.sum(torch.where(upper, b_x[None, :], b_y[None, :]), 1) + b_z * (torch.exp2(b_gl) * rest)
            hl.store(dg, [i_b, i_t, i_h], torch.where(i_t < end, b_dg, 0.0), extra_mask=i_t < fill)
    return dq, dk, dg, dbeta


def _chunk(q: torch.Tensor) -> int:
    """Tokens in a chunk: fp32 tiles of 64 do not fit a GPU's registers."""
    return 16 if q.dtype == torch.float32 else 64


def _prepare(q, k, v, g, beta, tables):
    """qg, kg, w, u, A, X, gc, gl, and gl spread over K as the walks take it; without a gate q, k, ..., three None."""
    C, G = _chunk(q), v.size(2) // q.size(2)
    if g is None:
        prepared = scalar_delta_prepare_kernel(q, k, v, None, None, beta, tables.chunks, C, G)
        return q, k, *prepared[2:], None, None, None
    gc, gl = gate_cumsum_kernel(g, tables.chunks, C)
    prepared = scalar_delta_prepare_kernel(q, k, v, gc, gl, beta, tables.chunks, C, G)
    return *prepared, gc, gl, gl[..., None].expand(-1, -1, -1, q.size(-1))


def scalar_delta_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, beta: torch.Tensor,
    h0: torch.Tensor | None, scale: float, tables: Tables,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [B,T,HV,V] in v's dtype and ht fp32 [N,HV,K,V]."""
    qg, kg, w, u, A, _, _, _, gl = _prepare(q, k, v, g, beta, tables)
    return delta_fwd_o_kernel(qg, kg, w, u, A, gl, h0, tables.sequences, scale)


def scalar_delta_bwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, beta: torch.Tensor,
    h0: torch.Tensor | None, scale: float, tables: Tables, do: torch.Tensor, dht: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, dg (None without a gate), dbeta in their inputs' dtypes and dh0 in fp32."""
    C, G, split = _chunk(q), v.size(2) // q.size(2), split_scale(scale)
    qg, kg, w, u, A, X, gc, gl, gl_k = _prepare(q, k, v, g, beta, tables)
    S, n = delta_fwd_state_kernel(kg, w, u, gl_k, h0, tables.sequences, C)
    del u
    D, dn, dh0 = delta_bwd_state_kernel(qg, kg, w, A, do, gl_k, dht, tables.sequences, *split)
    del qg, kg, w, A
    r, dv, rv = scalar_delta_bwd_v_kernel(v, beta, X, dn, tables.chunks)
    del X, dn
    dq, dk, dg, dbeta = scalar_delta_bwd_kernel(
        q, k, gc, gl, beta, n, S, do, D, r, rv, tables.chunks, scale, split[1], C, G)
    dq, dk = sum_of_group(dq, G), sum_of_group(dk, G)
    return dq, dk, dv, None if g is None else dg.to(g.dtype), dbeta, dh0


class _ScalarDelta(torch.autograd.Function):
    """(q, k, v, g or None, beta, h0 or None, scale, tables) -> o, ht.  Saves its inputs and recomputes the rest."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, h0, scale, tables):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, beta, h0, *tables)
        ctx.scale = scale
        return scalar_delta_fwd(q, k, v, g, beta, h0, scale, tables)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dht):
        q, k, v, g, beta, h0, *tables = ctx.saved_tensors
        if do is None and dht is None:
            return (None,) * 8
        do, dht = output_gradients(do, dht, v)
        dq, dk, dv, dg, dbeta, dh0 = scalar_delta_bwd(q, k, v, g, beta, h0, ctx.scale, Tables(*tables), do, dht)
        return dq, dk, dv, dg, dbeta, dh0.to(h0.dtype) if ctx.needs_input_grad[5] else None, None, None


def scalar_delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, beta: torch.Tensor,
    scale: float | None, initial_state: torch.Tensor | None, use_qk_l2norm: bool, cu_seqlens: torch.Tensor | None,
    state_v_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the final state for checked arguments of any K and V, differentiable."""
    scale = q.size(-1) ** -0.5 if scale is None else float(scale)

    def run(q, k, v, initial_state, tables):
        return _ScalarDelta.apply(q, k, v, g, beta, initial_state, scale, tables)

    if use_qk_l2norm:
        q, k = l2norm(q, k)
    return over_values(run, q, k, v, initial_state, cu_seqlens, _chunk(q), state_v_first, (g, beta))
