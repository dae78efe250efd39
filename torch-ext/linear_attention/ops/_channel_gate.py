"""Device functions for gates that differ by channel: the decays between the tokens of a chunk, by bisection.

The decay from token j to token i of a chunk, 2^(g_{j+1} + .. + g_i) in each channel, factors into a row and a column
that both stay at or below 1 only at an anchor between the two.  Bisection finds one for every pair: at level l
the chunk falls into blocks of 2^(l+1) rows, and the upper half of each block meets its lower half.

    inner_i   for a row of an upper half: the product of the decays from the half's first token to i
    outer_j   for a row of a lower half: the product of the decays after j to the half's last token

The pair (i, j) belongs to the level of the top bit of i ^ j, where its decay is inner_i outer_j.  inner and outer grow
from level to level as products of decays: one exponential a token and channel and no difference of sums, so a small
gate keeps its digits beside a strong one and a gate of -inf is an ordinary 0.  After the last level they reach from
the chunk's begin to i and from j to the chunk's end.  Every factor depends on tokens up to i alone.

As a row is in one half only, one operand a level serves both: q times inner in the upper rows, k times outer in the
lower ones.  Tiles are [C, BK], C a power of two of at least 16; sums are fp32.
The level is the variable of a loop on the device, in the kernel's body: unrolled, the compiler computes the masks of
all levels first and runs out of registers.
"""
from __future__ import annotations

import helion.language as hl
import torch


def upper_half(level, C):
    """Whether a row lies in the upper half of its block: bool [C, 1]."""
    return ((hl.arange(C) >> level) % 2 == 1)[:, None]


def factor(b_inner, b_outer, level, C):
    """A row's decay to the anchor of its block: inner in an upper half, outer in a lower one."""
    return torch.where(upper_half(level, C), b_inner, b_outer)


def level_pairs(level, C):
    """Whether two rows lie in the two halves of one block: bool [C, C], symmetric."""
    half = hl.arange(C) >> level
    return (half[:, None] ^ half[None, :]) == 1


def diagonal(C):
    """Whether two rows are the same: bool [C, C]."""
    return hl.arange(C)[:, None] == hl.arange(C)[None, :]


def first_level(b_g):
    """inner and outer of halves of one row, from log2 gates."""
    return torch.exp2(b_g), b_g * 0.0 + 1.0


def masked_sums(mask, b_x, dtype):
    """sum_i mask_ti x_i of fp32 x [C, BK], in a kernel whose inputs are of `dtype`.

    Beside narrow inputs x goes into two products, as a bf16 value and the bf16 value of the rest: 16 bits.
    """
    b_m = torch.where(mask, 1.0, 0.0)
    if dtype == torch.float32:
        return hl.dot(b_m, b_x)
    b_m = b_m.to(torch.bfloat16)
    b_high = b_x.to(torch.bfloat16)
    b_low = (b_x - b_high.to(torch.float32)).to(torch.bfloat16)
    return hl.dot(b_m, b_low, acc=hl.dot(b_m, b_high, out_dtype=torch.float32))


def level_gate_sums(b_x, level, dtype, C):
    """What a level's pairs add to the gradient of each token's gate.

    x_i is the sum of the pair weights of row i: in an upper half it counts for the gates up to i, in a lower half
    for the gates after i.
    """
    idx = hl.arange(C)
    half = idx >> level
    upper = half % 2 == 1
    inside = torch.where(upper[:, None], idx[None, :] >= idx[:, None], idx[None, :] < idx[:, None])
    return masked_sums((half[:, None] == half[None, :]) & inside, b_x, dtype)


def chunk_gate_sums(b_x, b_y, dtype, C):
    """sum_{i>=t} x_i + sum_{j<t} y_j, where x_i decays over the chunk's gates up to i and y_j over those after j."""
    idx = hl.arange(C)
    b_sums = masked_sums(idx[None, :] >= idx[:, None], b_x, dtype)
    return b_sums + masked_sums(idx[None, :] < idx[:, None], b_y, dtype)


def next_level(b_inner, b_outer, level, dtype, C):
    """inner and outer of halves twice as long.

    inner_i outer_i, the decay over a whole half, extends inner of the half above it and outer of the half below it: a
    permutation of rows, done as a product, to 16 bits beside narrow inputs and 22 beside fp32.
    """
    idx = hl.arange(C)
    upper = upper_half(level, C)
    distance = (idx * 0 + 1) << level  # a tensor: torch 2.11 cannot trace a shift of the number 1
    b_f = masked_sums((idx[:, None] ^ idx[None, :]) == distance[None, :], b_inner * b_outer, dtype)
    b_f = b_f * factor(b_inner, b_outer, level, C)
    return torch.where(upper, b_f, b_inner), torch.where(upper, b_outer, b_f)


def diagonal_scores(b_q, b_k, C):
    """A_ii = q_i . k_i on the diagonal of zeros, fp32 [C, C]."""
    return torch.where(diagonal(C), torch.sum(b_q.to(torch.float32) * b_k.to(torch.float32), 1)[:, None], 0.0)


def query_scores(b_q, b_k, b_A, b_inner, b_outer, level, C):
    """Adds a level's pairs to A_ij = sum_d q_id k_jd decay_ijd, i > j, and the same above the diagonal.

    q, k [C, BK], A fp32 [C, C] -> A and the next level's inner and outer.
    """
    b_f = factor(b_inner, b_outer, level, C)
    b_x = (torch.where(upper_half(level, C), b_q, b_k).to(torch.float32) * b_f).to(b_q.dtype)
    b_s = hl.dot(b_x, b_x.transpose(0, 1), out_dtype=torch.float32)
    return b_A + torch.where(level_pairs(level, C), b_s, 0.0), *next_level(b_inner, b_outer, level, b_q.dtype, C)


def query_key_scores(b_q, b_k, b_A, b_L, b_inner, b_outer, level, C):
    """query_scores, and the same with k for q: L_ij = sum_d k_id k_jd decay_ijd.

    q, k [C, BK], A, L fp32 [C, C] -> A, L and the next level's inner and outer.  A is right only below its diagonal.
    """
    pairs = level_pairs(level, C)
    b_f = factor(b_inner, b_outer, level, C)
    b_x = (torch.where(upper_half(level, C), b_q, b_k).to(torch.float32) * b_f).to(b_q.dtype)
    b_y = (b_k.to(torch.float32) * b_f).to(b_k.dtype)
    b_A = b_A + torch.where(pairs, hl.dot(b_x, b_y.transpose(0, 1), out_dtype=torch.float32), 0.0)
    b_L = b_L + torch.where(pairs, hl.dot(b_y, b_y.transpose(0, 1), out_dtype=torch.float32), 0.0)
    return b_A, b_L, *next_level(b_inner, b_outer, level, b_q.dtype, C)


def mirrored(b_x, C):
    """The lower triangle of a [C, C] tile, and above the diagonal its mirror image."""
    idx = hl.arange(C)
    return torch.where(idx[:, None] >= idx[None, :], b_x, b_x.transpose(0, 1))


def first_gradients(b_q, b_k, b_dA, C):
    """What the pairs i = j give of dq and dk, fp32 [C, BK]; no gate lies between the two.

    q, k [C, BK], dA [C, C].
    """
    b_d = torch.sum(torch.where(diagonal(C), b_dA.to(torch.float32), 0.0), 1)[:, None]
    return b_d * b_k.to(torch.float32), b_d * b_q.to(torch.float32)


def query_gradients(b_q, b_k, b_dA, b_dq, b_dk, b_dg, b_inner, b_outer, level, C):
    """Adds what a level's pairs of A give to dq, dk and dg; and inner and outer of the next level.

    q, k [C, BK], dA [C, C], mirrored; the rest fp32 [C, BK], and so the results: dq, dk, dg, inner, outer.
    One product gives dq in the upper rows and dk in the lower ones.
    """
    upper = upper_half(level, C)
    b_f = factor(b_inner, b_outer, level, C)
    b_x = torch.where(upper, b_q, b_k).to(torch.float32)
    b_p = torch.where(level_pairs(level, C), b_dA, 0.0)
    b_y = hl.dot(b_p, (b_x * b_f).to(b_q.dtype), out_dtype=torch.float32) * b_f
    b_dq = b_dq + torch.where(upper, b_y, 0.0)
    b_dk = b_dk + torch.where(upper, 0.0, b_y)
    b_dg = b_dg + level_gate_sums(b_x * b_y, level, b_q.dtype, C)
    return b_dq, b_dk, b_dg, *next_level(b_inner, b_outer, level, b_q.dtype, C)


def query_key_gradients(b_q, b_k, b_beta, b_dA, b_dL, b_dq, b_dk, b_dw, b_dg, b_inner, b_outer, level, C):
    """query_gradients, and what comes from beta_i L_ij, whose gradient is dL; L as in query_key_scores.

    As there, and beta fp32 [C, 1], dL [C, C], mirrored, and dw = sum_j dL_ij decay_ij k_j, which times beta is a part
    of dk_i and times k_i, summed, one of dbeta_i.  dL meets k in the lower rows and beta k in the upper ones.
    """
    upper = upper_half(level, C)
    pairs = level_pairs(level, C)
    b_f = factor(b_inner, b_outer, level, C)
    b_x = torch.where(upper, b_q, b_k).to(torch.float32)
    b_y = hl.dot(torch.where(pairs, b_dA, 0.0), (b_x * b_f).to(b_q.dtype), out_dtype=torch.float32) * b_f
    b_b = torch.where(upper, b_beta, 1.0)
    b_z = (b_k.to(torch.float32) * b_b * b_f).to(b_k.dtype)
    b_z = hl.dot(torch.where(pairs, b_dL, 0.0), b_z, out_dtype=torch.float32) * b_f
    b_dq = b_dq + torch.where(upper, b_y, 0.0)
    b_dk = b_dk + torch.where(upper, 0.0, b_y + b_z)
    b_dw = b_dw + torch.where(upper, b_z, 0.0)
    b_dg = b_dg + level_gate_sums(b_x * b_y + b_k.to(torch.float32) * b_z * b_b, level, b_q.dtype, C)
    return b_dq, b_dk, b_dw, b_dg, *next_level(b_inner, b_outer, level, b_q.dtype, C)
