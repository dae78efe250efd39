"""Every kernel compiles for GPUs that are not here: with the shipped configs, and the safe one in little memory."""
from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent


@pytest.mark.parametrize("device, case", [
    ("h200", "shipped"),
    ("h200", "bf16/128"),
    ("h200", "f32/128"),
    ("h200", "bf16/64"),  # K as long as a chunk: Helion tells sizes apart by their value
    ("h200", "f32/32"),
    ("h200", "f32/16"),
    ("h200", "bf16/128/packed"),
    ("h200", "f32/64/packed"),
    ("b200", "shipped"),
    ("a10", "bf16/256"),  # 99 KB of shared memory
    ("a10", "f32/256"),
])
def test_compiles(device, case):
    done = subprocess.run([sys.executable, HERE / "compiled.py", device, case], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("driver", ["13000", "12080", "absent"])
def test_a_hopper_gpu_gets_right_code(driver):
    done = subprocess.run([sys.executable, HERE / "assembled.py", driver], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
