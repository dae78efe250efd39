"""What the public functions do to shapes before and after the kernels, whose K and V are in 16..256."""
from __future__ import annotations

from collections.abc import Callable

import torch

MIN_DIM = 16
MAX_V = 256
WALK_K = 128  # up to here a forward walks with the state on chip and writes none; above, its steps wait for their loads


def pad_to_16(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """x with zeros appended along `dim`, counted from the end, up to 16; x itself if it is that long already."""
    short = MIN_DIM - x.size(dim)
    return x if short <= 0 else torch.nn.functional.pad(x, [0, 0] * (-1 - dim) + [0, short])


def last_contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """x, copied only if its last stride is not 1: kernels take all other strides as they come."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


@torch.compiler.disable
def over_values(
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, final_state) of an operator for any K <= 256 and any V, from calls that need both in 16..256.

    `run(q, k, v, initial_state)` gets q, k [B, T, H, K], v [B, T, H, V] and the state [B, H, K, V], each with last
    stride 1 and zero-padded to 16 where narrower (a gate a channel is for the caller to pad).  No column of v meets
    another one in any of the operators, so that a wide V goes in even slices.  Differentiable.
    """
    K, V = q.size(-1), v.size(-1)
    q, k = (last_contiguous(pad_to_16(x)) for x in (q, k))
    slices = -(-V // MAX_V)
    width = V if slices == 1 else -(-V // (slices * MIN_DIM)) * MIN_DIM
    results = []
    for begin in range(0, V, width):
        part = v[..., begin:begin + width]
        state = initial_state if initial_state is None else pad_to_16(initial_state[..., begin:begin + width])
        state = state if state is None else last_contiguous(pad_to_16(state, -2))
        o, final_state = run(q, k, last_contiguous(pad_to_16(part)), state)
        # contiguous, for callers that view o: what was padded is not, once the padding is off
        results.append((o[..., :part.size(-1)].contiguous(), final_state[..., :K, :part.size(-1)].contiguous()))
    return results[0] if len(results) == 1 else tuple(torch.cat(parts, -1) for parts in zip(*results))
