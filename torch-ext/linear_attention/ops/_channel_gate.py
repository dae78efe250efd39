"""Device functions for gates that differ by channel: products of pairs of tokens with the decay between them.

With gc the log2 gates summed from a chunk's begin, the decay from token j to token i of the chunk, 2^(gc_i - gc_j) in
each channel, has to be a factor of row i times a factor of row j for pairs to meet in a product of matrices.  Each row
and channel of q, or of what takes its place, goes one of three ways, with all pairs that end there:

Near: gc_i is at least -100.  The factors are 2^(50 + gc_i) and 2^(-50 - gc_j), from 2^-50 to 2^50: the numbers stay in
the range of bf16 and fp32, and the product is as precise as any other.  With gates of models this is the common case.

Mid: c_i, the gates summed from the begin of i's block of 16 tokens, is at least -100.  Pairs inside the block meet as
above, with c for gc; pairs of different blocks at levels 4 and up.  At level l the chunk falls into halves of 2^l
tokens, and the upper half of each pair of halves meets its lower half at their border.  The factor of a row is the
decay between it and the border, at most 1 whatever the gates.  The pair (i, j) belongs to the level of the top bit of
i ^ j.  A row is in one half only, so one operand a level serves both: q times its factor in the upper rows, k times its
factor in the lower ones.

Far: the rest, as with gates of -50 or -inf.  All pairs meet at levels, from 0 up, but for a token with itself.

What is not near is left to kernels of its own, the far kernels, which pass over a chunk that is all near: their code in
the others would cost registers.  fp16 has not the range, so there all is far.  Which way a row and channel goes, and
all that goes into row i of the scores, depends on tokens up to i alone.
Tiles are [C, BK], C a power of two of at least 16; sums are fp32.
"""
from __future__ import annotations

import helion.language as hl
import torch

BLOCK_LEVEL = 4  # blocks have 2^4 tokens
FAR_CHUNKS = 8  # chunks that a program for what is not near looks at
_REACH = 100.0  # log2; factors are within half of it, which leaves 2^77 for q k, and for do v k in the backward


def upper_half(level, C):
    """Whether a row lies in the upper one of two halves: bool [C, 1]."""
    return ((hl.arange(C) >> level) & 1 == 1)[:, None]


def level_pairs(level, C):
    """Whether two rows lie in the two halves of one pair of halves: bool [C, C], symmetric."""
    half = hl.arange(C) >> level
    return (half[:, None] ^ half[None, :]) == 1


def between(first, end, C):
    """Whether token j is in first_i .. end_i - 1: bool [C, C]."""
    return (hl.arange(C)[None, :] >= first[:, None]) & (hl.arange(C)[None, :] < end[:, None])


def half_begin(level, C):
    """The first token of each token's half of 2^level tokens: int [C]."""
    return (hl.arange(C) >> level) << level


def half_end(level, C):
    """The token after each token's half of 2^level tokens: int [C]."""
    return ((hl.arange(C) >> level) + 1) << level


def border(level, C):
    """The last token before the border of each token's two halves: int [C]."""
    # a shift of a tensor: torch 2.11 cannot trace one of the number 1
    return half_begin(level + 1, C) + ((hl.arange(C) * 0 + 1) << level) - 1


def upto(level, C):
    """Whether token j is at or before token i in its half: bool [C, C]."""
    return between(half_begin(level, C), hl.arange(C) + 1, C)


def before(level, C):
    """Whether token j is before token i in its half: bool [C, C]."""
    return between(half_begin(level, C), hl.arange(C), C)


def after(level, C):
    """Whether token j is after token i in its half: bool [C, C]."""
    return between(hl.arange(C) + 1, half_end(level, C), C)


def from_(level, C):
    """Whether token j is at or after token i in its half: bool [C, C]."""
    return between(hl.arange(C), half_end(level, C), C)


def diagonal(C):
    """Whether two rows are the same: bool [C, C]."""
    return hl.arange(C)[:, None] == hl.arange(C)[None, :]


def reach(dtype):
    """How far a sum of gates may fall for its exponentials to be factors.  For fp16 no sum, not even 0, is in reach."""
    return -1.0 if dtype == torch.float16 else _REACH


def within(b_c, dtype):
    """Which rows and channels of a sum of gates are in reach."""
    return b_c >= -reach(dtype)


def ahead(b_c, dtype):
    """2^c of rows and channels in reach, else 0, times half the reach."""
    return torch.where(within(b_c, dtype), torch.exp2(b_c + 0.5 * reach(dtype)), 0.0)


def back(b_c, dtype):
    """2^-c as far as a row in reach reads it, less half the reach: so neither factor is large or small by itself."""
    return torch.exp2(torch.clamp(-b_c, max=reach(dtype)) - 0.5 * reach(dtype))


def not_within(b_x, b_c, dtype):
    """x where c is not in reach, else 0; fp32."""
    return torch.where(within(b_c, dtype), 0.0, b_x.to(torch.float32))


def first_level(b_c, dtype):
    """The lowest level with pairs: 0 if anything is far."""
    return torch.where(torch.amin(torch.amin(b_c, 1), 0) < -reach(dtype), 0, BLOCK_LEVEL)


def at_level(b_x, b_c, level, dtype):
    """x, or a gradient of it, where its pairs at a level count: everywhere between blocks, where it is far inside them.

    What is near is zero in x already, or made so at the end.
    """
    return torch.where(within(b_c, dtype) & (level < BLOCK_LEVEL), 0.0, b_x)


def masked_sums(mask, b_x, dtype):
    """sum_j mask_ij x_j of fp32 x [C, BK], in a kernel whose inputs are of `dtype`.

    Beside narrow inputs x goes into two products, as a bf16 value and the bf16 value of the rest: 16 bits.
    """
    if dtype == torch.float32:
        return hl.dot(mask.to(torch.float32), b_x)
    b_m = mask.to(torch.bfloat16)
    b_high = b_x.to(torch.bfloat16)
    b_low = (b_x - b_high.to(torch.float32)).to(torch.bfloat16)
    return hl.dot(b_m, b_high, acc=hl.dot(b_m, b_low, out_dtype=torch.float32))


def later_gate_sums(b_x, dtype, C):
    """sum_{i<t} x_i over a chunk, where x_i decays over the gates after i."""
    return masked_sums(hl.arange(C)[None, :] < hl.arange(C)[:, None], b_x, dtype)


def level_gate_sums(b_x, level, dtype, C):
    """What a level's pairs add to the gradient of each token's gate.

    x_i is the sum of the pair weights of row i: in an upper half it counts for the gates up to i, in a lower half
    for the gates after i.
    """
    idx = hl.arange(C)
    upper = (idx >> level) & 1 == 1
    first = torch.where(upper, idx, half_begin(level, C))
    return masked_sums(between(first, torch.where(upper, half_end(level, C), idx), C), b_x, dtype)


def block_gate_sums(b_x, level, dtype, C):
    """sum_{i>=t} x_i over a half, with x_i the weights of the pairs that end in i less those that begin there.

    A pair whose tokens are both at or after t cancels, if both weights are made of the same rounded numbers: to fp32,
    and in the sum to what masked_sums keeps.
    """
    return masked_sums(from_(level, C), b_x, dtype)


def level_scores(b_x, b_k, b_A, b_f, level, C):
    """Adds a level's pairs to sum_d x_id k_jd decay_ijd, i > j.

    x, k [C, BK], A fp32 [C, C], f the level's factors.  A is right only below its diagonal.
    """
    b_u = (torch.where(upper_half(level, C), b_x.to(torch.float32), b_k.to(torch.float32)) * b_f).to(b_k.dtype)
    b_s = hl.dot(b_u, b_u.transpose(0, 1), out_dtype=torch.float32)
    return b_A + torch.where(level_pairs(level, C), b_s, 0.0)


def block_scores(b_x, b_k, b_c, level, C):
    """sum_d x_id k_jd decay_ijd, i >= j, of pairs in one half of 2^level tokens with c_i in reach; fp32 [C, C]."""
    b_u = (b_x.to(torch.float32) * ahead(b_c, b_k.dtype)).to(b_k.dtype)
    b_y = (b_k.to(torch.float32) * back(b_c, b_k.dtype)).to(b_k.dtype)
    return torch.where(upto(level, C), hl.dot(b_u, b_y.transpose(0, 1), out_dtype=torch.float32), 0.0)


def diagonal_scores(b_x, b_k, C):
    """x_i . k_i on the diagonal of zeros, fp32 [C, C]."""
    return torch.where(diagonal(C), torch.sum(b_x * b_k.to(torch.float32), 1)[:, None], 0.0)


def mirrored(b_x, C):
    """The lower triangle of a [C, C] tile, and above the diagonal its mirror image."""
    idx = hl.arange(C)
    return torch.where(idx[:, None] >= idx[None, :], b_x, b_x.transpose(0, 1))


def level_gradients(b_x, b_k, b_dA, b_f, level, C):
    """The product of a level's pairs that gives the gradient of x in upper rows and of k in lower ones; and its
    weights x_i dx_i and k_j dk_j, for level_gate_sums.

    x, k [C, BK], dA [C, C], mirrored, f the level's factors.
    """
    b_u = torch.where(upper_half(level, C), b_x.to(torch.float32), b_k.to(torch.float32)) * b_f
    b_p = torch.where(level_pairs(level, C), b_dA, 0.0)
    b_y = hl.dot(b_p, b_u.to(b_k.dtype), out_dtype=torch.float32)
    return b_y * b_f, b_u * b_y


def diagonal_gradients(b_q, b_k, b_dA, C):
    """What the pairs i = j give of dq and dk; no gate lies between the two.  fp32 [C, BK].

    q, k [C, BK], dA [C, C].
    """
    b_d = torch.sum(torch.where(diagonal(C), b_dA.to(torch.float32), 0.0), 1)[:, None]
    return b_d * b_k.to(torch.float32), b_d * b_q.to(torch.float32)


def block_gradients(b_q, b_k, b_dA, b_c, level, C):
    """What pairs i > j in one half of 2^level tokens with c_i in reach give of dq and dk; and the weights of the pairs
    that end in a row less those of the pairs that begin there, for block_gate_sums; fp32 [C, BK].

    q, k [C, BK], dA [C, C], mirrored.  Not i = j: its weight is no part of dg, and may be 2^100 times all others.
    """
    dtype = b_k.dtype
    b_x = (b_q.to(torch.float32) * ahead(b_c, dtype)).to(dtype)
    b_y = (b_k.to(torch.float32) * back(b_c, dtype)).to(dtype)
    b_dx = hl.dot(torch.where(before(level, C), b_dA, 0.0), b_y, out_dtype=torch.float32)
    b_dy = hl.dot(torch.where(after(level, C), b_dA, 0.0), b_x, out_dtype=torch.float32)
    b_w = b_x.to(torch.float32) * b_dx - b_y.to(torch.float32) * b_dy
    return b_dx * ahead(b_c, dtype), b_dy * back(b_c, dtype), b_w


def block_key_gradients(b_q, b_kb, b_k, b_dA, b_dL, b_c, level, C):
    """block_gradients of A and of beta_i L_ij, whose gradient is dL, with kb = beta k: dq, dk, dw and the weights.

    dw = sum_j dL_ij decay_ij k_j, which times beta is a part of dk_i and times k_i, summed, one of dbeta_i.
    """
    dtype = b_k.dtype
    b_x = (b_q.to(torch.float32) * ahead(b_c, dtype)).to(dtype)
    b_z = (b_kb * ahead(b_c, dtype)).to(dtype)
    b_y = (b_k.to(torch.float32) * back(b_c, dtype)).to(dtype)
    b_dx = hl.dot(torch.where(before(level, C), b_dA, 0.0), b_y, out_dtype=torch.float32)
    b_dz = hl.dot(torch.where(before(level, C), b_dL, 0.0), b_y, out_dtype=torch.float32)
    b_dy = hl.dot(torch.where(after(level, C), b_dA, 0.0), b_x, out_dtype=torch.float32)
    b_dy = hl.dot(torch.where(after(level, C), b_dL, 0.0), b_z, acc=b_dy)
    b_w = b_x.to(torch.float32) * b_dx + b_z.to(torch.float32) * b_dz - b_y.to(torch.float32) * b_dy
    b_ahead = ahead(b_c, dtype)
    return b_dx * b_ahead, b_dy * back(b_c, dtype), b_dz * b_ahead, b_w
