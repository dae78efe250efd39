"""What is measured: the operators, the shapes and their inputs. Shared by compare.py and report.py."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F


class Shape(NamedTuple):
    """Batch, tokens, heads, head dimension (of keys and of values); value heads, if they are more than the heads; the
    lengths of packed sequences, of which T is the sum and whose batch is 1.

    Named B4_T2048_H16_D128, B1_T8192_H16_HV32_D128, N8x1024_H96_D128, N1300+547+2048_H96_D128.
    """

    B: int
    T: int
    H: int
    D: int
    HV: int | None = None
    lengths: tuple[int, ...] = ()

    @classmethod
    def parse(cls, name: str) -> Shape:
        sequences = r"(?:\d+x)?\d+"
        tokens = rf"B(?P<B>\d+)_T(?P<T>\d+)|N(?P<N>{sequences}(?:\+{sequences})*)"
        match = re.fullmatch(rf"(?:{tokens})_H(?P<H>\d+)(?:_HV(?P<HV>\d+))?_D(?P<D>\d+)", name)
        if match is None:
            raise ValueError(f"shape: expected a name like B4_T2048_H16_D128, got {name!r}")
        H, D, HV = int(match["H"]), int(match["D"]), match["HV"] and int(match["HV"])
        if HV and HV % H:
            raise ValueError(f"shape: value heads must be a multiple of the heads, got {name!r}")
        if match["N"] is None:
            return cls(int(match["B"]), int(match["T"]), H, D, HV)
        lengths = []
        for part in match["N"].split("+"):
            *count, length = map(int, part.split("x"))
            lengths += [length] * (count[0] if count else 1)
        return cls(1, sum(lengths), H, D, HV, tuple(lengths))

    def __str__(self) -> str:
        tokens = f"B{self.B}_T{self.T}"
        if self.lengths:
            runs = [(length, len(list(run))) for length, run in itertools.groupby(self.lengths)]
            tokens = "N" + "+".join(f"{count}x{length}" if count > 1 else str(length) for length, count in runs)
        return f"{tokens}_H{self.H}" + (f"_HV{self.HV}" if self.HV else "") + f"_D{self.D}"


# The shapes of the benchmark registry of flash-linear-attention (FLA), the peer.
SHAPES = tuple(
    Shape.parse(name)
    for name in (
        "B1_T8192_H96_D128",
        "B2_T16384_H16_D128",
        "B4_T2048_H16_D128",
        "B4_T4096_H64_D128",
        "B8_T2048_H32_D256",
        "B8_T1024_H8_D64",
    )
)
# The small ones, where the eager chunked form is measured too: elsewhere its loop over chunks takes long.
EAGER_SHAPES = (SHAPES[2], SHAPES[5])


@dataclass(frozen=True)
class Workload:
    """An operator and how it is called.

    `gate` is None, "head" (`g` [B,T,H]), "channel" (`g` [B,T,H,K]) or "retention" (fixed, no argument).
    `options` are passed to every package alike.
    """

    op: str
    gate: str | None = None
    beta: bool = False
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def function(self) -> str:
        return f"chunk_{self.op}"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the tensor arguments, in the order of the gradients."""
        g = ("g",) if self.gate in ("head", "channel") else ()
        return ("q", "k", "v", *g, *(("beta",) if self.beta else ()))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of what is checked: o and the gradient of every input."""
        return ("o", *(f"d{name}" for name in self.inputs))

    @property
    def reference_options(self) -> dict[str, object]:
        """Those options that the exact form knows; the others change no result."""
        return {name: value for name, value in self.options.items() if name == "use_qk_l2norm_in_kernel"}

    def bind(self, package: ModuleType, tensors: Mapping[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
        """A call without arguments that returns `o`."""
        function = getattr(package, self.function)
        names = [*self.inputs, *(("cu_seqlens",) if "cu_seqlens" in tensors else ())]
        arguments = {name: tensors[name] for name in names} | dict(self.options)
        return lambda: function(**arguments)[0]

    def fla(self) -> ModuleType:
        """The module of FLA that holds the operator."""
        return importlib.import_module(f"fla.ops.{self.op}")


WORKLOADS = {
    "linear_attn": Workload("linear_attn", options={"normalize": False}),
    "retention": Workload("retention", gate="retention"),
    "simple_gla": Workload("simple_gla", gate="head"),
    "gla": Workload("gla", gate="channel"),
    "delta_rule": Workload("delta_rule", beta=True),
    "gated_delta_rule": Workload("gated_delta_rule", gate="head", beta=True),
    "kda": Workload("kda", gate="channel", beta=True),
}
# The options that models use. Reported beside the table, not in it.
EXTRA_WORKLOADS = {
    "gated_delta_rule+l2norm": Workload(
        "gated_delta_rule", gate="head", beta=True, options={"use_qk_l2norm_in_kernel": True}
    ),
    "kda+l2norm+safe_gate": Workload(
        "kda",
        gate="channel",
        beta=True,
        options={"use_qk_l2norm_in_kernel": True, "safe_gate": True, "lower_bound": -5.0},
    ),
}


def make_inputs(workload: Workload, shape: Shape, device: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """The arguments and `do`, the gradient of `o`.

    q, k [B,T,H,D], v, do [B,T,HV,D] and beta [B,T,HV] in bf16, g in fp32; k of length 1, g = logsigmoid(normal), per
    channel at least -5, beta = sigmoid(normal).  With packed sequences cu_seqlens too, in int64.
    """
    B, T, H, D = shape[:4]
    HV = shape.HV or H
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    tensors = {name: normal(B, T, heads, D).bfloat16() for name, heads in (("q", H), ("v", HV), ("do", HV))}
    tensors["k"] = F.normalize(normal(B, T, H, D), dim=-1).bfloat16()
    if workload.gate == "head":
        tensors["g"] = F.logsigmoid(normal(B, T, HV))
    elif workload.gate == "channel":
        tensors["g"] = F.logsigmoid(normal(B, T, HV, D)).clamp_(min=-5)
    if workload.beta:
        tensors["beta"] = normal(B, T, HV).sigmoid().bfloat16()
    if shape.lengths:
        tensors["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(shape.lengths)], device=device)
    return tensors
