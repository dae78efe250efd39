"""The seven operators as token recurrences in eager PyTorch, the definition of what the kernels compute.

With the state S [K, V] of a value head, S_0 the initial state or zero, and at each token o_t = scale S_t^T q_t:

    linear_attn        S_t = S_{t-1} + k_t v_t^T
    retention          S_t = gamma_h S_{t-1} + k_t v_t^T,  gamma_h = 1 - 2^(-5-h)
    simple_gla         S_t = e^{g_t} S_{t-1} + k_t v_t^T
    gla                S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T
    delta_rule         S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T
    gated_delta_rule   S_t = S' + beta_t k_t (v_t - S'^T k_t)^T,  S' = e^{g_t} S_{t-1}
    kda                the same,  S' = diag(e^{g_t}) S_{t-1}

Shapes: q, k [B, T, H, K], v [B, T, HV, V], beta [B, T, HV], initial_state [B, HV, K, V]; HV is a multiple of H, and
value head i reads query and key head i // (HV // H).  g is a natural log, at most 0, -inf included.  scale is K^-0.5
unless given.  Everything is cast to `dtype` (float64 or float32) first, and o [B, T, HV, V] and the final state
[B, HV, K, V] come back in it, differentiable in every argument but g_gamma.  Slow: one Python step a token.

Papers: linear attention, Katharopoulos et al. 2020; RetNet, Sun et al. 2023; GLA, Yang et al. 2024a; DeltaNet, Yang et
al. 2024b; Gated DeltaNet, Yang et al. 2024c; Kimi Linear (KDA), Kimi Team 2025.
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None, *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Linear attention without a gate and without a normaliser."""
    return _recurrence(q, k, v, None, None, scale, initial_state, dtype)


def retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None, *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Retention: a fixed decay for each head, gamma_h = 1 - 2^(-5-h)."""
    head = torch.arange(v.size(2), device=v.device, dtype=dtype)
    return _recurrence(q, k, v, (1 - 2 ** (-5 - head))[None, None, :, None], None, scale, initial_state, dtype)


def simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, *, dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Scalar gates: g [B, T, HV], or the constants g_gamma [HV] for every token; both add up, neither is no gate."""
    decay = None if g is None else g.to(dtype).exp()[..., None]
    if g_gamma is not None:
        fixed = g_gamma.detach().to(dtype).exp()[None, None, :, None]
        decay = fixed if decay is None else decay * fixed
    return _recurrence(q, k, v, decay, None, scale, initial_state, dtype)


def gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: Tensor | None = None, *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Gated linear attention: a gate for each key channel, g [B, T, HV, K]."""
    return _recurrence(q, k, v, g.to(dtype).exp(), None, scale, initial_state, dtype)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False, *, dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The delta rule: the state's value at k_t moves towards v_t by beta_t."""
    q, k = _l2norm(q, k, use_qk_l2norm_in_kernel, dtype)
    return _recurrence(q, k, v, None, beta, scale, initial_state, dtype)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False, *, dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The delta rule after a scalar gate, g [B, T, HV]."""
    q, k = _l2norm(q, k, use_qk_l2norm_in_kernel, dtype)
    return _recurrence(q, k, v, g[..., None].to(dtype).exp(), beta, scale, initial_state, dtype)


def kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False, *, dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Kimi delta attention: the delta rule after a gate for each key channel, g [B, T, HV, K]."""
    q, k = _l2norm(q, k, use_qk_l2norm_in_kernel, dtype)
    return _recurrence(q, k, v, g.to(dtype).exp(), beta, scale, initial_state, dtype)


def _l2norm(q, k, wanted, dtype):
    """x / sqrt(sum x^2 + 1e-6) over the last dimension, if wanted."""
    if not wanted:
        return q, k
    q, k = q.to(dtype), k.to(dtype)
    return tuple(x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))


def _recurrence(q, k, v, decay, beta, scale, initial_state, dtype):
    """The token loop.  decay: None, or in `dtype` and broadcastable to [B, T, HV, K]; beta: None for a sum of k v^T.

    Gates come as decays, so that a gate of -inf is a decay of 0 with gradient 0, and no difference of gates is taken.
    """
    (B, T, HV, V), K = v.shape, q.size(-1)
    q, k = (x.to(dtype).repeat_interleave(HV // x.size(2), 2) for x in (q, k))
    v = v.to(dtype)
    scale = K**-0.5 if scale is None else scale
    S = v.new_zeros(B, HV, K, V) if initial_state is None else initial_state.to(dtype)
    decays = [None] * T if decay is None else decay.expand(B, T, HV, -1)[..., None].unbind(1)
    betas = [None] * T if beta is None else beta.to(dtype)[..., None].unbind(1)
    o = []
    for b_q, b_k, b_v, b_decay, b_beta in zip(q.unbind(1), k.unbind(1), v.unbind(1), decays, betas):
        if b_decay is not None:
            S = S * b_decay
        if b_beta is not None:
            b_v = b_beta * (b_v - (b_k[:, :, None] @ S).squeeze(2))
        S = S + b_k[..., None] * b_v[:, :, None]
        o.append((b_q[:, :, None] @ S).squeeze(2))
    return scale * torch.stack(o, 1), S
