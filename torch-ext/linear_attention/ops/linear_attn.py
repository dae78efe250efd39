"""Linear attention: `S_t = S_{t-1} + k_t v_t^T`, `o_t = scale S_t^T q_t`.

Equations and kernels are in `_scalar_gate.py`.
"""
from __future__ import annotations

import torch

from ._checks import check_qkv, check_scale, check_state, not_yet
from ._scalar_gate import scalar_gate


def chunk_linear_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chunked linear attention without a gate, differentiable in q, k, v and initial_state.

    Args:
        q, k: queries and keys, [B, T, H, K] with K in 1..256; bf16, fp16 or fp32, any strides.
        v: values, [B, T, H, V] in q's dtype.
        scale: factor of the output; K**-0.5 if None.
        initial_state: S_0, [B, H, K, V]; zero if None.
        output_final_state: whether to return S_T.
        normalize: division of the output by q . (sum of keys); not supported yet, pass False.
        cu_seqlens: packed sequences, not supported yet.

    Returns:
        o, [B, T, H, V] in q's dtype, and S_T, fp32 [B, H, K, V], or None.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape or device is not as above.
        NotImplementedError: an option that is not supported yet is set.

    Paper: Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention,
    https://arxiv.org/abs/2006.16236
    """
    if normalize:
        raise NotImplementedError("normalize: expected False (not supported yet), got True; pass normalize=False")
    not_yet(cu_seqlens=cu_seqlens)
    check_qkv(q, k, v)
    check_scale(scale)
    check_state(initial_state, (q.size(0), q.size(2), q.size(3), v.size(3)), q)
    o, final_state = scalar_gate(q, k, v, None, scale, initial_state)
    return o, final_state if output_final_state else None
