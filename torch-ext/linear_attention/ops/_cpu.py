"""CPU kernels for the `out_dtype` overloads of mm, bmm, addmm and baddbmm, which torch has for CUDA only.

Helion's interpreter lowers `hl.dot` to them.  Operands are widened to fp32 (fp64 stays), multiplied and summed there,
and rounded once to `out_dtype`, as a matrix unit does.
"""
from __future__ import annotations

import functools

import torch


def _widen(*tensors: torch.Tensor) -> list[torch.Tensor]:
    wide = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    return [x.to(wide) for x in tensors]


def _product(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    a, b = _widen(a, b)
    return torch.matmul(a, b).to(out_dtype)


def _sum(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    bias, a, b = _widen(bias, a, b)
    out = torch.matmul(a, b) * alpha
    if beta:  # beta 0 ignores the bias, NaN included
        out = out + bias * beta
    return out.to(out_dtype)


@functools.cache
def register() -> torch.library.Library:
    """Register what this torch lacks, once; a kernel that torch has is never replaced."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in (("mm", _product), ("bmm", _product), ("addmm", _sum), ("baddbmm", _sum)):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}.dtype", "CPU"):
            library.impl(f"{name}.dtype", function, "CPU")
    return library  # kept by the cache: a library that is collected takes its kernels with it
