"""The seven operators as token recurrences in eager PyTorch, the definition of what the kernels compute.

With the state S [K, V] of a value head, S_0 the initial state or zero, and at each token o_t = scale S_t^T q_t:

    linear_attn        S_t = S_{t-1} + k_t v_t^T
    retention          S_t = gamma_h S_{t-1} + k_t v_t^T,  gamma_h = 1 - 2^(-5-h)
    simple_gla         S_t = e^{g_t} S_{t-1} + k_t v_t^T
    gla                S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T
    delta_rule         S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T
    gated_delta_rule   S_t = S' + beta_t k_t (v_t - S'^T k_t)^T,  S' = e^{g_t} S_{t-1}
    kda                the same,  S' = diag(e^{g_t}) S_{t-1}

Shapes: q, k [B, T, H, K], v [B, T, HV, V], beta [B, T, HV], initial_state [N, HV, K, V], with N = B; HV is a multiple
of H, and value head i reads query and key head i // (HV // H).  g is a natural log, at most 0, -inf included.  scale is
K^-0.5 unless given.  Everything is cast to `dtype` (float64 or float32) first, and o [B, T, HV, V] and the final state
[N, HV, K, V] come back in it, differentiable in every argument but g_gamma.  Slow: one Python step a token.

With cu_seqlens [N+1] the one batch row holds N sequences, sequence n the tokens cu_seqlens[n] to cu_seqlens[n+1] - 1,
and o is zero after the last one.  use_gate_in_kernel: the gate is -exp(A_log) softplus(g + dt_bias), or for KDA with a
lower_bound lower_bound sigmoid(exp(A_log) (g + dt_bias)), A_log [HV], dt_bias [HV] or, for KDA, [HV * K].
use_beta_sigmoid_in_kernel: sigmoid(beta) for beta, with allow_neg_eigval twice that.

Papers: linear attention, Katharopoulos et al. 2020; RetNet, Sun et al. 2023; GLA, Yang et al. 2024a; DeltaNet, Yang et
al. 2024b; Gated DeltaNet, Yang et al. 2024c; Kimi Linear (KDA), Kimi Team 2025.
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
    initial_state: Tensor | tuple[Tensor, Tensor] | None = None, normalize: bool = False,
    cu_seqlens: Tensor | None = None, *, dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
    """Linear attention without a gate; with normalize o_t is divided by scale q_t . (k_1 + ... + k_t) + 1e-10.

    Then the initial state may be a pair, its second one the sum of earlier keys [N, 1, H, K], and the final state is.
    """
    if not normalize:
        return _recurrence(q, k, v, None, None, scale, initial_state, dtype, cu_seqlens)
    S, keys = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
    keys = None if keys is None else keys.transpose(1, 2).mT
    o, S = _recurrence(q, k, v, None, None, scale, S, dtype, cu_seqlens)
    products, keys = _recurrence(q, k, torch.ones_like(v[..., :1]), None, None, scale, keys, dtype, cu_seqlens)
    return o / (products + 1e-10), (S, keys.mT.transpose(1, 2))


def retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, *, dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Retention: a fixed decay for each head, gamma_h = 1 - 2^(-5-h)."""
    head = torch.arange(v.size(2), device=v.device, dtype=dtype)
    decay = (1 - 2 ** (-5 - head))[None, None, :, None]
    return _recurrence(q, k, v, decay, None, scale, initial_state, dtype, cu_seqlens)


def simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None, *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Scalar gates: g [B, T, HV], or the constants g_gamma [HV] for every token; both add up, neither is no gate."""
    decay = None if g is None else g.to(dtype).exp()[..., None]
    if g_gamma is not None:
        fixed = g_gamma.detach().to(dtype).exp()[None, None, :, None]
        decay = fixed if decay is None else decay * fixed
    return _recurrence(q, k, v, decay, None, scale, initial_state, dtype, cu_seqlens)


def gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, *, dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Gated linear attention: a gate for each key channel, g [B, T, HV, K]."""
    return _recurrence(q, k, v, g.to(dtype).exp(), None, scale, initial_state, dtype, cu_seqlens)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None, *, dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The delta rule: the state's value at k_t moves towards v_t by beta_t."""
    q, k = _l2norm(q, k, use_qk_l2norm_in_kernel, dtype)
    return _recurrence(q, k, v, None, beta, scale, initial_state, dtype, cu_seqlens)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, cu_seqlens: Tensor | None = None,
    use_gate_in_kernel: bool = False, A_log: Tensor | None = None, dt_bias: Tensor | None = None, *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The delta rule after a scalar gate, g [B, T, HV]."""
    q, k = _l2norm(q, k, use_qk_l2norm_in_kernel, dtype)
    if use_gate_in_kernel:
        g = _gate(g[..., None], A_log, dt_bias, None, dtype).squeeze(-1)
    beta = _beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval, dtype)
    return _recurrence(q, k, v, g[..., None].to(dtype).exp(), beta, scale, initial_state, dtype, cu_seqlens)


def kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None, A_log: Tensor | None = None, dt_bias: Tensor | None = None, *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Kimi delta attention: the delta rule after a gate for each key channel, g [B, T, HV, K]."""
    q, k = _l2norm(q, k, use_qk_l2norm_in_kernel, dtype)
    if use_gate_in_kernel:
        g = _gate(g, A_log, dt_bias, lower_bound, dtype)
    beta = _beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval, dtype)
    return _recurrence(q, k, v, g.to(dtype).exp(), beta, scale, initial_state, dtype, cu_seqlens)


def _l2norm(q, k, wanted, dtype):
    """x / sqrt(sum x^2 + 1e-6) over the last dimension, if wanted."""
    if not wanted:
        return q, k
    q, k = q.to(dtype), k.to(dtype)
    return tuple(x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))


def _gate(g, A_log, dt_bias, lower_bound, dtype):
    """The gate made of g [B, T, HV, K], K 1 for a scalar one."""
    g = g.to(dtype)
    rate = g.new_ones(()) if A_log is None else A_log.to(dtype).exp()[:, None]
    if dt_bias is not None:
        g = g + dt_bias.to(dtype).view(g.shape[2:])
    return -rate * torch.nn.functional.softplus(g) if lower_bound is None else lower_bound * (rate * g).sigmoid()


def _beta(beta, activate, doubled, dtype):
    """The step size made of beta."""
    return beta.to(dtype).sigmoid() * (2 if doubled else 1) if activate else beta


def _recurrence(q, k, v, decay, beta, scale, initial_state, dtype, cu_seqlens=None):
    """The token loop, for each sequence.  decay: None, or in `dtype` and broadcastable to [B, T, HV, K]; beta: None for
    a sum of k v^T.

    Gates come as decays, so that a gate of -inf is a decay of 0 with gradient 0, and no difference of gates is taken.
    """
    scale = q.size(-1) ** -0.5 if scale is None else scale
    decay = None if decay is None else decay.expand(*v.shape[:3], -1)
    state = initial_state
    if state is None:
        N = v.size(0) if cu_seqlens is None else len(cu_seqlens) - 1
        state = v.new_zeros(N, v.size(2), q.size(-1), v.size(-1), dtype=dtype)
    if cu_seqlens is None:
        return _sequence(q, k, v, decay, beta, scale, state, dtype)
    ends = cu_seqlens.tolist()
    outputs, states = [], []
    for n, (begin, end) in enumerate(zip(ends, ends[1:])):
        part = [x if x is None else x[:, begin:end] for x in (q, k, v, decay, beta)]
        o, final = _sequence(*part, scale, state[n:n + 1], dtype)
        outputs.append(o)
        states.append(final)
    rest = torch.zeros_like(v[:, ends[-1]:], dtype=dtype)
    return torch.cat([*outputs, rest], 1), torch.cat(states)


def _sequence(q, k, v, decay, beta, scale, S, dtype):
    (B, T, HV, V) = v.shape
    q, k = (x.to(dtype).repeat_interleave(HV // x.size(2), 2) for x in (q, k))
    v, S = v.to(dtype), S.to(dtype)
    decays = [None] * T if decay is None else decay[..., None].unbind(1)
    betas = [None] * T if beta is None else beta.to(dtype)[..., None].unbind(1)
    o = [v.new_zeros(B, 0, HV, V)]
    for b_q, b_k, b_v, b_decay, b_beta in zip(q.unbind(1), k.unbind(1), v.unbind(1), decays, betas):
        if b_decay is not None:
            S = S * b_decay
        if b_beta is not None:
            b_v = b_beta * (b_v - (b_k[:, :, None] @ S).squeeze(2))
        S = S + b_k[..., None] * b_v[:, :, None]
        o.append((b_q[:, :, None] @ S).squeeze(2)[:, None])
    return scale * torch.cat(o, 1), S
