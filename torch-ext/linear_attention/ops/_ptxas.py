"""Which assembler Triton uses for these kernels on a Hopper GPU.

ptxas 12.8, which Triton 3.7 uses there, gets some kernels with several matrix products wrong: the shared-memory address
of an operand is taken from a uniform register that nothing has written, so that the product is wrong or the launch ends
in an illegal access (https://github.com/triton-lang/triton/issues/11366).  The same Triton carries ptxas 13.1 for newer
GPUs, which is right on the same input.  Here the kernels of this package, and no others, are compiled with it.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator

import torch

_log = logging.getLogger("linear_attention")
_RIGHT = (13, 1)
_lock = threading.RLock()  # the knob is the process's


def _version(tool: object) -> tuple[int, ...]:
    return tuple(map(int, tool.version.split(".")))


def _driver() -> int:
    """The CUDA version up to which the driver loads machine code, as 1000 times the major version."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


@functools.cache
def _newer() -> str | None:
    """The path of an assembler to use instead of Triton's for sm90, if there is need and one that is right."""
    import triton
    from triton import knobs

    early = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)  # its code does not bring out the fault
    if early or os.environ.get("TRITON_PTXAS_PATH") or _version(knobs.nvidia.ptxas) >= _RIGHT:
        return None
    try:
        tool = knobs.nvidia.ptxas_blackwell
    except (AttributeError, RuntimeError):  # another Triton, or one packed without it
        tool = None
    if tool is None or _version(tool) < _RIGHT:
        reason = "Triton has no newer one"
    elif _driver() < 1000 * _version(tool)[0]:
        reason = "the driver is too old for what the newer one makes"
    else:
        return tool.path
    _log.warning(
        "ptxas %s miscompiles some kernels for this GPU, and %s: point TRITON_PTXAS_PATH at ptxas 13.1 or later",
        knobs.nvidia.ptxas.version, reason)
    return None


@contextlib.contextmanager
def _using(path: str) -> Iterator[None]:
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas_version

    with _lock, knobs.nvidia.scope():
        knobs.nvidia.ptxas = path
        get_ptxas_version.cache_clear()  # a part of the key of Triton's cache on disk
        try:
            yield
        finally:
            get_ptxas_version.cache_clear()


def assembled_right(host: Callable, device: torch.device) -> Callable:
    """`host`, a callable that Helion has generated; from here on its Triton kernels are compiled as said above."""
    if torch.cuda.get_device_capability(device) != (9, 0) or _newer() is None:
        return host
    from triton.runtime.jit import JITFunction

    def wrapped(compile_: Callable) -> Callable:
        @functools.wraps(compile_)
        def with_newer(*args: object, **kwargs: object) -> object:
            with _using(_newer()):
                return compile_(*args, **kwargs)

        return with_newer

    for jit in host.__globals__.values():
        if isinstance(jit, JITFunction) and not hasattr(jit._do_compile, "__wrapped__"):
            jit._do_compile = wrapped(jit._do_compile)
    return host
