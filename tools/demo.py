"""Load the package from build/ as a user loads it from the Hub, offline, and run every operator forward and backward.

Prints one table: the relative RMS error of the output and of each gradient against the token recurrence in fp64, and
the time of one forward and backward. Runs on the GPU if there is one, else on the CPU.
"""
from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "HelionDSL/linear-attention"
# Read when `kernels` is imported or called: the build takes the place of the Hub, and nothing is downloaded.
os.environ["LOCAL_KERNELS"] = f"{REPO_ID}={ROOT}"
os.environ["HF_HUB_OFFLINE"] = "1"
# Threads that outnumber the free cores slow the interpreter down many times over.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from kernels import get_kernel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

B, T, H, D = 2, 1024, 8, 64
SEGMENT = 128
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta")


class Operator(NamedTuple):
    """An operator, its arguments, and options beside them that the reference does not have."""

    name: str
    arguments: tuple[str, ...]
    options: dict[str, object] = {}


OPERATORS = (
    Operator("linear_attn", ("q", "k", "v"), {"normalize": False}),
    Operator("retention", ("q", "k", "v")),
    Operator("simple_gla", ("q", "k", "v", "g_head")),
    Operator("gla", ("q", "k", "v", "g")),
    Operator("delta_rule", ("q", "k", "v", "beta")),
    Operator("gated_delta_rule", ("q", "k", "v", "g_head", "beta")),
    Operator("kda", ("q", "k", "v", "g", "beta")),
)


def make_inputs(device: str) -> dict[str, torch.Tensor]:
    """The inputs of the README's example, a gate for a whole head, and `do`, the gradient of the output."""
    torch.manual_seed(0)
    q = torch.randn(B, T, H, D, device=device, dtype=torch.bfloat16)
    g = -torch.rand_like(q, dtype=torch.float32) * 0.1
    return {
        "q": q,
        "k": torch.nn.functional.normalize(torch.randn_like(q, dtype=torch.float32), dim=-1).to(q),
        "v": torch.randn_like(q),
        "g": g,
        "g_head": g[..., 0].contiguous(),
        "beta": torch.rand(B, T, H, device=device, dtype=torch.bfloat16),
        "do": torch.randn_like(q),
    }


def forward_backward(function: Callable, tensors: dict[str, torch.Tensor], do: torch.Tensor) -> dict[str, torch.Tensor]:
    """`o` and the gradients of `tensors`, by the names of the table."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    o = function(**leaves)
    gradients = torch.autograd.grad(o, list(leaves.values()), do.to(o))
    return {"o": o.detach()} | {f"d{name}": gradient for name, gradient in zip(leaves, gradients)}


def in_segments(recurrence: Callable) -> Callable:
    """`recurrence` over all tokens, keeping only the states between segments for the backward."""

    def segment(state: torch.Tensor | None, *tensors: torch.Tensor, names: list[str]):
        return recurrence(**dict(zip(names, tensors)), initial_state=state, dtype=torch.float64)

    def run(**tensors: torch.Tensor) -> torch.Tensor:
        state, outputs = None, []
        for part in zip(*(x.split(SEGMENT, dim=1) for x in tensors.values())):
            o, state = checkpoint(segment, state, *part, names=list(tensors), use_reentrant=False)
            outputs.append(o)
        return torch.cat(outputs, dim=1)

    return run


def relative_rms(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return ((actual.double() - exact).norm() / exact.norm()).item()


def seconds(run: Callable[[], object], device: str) -> float:
    """Seconds of one call: on a GPU the median of 20 after one for warming up, on a CPU the call itself."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    run()
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def row(operator: Operator, device: str) -> list[str]:
    """One line of the table."""
    kernel = get_kernel(REPO_ID, version=0)
    recurrence = getattr(importlib.import_module(f"{kernel.__name__}.reference"), operator.name)
    chunked = getattr(kernel, f"chunk_{operator.name}")
    inputs = make_inputs(device)
    tensors = {name.removesuffix("_head"): inputs[name] for name in operator.arguments}
    ours: dict[str, torch.Tensor] = {}

    def run() -> None:
        ours.update(forward_backward(lambda **x: chunked(**x, **operator.options)[0], tensors, inputs["do"]))

    took = seconds(run, device)
    # fp64 leaves, so that the exact gradients are not rounded to the inputs' dtype
    doubles = {name: x.double() for name, x in tensors.items()}
    exact = forward_backward(in_segments(recurrence), doubles, inputs["do"])
    errors = [f"{relative_rms(ours[name], exact[name]):.1e}" if name in exact else "" for name in ("o", *GRADIENTS)]
    return [operator.name, *errors, f"{took:.2f} s" if device == "cpu" else f"{took * 1e3:.2f} ms"]


def rows(device: str) -> Iterator[list[str]]:
    """The lines as they are done: one after the other on a GPU, on a CPU as many at a time as there are cores."""
    if device == "cuda":
        yield from (row(operator, device) for operator in OPERATORS)
        return
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("spawn")) as pool:
        # the last ones take longest, so they start first
        jobs = [pool.submit(row, operator, device) for operator in reversed(OPERATORS)]
        yield from (job.result() for job in as_completed(jobs))


def main() -> None:
    start = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU, in Helion's interpreter: exact, not fast"
    print(f"{REPO_ID} version 0, {get_kernel(REPO_ID, version=0).__name__}, on {where}", flush=True)
    print(f"  0/{len(OPERATORS)} running the first ones", file=sys.stderr, flush=True)
    done: dict[str, list[str]] = {}
    for line in rows(device):
        done[line[0]] = line
        elapsed = time.perf_counter() - start
        print(f"  {len(done)}/{len(OPERATORS)} {line[0]} ({elapsed:.0f} s so far)", file=sys.stderr, flush=True)

    timed = "median of 20 eager calls" if device == "cuda" else "one call on one core"
    print(f"\nB {B}, T {T}, H {H}, K = V = {D}, bf16, gates in fp32. Errors: relative RMS against the token recurrence")
    print(f"in fp64. Time: one forward and backward, {timed}.\n")
    header = ["operator", "o", *GRADIENTS, "time"]
    table = [done[operator.name] for operator in OPERATORS]
    widths = [max(map(len, column)) for column in zip(header, *table)]
    for line in (header, ["-" * width for width in widths], *table):
        print("  ".join([line[0].ljust(widths[0]), *(x.rjust(width) for x, width in zip(line[1:], widths[1:]))]))
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
