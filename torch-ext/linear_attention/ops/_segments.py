"""Segments: stretches of a sequence that programs walk along at the same time.

A walk takes one chunk after another, so that few sequences and heads leave most of a GPU idle.  So long sequences
fall into segments of L tokens, whole chunks: one kernel sums what each segment adds to the state, then the walk along a
segment begins from the sum over those before it.  The sums read keys and values once more, and so whole sequences that
fill the GPU are one segment each.  L follows from shapes alone.  The segments of a batch of equal rows are arithmetic;
those of sequences of any lengths stand in a table, and an empty sequence has one segment too, for its state.
"""
from __future__ import annotations

import functools

import helion.language as hl
import torch

from ._aot import kernel

TILES = 264  # tiles of 64 columns that walk at once: two for each of an H200's 132 processors
SUMS = 0.4  # of a walk's time: what the sums of segments take
LAUNCH = 8  # chunks: what one more kernel takes
JOIN = 0.75  # of a chunk: what it takes to add the sum of one segment
MIN_CHUNKS = 4  # of a segment
MAX_SEGMENTS = 64  # of a sequence


def segment_length(v: torch.Tensor, C: int) -> int:
    """L, a multiple of C, for walks over v [B,T,H,V] of programs with 64 or 128 columns."""
    B, T, H, V = v.shape
    return _chunks_of_a_segment(B * H * -(-V // 64), -(-T // C)) * C


@functools.lru_cache(4096)
def _chunks_of_a_segment(tiles: int, chunks: int) -> int:
    """How many chunks make the walks of that many tiles over that many chunks shortest."""
    def time(n):
        turns = 2 / 3 if tiles * n <= TILES / 2 else -(-tiles * n // TILES)  # alone on a processor a tile is faster
        walk = turns * (-(-chunks // n) + JOIN * (n - 1) / 2)
        return walk + (n > 1) * (LAUNCH + SUMS * tiles * chunks / TILES)

    return -(-chunks // min(range(1, max(min(chunks // MIN_CHUNKS, MAX_SEGMENTS), 1) + 1), key=time))


def segment_table(sequences: torch.Tensor | None, T: int, C: int, L: int) -> torch.Tensor | None:
    """The table of segments of L tokens, or None in a batch of equal rows; `sequences` as in Tables."""
    return None if sequences is None else segment_table_kernel(sequences, T, C, L)


def segment_count(segments, L, T, B):
    """Rows of the table of segments, or segments in all of a batch of equal rows."""
    return B * ((T + L - 1) // L) if segments is None else segments.size(0)


def joined_count(segments, L, T, B):
    """Rows of the sums of segments: enough for those that have another one after them in a walk."""
    return B * ((T + L - 1) // L - 1) if segments is None else T // L


def segment(segments, i_s, C, L, T):
    """Batch row, sequence, the sequence's first segment and the one after its last; and of the segment the first chunk,
    how many chunks, the first token, end of reading and end of writing (which may lie after it).
    """
    if segments is None:
        G = (T + L - 1) // L
        i_n = i_s // G
        i_g = i_s - i_n * G
        chunks = L // C
        missing = G * chunks - (T + C - 1) // C
        return i_n, i_n, i_n * G, i_n * G + G, i_g * chunks, chunks - (i_g + 1) // G * missing, i_g * L, T, T
    begin = hl.load(segments, [i_s, 0])
    end = hl.load(segments, [i_s, 1])
    fill = hl.load(segments, [i_s, 2])
    i_n = hl.load(segments, [i_s, 3])
    first = hl.load(segments, [i_s, 4])
    stop = hl.load(segments, [i_s, 5])
    return 0, i_n, first, stop, hl.load(segments, [i_s, 6]), hl.load(segments, [i_s, 7]), begin, end, fill


def segments_of(tokens, L):
    """How many segments that many tokens fall into: at least one."""
    return torch.clamp((tokens + (L - 1)) // L, min=1)


@kernel()
def segment_table_kernel(sequences: torch.Tensor, T: int, C: int, L: int) -> torch.Tensor:
    """The table of segments of L tokens: begin, end of reading, end of writing, sequence, its first segment, the one
    after its last, first chunk, chunks.

    sequences int32 [N,5], of Tables, for chunks of C tokens -> int32 [T // L + N, 8].  Segments after a sequence's end,
    which only write zeros, and rows that stand for none, are neither before nor after another one in a walk: for them
    the first segment is the next row, and the one after the last the row itself.  A walk keeps the sum of segment s of
    sequence n in row s - n: with one segment of each sequence less these are T // L rows, whatever `sequences` holds.
    One program a tile of segments, each going through all sequences.
    """
    N = sequences.size(0)
    NS = T // L + N
    segments = torch.empty([NS, 8], dtype=torch.int32, device=sequences.device)
    size = L // C
    for tile_s in hl.tile(NS, block_size=64):
        before = hl.zeros([1], dtype=torch.int32)
        b_used = hl.zeros([tile_s], dtype=torch.int32)
        b_n = hl.zeros([tile_s], dtype=torch.int32)
        b_first = hl.zeros([tile_s], dtype=torch.int32)
        for tile_n in hl.tile(N, block_size=64):
            live = hl.load(sequences, [tile_n.index, 1]) - hl.load(sequences, [tile_n.index, 0])
            chunks = hl.load(sequences, [tile_n.index, 4])
            count = torch.maximum(segments_of(live, L), segments_of(chunks * C, L))
            count = torch.where(tile_n.index < N, count, 0).to(torch.int32)
            first = torch.cumsum(count, 0).to(torch.int32) - count + before
            before = torch.clamp(before + torch.sum(count, 0), max=NS).to(torch.int32)
            nth = tile_s.index[:, None] - first[None, :]
            own = torch.where((nth >= 0) & (nth < count[None, :]), 1, 0)
            b_used = b_used + torch.sum(own, 1).to(torch.int32)
            b_n = b_n + torch.sum(own * tile_n.index[None, :], 1).to(torch.int32)
            b_first = b_first + torch.sum(own * first[None, :], 1).to(torch.int32)
        used = b_used == 1
        b_n = torch.where(used, b_n, 0)
        b_nth = tile_s.index - b_first
        b_begin = hl.load(sequences, [b_n, 0])
        b_end = hl.load(sequences, [b_n, 1])
        b_count = segments_of(b_end - b_begin, L)
        b_stop = torch.minimum(b_first + b_count, T // L + b_n + 1)  # which sequences that do not fall never reach
        b_rest = torch.clamp(hl.load(sequences, [b_n, 4]) - b_nth * size, min=0, max=size)
        part = used & (tile_s.index < b_stop)  # of a walk: else only zeros are written
        segments[tile_s, 0] = torch.where(used, b_begin + b_nth * L, T).to(torch.int32)
        segments[tile_s, 1] = b_end
        segments[tile_s, 2] = hl.load(sequences, [b_n, 2])
        segments[tile_s, 3] = b_n
        segments[tile_s, 4] = torch.where(part, b_first, tile_s.index + 1).to(torch.int32)
        segments[tile_s, 5] = torch.where(part, b_stop, tile_s.index).to(torch.int32)
        segments[tile_s, 6] = torch.where(used, hl.load(sequences, [b_n, 3]) + b_nth * size, 0).to(torch.int32)
        segments[tile_s, 7] = torch.where(used, b_rest, 0).to(torch.int32)
    return segments
