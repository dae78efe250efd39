"""The delta rule: `S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T`, `o_t = scale S_t^T q_t`.

Equations and kernels are in `_scalar_delta.py` and `_delta.py`.
"""
from __future__ import annotations

import torch

from ._checks import check_beta, check_chunk_size, check_flags, check_qkv, check_scale, check_sequences, check_state
from ._scalar_delta import scalar_delta


def chunk_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chunked delta rule, differentiable in q, k, v, beta and initial_state.

    Args:
        q, k: queries and keys, [B, T, H, K] with K in 1..256; bf16, fp16 or fp32, any strides. The recurrence is stable
            for keys of unit length, which `use_qk_l2norm_in_kernel` ensures.
        v: values, [B, T, H, V] in q's dtype.
        beta: step sizes, [B, T, H], in (0, 2).
        scale: factor of the output; K**-0.5 if None.
        initial_state: S_0, [N, H, K, V]; zero if None.
        output_final_state: whether to return S_T.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum x^2 + 1e-6) over their channels first.
        chunk_size: 16, 32, 64 or 128: a hint, without effect on the result.
        cu_seqlens: where sequences of any lengths begin and end in the one batch row, [N+1], int32 or int64 on q's
            device, from 0 and not falling (which is not checked on a GPU): sequence n is tokens cu_seqlens[n] to
            cu_seqlens[n+1] - 1. Results for tokens after the last one, and their gradients, are zero. None for B
            sequences of T tokens; then N is B.
        cu_seqlens_cpu: the same on the CPU, only checked; or None.

    Returns:
        o, [B, T, H, V] in q's dtype, and S_T, fp32 [N, H, K, V], or None.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape or device is not as above.

    Paper: Parallelizing Linear Transformers with the Delta Rule over Sequence Length, https://arxiv.org/abs/2406.06484
    """
    check_flags(output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    check_qkv(q, k, v)
    check_beta(beta, v)
    check_scale(scale)
    N = check_sequences(cu_seqlens, cu_seqlens_cpu, q)
    check_state(initial_state, N, q, v)
    check_chunk_size(chunk_size)
    o, final_state = scalar_delta(q, k, v, None, beta, scale, initial_state, use_qk_l2norm_in_kernel, cu_seqlens)
    return o, final_state if output_final_state else None
