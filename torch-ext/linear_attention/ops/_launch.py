"""Launching without what Triton's JIT repeats for every launch: some 60 us of Python, where the GPU may need 10."""
from __future__ import annotations

import functools
from collections.abc import Callable

import torch


@functools.cache
def _direct() -> bool:
    """Whether this Triton's compiled kernels are known to take the arguments that Launch hands them."""
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) in ((3, 6), (3, 7))


@functools.cache
def _default_launcher() -> Callable:
    from helion.runtime import default_launcher

    return default_launcher


def _watched() -> bool:
    """Whether something, such as a profiler, has asked Triton to be called before or after every launch."""
    from triton import knobs

    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


class Launch:
    """What generated code calls instead of Helion's launcher, for calls of one layout of arguments on one device.

    Of such calls nothing differs but the addresses, and these not in what Triton compiles for, so that all of them run
    the machine code of the first one.  From the second one on it is launched at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device.index
        self._jit = self._run = self._function = self._metadata = None

    def __call__(self, jit: object, grid: tuple[int, ...], *args: object, **options: object) -> None:
        if jit is self._jit and not _watched():
            x, y, z = (*grid, 1, 1)[:3]
            stream = torch._C._cuda_getCurrentRawStream(self._device)
            self._run(x, y, z, stream, self._function, self._metadata, None, None, None, *args)
            return
        compiled = _default_launcher()(jit, grid, *args, **options)
        if compiled is not None and _direct():
            self._run, self._function, self._metadata = compiled.run, compiled.function, compiled.packed_metadata
            self._jit = jit
