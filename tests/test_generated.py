"""Every kernel's generated Triton code, executed on the CPU at a ragged size through whole operators."""
from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import workloads

HERE = pathlib.Path(__file__).resolve().parent


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("op", workloads.OPERATORS)
def test_generated_code_is_right(op, dtype):
    done = subprocess.run([sys.executable, HERE / "generated.py", op, dtype], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
