"""The delta rule without a gate, or with one gate a head and token: kernels, pipelines and the autograd function.

The recurrence is `S' = e^{g_t} S_{t-1}`, `S_t = S' + beta_t k_t (v_t - S'^T k_t)^T`, `o_t = scale S_t^T q_t`.  In a
chunk of C tokens, with gc the log2 gate summed from the chunk's begin:

    L_ij = beta_i 2^(gc_i - gc_j) k_i . k_j, i > j       X = (I + L)^-1       A_ij = 2^(gc_i - gc_j) q_i . k_j, i >= j

`_delta.py` says how the walks along the chunks go on from A and X, and what S, n, D and r are.  The forward prepares
all chunks at once and walks, writing no state.  The backward prepares again, walks once each way to write S, n and D, r
for every chunk, then takes all chunks at once.  Without a gate g is None.

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
from ._tile import decayed, in_range, two_parts, unit_lower_inverse


@kernel(dot_precision="tf32x3", fp32_precision="ieee")
def scalar_delta_prepare_kernel(
    q: torch.Tensor, k: torch.Tensor, gc: torch.Tensor | None, beta: torch.Tensor, chunks: torch.Tensor | None,
    C: hl.constexpr, G: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The scores A, X = (I + L)^-1 in two parts, and beta as the walks want it: `_delta.py`.

    q, k [B,T,H,K], gc fp32 [B,HV,T], beta [B,T,HV] -> A [B,T,HV,C], X [B,T,HV,2C] in q's dtype, beta fp32 [B,HV,T].
    G = HV / H.  One program a value head and chunk.
    """
    B, T, HV = beta.size()
    K = hl.specialize(k.size(3))
    A = torch.empty([B, T, HV, C], dtype=k.dtype, device=k.device)
    X = torch.empty([B, T, HV, 2 * C], dtype=k.dtype, device=k.device)
    by_head = torch.empty([B, HV, T], dtype=torch.float32, device=k.device)
    for i_bh, i_c in hl.grid([B * HV, chunk_count(chunks, C, T)]):
        i_b = i_bh // HV
        i_h = i_bh % HV
        begin, end, fill = chunk(chunks, i_c, C, T)
        idx = hl.arange(C)
        i_t = idx + begin
        i_k = hl.arange(K)
        live = (i_t < end)[:, None]
        written = (i_t < fill)[:, None]
        b_k = hl.load(k, [i_b, i_t, i_h // G, i_k], extra_mask=live)
        b_q = hl.load(q, [i_b, i_t, i_h // G, i_k], extra_mask=live)
        b_beta = row_values(beta, i_b, i_t, i_h, end, fill)
        hl.store(by_head, [i_b, i_h, i_t], b_beta, extra_mask=i_t < fill)
        b_A = hl.dot(b_q, b_k.transpose(0, 1), out_dtype=torch.float32)
        b_L = hl.dot(b_k, b_k.transpose(0, 1), out_dtype=torch.float32) * b_beta[:, None]
        lower = idx[:, None] >= idx[None, :]
        strict = idx[:, None] > idx[None, :]
        if gc is None:
            b_A = torch.where(lower, b_A, 0.0)
            b_L = torch.where(strict, b_L, 0.0)
        else:
            b_gc = hl.load(gc, [i_b, i_h, torch.clamp(i_t, max=fill - 1)])
            b_A = decayed(b_A, b_gc, lower)
            b_L = decayed(b_L, b_gc, strict)
        hl.store(A, [i_b, i_t, i_h, idx], in_range(b_A, A.dtype), extra_mask=written)
        b_X, b_low = two_parts(unit_lower_inverse(b_L, C, k.dtype), X.dtype)
        hl.store(X, [i_b, i_t, i_h, idx], b_X, extra_mask=written)
        hl.store(X, [i_b, i_t, i_h, idx + C], b_low, extra_mask=written)
    return A, X, by_head


@kernel(dot_precision="tf32x3")
def scalar_delta_bwd_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gc: torch.Tensor | None, beta: torch.Tensor, n: torch.Tensor,
    S: torch.Tensor, do: torch.Tensor, D: torch.Tensor, r: torch.Tensor, chunks: torch.Tensor | None, scale: float,
    rest: float, C: hl.constexpr, G: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of a chunk but dv.  With decay_ij = 2^(gc_i - gc_j) and db the gradient of beta k through S:

        P = scale tril(do n^T) . decay     R = -rest stril(r n^T) . decay     db = -rest 2^gc r S^T
        dq = scale 2^gc do S^T + P k
        dk = rest 2^(gl - gc) n D^T + beta db + P^T q + (beta R + (beta R)^T) k
        dbeta_i = rest r_i . v_i + db_i . k_i + sum_j R_ij k_i . k_j
        dg_t = sum_{i >= t} sum_{j < t} W_ij + sum_{i >= t} x_i + sum_{j < t} y_j + rest 2^gl sum(S . D)

    W_ij = P_ij q_i . k_j + beta_i R_ij k_i . k_j for i > j; x and y hold the terms of dq . q + beta db . k through S
    and those of dk . k through D.  The sum of W is taken as that of its row sums less its column sums over i >= t,
    exactly zero where no gradient comes in.

    q, k [B,T,H,K], v, n, do, r [B,T,HV,V], gc fp32 [B,HV,T], beta [B,T,HV], S, D [B,NT,HV,K,V]
    -> dq, dk [B,T,HV,K], of a value head each, in q's dtype, dg fp32 [B,T,HV], not written without a gate, dbeta as
    beta.  G = HV / H.  One program a value head and chunk, in tiles of K and V.
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
        b_P = hl.zeros([C, C], dtype=torch.float32)
        b_R = hl.zeros([C, C], dtype=torch.float32)
        b_dbeta = hl.zeros([C], dtype=torch.float32)
        for tile_v in hl.tile(V, block_size=BV):
            b_n = hl.load(n, [i_b, i_t, i_h, tile_v], extra_mask=live)
            b_P = hl.dot(hl.load(do, [i_b, i_t, i_h, tile_v], extra_mask=live), b_n.transpose(0, 1), acc=b_P)
            b_r = hl.load(r, [i_b, i_t, i_h, tile_v], extra_mask=live)
            b_R = hl.dot(b_r, b_n.transpose(0, 1), acc=b_R)
            b_v = hl.load(v, [i_b, i_t, i_h, tile_v], extra_mask=live)
            b_dbeta = b_dbeta + torch.sum(b_r.to(torch.float32) * b_v.to(torch.float32), 1)
        b_P = b_P * scale
        b_R = b_R * -rest
        b_dbeta = b_dbeta * rest
        if gc is None:
            b_P = torch.where(lower, b_P, 0.0)
            b_R = torch.where(strict, b_R, 0.0)
        else:
            b_gc = hl.load(gc, [i_b, i_h, torch.clamp(i_t, max=fill - 1)])
            b_gl = gc[i_b, i_h, min(begin + C, fill) - 1]
            b_from = torch.exp2(b_gc)
            b_rest = torch.exp2(torch.clamp(b_gl - b_gc, max=0.0))
            b_P = decayed(b_P, b_gc, lower)
            b_R = decayed(b_R, b_gc, strict)
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
        b_kk = b_kk * b_R
        b_dbeta = b_dbeta + torch.sum(b_kk, 1)
        if gc is not None:
            b_W = b_kk * b_beta[:, None] + torch.where(strict, b_P * b_qk, 0.0)
            b_x = torch.sum(b_W, 1) - torch.sum(b_W, 0)
        b_p = in_range(b_P, q.dtype)
        b_R = b_R * b_beta[:, None]
        b_both = in_range(b_R + b_R.transpose(0, 1), q.dtype)
        for tile_k in hl.tile(K, block_size=BK):
            b_k = hl.load(k, [i_b, i_t, i_h // G, tile_k], extra_mask=live)
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
            b_q = hl.load(q, [i_b, i_t, i_h // G, tile_k], extra_mask=live)
            b_dq = b_dq * scale
            b_dk = b_dk * -rest
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
            b_dk = hl.dot(b_both, b_k, acc=b_dk * b_beta[:, None] + b_dkD)
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


def _prepare(q, k, g, beta, tables):
    """gc (None without a gate), A, X and beta by head."""
    C, G = _chunk(q), beta.size(2) // q.size(2)
    gc = None if g is None else gate_cumsum_kernel(g, tables.chunks, C)
    return gc, *scalar_delta_prepare_kernel(q, k, gc, beta, tables.chunks, C, G)


def scalar_delta_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, beta: torch.Tensor,
    h0: torch.Tensor | None, scale: float, tables: Tables,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [B,T,HV,V] in v's dtype and ht fp32 [N,HV,K,V]."""
    gc, A, X, by_head = _prepare(q, k, g, beta, tables)
    return delta_fwd_o_kernel(
        q, k, None, v, A, X, by_head, gc, None, h0, tables.sequences, scale, v.size(2) // q.size(2))


def scalar_delta_bwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, beta: torch.Tensor,
    h0: torch.Tensor | None, scale: float, tables: Tables, do: torch.Tensor, dht: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, dg (None without a gate), dbeta in their inputs' dtypes and dh0 in fp32."""
    C, G, split = _chunk(q), v.size(2) // q.size(2), split_scale(scale)
    gc, A, X, by_head = _prepare(q, k, g, beta, tables)
    S, n = delta_fwd_state_kernel(k, None, v, X, by_head, gc, None, h0, tables.sequences, G)
    D, r, dv, dh0 = delta_bwd_state_kernel(
        q, k, None, A, X, by_head, do, gc, None, dht, tables.sequences, *split, G)
    del A, X
    dq, dk, dg, dbeta = scalar_delta_bwd_kernel(
        q, k, v, gc, beta, n, S, do, D, r, tables.chunks, scale, split[1], C, G)
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
