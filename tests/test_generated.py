"""Every kernel's generated Triton code, executed on the CPU at a ragged size through whole operators."""
from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import workloads

HERE = pathlib.Path(__file__).resolve().parent


CASES = [(op, *rest) for op in workloads.OPERATORS for rest in (("bf16",), ("fp32",), ("bf16", "20", "packed"))] + [
    ("gla", "fp16", "64"), ("kda", "fp16", "64"),  # all pairs go through the far kernels; K as long as a chunk
    ("simple_gla", "bf16", "136"), ("gla", "bf16", "136"),  # forwards that write their states
    ("kda", "bf16", "20", "bound"),
    ("simple_gla", "bf16", "136", "packed"), ("gla", "bf16", "136", "packed"),
    ("linear_attn", "bf16", "20", "segments"), ("retention", "bf16", "136", "packed", "segments"),
    ("simple_gla", "fp32", "20", "packed", "segments"), ("gla", "bf16", "20", "packed", "segments"),
    ("gla", "bf16", "136", "segments"),
]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_generated_code_is_right(case):
    done = subprocess.run([sys.executable, HERE / "generated.py", *case], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
