"""Random calls against the recurrence: any mix of sizes, dtypes, strides, gates, sequences and options.

The same examples every time, so that a failure is a change's; `HYPOTHESIS_PROFILE=search` looks for new ones, on a GPU
too.  What it finds becomes a row of cases.py.
"""

from __future__ import annotations

import os

import pytest
import torch
from cases import DELTA, GATED, OPERATORS, Case, make
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_ops import check

shared = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
# on a GPU nearly every example is kernels to compile
settings.register_profile("fixed", derandomize=True, max_examples=6 if torch.cuda.is_available() else 15, **shared)
settings.register_profile("search", max_examples=int(os.environ.get("EXAMPLES", "300")), print_blob=True, **shared)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@st.composite
def calls(draw, op, widths):
    """A Case of the operator, with K and V among `widths`."""
    fields = {
        "B": draw(st.integers(1, 3)),
        "T": draw(st.integers(1, 200)),
        "H": draw(st.integers(1, 3)),
        "K": draw(st.sampled_from(widths)),
        "V": draw(st.sampled_from(widths)),
        "dtype": draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        "layout": draw(st.sampled_from(["dense", "transposed", "head_first", "sliced"])),
        "h0": draw(st.booleans()),
        "ht": draw(st.booleans()),
        "roots": draw(st.sampled_from(["o", "ht", "o+ht"])),
        "scale": draw(st.sampled_from([None, 0.3])),
    }
    if not fields["ht"]:
        fields["roots"] = "o"
    if draw(st.booleans()):
        fields["lengths"] = tuple(draw(st.lists(st.integers(0, 130), min_size=1, max_size=5)))
        fields["tail"] = draw(st.sampled_from([0, 1, 70]))
        if sum(fields["lengths"]) + fields["tail"] == 0:
            fields["tail"] = 3
    if op in GATED:
        fields["gate"] = draw(st.sampled_from(["model", "zero", "weak", "strong", "six", "some_inf"]))
        fields["v_first"] = draw(st.booleans())
        fields["small"] = draw(st.sampled_from(["", fields["dtype"]]))
    if op in DELTA:
        fields["l2norm"] = draw(st.booleans())
    if op in ("gated_delta_rule", "kda"):
        fields["HV"] = fields["H"] * draw(st.integers(1, 3))
        gate = draw(st.sampled_from([[], ["gate", "rate"], ["gate", "rate", "bias"]]))
        if op == "kda" and draw(st.booleans()):
            gate = ["bound", *draw(st.sampled_from([[], ["rate"], ["rate", "bias"]]))]
        beta = draw(st.sampled_from([[], ["beta"], ["beta", "neg"]]))
        fields["preamble"] = "+".join(gate + beta)
    return Case(op, **fields)


def slack(case):
    """Of the bound, which is for averages over many numbers: the gradient of beta has one a token and head."""
    numbers = (sum(case.lengths) or case.B * case.T) * case.H
    return 16 if numbers < 16 else 4


@pytest.mark.parametrize("op", OPERATORS)
def test_in_the_interpreter(op, package, reference):
    @given(calls(op, [5, 16, 20, 33, 64]))
    def run(case):
        check(case, *make(case), package, reference, slack(case))

    run()


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPERATORS)
def test_on_the_gpu(op, package, reference):
    @given(calls(op, [20, 64]))
    def run(case):
        check(case, *make(case, "cuda"), package, reference, slack(case))
        torch.cuda.empty_cache()

    run()
