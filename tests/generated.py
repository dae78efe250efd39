"""Run an operator forward and backward by the Triton code that Helion generates for a GPU, interpreted on the CPU.

    python generated.py kda bf16 [K] [packed|bound] [segments]

Helion's own interpreter ignores block sizes and masks; here they are the GPU's.  Triton's interpreter is switched on
for a whole process, so test_generated.py starts one for each operator.  A wrong number raises.
"""
from __future__ import annotations

import dataclasses
import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent / "tools")]

import run_generated  # noqa: E402  (first: it sets TRITON_INTERPRET)
import torch  # noqa: E402
import workloads  # noqa: E402
from cases import DELTA, DTYPES, Case, make, without_tail  # noqa: E402
from numerics import UNIT, assert_within, gate_terms, poisoned, run, run_eager, run_exact  # noqa: E402


def interpret(kernel: object, args: tuple) -> object:
    """The kernel's generated code with small tiles, so that T, K and V end in the middle of one."""
    return run_generated.call(workloads.flexible(kernel, args), args, workloads.safe_config(kernel, args))


def main(op: str, dtype: str, K: str = "20", *special: str) -> None:
    import linear_attention
    from linear_attention import reference
    from linear_attention.ops import _segments

    torch.set_num_threads(1)
    if "segments" in special:
        _segments._chunks_of_a_segment = lambda tiles, chunks: 1
    case = Case(op, T=70, K=int(K), V=24, dtype=dtype, l2norm=op in DELTA)
    if "bound" in special:
        case = dataclasses.replace(case, preamble="bound+bias", small="bf16")
    if "packed" in special:
        case = dataclasses.replace(case, lengths=(20, 0, 33), tail=17)
        if op in ("gated_delta_rule", "kda"):
            case = dataclasses.replace(case, HV=4, preamble="gate+rate+bias+beta+neg")
    inputs, do, dht = make(case)
    operator = getattr(linear_attention, f"chunk_{op}")
    options = {"normalize": False} if op == "linear_attn" else {}
    with poisoned(), workloads.replaced(interpret):
        got = run(lambda **inputs: operator(**inputs, **options, output_final_state=True), inputs, do, dht)
    inputs, do = without_tail(inputs, do)
    exact, rounded = run_exact(reference, op, inputs, do, dht), run_eager(op, inputs, do, dht)
    terms = gate_terms(op, inputs, do, dht) if "dg" in got else None
    assert_within(str(case), got, rounded, exact, UNIT[DTYPES[dtype]], terms)


if __name__ == "__main__":
    main(*sys.argv[1:])
