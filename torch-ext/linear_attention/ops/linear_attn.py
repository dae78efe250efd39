"""Linear attention: `S_t = S_{t-1} + k_t v_t^T`, `o_t = scale S_t^T q_t`.

Equations and kernels are in `_scalar_gate.py`.
"""
from __future__ import annotations

import torch

from ._checks import check_flags, check_key_sum, check_pair, check_qkv, check_scale, check_sequences, check_state
from ._scalar_gate import scalar_gate


def chunk_linear_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None]:
    """Chunked linear attention without a gate, differentiable in q, k, v and initial_state.

    Args:
        q, k: queries and keys, [B, T, H, K] with K in 1..256; bf16, fp16 or fp32, any strides.
        v: values, [B, T, H, V] in q's dtype.
        scale: factor of the output; K**-0.5 if None.
        initial_state: S_0, [N, H, K, V], or with normalize S_0 and the sum of earlier keys, [N, 1, H, K] (a tensor
            alone is S_0); zero if None.
        output_final_state: whether to return the final state.
        normalize: divide o_t by scale q_t . (k_1 + ... + k_t) + 1e-10, as flash-linear-attention does by default; of
            use if these products are positive.
        cu_seqlens: where sequences of any lengths begin and end in the one batch row, [N+1], int32 or int64 on q's
            device, from 0 and not falling (which is not checked on a GPU): sequence n is tokens cu_seqlens[n] to
            cu_seqlens[n+1] - 1. Results for tokens after the last one, and their gradients, are zero. None for B
            sequences of T tokens; then N is B.

    Returns:
        o, [B, T, H, V] in q's dtype, and None or the final state: S_T, fp32 [N, H, K, V], or with normalize S_T and the
        sum of keys, fp32 [N, 1, H, K].

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape or device is not as above.

    Paper: Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention,
    https://arxiv.org/abs/2006.16236
    """
    check_flags(output_final_state=output_final_state, normalize=normalize)
    check_qkv(q, k, v)
    check_scale(scale)
    N = check_sequences(cu_seqlens, None, q)
    keys = None
    if normalize and isinstance(initial_state, (tuple, list)):
        initial_state, keys = check_pair(initial_state)
    check_state(initial_state, N, q, v)
    check_key_sum(keys, N, q)
    dtype = q.dtype
    if normalize and dtype == torch.float16:  # whose range the sums leave that are divided by each other
        q, k, v = q.float(), k.float(), v.float()
    o, final_state = scalar_gate(q, k, v, None, scale, initial_state, cu_seqlens)
    if normalize:
        # the sum of keys is the state that values of 1 leave, and q . sum the output
        keys = None if keys is None else keys.squeeze(1)[..., None]
        products, keys = scalar_gate(q, k, torch.ones_like(v[..., :1]), None, scale, keys, cu_seqlens)
        o = (o.float() / (products.float() + 1e-10)).to(dtype)
        final_state = final_state, keys.squeeze(-1)[:, None]
    return o, final_state if output_final_state else None
