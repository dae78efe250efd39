"""tools/pipeline_races.py: it sees the race that Triton leaves, in the kernel that had it and in loops written out."""
from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pipeline_races
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOOP = """
    %a = ttg.local_alloc : () -> !ttg.memdesc<{buffers}x64x64xbf16, #shared, #smem, mutable>
    %b = ttg.local_alloc : () -> !ttg.memdesc<4x64x64xbf16, #shared, #smem, mutable>
    %a_0 = ttg.memdesc_index %a[%c0] : !ttg.memdesc<{buffers}x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
    {prologue}
    %sum:2 = scf.for %i = %c0 to %n step %c1 iter_args(%acc = %zero) -> (tensor<64x64xf32>) : i32 {{
      %a_i = ttg.memdesc_index %a[%i] : !ttg.memdesc<{buffers}x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
      %a_t = ttg.memdesc_trans %a_i {{order = array<i32: 1, 0>}} : !ttg.memdesc<64x64xbf16>
      %b_i = ttg.memdesc_index %b[%i] : !ttg.memdesc<4x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
      %x = ttng.warp_group_dot %b_i, %a_t, %acc {{inputPrecision = 1 : i32, isAsync = true}} : !ttg.memdesc<64x64xbf16>
      %y:3 = ttng.warp_group_dot_wait %x, %b_i, %a_t {{pendings = {pendings} : i32}} : tensor<64x64xf32>
      {copy}
      scf.yield %y#0 : tensor<64x64xf32>
    }}
"""
COPY = "%t{n} = ttg.async_copy_global_to_local %p, %a_0 mask %m : tensor<64x64x!tt.ptr<bf16>> -> <64x64xbf16>"
TMA = "ttng.async_tma_copy_global_to_local %d[%i, %j] %a_0, %bar, %true : !tt.tensordesc<tensor<64x64xbf16>>"


@pytest.mark.parametrize("copy", [COPY, TMA])
@pytest.mark.parametrize("buffers, ahead, pendings, race", [
    (1, 1, 1, True),
    (2, 1, 1, False),
    (2, 2, 1, True),
    (3, 2, 1, False),
    (1, 1, 0, False),  # the product is waited for before the copy
])
def test_loop(buffers, ahead, pendings, race, copy):
    prologue = "\n    ".join(copy.format(n=n) for n in range(ahead))
    ttgir = LOOP.format(buffers=buffers, prologue=prologue, pendings=pendings, copy=copy.format(n=ahead))
    assert bool(pipeline_races.pipeline_races(ttgir)) == race
    no_copy = LOOP.format(buffers=buffers, prologue=prologue, pendings=pendings, copy="")
    assert not pipeline_races.pipeline_races(no_copy)


def test_kernel():
    """S and D of a gate's gradient, in products and in a sum: on an H200 two stages gave other numbers in each run."""
    x, s = "bf16[4,4096,64,128]", "bf16[4,64,64,128,128]"
    args = [x, x, x.replace("bf16", "f32"), "f32[4,64,64,128]", x, x, "bf16[4,4096,64,64]", s, s]
    args += ["None", "0.125", "1.0", "64"]
    command = [sys.executable, ROOT / "tools" / "offline_compile.py",
               "linear_attention.ops.gla:gla_bwd_qk_kernel.helion", "--args", *args]
    for stages in (1, 2, 3):
        config = {"block_sizes": [32, 64], "num_warps": 4, "num_stages": stages, "indexing": "pointer"}
        command += ["--config", json.dumps(config)]
    done = subprocess.run(command, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT / "torch-ext")})
    reports = {report["config"]["num_stages"]: report for report in map(json.loads, done.stdout.splitlines())}
    assert len(reports) == 3, done.stderr
    assert reports[1]["ok"]
    assert all(not reports[n]["ok"] and "race on" in reports[n]["error"] for n in (2, 3)), reports
