"""Every kernel's generated Triton code, executed on the CPU at a ragged size through whole operators."""
from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import workloads

HERE = pathlib.Path(__file__).resolve().parent


CASES = [(op, dtype, 20) for op in workloads.OPERATORS for dtype in ("bf16", "fp32")] + [
    ("gla", "fp16", 64), ("kda", "fp16", 64),  # all pairs go through the far kernels; K as long as a chunk
    ("simple_gla", "bf16", 136), ("gla", "bf16", 136),  # forwards that write their states
]


@pytest.mark.parametrize("op, dtype, K", CASES)
def test_generated_code_is_right(op, dtype, K):
    done = subprocess.run([sys.executable, HERE / "generated.py", op, dtype, str(K)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
