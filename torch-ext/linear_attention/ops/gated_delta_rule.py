"""The gated delta rule: `S' = e^{g_t} S_{t-1}`, `S_t = S' + beta_t k_t (v_t - S'^T k_t)^T`, `o_t = scale S_t^T q_t`.

Equations and kernels are in `_scalar_delta.py` and `_delta.py`.
"""
from __future__ import annotations

import torch

from ._checks import check_beta, check_chunk_size, check_gate, check_qkv, check_scale, check_state, not_yet
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
    """Chunked gated delta rule, differentiable in q, k, v, g, beta and initial_state.

    Args:
        q, k: queries and keys, [B, T, H, K] with K in 1..256; bf16, fp16 or fp32, any strides. The recurrence is stable
            for keys of unit length, which `use_qk_l2norm_in_kernel` ensures.
        v: values, [B, T, H, V] in q's dtype.
        g: natural-log decays, [B, T, H], at most 0; -inf forgets the state.
        beta: step sizes, [B, T, H], in (0, 2).
        scale: factor of the output; K**-0.5 if None.
        initial_state: S_0, [B, H, K, V]; zero if None.
        output_final_state: whether to return S_T.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum x^2 + 1e-6) over their channels first.
        chunk_size: 16, 32, 64 or 128: a hint, without effect on the result.
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens, cu_seqlens_cpu, chunk_indices,
            cp_context, use_gate_in_kernel, A_log, dt_bias: not supported yet.

    Returns:
        o, [B, T, H, V] in q's dtype, and S_T, fp32 [B, H, K, V], or None.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape or device is not as above.
        NotImplementedError: an option that is not supported yet is set.

    Paper: Gated Delta Networks: Improving Mamba2 with Delta Rule, https://arxiv.org/abs/2412.06464
    """
    not_yet(
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, chunk_indices=chunk_indices,
        cp_context=cp_context, use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias,
    )
    check_qkv(q, k, v)
    check_gate(g, v.shape[:3], q)
    check_beta(beta, v)
    check_scale(scale)
    check_state(initial_state, (q.size(0), q.size(2), q.size(3), v.size(3)), q)
    check_chunk_size(chunk_size)
    o, final_state = scalar_delta(q, k, v, g, beta, scale, initial_state, use_qk_l2norm_in_kernel)
    return o, final_state if output_final_state else None
