"""What the public functions do before and after the kernels, whose T is at least 1 and K and V in 16..256."""
from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ._sequences import sequence_tables

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


def output_gradients(
    do: torch.Tensor | None, dht: torch.Tensor | None, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """do and dht as the kernels take them, their last stride 1: zeros for a do that is not there."""
    do = torch.zeros(v.shape, dtype=v.dtype, device=v.device) if do is None else last_contiguous(do)
    return do, last_contiguous(dht)


@torch.compiler.disable
def over_values(
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, C: int, state_v_first: bool = False,
    others: tuple[torch.Tensor | None, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, final_state) of an operator for any T, any K <= 256 and any V, from calls with T >= 1, K and V in 16..256.

    `run(q, k, v, initial_state, tables)` gets q, k [B, T, H, K], v [B, T, HV, V] and the state [N, HV, K, V], each with
    last stride 1 and zero-padded to 16 where narrower (a gate a channel is for the caller to pad), and where sequences
    and their chunks of C tokens lie.  No column of v meets another one in any of the operators, so that a wide V goes
    in even slices.  Differentiable; `others` are the operator's other tensors, which get gradients of zero where there
    is nothing to compute.
    """
    (B, T, HV, V), K = v.shape, q.size(-1)
    if initial_state is not None and state_v_first:
        initial_state = initial_state.mT
    if 0 in (B, T, HV):
        N = B if cu_seqlens is None else cu_seqlens.numel() - 1
        final_state = v.new_zeros(N, HV, K, V, dtype=torch.float32) if initial_state is None else initial_state.float()
        nothing = sum(x[:0].sum(dtype=torch.float32) for x in (q, k, v, *others) if x is not None)
        results = [(v + nothing.to(v.dtype), final_state + nothing)]
    else:
        tables = sequence_tables(cu_seqlens, T, C)
        q, k = (last_contiguous(pad_to_16(x)) for x in (q, k))
        slices = -(-V // MAX_V)
        width = V if slices == 1 else -(-V // (slices * MIN_DIM)) * MIN_DIM
        results = []
        for begin in range(0, V, width):
            part = v[..., begin:begin + width]
            state = initial_state if initial_state is None else pad_to_16(initial_state[..., begin:begin + width])
            state = state if state is None else last_contiguous(pad_to_16(state, -2))
            o, final_state = run(q, k, last_contiguous(pad_to_16(part)), state, tables)
            # contiguous, for callers that view o: what was padded is not, once the padding is off
            results.append((o[..., :part.size(-1)].contiguous(), final_state[..., :K, :part.size(-1)].contiguous()))
    o, final_state = results[0] if len(results) == 1 else (torch.cat(parts, -1) for parts in zip(*results))
    return o, final_state.mT.contiguous() if state_v_first else final_state


def split_scale(scale: float) -> tuple[float, float]:
    """unit and rest, whose product scale is.  unit is a power of two, negative or 0 where scale is: an operand in bf16
    is not rounded for it, as it would be for scale, all equal numbers by the same 2^-9.  rest, in [1, 2), is for fp32.
    """
    fraction, exponent = math.frexp(scale)
    return (math.copysign(2.0 ** (exponent - 1), scale), 2 * abs(fraction)) if scale else (0.0, 1.0)


def before_end(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """x [B, T, H], with zeros for what follows the last sequence; differentiable."""
    if cu_seqlens is None:
        return x
    return x.masked_fill((torch.arange(x.size(1), device=x.device) >= cu_seqlens[-1])[:, None], 0.0)


def activated_beta(beta: torch.Tensor, doubled: bool, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """sigmoid(beta) [B, T, H] in fp32, or twice that; differentiable."""
    beta = before_end(beta, cu_seqlens).float().sigmoid()
    return 2 * beta if doubled else beta


def activated_gate(
    g: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor | None, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """-exp(A_log) softplus(g + dt_bias) in fp32: g [B, T, H], A_log, dt_bias [H]; differentiable."""
    g = before_end(g, cu_seqlens).float()
    return -A_log.float().exp() * torch.nn.functional.softplus(g if dt_bias is None else g + dt_bias.float())


def sum_of_group(dx: torch.Tensor, group: int) -> torch.Tensor:
    """Gradients dx [B, T, HV, K] of each value head, summed over the value heads that share a head: [B, T, H, K]."""
    return dx if group == 1 else dx.unflatten(2, (-1, group)).sum(3)
