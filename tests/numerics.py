"""Running an operator, the reference and the eager chunked form alike, and the one bound on a kernel's error."""

from __future__ import annotations

import contextlib
import math

import eager
import torch

UNIT = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-20}
LEAVES = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
MANY = 512  # tokens
worst: dict[str, float] = {}  # of "operator result": the largest error over its bound, of what a test has compared


@contextlib.contextmanager
def poisoned():
    """Memory allocated without a value holds NaN, so that whatever a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def run(fn, inputs, do, dht, wanted=LEAVES) -> dict[str, torch.Tensor]:
    """fn(**inputs) -> (o, final state), and the gradients of the inputs in `wanted` for do and dht (one may be None).

    Returns "o", "ht" if there is one, "dq", "dk", ...; the gradient of an input that took no part is zero.
    """
    leaves = {name: inputs[name].detach().requires_grad_() for name in wanted if inputs.get(name) is not None}
    o, ht = fn(**{**inputs, **leaves})
    results = {"o": o} if ht is None else {"o": o, "ht": ht}
    roots = [(x, dx.to(x.dtype)) for x, dx in ((o, do), (ht, dht)) if dx is not None and x.requires_grad]
    found = [None] * len(leaves)
    if roots:
        outputs, gradients = zip(*roots)
        found = torch.autograd.grad(outputs, list(leaves.values()), gradients, allow_unused=True)
    results |= {f"d{name}": torch.zeros_like(x) if dx is None else dx for (name, x), dx in zip(leaves.items(), found)}
    return {name: x.detach() for name, x in results.items()}


class _Chunked(torch.autograd.Function):
    """eager.py's formulas, forward and backward, as an operator of (op, exact, absolute, names, *values) -> o, ht.

    With absolute the gradient of g is the sum of its terms' absolute values, which takes exact.
    """

    @staticmethod
    def forward(ctx, op, exact, absolute, names, *values):
        ctx.names, ctx.absolute = names, absolute
        o, ht, ctx.saved = eager.forward(op, dict(zip(names, values)), exact)
        return o, ht

    @staticmethod
    def backward(ctx, do, dht):
        gradients = eager.backward(ctx.saved, do, dht)
        if ctx.absolute:
            gradients["g"] = gradients["g_terms"]
        return None, None, None, None, *(gradients.get(name) for name in ctx.names)


def chunked(op, exact=False, absolute=False):
    """The eager chunked form of an operator, with the options of reference.py, differentiable."""

    def operator(
        q, k, v, g=None, beta=None, initial_state=None, cu_seqlens=None, A_log=None, dt_bias=None, lower_bound=None,
        use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, **rest,
    ):
        if use_gate_in_kernel:
            rate = 1.0 if A_log is None else A_log.to(sums).exp().view(-1, *[1] * (g.dim() - 3))
            g = g.to(sums) if dt_bias is None else g.to(sums) + dt_bias.to(sums).view(g.shape[2:])
            g = -rate * torch.nn.functional.softplus(g) if lower_bound is None else lower_bound * (rate * g).sigmoid()
        if use_beta_sigmoid_in_kernel:
            beta = beta.to(sums).sigmoid() * (2 if allow_neg_eigval else 1)
        q, k = (x.repeat_interleave(v.size(2) // x.size(2), 2) for x in (q, k))
        tokens = {name: x for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)) if x is not None}

        def sequence(tokens, state):
            if not tokens["q"].size(1):
                zero = q.new_zeros(q.size(0), v.size(2), q.size(3), v.size(3), dtype=sums)
                return torch.zeros_like(tokens["v"]), zero if state is None else state.to(sums)
            arguments = {**tokens, "initial_state": state, **rest}
            return _Chunked.apply(op, exact, absolute, tuple(arguments), *arguments.values())

        if cu_seqlens is None:
            return sequence(tokens, initial_state)
        ends, outputs = cu_seqlens.tolist(), []
        for n, (begin, end) in enumerate(zip(ends, ends[1:])):
            state = None if initial_state is None else initial_state[n:n + 1]
            outputs.append(sequence({name: x[:, begin:end] for name, x in tokens.items()}, state))
        outputs.append((torch.zeros_like(v[:, ends[-1]:]), outputs[-1][1][:0]))
        o, ht = (torch.cat(parts, dim) for dim, parts in ((1, [o for o, _ in outputs]), (0, [h for _, h in outputs])))
        return o, ht

    sums = torch.float64 if exact else torch.float32
    return operator


def run_eager(op, inputs, do, dht, exact=False, wanted=LEAVES, absolute=False) -> dict[str, torch.Tensor]:
    """The chunked form's results, named as in `run`; exact=True: in fp64."""
    if exact:
        inputs = in_fp64(inputs)
    return run(chunked(op, exact, absolute), inputs, do, dht, wanted)


def gate_terms(op, inputs, do, dht) -> dict[str, torch.Tensor]:
    """What the gradients of a gate and of its parameters are, each of their terms taken as its absolute value."""
    found = run_eager(op, inputs, do, dht, exact=True, wanted=("g", "A_log", "dt_bias"), absolute=True)
    return {name: x.abs() for name, x in found.items() if name in ("dg", "dA_log", "ddt_bias")}


def in_fp64(inputs):
    """Floating-point arguments in fp64."""
    return {name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for name, x in inputs.items()}


def run_exact(reference, op, inputs, do, dht, wanted=LEAVES) -> dict[str, torch.Tensor]:
    """The token recurrence's results in fp64, its gradients too; of many tokens the chunked form's, which are the same.

    test_reference.py holds the two together.
    """
    if inputs["q"].size(1) > MANY:
        return run_eager(op, inputs, do, dht, exact=True, wanted=wanted)
    return run(getattr(reference, op), in_fp64(inputs), do, dht, wanted)


def assert_within(case, got, rounded, exact, unit, terms=None):
    """Every result's RMS error is at most twice the eager form's, plus `unit` times the RMS of the exact result.

    For the gradients of a gate, sums in which terms may cancel, that scale is at least the RMS of the sum of its terms'
    absolute values (gate_terms).  What is below fp32's normal numbers may be lost.  `case` begins with the operator.
    """
    op, failures = case.split("-")[0], []
    for name, x in got.items():
        assert x.shape == exact[name].shape, f"{case}: {name} has shape {list(x.shape)}"
        scale = max(rms(exact[name]), rms(terms[name]) if terms and name in terms else 0.0)
        error, eager_error = rms(x - exact[name]), rms(rounded[name] - exact[name])
        bound = 2 * eager_error + unit * scale + torch.finfo(torch.float32).tiny
        within = error / bound
        worst[f"{op} {name}"] = max(worst.get(f"{op} {name}", 0.0), math.inf if math.isnan(within) else within)
        if not within <= 1:  # NaN fails too
            failures.append(f"{name}: error {error:.3e} > bound {bound:.3e} (eager {eager_error:.3e}, RMS {scale:.3e})")
    assert not failures, f"{case}\n" + "\n".join(failures)
