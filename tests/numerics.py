"""Running an operator, the reference and the eager chunked form alike, and the one bound on a kernel's error."""

from __future__ import annotations

import contextlib

import eager
import torch
from torch.utils.checkpoint import checkpoint

UNIT = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-20}
LEAVES = ("q", "k", "v", "g", "beta", "initial_state")
SEGMENT = 256  # tokens


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
    outputs, gradients = zip(*roots)
    found = torch.autograd.grad(outputs, list(leaves.values()), gradients, allow_unused=True)
    results |= {f"d{name}": torch.zeros_like(x) if dx is None else dx for (name, x), dx in zip(leaves.items(), found)}
    return {name: x.detach() for name, x in results.items()}


def run_eager(op, inputs, do, dht, exact=False) -> dict[str, torch.Tensor]:
    """The chunked form's results, named as in `run`, with all gradients; exact=True: in fp64, and "dg_terms" too."""
    o, ht, saved = eager.forward(op, inputs, exact)
    do = torch.zeros_like(o) if do is None else do
    return {"o": o, "ht": ht, **{f"d{name}": dx for name, dx in eager.backward(saved, do, dht).items()}}


def in_segments(recurrence):
    """The recurrence over all tokens, of which the backward keeps only the states between segments."""

    def run_segments(initial_state=None, **arguments):
        names = [name for name, x in arguments.items() if isinstance(x, torch.Tensor) and name != "g_gamma"]
        constant = {name: x for name, x in arguments.items() if name not in names}

        def segment(state, *tokens):
            return recurrence(**dict(zip(names, tokens)), initial_state=state, **constant)

        state, outputs = initial_state, []
        for tokens in zip(*(arguments[name].split(SEGMENT, dim=1) for name in names)):
            o, state = checkpoint(segment, state, *tokens, use_reentrant=False, preserve_rng_state=False)
            outputs.append(o)
        return torch.cat(outputs, dim=1), state

    return run_segments


def run_exact(reference, op, inputs, do, dht, wanted=LEAVES) -> dict[str, torch.Tensor]:
    """The token recurrence's results in fp64, its gradients too."""
    inputs = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    recurrence = getattr(reference, op)
    return run(in_segments(recurrence) if inputs["q"].size(1) > SEGMENT else recurrence, inputs, do, dht, wanted)


def assert_within(case, got, rounded, exact, unit, dg_terms=None):
    """Every result's RMS error is at most twice the eager form's, plus `unit` times the RMS of the exact result.

    For dg, a sum in which terms may cancel, that scale is the RMS of the sum of its terms' absolute values (dg_terms).
    """
    failures = []
    for name, x in got.items():
        assert x.shape == exact[name].shape, f"{case}: {name} has shape {list(x.shape)}"
        scale = rms(dg_terms if name == "dg" else exact[name])
        error, eager_error = rms(x - exact[name]), rms(rounded[name] - exact[name])
        bound = 2 * eager_error + unit * scale
        if not error <= bound:  # NaN fails too
            failures.append(f"{name}: error {error:.3e} > bound {bound:.3e} (eager {eager_error:.3e}, RMS {scale:.3e})")
    assert not failures, f"{case}\n" + "\n".join(failures)
