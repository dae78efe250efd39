"""Kimi delta attention: `S' = diag(e^{g_t}) S_{t-1}`, `S_t = S' + beta_t k_t (v_t - S'^T k_t)^T`.

The output is `o_t = scale S_t^T q_t`; a gate has a value for each channel and token.  The chunk equations
are in `_kda_kernels.py` and `_delta.py`.  The forward turns q, k, v, g and beta into what a walk along the sequence
needs and walks with the state on chip, writing no state.  The backward walks once each way, to write S, n and D, dn for
every chunk; then all chunks are independent.
"""
from __future__ import annotations

import torch

from ._checks import check_beta, check_chunk_size, check_gate, check_qkv, check_scale, check_state, not_yet
from ._delta import delta_bwd_state_kernel, delta_fwd_o_kernel, delta_fwd_state_kernel
from ._gates import channel_gate_cumsum_kernel
from ._host import last_contiguous, over_values, pad_to_16
from ._kda_kernels import (
    kda_bwd_qk_kernel,
    kda_bwd_v_kernel,
    kda_far_bwd_qk_kernel,
    kda_far_scores_kernel,
    kda_scores_kernel,
    kda_solve_kernel,
)
from ._l2norm import l2norm


def _chunk(q: torch.Tensor) -> int:
    """Tokens in a chunk: fewer in fp32, whose tiles and products are several times as large."""
    return 16 if q.dtype == torch.float32 else 64


def chunk_kda_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    h0: torch.Tensor | None, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [B,T,H,V] in v's dtype and ht fp32 [B,H,K,V]."""
    gc, gl = channel_gate_cumsum_kernel(g, _chunk(q))
    A, L, qg, kb, kg = kda_scores_kernel(q, k, gc, gl, beta, _chunk(q))
    kda_far_scores_kernel(q, k, gc, gl, beta, A, L, _chunk(q))
    del gc
    _, w, u = kda_solve_kernel(L, kb, v, beta)
    del L, kb
    return delta_fwd_o_kernel(qg, kg, w, u, A, gl, h0, scale)


def chunk_kda_bwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    h0: torch.Tensor | None, scale: float, do: torch.Tensor, dht: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, dg, dbeta in their inputs' dtypes and dh0 in fp32.  Temporaries go as early as they can."""
    C = _chunk(q)
    gc, gl = channel_gate_cumsum_kernel(g, C)
    A, L, qg, kb, kg = kda_scores_kernel(q, k, gc, gl, beta, C)
    kda_far_scores_kernel(q, k, gc, gl, beta, A, L, C)
    X, w, u = kda_solve_kernel(L, kb, v, beta)
    del L, kb
    S, n = delta_fwd_state_kernel(kg, w, u, gl, h0, C)
    del u
    D, dn, dh0 = delta_bwd_state_kernel(qg, kg, w, A, do, gl, dht, scale)
    del qg, kg, w, A
    r, dv, dA, dL, dbeta_v = kda_bwd_v_kernel(X, v, beta, n, do, dn, scale)
    del X, dn
    dq, dk, dg, dbeta_k = kda_bwd_qk_kernel(q, k, gc, gl, beta, do, n, r, dA, dL, S, D, scale, C)
    kda_far_bwd_qk_kernel(q, k, gc, gl, beta, dA, dL, dq, dk, dg, dbeta_k, C)
    return dq, dk, dv, dg.to(g.dtype), (dbeta_k.sum(0) + dbeta_v).to(beta.dtype), dh0


class _KDA(torch.autograd.Function):
    """(q, k, v, g, beta, h0 or None, scale) -> o, ht.  Saves its inputs and recomputes the rest."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, h0, scale):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, beta, h0)
        ctx.scale = scale
        return chunk_kda_fwd(q, k, v, g, beta, h0, scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dht):
        q, k, v, g, beta, h0 = ctx.saved_tensors
        if do is None and dht is None:
            return (None,) * 7
        do = torch.zeros(v.shape, dtype=v.dtype, device=v.device) if do is None else last_contiguous(do)
        dq, dk, dv, dg, dbeta, dh0 = chunk_kda_bwd(q, k, v, g, beta, h0, ctx.scale, do, last_contiguous(dht))
        return dq, dk, dv, dg, dbeta, dh0.to(h0.dtype) if ctx.needs_input_grad[5] else None, None


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    chunk_size: int | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chunked Kimi delta attention, differentiable in q, k, v, g, beta and initial_state.

    Args:
        q, k: queries and keys, [B, T, H, K] with K in 1..256; bf16, fp16 or fp32, any strides. The recurrence is stable
            for keys of unit length, which `use_qk_l2norm_in_kernel` ensures.
        v: values, [B, T, H, V] in q's dtype.
        g: natural-log decays, [B, T, H, K], at most 0; -inf forgets the channel's state.
        beta: step sizes, [B, T, H], in (0, 2).
        scale: factor of the output; K**-0.5 if None.
        initial_state: S_0, [B, H, K, V]; zero if None.
        output_final_state: whether to return S_T.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum x^2 + 1e-6) over their channels first.
        safe_gate, lower_bound: a promise that g is in [lower_bound, 0); accepted, not needed, without effect.
        chunk_size: 16, 32, 64 or 128: a hint, without effect on the result.
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, disable_recompute, return_intermediate_states,
            state_v_first, cu_seqlens, cu_seqlens_cpu, cp_context, use_graph, max_num_seqs, A_log, dt_bias: not
            supported yet.

    Returns:
        o, [B, T, H, V] in q's dtype, and S_T, fp32 [B, H, K, V], or None.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape or device is not as above.
        NotImplementedError: an option that is not supported yet is set.

    Paper: Kimi Linear: An Expressive, Efficient Attention Architecture, https://arxiv.org/abs/2510.26692
    """
    not_yet(
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu, cp_context=cp_context, use_graph=use_graph, max_num_seqs=max_num_seqs,
        A_log=A_log, dt_bias=dt_bias,
    )
    check_qkv(q, k, v)
    check_gate(g, q.shape, q)
    check_beta(beta, v)
    check_scale(scale)
    check_state(initial_state, (q.size(0), q.size(2), q.size(3), v.size(3)), q)
    check_chunk_size(chunk_size)
    scale = q.size(-1) ** -0.5 if scale is None else float(scale)
    g = last_contiguous(pad_to_16(g))

    def run(q, k, v, initial_state):
        return _KDA.apply(q, k, v, g, beta, initial_state, scale)

    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q, k)
    o, final_state = over_values(run, q, k, v, initial_state)
    return o, final_state if output_final_state else None
