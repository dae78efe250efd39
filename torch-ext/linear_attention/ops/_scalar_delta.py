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
from ._host import last_contiguous, over_values
from ._l2norm import l2norm
from ._tile import decay_tile, unit_lower_inverse


@kernel(dot_precision="tf32x3")
def scalar_delta_prepare_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gc: torch.Tensor | None, beta: torch.Tensor, C: hl.constexpr
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """[w, u] = X beta [2^gc k, v] with X = (I + L)^-1, the scores A, and qg = 2^gc q, kg = 2^(gl - gc) k.

    q, k [B,T,H,K], v [B,T,H,V], gc fp32 [B,T,H], beta [B,T,H] -> qg, kg, w [B,T,H,K], u [B,T,H,V], A, X [B,T,H,C],
    all in q's dtype.  Without a gate qg and kg are not written.  One program a head and chunk.
    """
    B, T, H, K = k.size()
    K, V = hl.specialize((K, v.size(3)))
    NT = (T + C - 1) // C
    qg = torch.empty([B, T, H, K], dtype=k.dtype, device=k.device)
    kg = torch.empty([B, T, H, K], dtype=k.dtype, device=k.device)
    w = torch.empty([B, T, H, K], dtype=k.dtype, device=k.device)
    u = torch.empty([B, T, H, V], dtype=k.dtype, device=k.device)
    A = torch.empty([B, T, H, C], dtype=k.dtype, device=k.device)
    X = torch.empty([B, T, H, C], dtype=k.dtype, device=k.device)
    for i_bh, i_c in hl.grid([B * H, NT]):
        i_b = i_bh // H
        i_h = i_bh % H
        idx = hl.arange(C)
        i_t = i_c * C + idx
        i_k = hl.arange(K)
        i_v = hl.arange(V)
        rows = (i_t < T)[:, None]
        b_k = hl.load(k, [i_b, i_t, i_h, i_k], extra_mask=rows)
        b_q = hl.load(q, [i_b, i_t, i_h, i_k], extra_mask=rows)
        i_s = torch.clamp(i_t, max=T - 1)  # for one value a row: the compiler branches around a masked load of these
        b_beta = hl.load(beta, [i_b, i_s, i_h]).to(torch.float32)
        b_A = hl.dot(b_q, b_k.transpose(0, 1), out_dtype=torch.float32)
        b_L = hl.dot(b_k, b_k.transpose(0, 1), out_dtype=torch.float32) * b_beta[:, None]
        lower = idx[:, None] >= idx[None, :]
        strict = idx[:, None] > idx[None, :]
        if gc is None:
            b_A = torch.where(lower, b_A, 0.0)
            b_L = torch.where(strict, b_L, 0.0)
        else:
            b_gc = hl.load(gc, [i_b, i_s, i_h])
            b_gl = hl.load(gc, [i_b, min(i_c * C + C, T) - 1, i_h])
            b_decay = decay_tile(b_gc, lower)
            b_A = b_A * b_decay
            b_L = torch.where(strict, b_L * b_decay, 0.0)
            b_from = torch.exp2(b_gc)
            b_rest = torch.exp2(torch.clamp(b_gl - b_gc, max=0.0))
            b_qg = (b_q.to(torch.float32) * b_from[:, None]).to(q.dtype)
            hl.store(qg, [i_b, i_t, i_h, i_k], b_qg, extra_mask=rows)
            b_kg = (b_k.to(torch.float32) * b_rest[:, None]).to(k.dtype)
            hl.store(kg, [i_b, i_t, i_h, i_k], b_kg, extra_mask=rows)
        hl.store(A, [i_b, i_t, i_h, idx], b_A.to(A.dtype), extra_mask=rows)
        b_X = unit_lower_inverse(b_L, C)
        hl.store(X, [i_b, i_t, i_h, idx], b_X.to(X.dtype), extra_mask=rows)
        b_v = hl.load(v, [i_b, i_t, i_h, i_v], extra_mask=rows)
        b_Xb = b_X * b_beta[None, :]
        b_u = hl.dot(b_Xb.to(v.dtype), b_v, out_dtype=torch.float32)
        hl.store(u, [i_b, i_t, i_h, i_v], b_u.to(u.dtype), extra_mask=rows)
        if gc is not None:
            b_Xb = b_Xb * b_from[None, :]
        b_w = hl.dot(b_Xb.to(k.dtype), b_k, out_dtype=torch.float32)
        hl.store(w, [i_b, i_t, i_h, i_k], b_w.to(w.dtype), extra_mask=rows)
    return qg, kg, w, u, A, X


@kernel(dot_precision="tf32x3")
def scalar_delta_bwd_v_kernel(
    v: torch.Tensor, beta: torch.Tensor, X: torch.Tensor, dn: torch.Tensor
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
    for i_bh, i_c in hl.grid([B * H, (T + C - 1) // C]):
        i_b = i_bh // H
        i_h = i_bh % H
        i_t = i_c * C + hl.arange(C)
        live = i_t < T
        rows = live[:, None]
        b_beta = hl.load(beta, [i_b, torch.clamp(i_t, max=T - 1), i_h]).to(torch.float32)
        b_X = hl.load(X, [i_b, i_t, i_h, hl.arange(C)], extra_mask=rows).transpose(0, 1)
        b_rv = hl.zeros([C], dtype=torch.float32)
        for tile_v in hl.tile(V, block_size=BV):
            b_dn = hl.load(dn, [i_b, i_t, i_h, tile_v], extra_mask=rows)
            b_r = hl.dot(b_X, b_dn, out_dtype=torch.float32)
            hl.store(r, [i_b, i_t, i_h, tile_v], b_r.to(r.dtype), extra_mask=rows)
            hl.store(dv, [i_b, i_t, i_h, tile_v], (b_r * b_beta[:, None]).to(dv.dtype), extra_mask=rows)
            b_v = hl.load(v, [i_b, i_t, i_h, tile_v], extra_mask=rows).to(torch.float32)
            b_rv = b_rv + torch.sum(b_r * b_v, 1)
        hl.store(rv, [i_b, i_t, i_h], b_rv, extra_mask=live)
    return r, dv, rv


@kernel(dot_precision="tf32x3")
def scalar_delta_bwd_kernel(
    q: torch.Tensor, k: torch.Tensor, gc: torch.Tensor | None, beta: torch.Tensor, n: torch.Tensor, S: torch.Tensor,
    do: torch.Tensor, D: torch.Tensor, r: torch.Tensor, rv: torch.Tensor, scale: float, C: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of a chunk but dv.  With decay_ij = 2^(gc_i - gc_j) and db the gradient of beta k through w and S:

        P = scale tril(do n^T) . decay        G = -beta stril(r n^T) . decay        db = -2^gc r S^T
        dq = scale 2^gc do S^T + P k
        dk = 2^(gl - gc) n D^T + beta db + P^T q + (G + G^T) k
        dbeta_i = rv_i + db_i . k_i + sum_j G_ij k_i . k_j / beta_i
        dg_t = sum_{i >= t} sum_{j < t} W_ij + sum_{i >= t} x_i + sum_{j < t} y_j + 2^gl sum(S . D)

    W_ij = P_ij q_i . k_j + G_ij k_i . k_j for i > j; x and y hold the terms of dq . q + beta db . k through S and those
    of dk . k through D.  The sum of W is taken as that of its row sums less its column sums over i >= t, exactly zero
    where no gradient comes in.  The division by beta is only notation.

    q, k [B,T,H,K], n, do, r [B,T,H,V], gc, rv fp32 [B,T,H], beta [B,T,H], S, D [B,NT,H,K,V]
    -> dq, dk as q, k, dg fp32 [B,T,H], not written without a gate, dbeta as beta.
    One program a head and chunk, in tiles of K.  r is loaded, not made here: its tile would not fit the registers.
    """
    B, T, H, K = k.size()
    K, V = hl.specialize((K, n.size(3)))
    NT = (T + C - 1) // C
    dq = torch.empty([B, T, H, K], dtype=q.dtype, device=q.device)
    dk = torch.empty([B, T, H, K], dtype=q.dtype, device=q.device)
    dbeta = torch.empty([B, T, H], dtype=beta.dtype, device=q.device)
    dg = torch.empty([B, T, H], dtype=torch.float32, device=q.device)
    BK = hl.register_block_size(16, K)
    for i_bh, i_c in hl.grid([B * H, NT]):
        i_b = i_bh // H
        i_h = i_bh % H
        idx = hl.arange(C)
        i_t = i_c * C + idx
        i_v = hl.arange(V)
        live = i_t < T
        rows = live[:, None]
        lower = idx[:, None] >= idx[None, :]
        strict = idx[:, None] > idx[None, :]
        i_s = torch.clamp(i_t, max=T - 1)
        b_beta = hl.load(beta, [i_b, i_s, i_h]).to(torch.float32)
        b_dbeta = hl.load(rv, [i_b, i_s, i_h])
        b_nt = hl.load(n, [i_b, i_t, i_h, i_v], extra_mask=rows).transpose(0, 1)
        b_P = hl.dot(hl.load(do, [i_b, i_t, i_h, i_v], extra_mask=rows), b_nt, out_dtype=torch.float32)
        b_P = torch.where(lower, b_P * scale, 0.0)
        b_G = hl.dot(hl.load(r, [i_b, i_t, i_h, i_v], extra_mask=rows), b_nt, out_dtype=torch.float32)
        b_G = torch.where(strict, -b_G, 0.0)
        if gc is not None:
            b_gc = hl.load(gc, [i_b, i_s, i_h])
            b_gl = hl.load(gc, [i_b, min(i_c * C + C, T) - 1, i_h])
            b_from = torch.exp2(b_gc)
            b_rest = torch.exp2(torch.clamp(b_gl - b_gc, max=0.0))
            b_decay = decay_tile(b_gc, lower)
            b_P = b_P * b_decay
            b_G = b_G * b_decay
            b_qk = hl.zeros([C, C], dtype=torch.float32)
            b_y = hl.zeros([C], dtype=torch.float32)
            b_z = hl.zeros([C], dtype=torch.float32)
        b_kk = hl.zeros([C, C], dtype=torch.float32)
        for tile_k in hl.tile(K, block_size=BK):
            b_k = hl.load(k, [i_b, i_t, i_h, tile_k], extra_mask=rows)
            b_kk = hl.dot(b_k, b_k.transpose(0, 1), acc=b_kk)
            if gc is not None:
                b_q = hl.load(q, [i_b, i_t, i_h, tile_k], extra_mask=rows)
                b_qk = hl.dot(b_q, b_k.transpose(0, 1), acc=b_qk)
        b_kk = b_kk * b_G
        b_dbeta = b_dbeta + torch.sum(b_kk, 1)
        if gc is not None:
            b_W = b_kk * b_beta[:, None] + torch.where(strict, b_P * b_qk, 0.0)
            b_x = torch.sum(b_W, 1) - torch.sum(b_W, 0)
        b_p = b_P.to(q.dtype)
        b_G = b_G * b_beta[:, None]
        b_gg = (b_G + b_G.transpose(0, 1)).to(q.dtype)
        for tile_k in hl.tile(K, block_size=BK):
            b_k = hl.load(k, [i_b, i_t, i_h, tile_k], extra_mask=rows)
            b_S = S[i_b, i_c, i_h, tile_k, :]
            # r, do and n once more: kept from above they would fill the shared memory of smaller GPUs; a new range of
            # columns, since one made outside the loop is not masked where V is not a power of two
            b_r = hl.load(r, [i_b, i_t, i_h, hl.arange(V)], extra_mask=rows)
            b_dk = -hl.dot(b_r, b_S.transpose(0, 1), out_dtype=torch.float32)
            if gc is not None:
                b_dk = b_dk * b_from[:, None]
            b_dbk = torch.sum(b_dk * b_k.to(torch.float32), 1)
            b_dbeta = b_dbeta + b_dbk
            b_dk = hl.dot(b_gg, b_k, acc=b_dk * b_beta[:, None])
            b_do = hl.load(do, [i_b, i_t, i_h, hl.arange(V)], extra_mask=rows)
            b_dq = hl.dot(b_do, b_S.transpose(0, 1), out_dtype=torch.float32) * scale
            b_q = hl.load(q, [i_b, i_t, i_h, tile_k], extra_mask=rows)
            if gc is not None:
                b_dq = b_dq * b_from[:, None]
                b_x = b_x + b_beta * b_dbk + torch.sum(b_dq * b_q.to(torch.float32), 1)
            b_dq = hl.dot(b_p, b_k, acc=b_dq)
            hl.store(dq, [i_b, i_t, i_h, tile_k], b_dq.to(dq.dtype), extra_mask=rows)
            b_dk = hl.dot(b_p.transpose(0, 1), b_q, acc=b_dk)
            b_D = D[i_b, i_c, i_h, tile_k, :]
            b_n = hl.load(n, [i_b, i_t, i_h, hl.arange(V)], extra_mask=rows)
            b_dkD = hl.dot(b_n, b_D.transpose(0, 1), out_dtype=torch.float32)
            if gc is not None:
                b_dkD = b_dkD * b_rest[:, None]
                b_y = b_y + torch.sum(b_dkD * b_k.to(torch.float32), 1)
                b_z = b_z + torch.sum(torch.sum(b_S.to(torch.float32) * b_D.to(torch.float32), 1), 0)
            hl.store(dk, [i_b, i_t, i_h, tile_k], (b_dk + b_dkD).to(dk.dtype), extra_mask=rows)
        hl.store(dbeta, [i_b, i_t, i_h], b_dbeta.to(dbeta.dtype), extra_mask=live)
        if gc is not None:
            upper = idx[:, None] <= idx[None, :]
            b_dg = torch.sum(torch.where(upper, b_x[None, :], b_y[None, :]), 1) + b_z * torch.exp2(b_gl)
            hl.store(dg, [i_b, i_t, i_h], b_dg, extra_mask=live)
    return dq, dk, dg, dbeta


def _chunk(q: torch.Tensor) -> int:
    """Tokens in a chunk: fp32 tiles of 64 do not fit a GPU's registers."""
    return 16 if q.dtype == torch.float32 else 64


def _prepare(q, k, v, g, beta):
    """qg, kg, w, u, A, X, gc, and gl spread over K as the walks take it; without a gate q, k, ... and twice None."""
    if g is None:
        return q, k, *scalar_delta_prepare_kernel(q, k, v, None, beta, _chunk(q))[2:], None, None
    gc, gl = gate_cumsum_kernel(g, _chunk(q))
    gl = gl[..., None].expand(-1, -1, -1, q.size(-1))
    return *scalar_delta_prepare_kernel(q, k, v, gc, beta, _chunk(q)), gc, gl


def scalar_delta_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, beta: torch.Tensor,
    h0: torch.Tensor | None, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [B,T,H,V] in v's dtype and ht fp32 [B,H,K,V]."""
    qg, kg, w, u, A, _, _, gl = _prepare(q, k, v, g, beta)
    return delta_fwd_o_kernel(qg, kg, w, u, A, gl, h0, scale)


def scalar_delta_bwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, beta: torch.Tensor,
    h0: torch.Tensor | None, scale: float, do: torch.Tensor, dht: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, dg (None without a gate), dbeta in their inputs' dtypes and dh0 in fp32."""
    qg, kg, w, u, A, X, gc, gl = _prepare(q, k, v, g, beta)
    S, n = delta_fwd_state_kernel(kg, w, u, gl, h0, _chunk(q))
    del u
    D, dn, dh0 = delta_bwd_state_kernel(qg, kg, w, A, do, gl, dht, scale)
    del qg, kg, w, A
    r, dv, rv = scalar_delta_bwd_v_kernel(v, beta, X, dn)
    del X, dn
    dq, dk, dg, dbeta = scalar_delta_bwd_kernel(q, k, gc, beta, n, S, do, D, r, rv, scale, _chunk(q))
    return dq, dk, dv, None if g is None else dg.to(g.dtype), dbeta, dh0


class _ScalarDelta(torch.autograd.Function):
    """(q, k, v, g or None, beta, h0 or None, scale) -> o, ht.  Saves its inputs and recomputes the rest."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, h0, scale):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, beta, h0)
        ctx.scale = scale
        return scalar_delta_fwd(q, k, v, g, beta, h0, scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dht):
        q, k, v, g, beta, h0 = ctx.saved_tensors
        if do is None and dht is None:
            return (None,) * 7
        do = torch.zeros(v.shape, dtype=v.dtype, device=v.device) if do is None else last_contiguous(do)
        dq, dk, dv, dg, dbeta, dh0 = scalar_delta_bwd(q, k, v, g, beta, h0, ctx.scale, do, last_contiguous(dht))
        return dq, dk, dv, dg, dbeta, dh0.to(h0.dtype) if ctx.needs_input_grad[5] else None, None


def scalar_delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, beta: torch.Tensor,
    scale: float | None, initial_state: torch.Tensor | None, use_qk_l2norm: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the final state for checked arguments of any K and V, differentiable."""
    scale = q.size(-1) ** -0.5 if scale is None else float(scale)

    def run(q, k, v, initial_state):
        return _ScalarDelta.apply(q, k, v, g, beta, initial_state, scale)

    if use_qk_l2norm:
        q, k = l2norm(q, k)
    return over_values(run, q, k, v, initial_state)
