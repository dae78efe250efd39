"""Simple gated linear attention: `S_t = e^{g_t} S_{t-1} + k_t v_t^T`, `o_t = scale S_t^T q_t`, a gate a head and token.

Equations and kernels are in `_scalar_gate.py`.
"""
from __future__ import annotations

import torch

from ._checks import check_chunk_size, check_flags, check_gate, check_qkv, check_scale, check_sequences, check_state
from ._scalar_gate import scalar_gate


def chunk_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chunked attention with a scalar gate a head and token, differentiable in q, k, v, g and initial_state.

    Args:
        q, k: queries and keys, [B, T, H, K] with K in 1..256; bf16, fp16 or fp32, any strides.
        v: values, [B, T, H, V] in q's dtype.
        g: natural-log decay of each token, [B, T, H], at most 0, -inf allowed; no decay if None.
        g_gamma: natural-log decay of each head, [H], a constant without a gradient; adds to g if both are given.
        scale: factor of the output; K**-0.5 if None.
        initial_state: S_0, [N, H, K, V], or [N, H, V, K] with state_v_first; zero if None.
        output_final_state: whether to return S_T.
        state_v_first: states have their last two dimensions in the order V, K.
        cu_seqlens: where sequences of any lengths begin and end in the one batch row, [N+1], int32 or int64 on q's
            device, from 0 and not falling (which is not checked on a GPU): sequence n is tokens cu_seqlens[n] to
            cu_seqlens[n+1] - 1. Results for tokens after the last one, and their gradients, are zero. None for B
            sequences of T tokens; then N is B.
        cu_seqlens_cpu: the same on the CPU, only checked; or None.
        chunk_size: 16, 32, 64 or 128: a hint, without effect on the result.

    Returns:
        o, [B, T, H, V] in q's dtype, and S_T, fp32, with the shape of S_0, or None.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape or device is not as above.

    Papers: Gated Linear Attention Transformers with Hardware-Efficient Training, https://arxiv.org/abs/2312.06635;
    Transformers are SSMs, https://arxiv.org/abs/2405.21060 (the scalar gate)
    """
    check_flags(output_final_state=output_final_state, state_v_first=state_v_first)
    check_qkv(q, k, v)
    if g is not None:
        check_gate(g, q.shape[:3], q)
    if g_gamma is not None:
        check_gate(g_gamma, q.shape[2:3], q, "g_gamma")
        gamma = g_gamma.detach()
        g = gamma.expand(q.shape[:3]) if g is None else g.float() + gamma.float()
    check_scale(scale)
    N = check_sequences(cu_seqlens, cu_seqlens_cpu, q)
    check_state(initial_state, N, q, v, state_v_first)
    check_chunk_size(chunk_size)
    o, final_state = scalar_gate(q, k, v, g, scale, initial_state, cu_seqlens, state_v_first)
    return o, final_state if output_final_state else None
