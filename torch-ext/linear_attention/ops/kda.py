"""Kimi delta attention: `S' = diag(e^{g_t}) S_{t-1}`, `S_t = S' + beta_t k_t (v_t - S'^T k_t)^T`.

The output is `o_t = scale S_t^T q_t`; a gate has a value for each channel and token.  The chunk equations
are in `_kda_kernels.py` and `_delta.py`.  The forward turns q, k, v, g and beta into what a walk along the sequence
needs and walks with the state on chip, writing no state.  The backward walks once each way, to write S, n and D, r for
every chunk; then all chunks are independent.
"""
from __future__ import annotations

from typing import NamedTuple

import torch

from ._checks import (
    check_beta,
    check_chunk_size,
    check_flags,
    check_gate,
    check_gate_parameters,
    check_hints,
    check_lower_bound,
    check_qkv,
    check_scale,
    check_sequences,
    check_state,
    not_yet,
)
from ._delta import delta_bwd_state_kernel, delta_fwd_o_kernel, delta_fwd_state_kernel
from ._gates import channel_gate_bwd_kernel, channel_gate_cumsum_kernel
from ._host import (
    activated_beta,
    last_contiguous,
    output_gradients,
    over_values,
    pad_to_16,
    split_scale,
    sum_of_group,
)
from ._kda_kernels import (
    kda_bwd_qk_kernel,
    kda_bwd_v_kernel,
    kda_far_bwd_qk_kernel,
    kda_far_scores_kernel,
    kda_scores_kernel,
    kda_solve_kernel,
)
from ._l2norm import l2norm
from ._sequences import Tables


def _chunk(q: torch.Tensor) -> int:
    """Tokens in a chunk: fewer in fp32, whose tiles and products are several times as large."""
    return 16 if q.dtype == torch.float32 else 64


class Gate(NamedTuple):
    """How g becomes a log decay: as it is, or with activate by `natural_gate` of `_gates.py`."""

    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    lower_bound: float | None = None
    activate: bool = False


def _prepare(q, k, v, g, beta, gate, chunks):
    """gc, gl, A, M, X, beta by head, qg, kb and kg."""
    C, G = _chunk(q), v.size(2) // q.size(2)
    gc, gl = channel_gate_cumsum_kernel(g, gate.A_log, gate.dt_bias, chunks, gate.lower_bound, C, gate.activate)
    A, M, qg, kb, kg = kda_scores_kernel(q, k, gc, gl, chunks, C, G)
    kda_far_scores_kernel(q, k, gc, gl, A, M, chunks, C, G)
    return gc, gl, A, M, *kda_solve_kernel(M, beta, A, chunks), qg, kb, kg


def chunk_kda_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    h0: torch.Tensor | None, gate: Gate, scale: float, tables: Tables,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [B,T,HV,V] in v's dtype and ht fp32 [N,HV,K,V]."""
    _, gl, A, _, X, by_head, qg, kb, kg = _prepare(q, k, v, g, beta, gate, tables.chunks)
    return delta_fwd_o_kernel(qg, kb, kg, v, A, X, by_head, None, gl, h0, tables.sequences, scale, 1)


def chunk_kda_bwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    h0: torch.Tensor | None, gate: Gate, scale: float, tables: Tables, do: torch.Tensor, dht: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv, dg, dbeta, dA_log, ddt_bias in their inputs' dtypes and dh0 in fp32."""
    C, G, split = _chunk(q), v.size(2) // q.size(2), split_scale(scale)
    sequences, chunks = tables
    gc, gl, A, M, X, by_head, qg, kb, kg = _prepare(q, k, v, g, beta, gate, chunks)
    D, r, dv, dh0 = delta_bwd_state_kernel(qg, kb, kg, A, X, by_head, do, None, gl, dht, sequences, *split, 1)
    del qg, A
    S, n = delta_fwd_state_kernel(kb, kg, v, X, by_head, None, gl, h0, sequences, 1)
    del kb, kg, X, by_head
    dA, dL, dbeta = kda_bwd_v_kernel(v, n, do, r, M, chunks, scale, split[1], C)
    del M
    dq, dk, dg, dbeta_k = kda_bwd_qk_kernel(q, k, gc, gl, beta, do, n, r, dA, dL, S, D, chunks, scale, split[1], C, G)
    del S, D, n, r
    kda_far_bwd_qk_kernel(q, k, gc, gl, beta, dA, dL, dq, dk, dg, chunks, C, G)
    dbeta = (dbeta + dbeta_k.sum(0)).to(beta.dtype)
    dq, dk = sum_of_group(dq, G), sum_of_group(dk, G)
    if not gate.activate:
        return dq, dk, dv, dg.to(g.dtype), dbeta, None, None, dh0
    dg, dA_log, ddt_bias = channel_gate_bwd_kernel(g, gate.A_log, gate.dt_bias, dg, gate.lower_bound)
    dA_log = None if gate.A_log is None else dA_log.sum((0, 1, 3)).to(gate.A_log.dtype)
    ddt_bias = None if gate.dt_bias is None else ddt_bias.sum((0, 1)).to(gate.dt_bias.dtype)
    return dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0


class _KDA(torch.autograd.Function):
    """(q, k, v, g, beta, h0 or None, A_log, dt_bias, lower_bound, activate, scale, tables) -> o, ht.

    Saves its inputs and recomputes the rest.
    """

    @staticmethod
    def forward(ctx, q, k, v, g, beta, h0, A_log, dt_bias, lower_bound, activate, scale, tables):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, beta, h0, A_log, dt_bias, *tables)
        ctx.constants = lower_bound, activate, scale
        return chunk_kda_fwd(q, k, v, g, beta, h0, Gate(A_log, dt_bias, lower_bound, activate), scale, tables)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dht):
        q, k, v, g, beta, h0, A_log, dt_bias, *tables = ctx.saved_tensors
        lower_bound, activate, scale = ctx.constants
        if do is None and dht is None:
            return (None,) * 12
        do, dht = output_gradients(do, dht, v)
        *gradients, dA_log, ddt_bias, dh0 = chunk_kda_bwd(
            q, k, v, g, beta, h0, Gate(A_log, dt_bias, lower_bound, activate), scale, Tables(*tables), do, dht)
        return *gradients, dh0.to(h0.dtype) if ctx.needs_input_grad[5] else None, dA_log, ddt_bias, *(None,) * 4


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
    """Chunked Kimi delta attention, differentiable in q, k, v, g, beta, initial_state, A_log and dt_bias.

    Args:
        q, k: queries and keys, [B, T, H, K] with K in 1..256; bf16, fp16 or fp32, any strides. The recurrence is stable
            for keys of unit length, which `use_qk_l2norm_in_kernel` ensures.
        v: values, [B, T, HV, V] in q's dtype; HV is a multiple of H, and value head i reads q and k of head
            i // (HV / H).
        g: natural-log decays, [B, T, HV, K], at most 0; -inf forgets the channel's state. With use_gate_in_kernel any
            numbers, of which the decays are made.
        beta: step sizes, [B, T, HV], in (0, 2). With use_beta_sigmoid_in_kernel any numbers.
        scale: factor of the output; K**-0.5 if None.
        initial_state: S_0, [N, HV, K, V], or [N, HV, V, K] with state_v_first; zero if None.
        output_final_state: whether to return S_T.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum x^2 + 1e-6) over their channels first.
        use_gate_in_kernel: the decays are -exp(A_log) softplus(g + dt_bias), or with lower_bound
            lower_bound sigmoid(exp(A_log) (g + dt_bias)).
        use_beta_sigmoid_in_kernel: the step sizes are sigmoid(beta), with allow_neg_eigval twice that.
        safe_gate: a promise that decays are in [lower_bound, 0); not needed, without effect.
        lower_bound: see use_gate_in_kernel; else without effect.
        state_v_first: states have their last two dimensions in the order V, K.
        cu_seqlens: where sequences of any lengths begin and end in the one batch row, [N+1], int32 or int64 on q's
            device, from 0 and not falling (which is not checked on a GPU): sequence n is tokens cu_seqlens[n] to
            cu_seqlens[n+1] - 1. Results for tokens after the last one, and their gradients, are zero. None for B
            sequences of T tokens; then N is B.
        cu_seqlens_cpu: the same on the CPU, only checked; or None.
        use_graph, max_num_seqs: without effect; every call can be captured in a CUDA graph.
        chunk_size: 16, 32, 64 or 128: a hint, without effect on the result.
        A_log: [HV], see use_gate_in_kernel; None is 0, and needs lower_bound.
        dt_bias: [HV * K], see use_gate_in_kernel; None is 0.
        disable_recompute, return_intermediate_states, cp_context: not supported yet.

    Returns:
        o, [B, T, HV, V] in q's dtype, and S_T, fp32, with the shape of S_0, or None.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape or device is not as above.
        NotImplementedError: an option that is not supported yet is set.

    Paper: Kimi Linear: An Expressive, Efficient Attention Architecture, https://arxiv.org/abs/2510.26692
    """
    not_yet(
        disable_recompute=disable_recompute, return_intermediate_states=return_intermediate_states,
        cp_context=cp_context)
    check_flags(
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, safe_gate=safe_gate, state_v_first=state_v_first, use_graph=use_graph)
    check_qkv(q, k, v, grouped=True)
    K = q.size(3)
    check_gate(g, (*v.shape[:3], K), q, layout="[B, T, HV, K]")
    check_gate_parameters(use_gate_in_kernel, A_log, dt_bias, v, K, A_optional=lower_bound is not None)
    check_lower_bound(lower_bound, safe_gate, use_gate_in_kernel)
    check_beta(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    check_scale(scale)
    N = check_sequences(cu_seqlens, cu_seqlens_cpu, q)
    check_state(initial_state, N, q, v, state_v_first)
    check_chunk_size(chunk_size)
    check_hints(max_num_seqs=max_num_seqs)
    scale = K**-0.5 if scale is None else float(scale)
    g = last_contiguous(pad_to_16(g))
    if use_gate_in_kernel:
        bias = None if dt_bias is None else pad_to_16(dt_bias.reshape(-1, K))
        gate = Gate(A_log, bias, None if lower_bound is None else float(lower_bound), activate=True)
    else:
        gate = Gate()
    if use_beta_sigmoid_in_kernel:
        beta = activated_beta(beta, allow_neg_eigval, cu_seqlens)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q, k)

    def run(q, k, v, initial_state, tables):
        return _KDA.apply(q, k, v, g, beta, initial_state, *gate, scale, tables)

    others = g, beta, A_log, dt_bias
    o, final_state = over_values(run, q, k, v, initial_state, cu_seqlens, _chunk(q), state_v_first, others)
    return o, final_state if output_final_state else None
