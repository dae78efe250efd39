"""The gated delta rule: `S' = e^{g_t} S_{t-1}`, `S_t = S' + beta_t k_t (v_t - S'^T k_t)^T`, `o_t = scale S_t^T q_t`.

Equations and kernels are in `_scalar_delta.py` and `_delta.py`.
"""
from __future__ import annotations

import torch

from ._checks import (
    check_beta,
    check_chunk_size,
    check_flags,
    check_gate,
    check_gate_parameters,
    check_hints,
    check_qkv,
    check_scale,
    check_sequences,
    check_state,
    not_yet,
)
from ._host import activated_beta, activated_gate
from ._scalar_delta import scalar_delta


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: object | None = None,
    *,
    chunk_size: int | None = None,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chunked gated delta rule, differentiable in q, k, v, g, beta, initial_state, A_log and dt_bias.

    Args:
        q, k: queries and keys, [B, T, H, K] with K in 1..256; bf16, fp16 or fp32, any strides. The recurrence is stable
            for keys of unit length, which `use_qk_l2norm_in_kernel` ensures.
        v: values, [B, T, HV, V] in q's dtype; HV is a multiple of H, and value head i reads q and k of head
            i // (HV / H).
        g: natural-log decays, [B, T, HV], at most 0; -inf forgets the state. With use_gate_in_kernel any numbers, of
            which the decays are made.
        beta: step sizes, [B, T, HV], in (0, 2). With use_beta_sigmoid_in_kernel any numbers.
        scale: factor of the output; K**-0.5 if None.
        initial_state: S_0, [N, HV, K, V], or [N, HV, V, K] with state_v_first; zero if None.
        output_final_state: whether to return S_T.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum x^2 + 1e-6) over their channels first.
        use_beta_sigmoid_in_kernel: the step sizes are sigmoid(beta), with allow_neg_eigval twice that.
        state_v_first: states have their last two dimensions in the order V, K.
        cu_seqlens: where sequences of any lengths begin and end in the one batch row, [N+1], int32 or int64 on q's
            device, from 0 and not falling (which is not checked on a GPU): sequence n is tokens cu_seqlens[n] to
            cu_seqlens[n+1] - 1. Results for tokens after the last one, and their gradients, are zero. None for B
            sequences of T tokens; then N is B.
        cu_seqlens_cpu: the same on the CPU, only checked; or None.
        chunk_indices: a tensor or None, without effect; where chunks lie is found on the device.
        cp_context: not supported yet.
        chunk_size: 16, 32, 64 or 128: a hint, without effect on the result.
        use_gate_in_kernel: the decays are -exp(A_log) softplus(g + dt_bias).
        A_log, dt_bias: [HV], see use_gate_in_kernel; without dt_bias it is 0.

    Returns:
        o, [B, T, HV, V] in q's dtype, and S_T, fp32, with the shape of S_0, or None.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape or device is not as above.
        NotImplementedError: an option that is not supported yet is set.

    Paper: Gated Delta Networks: Improving Mamba2 with Delta Rule, https://arxiv.org/abs/2412.06464
    """
    not_yet(cp_context=cp_context)
    check_flags(
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, use_gate_in_kernel=use_gate_in_kernel)
    check_qkv(q, k, v, grouped=True)
    check_gate(g, v.shape[:3], q, layout="[B, T, HV]")
    check_gate_parameters(use_gate_in_kernel, A_log, dt_bias, v)
    check_beta(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    check_scale(scale)
    N = check_sequences(cu_seqlens, cu_seqlens_cpu, q)
    check_state(initial_state, N, q, v, state_v_first)
    check_chunk_size(chunk_size)
    check_hints(chunk_indices=chunk_indices)
    if use_gate_in_kernel:
        g = activated_gate(g, A_log, dt_bias, cu_seqlens)
    if use_beta_sigmoid_in_kernel:
        beta = activated_beta(beta, allow_neg_eigval, cu_seqlens)
    o, final_state = scalar_delta(
        q, k, v, g, beta, scale, initial_state, use_qk_l2norm_in_kernel, cu_seqlens, state_v_first)
    return o, final_state if output_final_state else None
