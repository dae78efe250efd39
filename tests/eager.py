"""The chunked algorithm in eager PyTorch, by explicit formulas: the yardstick of the kernels' errors.

`forward` and `backward` run one of the seven operators in chunks of 64 tokens.  By default they round as the kernels
do: fp32 sums, gates, states and triangular inverse; operands of matrix products and stored activations rounded to q's
dtype.  With exact=True the same formulas run in fp64 and round nothing: test_reference.py holds them against the token
loop of reference.py, and from them comes the size of the terms that add up to a gate's gradient.

In a chunk, gc is the running sum of log2 gates and gl its last value; S is the state at the chunk's begin, D the
gradient of the state at its end.  Tokens are rows, and P(a, b)_ij = sum_d a_id b_jd 2^(gc_id - gc_jd) for i >= j.

    A = P(q, k),  qg = 2^gc q,  kg = 2^(gl - gc) k,  n = v, or for the delta family
    L = strict_tril(beta P(k, k)),  X = (I + L)^-1,  kb = 2^gc k,  e = beta (v - kb S),  n = X e
    o = scale (qg S + A n),  S <- 2^gl S + kg^T n
    dn = scale A^T do + kg D,  r = X^T dn,  D <- 2^gl D + scale qg^T do - kb^T (beta r)
    dA = scale tril(do n^T),  dL = -strict_tril(r n^T),  dv = beta r (or dn),  and from those dq, dk, dbeta, dg

X is the sum of two tensors in q's dtype, the only operand with twice the digits.  Where scale is unit, a power of two,
times rest, D, dn and r are kept without rest: rounded with it, equal numbers would all be off by the same.

A gate's gradient is a sum over all that decays through its token t, without terms that cancel: pairs i >= t > j, tokens
i >= t with the state before them, tokens j < t with the state after them, and the state before with the state after.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

CHUNK = 64
LOG2E = 1.4426950408889634
DELTA = ("delta_rule", "gated_delta_rule", "kda")


def log_gate(op, q, g=None, g_gamma=None):
    """The natural-log gate of operator `op` as [B, T, H, 1] or [B, T, H, K], or None."""
    if op == "retention":
        g_gamma = torch.log1p(-(2.0 ** (-5 - torch.arange(q.size(2), device=q.device, dtype=torch.float64))))
    if g is not None and g.dim() == 3:
        g = g[..., None]
    if g_gamma is not None:
        fixed = g_gamma[None, None, :, None].expand(*q.shape[:3], 1)
        g = fixed if g is None else g.double() + fixed
    return g


def in_chunks(x):
    """[B, T, H, D] -> [B, H, NT, CHUNK, D], zeros past T."""
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.size(1) % CHUNK))
    return x.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4)


def in_tokens(x, T):
    """The inverse of in_chunks."""
    return x.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :T]


def levels(device):
    """For each level of the bisection: which rows are in the upper half of their block, the row of each block's anchor
    (the last one of its lower half), and which pairs (i, j) belong to it (i in the upper half, j in the lower half)."""
    i = torch.arange(CHUNK, device=device)
    for half in (1, 2, 4, 8, 16, 32):
        upper = (i & half) != 0
        block = i // (2 * half)
        pairs = (block[:, None] == block) & upper[:, None] & ~upper
        yield upper[:, None], block * 2 * half + half - 1, pairs


def decay_tile(gc):
    """2^(gc_i - gc_j) for i >= j, else 0, of a scalar gate: [..., C, 1] -> [..., C, C]."""
    return torch.exp2((gc - gc.mT).clamp(max=0)).tril()


def pair_scores(a, b, gc, rounded):
    """P(a, b), zero for i < j.  Per-channel gates go by bisection, so that both factors of a decay are at most 1."""
    if gc.size(-1) == 1:
        return (a @ b.mT) * decay_tile(gc)
    scores = torch.diag_embed((a * b).sum(-1))
    for _, anchor, pairs in levels(gc.device):
        decay = torch.exp2(-(gc - gc[..., anchor, :]).abs())
        scores = scores + (rounded(a * decay) @ rounded(b * decay).mT) * pairs
    return scores


def pair_gradients(dP, a, b, gc, rounded):
    """The gradients of P(a, b) for a, b and the gate, dP being zero for i < j:

    da_i = sum_j dP_ij 2^(gc_i - gc_j) b_j,  db_j = sum_i dP_ij 2^(gc_i - gc_j) a_i,  and for the gate of token t
    the sum of a_id dP_ij 2^(gc_id - gc_jd) b_jd over i >= t > j, as gc [..., C, 1] (summed over d) or [..., C, K].
    """
    i = torch.arange(CHUNK, device=gc.device)
    before = i < i[:, None]
    if gc.size(-1) == 1:
        dg = through_token(dP * pair_scores(a, b, gc, rounded))
        dP = rounded(dP * decay_tile(gc))
        return dP @ b, dP.mT @ a, dg
    diagonal = dP.diagonal(dim1=-2, dim2=-1)[..., None]
    da, db, dg = diagonal * b, diagonal * a, 0
    for upper, anchor, pairs in levels(gc.device):
        decay = torch.exp2(-(gc - gc[..., anchor, :]).abs())
        dP_level = rounded(dP * pairs)
        da_level = decay * (dP_level @ rounded(b * decay))
        db_level = decay * (dP_level.mT @ rounded(a * decay))
        same_half = (anchor[:, None] == anchor) & (upper == upper.T)
        through = same_half & torch.where(upper.T, ~before, before)
        dg = dg + through.to(gc.dtype) @ torch.where(upper, a * da_level, b * db_level)
        da, db = da + da_level, db + db_level
    return da, db, dg


def absolute_pair_terms(dP, a, b, gc):
    """The gate's gradient with the absolute value of each term: one a pair, or a pair and channel."""
    if gc.size(-1) == 1:
        return through_token((dP * pair_scores(a, b, gc, lambda x: x)).abs())
    return pair_gradients(dP.abs(), a.abs(), b.abs(), gc, lambda x: x)[2]


def through_token(terms):
    """sum_{i >= t > j} terms_ij: [..., C, C] -> [..., C, 1]."""
    return from_token(terms.tril(-1)).tril(-1).sum(-1, keepdim=True)


def from_token(x):
    """sum_{i >= t} x_i over the rows of a chunk."""
    return x.flip(-2).cumsum(-2).flip(-2)


def before_token(x):
    """sum_{j < t} x_j over the rows of a chunk."""
    return torch.nn.functional.pad(x.cumsum(-2)[..., :-1, :], (0, 0, 1, 0))


def _l2norm(x):
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _l2norm_gradient(x, dy):
    rstd = (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    return rstd * (dy - x * rstd.square() * (x * dy).sum(-1, keepdim=True))


class Saved(NamedTuple):
    """What the backward needs: the inputs, their chunks, and activations as kernels store or recompute them."""

    inputs: dict
    exact: bool
    scale: float
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor | None
    gc: torch.Tensor
    qg: torch.Tensor
    kg: torch.Tensor
    A: torch.Tensor
    X: torch.Tensor | None
    kb: torch.Tensor | None
    n: torch.Tensor
    S: torch.Tensor


def _precision(inputs, exact):
    """The dtype of sums, and the rounding of operands and stored activations."""
    if exact:
        return torch.float64, lambda x: x
    dtype = inputs["q"].dtype
    return torch.float32, lambda x: x.to(dtype).to(torch.float32)


def forward(op, inputs, exact=False):
    """inputs: the operator's arguments by name, of those that reference.py knows.

    Returns o (q's dtype), the final state (fp32) and what `backward` needs; with exact=True all in fp64.
    """
    sums, rounded = _precision(inputs, exact)
    x = {name: value.to(sums) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    q, k, v, T = x["q"], x["k"], x["v"], x["q"].size(1)
    if x.get("use_qk_l2norm_in_kernel"):
        q, k = rounded(_l2norm(q)), rounded(_l2norm(k))
    scale = x.get("scale")
    scale = q.size(-1) ** -0.5 if scale is None else scale
    gate = log_gate(op, q, x.get("g"), x.get("g_gamma"))
    gate = torch.zeros_like(q[..., :1]) if gate is None else gate.to(sums)
    gate = (gate * LOG2E).clamp(min=-160 if sums == torch.float32 else -1100)  # 2^that is zero in either dtype
    q, k, v, gc = in_chunks(q), in_chunks(k), in_chunks(v), in_chunks(gate).cumsum(-2)
    gl = gc[..., -1:, :]
    qg, kg = rounded(q * torch.exp2(gc)), rounded(k * torch.exp2(gl - gc))
    A = rounded(pair_scores(q, k, gc, rounded))
    beta = X = kb = None
    if op in DELTA:
        beta = in_chunks(x["beta"][..., None])
        L = (beta * pair_scores(k, k, gc, rounded)).tril(-1)
        eye = torch.eye(CHUNK, dtype=sums, device=q.device).expand_as(L)
        X = torch.linalg.solve_triangular(eye + L, eye, upper=False, unitriangular=True)
        X = rounded(X) + rounded(X - rounded(X))
        kb = rounded(k * torch.exp2(gc))

    state = q.new_zeros(*q.shape[:2], q.size(-1), v.size(-1))
    state = state if x.get("initial_state") is None else x["initial_state"]
    S, n, o = [], [], []
    for c in range(q.size(2)):
        b_S = rounded(state)
        b_n = v[:, :, c]
        if beta is not None:
            b_n = rounded(X[:, :, c] @ rounded(beta[:, :, c] * (b_n - kb[:, :, c] @ b_S)))
        o.append(scale * (qg[:, :, c] @ b_S + A[:, :, c] @ b_n))
        state = state * torch.exp2(gl[:, :, c].mT) + kg[:, :, c].mT @ b_n
        S.append(b_S)
        n.append(b_n)
    saved = Saved(inputs, exact, scale, q, k, v, beta, gc, qg, kg, A, X, kb, torch.stack(n, 2), torch.stack(S, 2))
    o = in_tokens(torch.stack(o, 2), T)
    return o if exact else o.to(inputs["q"].dtype), state, saved


def backward(saved, do, dht=None):
    """Gradients of q, k, v, g, beta and initial_state, of those given, by name, in their dtypes (exact: fp64).

    With exact=True also "g_terms": the sum that is the gradient of g, with the absolute value of each of its terms.
    """
    inputs, exact, scale, q, k, v, beta, gc, qg, kg, A, X, kb, n, S = saved
    sums, rounded = _precision(inputs, exact)
    T, gl = do.size(1), gc[..., -1:, :]
    in_decay, out_decay = torch.exp2(gc), torch.exp2(gl - gc)
    do = in_chunks(do.to(sums))
    unit = math.copysign(2.0 ** (math.frexp(scale)[1] - 1), scale) if scale else 0.0
    rest = scale / unit if scale else 1.0
    dstate = torch.zeros_like(S[:, :, 0]) if dht is None else dht.to(sums) / rest
    D, dn, r = [None] * q.size(2), [None] * q.size(2), [None] * q.size(2)
    for c in reversed(range(q.size(2))):
        D[c] = rounded(dstate)
        dn[c] = unit * (A[:, :, c].mT @ do[:, :, c]) + kg[:, :, c] @ D[c]
        dstate = dstate * torch.exp2(gl[:, :, c].mT) + unit * (qg[:, :, c].mT @ do[:, :, c])
        if beta is not None:
            r[c] = X[:, :, c].mT @ rounded(dn[c])
            dstate = dstate - kb[:, :, c].mT @ rounded(beta[:, :, c] * r[c])
    D, dv = rest * torch.stack(D, 2), rest * torch.stack(dn, 2)

    dA = scale * (do @ n.mT).tril()
    dq_state = in_decay * scale * (do @ S.mT)
    dk_state = out_decay * (n @ D.mT)
    da, db, dg = pair_gradients(dA, q, k, gc, rounded)
    dq, dk = dq_state + da, dk_state + db
    pairs, reads = [(dA, q)], [q * dq_state]
    if beta is not None:
        r = torch.stack(r, 2)
        dv, r = rest * beta * r, rest * rounded(r)
        dL = -(r @ n.mT).tril(-1)
        dwb = -(r @ S.mT)
        dbeta = (r * v).sum(-1) + (dwb * in_decay * k).sum(-1) + (dL * pair_scores(k, k, gc, rounded)).sum(-1)
        da, db, dg_L = pair_gradients(beta * dL, k, k, gc, rounded)
        dk, dg = dk + da + db + beta * in_decay * dwb, dg + dg_L
        pairs.append((beta * dL, k))
        reads.append(beta * in_decay * k * dwb)

    def summed(x):
        return x.sum(-1, keepdim=True) if gc.size(-1) == 1 else x

    reads, writes = [summed(x) for x in reads], summed(k * dk_state)
    both = summed(torch.exp2(gl) * (S * D).sum(-1)[..., None, :])
    dg = dg + from_token(sum(reads)) + before_token(writes) + both

    dq, dk, dv = (in_tokens(x, T) for x in (dq, dk, dv))
    if inputs.get("use_qk_l2norm_in_kernel"):
        dq, dk = (_l2norm_gradient(inputs[name].to(sums), rounded(x)) for name, x in (("q", dq), ("k", dk)))
    out = {"q": dq, "k": dk, "v": dv}
    if beta is not None:
        out["beta"] = in_tokens(dbeta[..., None], T)[..., 0]
    if inputs.get("g") is not None:
        out["g"] = in_tokens(dg, T).reshape(inputs["g"].shape)
        if exact:
            terms = from_token(sum(x.abs() for x in reads)) + before_token(writes.abs()) + both.abs()
            terms = terms + sum(absolute_pair_terms(dP, a, k, gc) for dP, a in pairs)
            out["g_terms"] = in_tokens(terms, T).reshape(inputs["g"].shape)
    if inputs.get("initial_state") is not None:
        out["initial_state"] = rest * dstate
    return out if exact else {name: x.to(inputs[name].dtype) for name, x in out.items()}
