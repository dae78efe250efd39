"""Where sequences and chunks lie: a batch of equal rows, or sequences of any lengths one after another in one row.

Sequences of any lengths come as cu_seqlens [N+1]: sequence n is the tokens cu_seqlens[n] to cu_seqlens[n+1] - 1 of the
one batch row.  Every sequence is cut into chunks from its own begin, and states are kept for sequences where a batch
has them for rows.  Two small tables say where all lie, made on the device, so that nothing waits for it; kernels read
them through the device functions below, which for a batch of equal rows, without tables, come to plain arithmetic.

Tokens after the last sequence count as the last sequence's as far as writing goes: they are read as zeros, so that all
that is computed of them is zero, and do not change its state.
"""
from __future__ import annotations

from typing import NamedTuple

import helion.language as hl
import torch

from ._aot import kernel


class Tables(NamedTuple):
    """sequences int32 [N,5]: begin, end, end of writing, first chunk, chunks.  chunks int32 [NT,3]: begin, and of its
    sequence end and end of writing.  Both None for a batch of equal rows.
    """

    sequences: torch.Tensor | None = None
    chunks: torch.Tensor | None = None


def sequence(sequences, i_n, C, T):
    """Batch row, first chunk, chunks, first token, end of reading and end of writing of a sequence."""
    if sequences is None:
        return i_n, 0, (T + C - 1) // C, 0, T, T
    begin = hl.load(sequences, [i_n, 0])
    end = hl.load(sequences, [i_n, 1])
    fill = hl.load(sequences, [i_n, 2])
    return 0, hl.load(sequences, [i_n, 3]), hl.load(sequences, [i_n, 4]), begin, end, fill


def unless_empty(rest, table, begin, end):
    """A factor of a sequence's state before and after a walk: 1, which changes no bit, where there is no token."""
    return rest if table is None else torch.where(begin < end, rest, 1.0)


def chunk(chunks, i_c, C, T):
    """First token of a chunk, end of reading and end of writing."""
    if chunks is None:
        return i_c * C, T, T
    return hl.load(chunks, [i_c, 0]), hl.load(chunks, [i_c, 1]), hl.load(chunks, [i_c, 2])


def row_values(x, i_b, i_t, i_h, end, fill):
    """x [B,T,H] of a chunk's tokens in fp32, zero after the end: [C].

    Not a masked load, around which the compiler would branch, one value a row as it is.
    """
    return torch.where(i_t < end, hl.load(x, [i_b, torch.clamp(i_t, max=fill - 1), i_h]).to(torch.float32), 0.0)


def chunk_count(chunks, C, T):
    """Rows that per-chunk results have."""
    return (T + C - 1) // C if chunks is None else chunks.size(0)


def all_chunks(sequences, C, T):
    """chunk_count, from the other table."""
    return (T + C - 1) // C + (0 if sequences is None else sequences.size(0) - 1)


def sequence_count(sequences, B):
    """Rows that states have."""
    return B if sequences is None else sequences.size(0)


@kernel()
def sequence_tables_kernel(
    cu_seqlens: torch.Tensor, T: int, C: hl.constexpr
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two tables of Tables, for chunks of C tokens.

    cu_seqlens int32 or int64 [N+1].  There are cdiv(T, C) + N - 1 rows of chunks, which is enough for any lengths;
    those that no sequence needs begin at T.  Whatever cu_seqlens holds, all that the tables say is inside of T and of
    their own rows (T below 2^29).  One program a tile of chunks, each going through all sequences.
    """
    N = cu_seqlens.size(0) - 1
    NT = (T + C - 1) // C + N - 1
    sequences = torch.empty([N, 5], dtype=torch.int32, device=cu_seqlens.device)
    chunks = torch.empty([NT, 3], dtype=torch.int32, device=cu_seqlens.device)
    for tile_c in hl.tile(NT, block_size=128):
        before = hl.zeros([1], dtype=torch.int32)
        b_used = hl.zeros([tile_c], dtype=torch.int32)
        b_begin = hl.zeros([tile_c], dtype=torch.int32)
        b_end = hl.zeros([tile_c], dtype=torch.int32)
        b_fill = hl.zeros([tile_c], dtype=torch.int32)
        for tile_n in hl.tile(N, block_size=64):
            begin = torch.clamp(hl.load(cu_seqlens, [tile_n.index]), min=0, max=T).to(torch.int32)
            end = torch.clamp(hl.load(cu_seqlens, [tile_n.index + 1]), min=0, max=T).to(torch.int32)
            fill = torch.where(tile_n.index == N - 1, T, end).to(torch.int32)
            count = torch.where(tile_n.index < N, torch.clamp(fill - begin + (C - 1), min=0) // C, 0).to(torch.int32)
            first = torch.cumsum(count, 0).to(torch.int32) - count + before
            before = torch.clamp(before + torch.sum(count, 0), max=NT).to(torch.int32)
            if tile_c.id == 0:
                sequences[tile_n, 0] = begin
                sequences[tile_n, 1] = end
                sequences[tile_n, 2] = fill
                sequences[tile_n, 3] = torch.clamp(first, max=NT)
                sequences[tile_n, 4] = torch.minimum(count, torch.clamp(NT - first, min=0))
            nth = tile_c.index[:, None] - first[None, :]
            own = torch.where((nth >= 0) & (nth < count[None, :]), 1, 0)
            b_used = b_used + torch.sum(own, 1).to(torch.int32)
            b_begin = b_begin + torch.sum(own * (begin[None, :] + nth * C), 1).to(torch.int32)
            b_end = b_end + torch.sum(own * end[None, :], 1).to(torch.int32)
            b_fill = b_fill + torch.sum(own * fill[None, :], 1).to(torch.int32)
        chunks[tile_c, 0] = torch.where(b_used == 1, b_begin, T).to(torch.int32)
        chunks[tile_c, 1] = torch.where(b_used == 1, b_end, T).to(torch.int32)
        chunks[tile_c, 2] = torch.where(b_used == 1, b_fill, T).to(torch.int32)
    return sequences, chunks


def sequence_tables(cu_seqlens: torch.Tensor | None, T: int, C: int) -> Tables:
    """The tables for chunks of C tokens of the sequences between cu_seqlens, in a row of T tokens."""
    return Tables() if cu_seqlens is None else Tables(*sequence_tables_kernel(cu_seqlens, T, C))
