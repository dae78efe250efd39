"""The one table of cases for the operators, and the inputs of a case."""

from __future__ import annotations

import dataclasses
import zlib

import torch

OPERATORS = ("linear_attn", "retention", "simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda")
GATED = {"simple_gla": "head", "gla": "channel", "gated_delta_rule": "head", "kda": "channel"}
DELTA = ("delta_rule", "gated_delta_rule", "kda")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOKENS = ("q", "k", "v", "g", "beta")  # the arguments that have a token dimension
PRODUCTION = {  # B, T, H, K = V: the shapes that flash-linear-attention's own benchmarks use
    "B1_T8192_H96_D128": (1, 8192, 96, 128),
    "B2_T16384_H16_D128": (2, 16384, 16, 128),
    "B4_T2048_H16_D128": (4, 2048, 16, 128),
    "B4_T4096_H64_D128": (4, 4096, 64, 128),
    "B8_T2048_H32_D256": (8, 2048, 32, 256),
    "B8_T1024_H8_D64": (8, 1024, 8, 64),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator, its sizes, and what is special about the call."""

    op: str
    B: int = 1
    T: int = 100
    H: int = 2
    K: int = 32
    V: int = 48
    dtype: str = "bf16"
    gate: str = "model"  # see make_gate
    layout: str = "dense"  # see laid_out
    h0: bool = True  # with an initial state
    ht: bool = True  # with a final state
    roots: str = "o+ht"  # the results that have a gradient
    wanted: tuple[str, ...] = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")  # want one
    keys: str = "random"  # or nearly parallel, with beta 1; or equal, all the same
    beta: str = ""  # wide: up to 2
    small: str = ""  # the dtype of g, beta and the initial state; else fp32, the case's, fp32
    scale: float | None = None
    l2norm: bool = False
    chunk_size: int | None = None
    HV: int = 0  # value heads, if not H
    lengths: tuple[int, ...] = ()  # of the sequences in one row, for which T is then ignored, and B too
    tail: int = 0  # tokens after the last sequence
    preamble: str = ""  # what the kernel makes of raw g and beta: some of gate, bound, rate (A_log), bias, beta, neg
    v_first: bool = False

    def __str__(self) -> str:
        sizes = f"{self.op}-B{self.B}-T{self.T}-H{self.H}-K{self.K}-V{self.V}-{self.dtype}"
        special = [
            f"{field.name}={'+'.join(map(str, value)) if isinstance(value, tuple) else value}"
            for field in dataclasses.fields(self)[7:]
            if (value := getattr(self, field.name)) != field.default
        ]
        return "-".join([sizes, *special])


LENGTHS = (
    dict(T=1),
    dict(T=1, h0=False, ht=False),
    dict(T=15),
    dict(T=63, ht=False),
    dict(T=64, B=2, H=3),
    dict(T=65, h0=False),
    dict(T=100, B=2),
    dict(T=1000, H=1, K=16, V=16),
)
HEAD_DIMS = (
    dict(T=70, K=20, V=24),
    dict(T=70, K=100, V=36),
    dict(T=70, K=8, V=12),
    dict(T=70, K=16, V=5),
    dict(T=70, K=3, V=64),
    dict(T=70, K=64, V=300, H=1),
    dict(T=70, K=256, V=256, H=1),
)
PRECISIONS = (
    dict(dtype="fp16", K=20, V=24),
    dict(dtype="fp16", T=150, K=64, V=64),
    dict(dtype="fp32", K=20, V=24),
    dict(dtype="fp32", T=150, K=64, V=64),
    dict(dtype="bf16", small="bf16"),
    dict(dtype="fp16", small="fp16"),
)
LAYOUTS = tuple(dict(layout=layout, B=2) for layout in ("transposed", "head_first", "sliced", "expanded")) + (
    dict(layout="expanded", T=200, H=1, K=58, gate="zero"),  # 58^-0.5 in bf16 is 0.3 percent off, for all of do
)
CALLS = (
    dict(roots="ht"),
    dict(roots="o"),
    dict(roots="o", h0=False),
    dict(wanted=("q",)),
    dict(wanted=("v",)),
    dict(wanted=("k", "initial_state")),
    dict(scale=0.3),
    dict(scale=-0.7),
    dict(scale=0.0),
)
GATES = tuple(
    dict(gate=gate) for gate in ("zero", "weak", "strong", "six", "twenty", "fifty", "some_inf", "all_inf")) + (
    dict(gate="some_inf", dtype="fp16"),
    dict(gate="some_inf", dtype="fp32"),
    dict(gate="strong", dtype="fp16"),
    dict(gate="strong", dtype="fp32"),
    dict(gate="six", dtype="fp32"),
    dict(gate="twenty", dtype="fp32"),
    dict(gate="fifty", dtype="fp32"),
    dict(gate="hundred"),
    dict(gate="mixed"),
    dict(gate="mixed", dtype="fp32"),
    dict(gate="step"),
    dict(gate="step", dtype="fp16"),
    dict(gate="strong", T=300, B=2),
    dict(gate="some_inf", T=300, B=2),
    dict(wanted=("g",)),
)
KEYS = (
    dict(keys="parallel", gate="zero"),
    dict(keys="parallel", gate="zero", dtype="fp32"),
    dict(keys="equal", l2norm=True),
    dict(keys="equal", l2norm=True, beta="wide"),
    # the state's gradient alone, where the sums over a chunk nearly vanish
    dict(keys="equal", l2norm=True, beta="wide", gate="zero", T=64, K=64, V=64, roots="ht"),
    dict(keys="equal", l2norm=True, beta="wide", gate="zero", T=193, K=64, V=100, h0=False, roots="ht"),
    dict(keys="equal", l2norm=True, beta="wide", gate="zero", dtype="fp16", T=64, K=64, V=64, roots="ht"),
    dict(keys="equal", l2norm=True, dtype="fp32"),
    dict(keys="equal", l2norm=True, dtype="fp32", beta="wide"),
    dict(beta="wide"),
    dict(beta="wide", dtype="fp32"),
    dict(l2norm=True),
    dict(l2norm=True, K=20, V=24, dtype="fp16"),
    dict(l2norm=True, layout="transposed"),
    dict(wanted=("beta",)),
)
SEQUENCES = (
    dict(lengths=(37, 64, 0, 1, 63, 65), tail=9),
    dict(lengths=(5, 3, 8, 1, 1, 20, 0, 0), K=20, V=24),
    dict(lengths=(0, 0, 70, 0), tail=130, h0=False),
    dict(lengths=(0, 0), tail=20),
    dict(lengths=(20, 50), tail=1, dtype="fp16"),
    dict(lengths=(20, 50), tail=1, dtype="fp32"),
    dict(lengths=(20, 50), tail=1, layout="transposed"),
    dict(lengths=(30, 40), tail=1, K=8, V=300, H=1),
)
GATED_SEQUENCES = (dict(lengths=(90, 0, 40), tail=7, gate="some_inf"), dict(lengths=(90, 0, 40), tail=7, gate="strong"))
GROUPS = (
    dict(HV=6),
    dict(HV=4, l2norm=True, dtype="fp32"),
    dict(HV=4, l2norm=True, lengths=(20, 0, 70), tail=5),
    dict(HV=6, H=1, layout="head_first"),
    # dbeta of the gated delta rule is one number, the sum of terms of 30 times its size
    dict(HV=1, H=1, T=1, K=20, V=20, h0=False, ht=False, roots="o"),
)
PREAMBLES = (
    dict(preamble="gate+rate+bias"),
    dict(preamble="gate+rate", dtype="fp32", small="fp32"),
    dict(preamble="beta", dtype="fp16", small="fp16"),
    dict(preamble="gate+rate+bias+beta+neg", l2norm=True, small="bf16"),
    dict(preamble="gate+rate+bias+beta+neg", l2norm=True, lengths=(20, 0, 70), tail=5, HV=4),
    dict(preamble="gate+rate+bias+beta", wanted=("A_log", "dt_bias")),
)
BOUNDS = (
    dict(preamble="bound+rate+bias"),
    dict(preamble="bound+bias", l2norm=True, K=20, V=24, dtype="fp32"),
    dict(preamble="bound+rate+beta", l2norm=True, lengths=(20, 0, 70), tail=5, HV=4),
    dict(preamble="bound+rate+bias", K=8, V=12),
)
V_FIRST = (dict(v_first=True), dict(v_first=True, lengths=(20, 0, 70), K=3, V=40))
LARGE = (
    dict(B=2, T=1000, H=4, K=64, V=128),
    dict(B=2, T=1000, H=4, K=64, V=128, dtype="fp16"),
    dict(B=2, T=1000, H=4, K=64, V=128, dtype="fp32"),
    dict(B=2, T=1000, H=4, K=128, V=64),
    dict(B=2, T=1000, H=4, K=128, V=128, gate="strong"),
    dict(B=2, T=1000, H=4, K=128, V=128, gate="some_inf", h0=False),
    dict(B=2, T=1000, H=2, K=256, V=256),
    dict(T=200, K=256, V=256, dtype="fp16"),
    dict(T=200, K=256, V=256, dtype="fp32"),
    dict(T=200, K=128, V=128, dtype="fp32"),
    dict(B=2, T=1000, H=4, K=100, V=200),
    dict(T=16384, H=1, K=64, V=64),
    dict(T=16384, H=1, K=64, V=64, gate="weak"),
)


def _cases(op, large):
    rows = LENGTHS + HEAD_DIMS + PRECISIONS + LAYOUTS + CALLS
    if op in GATED:
        rows += GATES
    if op in DELTA:
        rows += KEYS
    if op == "simple_gla":
        rows += (dict(gate="gamma"), dict(gate="gamma", h0=False), dict(gate="none"))
        rows += (dict(gate="both"), dict(gate="both", small="bf16", dtype="fp32"))
        rows += tuple(dict(gate=gate, lengths=(20, 0, 70), tail=5) for gate in ("gamma", "none", "both"))
    if op in ("retention", "simple_gla", "delta_rule", "gated_delta_rule", "kda"):
        rows += (dict(chunk_size=32),)
    rows += SEQUENCES
    if op in GATED:
        rows += GATED_SEQUENCES
    if op in ("gated_delta_rule", "kda"):
        rows += GROUPS + PREAMBLES
    if op == "kda":
        rows += BOUNDS
    if op in GATED:
        rows += V_FIRST
    # a row may be one that the defaults, or an operator without gates, already have
    return list(dict.fromkeys(_case(op, row) for row in rows + (LARGE if large else ())))


def _case(op, row):
    row = dict(row)
    if op not in GATED:
        row.pop("gate", None)
    return Case(op, **row)


INTERPRETER = [case for op in OPERATORS for case in _cases(op, large=False)]
GPU = [case for op in OPERATORS for case in _cases(op, large=True)]


def make_gate(kind, shape):
    """Natural-log gates, fp32: as models have them, or at an extreme."""
    if kind == "model":
        return torch.nn.functional.logsigmoid(torch.randn(shape)).clamp(min=-5)
    if kind == "weak":
        return -0.1 * torch.rand(shape)
    if kind == "strong":
        return -50 * torch.rand(shape)
    if kind == "some_inf":
        return torch.where(torch.rand(shape) < 0.05, -torch.inf, -0.2 * torch.rand(shape))
    if kind == "mixed":
        return torch.tensor([0.0, -1e-4, -1.0, -6.0, -20.0, -100.0, -torch.inf])[torch.randint(0, 7, shape)]
    if kind == "step":  # in the middle of a chunk
        late = torch.arange(shape[1]) >= shape[1] // 2
        return torch.where(late.view(1, -1, *[1] * (len(shape) - 2)), -30.0, 0.0).expand(shape).contiguous()
    return torch.full(shape, {"zero": 0.0, "six": -6.0, "twenty": -20.0, "fifty": -50.0, "hundred": -100.0,
                              "all_inf": -torch.inf}[kind])


def laid_out(x, layout):
    """x [B, T, H, ...] with the strides of a layout; "expanded" also gives every head the values of the first one."""
    if layout == "transposed":  # what a causal convolution leaves: time is the last dimension in memory
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "head_first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":  # part of a wider tensor, at an address that is not aligned
        wide = x.new_zeros(*x.shape[:-1], x.size(-1) + 3)
        wide[..., 1:-2] = x
        return wide[..., 1:-2]
    if layout == "expanded":
        return x[:, :, :1].expand_as(x)
    return x


def make(case, device="cpu"):
    """The arguments that operator and reference share, by name, and the gradients of o and the final state (or None).

    The numbers come from the CPU and a seed of the case's own, so that a case is the same everywhere.  What belongs to
    no sequence is NaN.
    """
    torch.manual_seed(zlib.crc32(str(case).encode()))
    dtype, small = DTYPES[case.dtype], DTYPES.get(case.small)
    B, T, H, HV, K, V = case.B, case.T, case.H, case.HV or case.H, case.K, case.V
    if case.lengths:
        B, T = 1, sum(case.lengths) + case.tail
    N, preamble = len(case.lengths) or B, case.preamble.split("+")
    q, k, v = torch.randn(B, T, H, K), torch.randn(B, T, H, K), torch.randn(B, T, HV, V)
    if case.keys == "parallel":
        k = torch.randn(1, 1, H, K) + 0.03 * k
    if case.keys == "equal":
        k = torch.randn(1, 1, H, K).expand_as(k).contiguous()
    if not case.l2norm:
        k = torch.nn.functional.normalize(k, dim=-1)
    inputs = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    if case.op in GATED and case.gate not in ("gamma", "none"):
        shape = (B, T, HV) if GATED[case.op] == "head" else (B, T, HV, K)
        g = make_gate("model" if case.gate == "both" else case.gate, shape)
        if "gate" in preamble or "bound" in preamble:
            g = torch.randn(shape)
        inputs["g"] = g.to(small or torch.float32)
    if case.op in DELTA:
        beta = torch.randn(B, T, HV)
        if "beta" not in preamble:
            beta = torch.ones(B, T, HV) if case.keys == "parallel" else beta.sigmoid() * (2 if case.beta else 1)
        inputs["beta"] = beta.to(small or dtype)
    inputs = {name: laid_out(x.to(device), case.layout) for name, x in inputs.items()}
    if case.gate in ("gamma", "both"):
        inputs["g_gamma"] = torch.linspace(-0.5, -0.01, H, device=device, dtype=small)
    if case.h0:
        h0 = torch.randn(N, HV, K, V).to(device, small or torch.float32)
        inputs["initial_state"] = h0.mT.contiguous().mT if case.layout == "transposed" else h0
    inputs |= {"scale": case.scale} if case.scale is not None else {}
    inputs |= {"use_qk_l2norm_in_kernel": True} if case.l2norm else {}
    inputs |= {"use_gate_in_kernel": True} if "gate" in preamble or "bound" in preamble else {}
    inputs |= {"lower_bound": -5.0} if "bound" in preamble else {}
    inputs |= {"A_log": (0.5 * torch.randn(HV)).to(device, small)} if "rate" in preamble else {}
    width = HV * K if case.op in GATED and GATED[case.op] == "channel" else HV
    inputs |= {"dt_bias": (0.5 * torch.randn(width)).to(device, small)} if "bias" in preamble else {}
    inputs |= {"use_beta_sigmoid_in_kernel": True} if "beta" in preamble else {}
    inputs |= {"allow_neg_eigval": True} if "neg" in preamble else {}
    do, dht = torch.randn(B, T, HV, V).to(device, dtype), torch.randn(N, HV, K, V).to(device)
    if case.layout == "expanded":  # the gradient that a plain sum has
        do = torch.ones_like(do[:1, :1, :1, :1]).expand_as(do)
    do = laid_out(do, case.layout)
    if case.lengths:
        ends = torch.tensor((0, *case.lengths)).cumsum(0)
        inputs["cu_seqlens"] = ends.to(device, torch.int32 if case.dtype == "bf16" else torch.int64)
        for x in (*(inputs[name] for name in TOKENS if name in inputs), do):
            x[:, ends[-1]:] = torch.nan
    return inputs, do if "o" in case.roots.split("+") else None, dht if case.ht and "ht" in case.roots else None


def without_tail(inputs, do):
    """Zeros for what belongs to no sequence, which the reference may then calculate with."""
    if "cu_seqlens" not in inputs:
        return inputs, do
    end = inputs["cu_seqlens"][-1]
    cleared = [x if x is None else torch.where((torch.arange(x.size(1), device=x.device) < end).view(
        1, -1, *[1] * (x.dim() - 2)), x, 0) for x in (do, *(inputs.get(name) for name in TOKENS))]
    return inputs | {name: x for name, x in zip(TOKENS, cleared[1:]) if x is not None}, cleared[0]
