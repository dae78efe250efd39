"""Launches after the first one of a layout go to the compiled kernel at once, with the arguments Triton would pass."""
from __future__ import annotations

import importlib
import types

import pytest
import torch


@pytest.fixture
def launched(package, monkeypatch):
    """(Launch, launches): a launch is ("jit" or "direct", its arguments); compiled kernels are made up."""
    module = importlib.import_module(f"{package.__name__}.ops._launch")
    launches = []

    def default_launcher(jit, grid, *args, **options):
        launches.append(("jit", jit, grid, args, options))
        run = lambda *args: launches.append(("direct", *args))  # noqa: E731
        return types.SimpleNamespace(run=run, function=f"code of {jit}", packed_metadata=(4, 1, 0))

    monkeypatch.setattr(module, "_default_launcher", lambda: default_launcher)
    monkeypatch.setattr(module, "_direct", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1000 + index, raising=False)
    return module, launches


def test_second_launch_is_direct(launched):
    module, launches = launched
    launch = module.Launch(torch.device("cuda", 3))
    launch("kernel", (5,), 1, 2, num_warps=4)
    launch("kernel", (6,), 7, 8, num_warps=4)
    assert launches == [
        ("jit", "kernel", (5,), (1, 2), {"num_warps": 4}),
        ("direct", 6, 1, 1, 1003, "code of kernel", (4, 1, 0), None, None, None, 7, 8),
    ]
    launch("another", (1, 2), num_warps=4)  # should code ever launch two kernels, each finds its own
    launch("kernel", (5,), 1, 2, num_warps=4)
    assert [x[0] for x in launches] == ["jit", "direct", "jit", "jit"]


@pytest.mark.parametrize("when", ["enter", "exit"])
def test_hooks_and_other_versions_see_every_launch(launched, monkeypatch, when):
    from triton import knobs

    module, launches = launched
    launch, hook = module.Launch(torch.device("cuda", 0)), lambda metadata: None
    launch("kernel", (5,))
    hooks = getattr(knobs.runtime, f"launch_{when}_hook")
    hooks.add(hook)
    try:
        launch("kernel", (5,))
    finally:
        hooks.remove(hook)
    launch("kernel", (5,))
    monkeypatch.setattr(module, "_direct", lambda: False)
    launch = module.Launch(torch.device("cuda", 0))
    launch("kernel", (5,))
    launch("kernel", (5,))
    assert [x[0] for x in launches] == ["jit", "jit", "direct", "jit", "jit"]


def test_first_launch_may_compile_nothing(launched, monkeypatch):
    """A hook of Triton's may keep a kernel from being compiled: then there is nothing to launch directly."""
    module, launches = launched
    monkeypatch.setattr(module, "_default_launcher", lambda: lambda *args, **options: launches.append(("jit",)))
    launch = module.Launch(torch.device("cuda", 0))
    launch("kernel", (5,))
    launch("kernel", (5,))
    assert launches == [("jit",)] * 2
