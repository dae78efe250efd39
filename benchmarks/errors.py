"""How wrong a result is, and how wrong it may be: the bound of the tests, beside a measurement at a production shape.

Exact values and the bound come from the chunked form of tests/eager.py, in fp64 and rounded as the kernels round, over
all tokens of the batches {0, B-1} and heads {0, H-1}, with all of their value heads: heads do not mix, so whole inputs
are not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from cells import Workload
from numerics import UNIT, gate_terms, rms, run_eager


class Yardstick(NamedTuple):
    """Exact results at the corners, by name ("o", "dq", …), and the largest relative RMS error that each may have."""

    exact: dict[str, torch.Tensor]
    limits: dict[str, float]
    heads: int

    def errors(self, found: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """RMS error over the RMS of the exact result, of whole tensors."""
        return {name: rms(corners(found[name], self.heads) - right) / rms(right) for name, right in self.exact.items()}


def corners(x: torch.Tensor, heads: int) -> torch.Tensor:
    """The batches {0, B-1} and heads {0, H-1} of x [B,T,H,...], or of x [B,T,HV,...] the value heads of these heads."""
    return x[ends(x.shape[0])].unflatten(2, (heads, -1))[:, :, ends(heads)].flatten(2, 3)


def ends(n: int) -> list[int]:
    """The first and the last of n positions."""
    return sorted({0, n - 1})


def yardstick(workload: Workload, tensors: Mapping[str, torch.Tensor]) -> Yardstick:
    """For whole inputs and `do`, with the bound of tests/numerics.py."""
    H, cu_seqlens = tensors["q"].shape[2], tensors.get("cu_seqlens")
    inputs, op = {name: corners(tensors[name], H) for name in workload.inputs}, workload.op
    do, batch = corners(tensors["do"], H), None
    if cu_seqlens is not None:
        lengths = cu_seqlens.diff().tolist()
        if len(set(lengths)) == 1:  # sequences of one length are a batch, which takes no loop
            batch = (len(lengths), lengths[0])
            inputs, do = {name: x[0].unflatten(0, batch) for name, x in inputs.items()}, do[0].unflatten(0, batch)
        else:
            inputs["cu_seqlens"] = cu_seqlens
    inputs |= workload.reference_options
    if op == "retention":
        # the decay of a head follows from its number, which the corners have lost
        gammas = torch.log1p(-torch.exp2(-5.0 - torch.arange(H, dtype=torch.float64, device=tensors["q"].device)))
        op, inputs["g_gamma"] = "simple_gla", gammas[ends(H)]
    exact = run_eager(op, inputs, do, None, exact=True)
    rounded = run_eager(op, inputs, do, None)
    names = workload.outputs
    terms = gate_terms(op, inputs, do, None) if "dg" in names else {}
    scales = {name: rms(terms.get(name, exact[name])) for name in names}
    unit = UNIT[tensors["q"].dtype]
    limits = {name: (2 * rms(rounded[name] - exact[name]) + unit * scales[name]) / rms(exact[name]) for name in names}
    exact = {name: exact[name] if batch is None else exact[name].flatten(0, 1)[None] for name in names}
    return Yardstick(exact, limits, H)
