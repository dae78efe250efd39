"""What a kernel call resolves to, on a GPU that is not there: python calls.py h200|a10.  Launches are left out.

h200: a call takes its tuned config and compiles once for a class of shapes.  a10: it takes the safe config and says so.
Either way nothing is searched, and nothing is written to the working folder or the environment.
"""
from __future__ import annotations

import logging
import os
import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent / "tools")]

import offline_compile  # noqa: E402
import render_configs  # noqa: E402
import torch  # noqa: E402
import workloads  # noqa: E402


def forbid_searching() -> None:
    from helion.runtime.kernel import BoundKernel, Kernel

    def search(*args, **kwargs):
        raise AssertionError("a call started a search")

    BoundKernel.autotune = Kernel.autotune = search


class Compilations:
    """Counts the Triton functions and machine-code variants that calls ask for."""

    def __init__(self) -> None:
        from helion.runtime.kernel import BoundKernel
        from torch._inductor.codecache import PyCodeCache

        self.bound, self.sources = 0, set()
        bind, load = BoundKernel.__init__, PyCodeCache.load

        def count_bind(*args, **kwargs):
            self.bound += 1
            return bind(*args, **kwargs)

        def count_load(source, *args, **kwargs):
            self.sources.add(source)
            return load(source, *args, **kwargs)

        BoundKernel.__init__, PyCodeCache.load = count_bind, count_load


def arguments(B=2, T=1000, H=4, K=64, V=64, dtype="bf16", strides="") -> tuple:
    """Arguments of scalar_walk_kernel, along whole sequences."""
    x = f"{dtype}[{B},{T},{H},{K}]{strides}"
    v, gc, L = f"{dtype}[{B},{T},{H},{V}]", f"f32[{B},{H},{T}]", -(-T // 64) * 64
    return offline_compile.fakes([x, x, v, gc, None, None, None, None, None, 0.125, 1.5, 64, L, False])


def main(device: str) -> None:
    offline_compile.pretend(device)
    environment, files = dict(os.environ), sorted(os.listdir())
    import linear_attention  # noqa: F401
    from linear_attention.ops._scalar_gate import scalar_walk_kernel as kernel

    forbid_searching()
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("linear_attention").addHandler(handler)
    counted = Compilations()
    with offline_compile.not_launching():
        o, ht = kernel(*arguments())
        assert o.shape == (2, 1000, 4, 64) and ht.shape == (2, 4, 64, 64) and ht.dtype == torch.float32
        if device == "h200":
            check_classes(kernel, counted)
        else:
            kernel(*arguments(T=50))
            assert len(lines) == 1 and "A10" in lines[0] and "tune" in lines[0], lines
    assert dict(os.environ) == environment, dict(os.environ).items() ^ environment.items()
    assert sorted(os.listdir()) == files


def check_classes(kernel: object, counted: Compilations) -> None:
    entry = render_configs.read("cuda_sm90", "_scalar_gate")["kernels"][kernel.name][0]
    assert kernel.config(*offline_compile.fakes(entry["args"])) == entry["config"]
    assert kernel.config(*arguments(dtype="f32")) == workloads.safe_config(kernel, arguments(dtype="f32"))
    bound, sources = counted.bound, len(counted.sources)
    for T in (999, 1001, 4096, 64, 63, 2):
        kernel(*arguments(T=T))
    for B, H in ((3, 5), (7, 11)):
        kernel(*arguments(B=B, H=H))
    if kernel.config(*arguments(B=7, H=11)) == kernel.config(*arguments()):
        assert (counted.bound, len(counted.sources)) == (bound, sources), "a new size compiled something"
    for changed in ({"T": 1}, {"B": 1}, {"K": 32}, {"dtype": "f32"}, {"strides": f"@{2**31},256,64,1"}):
        bound = counted.bound
        kernel(*arguments(**changed))
        assert counted.bound > bound, f"{changed} compiled nothing of its own"
        kernel(*arguments(**changed))
    wide = [source for source in counted.sources if "int64" in source]
    assert wide, "offsets past 2**31 stayed in 32 bits"
    q = arguments()[0]
    alone, twice = len(kernel._runs), (q, q, *arguments()[2:])
    kernel(*twice)
    kernel(q, arguments()[1], *arguments()[2:])
    assert len(kernel._runs) == alone + 1, "one tensor given twice is a class of its own"
    os.environ["HELION_AOT_MODE"] = "collect"
    kernel.__dict__["helion"] = lambda *args: "helion.aot_kernel"
    assert kernel(*arguments()) == "helion.aot_kernel"
    del os.environ["HELION_AOT_MODE"]


if __name__ == "__main__":
    main(*sys.argv[1:])
