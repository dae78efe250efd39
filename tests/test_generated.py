"""Every kernel's generated Triton code, executed on the CPU at a ragged size through whole operators."""
from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import workloads

HERE = pathlib.Path(__file__).resolve().parent


@pytest.mark.parametrize("op, dtype", [(op, dtype) for op in workloads.OPERATORS for dtype in ("bf16", "fp32")] + [
    ("gla", "fp16"), ("kda", "fp16")])  # fp16: all pairs of tokens through the kernels for what is not near
def test_generated_code_is_right(op, dtype):
    done = subprocess.run([sys.executable, HERE / "generated.py", op, dtype], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
