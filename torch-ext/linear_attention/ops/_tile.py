"""Device functions, inlined into the kernels: in-chunk gate sums, decay tiles, the triangular inverse."""
from __future__ import annotations

import helion.language as hl
import torch

LOG2_E = 1.4426950408889634
UPPER_HALF = -(1 << 16)  # of an fp32's bits: a bf16


def log2_gate(b_g):
    """A token's gate from natural log to log2, fp32, at least -160.

    2^-160 is zero in fp32, and finite gates keep -inf out of differences.
    """
    return torch.clamp(b_g.to(torch.float32) * LOG2_E, min=-160.0)


def in_range(b_x, dtype):
    """b_x in dtype; in fp16 what is beyond its range, but not infinite, becomes its largest number.

    A chunk's products meet what later tokens left with zeros: zero times infinity would reach earlier tokens.  An
    infinity in b_x comes of one in the inputs, which is not to be hidden.
    """
    if dtype == torch.float16:
        b_x = torch.where(torch.abs(b_x) < float("inf"), torch.clamp(b_x, min=-65504.0, max=65504.0), b_x)
    return b_x.to(dtype)


def two_parts(b_x, dtype):
    """b_x, fp32, as the sum of two tiles in dtype: twice the digits of one."""
    b_high = in_range(b_x, dtype)
    return b_high, in_range(b_x - b_high.to(torch.float32), dtype)


def decayed(b_x, b_gc, mask):
    """2^(gc_i - gc_j) x_ij where mask (i >= j or i > j), else 0: x fp32 [C, C], gc [C].

    The clamp is for the masked half, whose differences are positive; masked last, since x may be infinite there.
    """
    return torch.where(mask, b_x * torch.exp2(torch.clamp(b_gc.unsqueeze(1) - b_gc.unsqueeze(0), max=0.0)), 0.0)


def diagonal_inverse(b_L, C):
    """The 16x16 diagonal blocks of (I + L)^-1 in a [C, C] tile of zeros; L strictly lower, fp32.

    Forward substitution on all blocks at once, a [C/16, 16, 16] batch: in 15 unrolled steps row j of the solution is
    taken from the rows below it.  A column of L and a row of the solution are where the next step needs them; rows of L
    would have to change places with columns.
    """
    blk = hl.arange(C // 16)
    row = hl.arange(16)
    same = blk[:, None, None, None] == blk[None, None, :, None]
    b_D = torch.sum(torch.where(same, b_L.reshape([C // 16, 16, C // 16, 16]), 0.0), 2)
    b_X = (row[None, :, None] == row[None, None, :]).to(torch.float32) + b_D * 0.0
    for j in range(15):
        b_l = torch.sum(torch.where((row == j)[None, None, :], b_D, 0.0), 2)
        b_x = torch.sum(torch.where((row == j)[None, :, None], b_X, 0.0), 1)
        b_X = b_X - b_l[:, :, None] * b_x[:, None, :]
    return torch.where(same, b_X[:, :, None, :], 0.0).reshape([C, C])


def precise_dot(b_x, b_y, dtype):
    """x y of fp32 tiles for an operator in dtype, by the kernel's dot_precision, which is to be tf32x3 or ieee.

    In bf16 off by some 2^-14 of |x| |y|, in three bf16 products, smallest first: of the upper halves of their bits, cut
    off so that nothing overflows, and of what is left.  Enough for bf16, and faster than tf32x3; not for fp16.
    """
    if dtype != torch.bfloat16:
        return hl.dot(b_x, b_y)
    b_xh = (b_x.view(torch.int32) & UPPER_HALF).view(torch.float32)
    b_yh = (b_y.view(torch.int32) & UPPER_HALF).view(torch.float32)
    b_xl = (b_x - b_xh).to(torch.bfloat16)
    b_yl = (b_y - b_yh).to(torch.bfloat16)
    b_xh = b_xh.to(torch.bfloat16)
    b_yh = b_yh.to(torch.bfloat16)
    b_z = hl.dot(b_xl, b_yh, out_dtype=torch.float32)
    b_z = hl.dot(b_xh, b_yl, acc=b_z)
    return hl.dot(b_xh, b_yh, acc=b_z)


def unit_lower_inverse(b_L, C, dtype):
    """(I + L)^-1 in fp32 for an operator in dtype, L strictly lower [C, C], C <= 64.

    The 16x16 diagonal blocks Xd by substitution.  With Y = Xd L_off it is (I + Y)^-1 Xd = (I - Y)(I + Y^2) Xd: of four
    blocks or fewer Y^4 = 0.
    """
    b_Xd = diagonal_inverse(b_L, C)
    blk = hl.arange(C) // 16
    b_Y = precise_dot(b_Xd, torch.where(blk[:, None] != blk[None, :], b_L, 0.0), dtype)
    b_Z = b_Xd + precise_dot(b_Y, precise_dot(b_Y, b_Xd, dtype), dtype)
    return b_Z - precise_dot(b_Y, b_Z, dtype)
