"""Retention: `S_t = gamma_h S_{t-1} + k_t v_t^T`, `o_t = scale S_t^T q_t`, with `gamma_h = 1 - 2^(-5 - h)`.

Equations and kernels are in `_scalar_gate.py`: the gate is log gamma_h.
"""
from __future__ import annotations

import torch

from ._checks import check_chunk_size, check_flags, check_qkv, check_scale, check_sequences, check_state
from ._scalar_gate import scalar_gate


def chunk_retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chunked retention, differentiable in q, k, v and initial_state.

    Head h decays by 1 - 2^(-5 - h) a token.

    Args:
        q, k: queries and keys, [B, T, H, K] with K in 1..256; bf16, fp16 or fp32, any strides.
        v: values, [B, T, H, V] in q's dtype.
        scale: factor of the output; K**-0.5 if None.
        initial_state: S_0, [N, H, K, V]; zero if None.
        output_final_state: whether to return S_T.
        cu_seqlens: where sequences of any lengths begin and end in the one batch row, [N+1], int32 or int64 on q's
            device, from 0 and not falling (which is not checked on a GPU): sequence n is tokens cu_seqlens[n] to
            cu_seqlens[n+1] - 1. Results for tokens after the last one, and their gradients, are zero. None for B
            sequences of T tokens; then N is B.
        chunk_size: 16, 32, 64 or 128: a hint, without effect on the result.

    Returns:
        o, [B, T, H, V] in q's dtype, and S_T, fp32 [N, H, K, V], or None.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape or device is not as above.

    Paper: Retentive Network: A Successor to Transformer for Large Language Models, https://arxiv.org/abs/2307.08621
    """
    check_flags(output_final_state=output_final_state)
    check_qkv(q, k, v)
    check_scale(scale)
    N = check_sequences(cu_seqlens, None, q)
    check_state(initial_state, N, q, v)
    check_chunk_size(chunk_size)
    o, final_state = scalar_gate(q, k, v, None, scale, initial_state, cu_seqlens, head_decay=True)
    return o, final_state if output_final_state else None
