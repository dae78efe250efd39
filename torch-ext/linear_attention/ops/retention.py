"""Retention: `S_t = gamma_h S_{t-1} + k_t v_t^T`, `o_t = scale S_t^T q_t`, with `gamma_h = 1 - 2^(-5 - h)`.

Equations and kernels are in `_scalar_gate.py`: the gate is log gamma_h, one value a head expanded over all tokens.
"""
from __future__ import annotations

import math

import torch

from ._checks import check_chunk_size, check_qkv, check_scale, check_state, not_yet
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
        initial_state: S_0, [B, H, K, V]; zero if None.
        output_final_state: whether to return S_T.
        cu_seqlens: packed sequences, not supported yet.
        chunk_size: 16, 32, 64 or 128: a hint, without effect on the result.

    Returns:
        o, [B, T, H, V] in q's dtype, and S_T, fp32 [B, H, K, V], or None.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape or device is not as above.
        NotImplementedError: an option that is not supported yet is set.

    Paper: Retentive Network: A Successor to Transformer for Large Language Models, https://arxiv.org/abs/2307.08621
    """
    not_yet(cu_seqlens=cu_seqlens)
    check_qkv(q, k, v)
    check_scale(scale)
    check_state(initial_state, (q.size(0), q.size(2), q.size(3), v.size(3)), q)
    check_chunk_size(chunk_size)
    head = torch.arange(q.size(2), dtype=torch.float64, device=q.device)
    # exp, since PyTorch compiles its exp2 for CUDA at the first call.
    log_gamma = torch.log1p(-torch.exp((-5 - head) * math.log(2))).to(torch.float32)
    o, final_state = scalar_gate(q, k, v, log_gamma.expand(q.shape[:3]), scale, initial_state)
    return o, final_state if output_final_state else None
