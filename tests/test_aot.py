"""How kernels are called: the interpreter on a CPU, and what is resolved, kept and never done on a GPU."""
from __future__ import annotations

import logging
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import tune

HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture
def aot(package):
    return sys.modules[f"{package.__name__}.ops._aot"]


@pytest.mark.parametrize("device", ["h200", "a10"])
def test_calls_on_an_absent_gpu(device, tmp_path):
    """The working folder cannot be written to."""
    tmp_path.chmod(0o555)
    done = subprocess.run(
        [sys.executable, HERE / "calls.py", device], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


COLLECT = """
import importlib, torch
from kernels import get_kernel
package = get_kernel("HelionDSL/linear-attention", version=0)
module = importlib.import_module(package.__name__ + ".ops._l2norm")
q, k = torch.randn(2, 2, 256, 4, 64, device="cuda", dtype=torch.bfloat16).unbind()
yq, yk = module.l2norm_fwd_kernel(q, k)
torch.testing.assert_close(yq.float().norm(dim=-1), torch.ones(2, 256, 4, device="cuda"), rtol=0.01, atol=0)
"""


@pytest.mark.gpu
def test_collecting_configs_on_the_loaded_package(package, tmp_path):
    """Helion's own workflow: a short search for one kernel, whose result tools/tune.py can take."""
    short = {"EFFORT": "quick", "MAX_GENERATIONS": "1", "BUDGET_SECONDS": "20"}
    environment = {
        **os.environ, "HELION_AOT_MODE": "collect", "HELION_AOT_DATA_DIR": str(tmp_path),
        **{f"HELION_AUTOTUNE_{key}": value for key, value in short.items()}}
    done = subprocess.run([sys.executable, "-c", COLLECT], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    (recorded,) = tmp_path.glob("tuned_configs_*.json")
    (group,) = tune.collected(recorded)["l2norm_fwd_kernel"]
    assert group["args"] == ["bf16[2,256,4,64]"] * 2
    assert group["candidates"][0]["config"]["num_warps"] >= 1


def test_one_line_says_that_a_cpu_is_slow(package, aot, caplog):
    aot._start_interpreter.cache_clear()
    q = torch.randn(1, 5, 1, 16)
    with caplog.at_level(logging.INFO, logger="linear_attention"):
        for _ in range(2):
            package.chunk_linear_attn(q, q, q, normalize=False)
    assert len(caplog.records) == 1
    assert "slow" in caplog.text and "exact" in caplog.text


def test_cpu_products_accumulate_in_fp32_and_round_once(package):
    sys.modules[f"{package.__name__}.ops._aot"]._start_interpreter()
    a, b, bias = torch.randn(3, 8, 8).bfloat16()
    exact = a.double() @ b.double()
    for out in (torch.float32, torch.bfloat16):
        unit = 2.0**-20 if out == torch.float32 else 2.0**-8
        torch.testing.assert_close(torch.mm(a, b, out_dtype=out).double(), exact, rtol=unit, atol=unit)
        got = torch.addmm(bias, a, b, out_dtype=out).double()
        torch.testing.assert_close(got, bias.double() + exact, rtol=unit, atol=4 * unit)
    nan = torch.full_like(bias, torch.nan)
    assert torch.addmm(nan, a, b, torch.float32, beta=0).isfinite().all()


def test_present_cpu_kernels_are_kept(aot, monkeypatch):
    """A torch that has the kernels keeps its own."""
    registered = []
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: True)
    monkeypatch.setattr(torch.library.Library, "impl", lambda *args, **kwargs: registered.append(args))
    aot._cpu.register.__wrapped__()
    assert not registered


@pytest.mark.parametrize("sizes, strides, wide", [
    ((4, 4096, 64, 128), None, False),
    ((8, 2048, 32, 256), None, False),
    ((2, 100, 4, 64), (2**31, 256, 64, 1), True),
    ((16, 16384, 64, 128), None, True),  # 2**31 elements
    ((2, 16384, 128, 256), None, True),  # half of that, but the states of its chunks have 2**32
    ((2, 65600, 128, 64), None, True),  # half of that, but an inverse in two parts has 128 columns
    ((600, 65, 32, 256), None, True),  # 2 chunks a row: states of 2.5e9 elements
    ((1100, 1, 32, 256), None, True),  # final states of 2.3e9
])
def test_offsets_wider_than_32_bits(aot, sizes, strides, wide):
    strides = strides or torch.empty(sizes, device="meta").stride()
    x = torch.empty_strided(sizes, strides, dtype=torch.bfloat16, device="meta")
    assert (aot._reach((x, None, 64)) >= 2**31) == wide


def test_states_of_short_sequences(aot):
    """Thousands of them have more chunks than their tokens fill."""
    x = torch.empty(1, 65536, 32, 128, dtype=torch.bfloat16, device="meta")
    table = torch.empty(4096, 5, dtype=torch.int32, device="meta")
    assert aot._reach((x, None, 64)) < 2**31 <= aot._reach((x, table, 64))


def test_launches_run_on_the_tensors_device(aot, monkeypatch):
    entered = []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)

        def __exit__(self, *args):
            entered.append(None)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    run = lambda *args: [*args, len(entered)]  # noqa: E731
    assert aot._on_device(torch.device("cuda", 0), run, 7) == [7, 0] and not entered
    assert aot._on_device(torch.device("cuda", 1), run, 7) == [7, 1]
    assert entered == [torch.device("cuda", 1), None]
