"""How a kernel function becomes something to call: the one place that names `helion.aot_kernel`.

CPU tensors run in Helion's interpreter.  CUDA tensors run a compiled callable that is resolved once for every layout
of the arguments and kept: the config comes from the rendered file beside the kernel's source (`configs/README.md`),
nothing is ever searched, and no file is written in the user's folder.  With `HELION_AOT_MODE` set to anything but
`evaluate` calls go through `helion.aot_kernel` instead, so that Helion's documented workflow works on this package.
"""
from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import pathlib
import threading
import types
from collections.abc import Callable, Iterator

import helion
import torch

from . import _cpu
from ._launch import Launch
from ._ptxas import assembled_right

try:
    from helion import aot_kernel
except ImportError:  # Helion before 1.4, which the Hub's builder imports the package with
    from helion.experimental.aot_kernel import aot_kernel

_log = logging.getLogger("linear_attention")
_lock = threading.RLock()  # binding and code generation share state in Helion and Inductor
_INT32_MAX = 2**31 - 1
_KEPT = 4096  # layouts a kernel keeps before it forgets them all: bounded, whatever the lengths a user sends


@functools.cache
def _start_interpreter() -> None:
    _cpu.register()
    _log.warning("CPU tensors: kernels run in Helion's interpreter, slow and exact")


@functools.cache
def _warn_untuned(name: str, capability: str) -> None:
    _log.warning("%s (%s) has no tuned configs: safe ones are used; tools/tune.py makes better ones", name, capability)


@functools.cache
def _rendered(source: pathlib.Path, device: torch.device) -> types.ModuleType:
    """The rendered configs of a kernel's source file for a device; another GPU's file holds the safe defaults too."""
    capability = "sm{}{}".format(*torch.cuda.get_device_capability(device))
    path = source.with_name(f"_helion_aot_{source.stem}_cuda_{capability}.py")
    if not path.exists():
        _warn_untuned(torch.cuda.get_device_name(device), capability)
        path = source.with_name(f"_helion_aot_{source.stem}_cuda_sm90.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _reach(args: tuple) -> int:
    """The largest element offset in an argument, or in an output as large as these kernels make them.

    An output has the arguments' rows with at most 128 columns, or a K x V state for every sequence, head and chunk.  A
    chunk's length is the least of the integer arguments of at least 16 and of the widths that it can be; a table of
    sequences adds a chunk for each row.
    """
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    inputs = max(sum((n - 1) * s for n, s in zip(x.shape, x.stride())) for x in tensors)
    tokens = [x for x in tensors if x.dim() == 4 and x.numel()]
    widths = [x.shape[3] for x in tokens]
    C = min([n for n in args if type(n) is int and n >= 16] + [n for n in widths if n in (16, 32, 64)], default=16)
    width = max(widths, default=0)
    rows = max((x.numel() // x.shape[3] for x in tokens), default=0)
    more = max((x.shape[0] for x in tensors if x.dtype == torch.int32), default=0)
    states = max((x.shape[2] * (x.shape[0] * -(-x.shape[1] // C) + more) for x in tokens), default=0)
    return max(inputs, rows * max(128, width), states * width**2)


def _aliases(args: tuple) -> tuple[int, ...]:
    """For each argument the position of the first one that is the same object."""
    return tuple(next(i for i, y in enumerate(args) if y is x) for x in args)


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    """Helion points TRITON_CACHE_DIR, which all of the process reads, at a folder of its own: undo that."""
    before = os.environ.get("TRITON_CACHE_DIR")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TRITON_CACHE_DIR", None)


def _on_device(device: torch.device, run: Callable, *args: object) -> object:
    """Triton launches on the current device: make it the tensors'."""
    if torch.cuda.current_device() == device.index:
        return run(*args)
    with torch.cuda.device(device):
        return run(*args)


class Kernel:
    """A Helion kernel: interpreted for CPU tensors, compiled with a shipped config for CUDA tensors.

    Arguments are positional, all of them; tensors live on one device.  `fp32_precision` is the dot_precision where the
    first tensor is fp32, if that of `settings` is not enough.
    """

    def __init__(self, fn: Callable, fp32_precision: str | None = None, **settings: object) -> None:
        self.fn = fn
        self.name = fn.__name__
        self.settings = {"static_shapes": False, **settings}
        self.fp32_settings = self.settings | ({"dot_precision": fp32_precision} if fp32_precision else {})
        self._fixed: dict[object, object] = {}
        self._runs: dict[tuple, Callable] = {}
        functools.update_wrapper(self, fn)

    @functools.cached_property
    def helion(self) -> object:
        """The `helion.aot_kernel` object; binding and code generation need no GPU."""
        return aot_kernel(**self.settings)(self.fn)

    @functools.cached_property
    def _interpreted(self) -> object:
        return helion.kernel(self.fn, ref_mode=helion.RefMode.EAGER, **self.settings)

    def __call__(self, *args: object) -> object:
        key, pointers, device = [], [], None
        for x in args:
            if isinstance(x, torch.Tensor):
                device = device or x.device
                pointer = x.data_ptr()
                pointers.append(pointer)
                # tensor descriptors need an aligned base, a view of one an offset of 0
                key += (x.dtype, x.shape, x.stride(), pointer & 15, x.storage_offset() == 0)
            else:
                key += (type(x), x)
        if device.type == "cpu":
            _start_interpreter()
            with torch.autocast("cpu", enabled=False):  # the interpreter's products are PyTorch's
                return self._interpreted(*args)
        if os.environ.get("HELION_AOT_MODE", "evaluate").lower() != "evaluate":
            return self.helion(*args)
        if len(set(pointers)) < len(pointers):  # one tensor given twice is one to the compiler
            key += _aliases(args)
        key = (device, *key)
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = self._resolve(args, device)
        return run(*args)

    def _resolve(self, args: tuple, device: torch.device) -> Callable:
        """The compiled callable for `args`; compiles only if Helion has not met their class with the same config."""
        with _lock, _environment_kept():
            if len(self._runs) >= _KEPT:
                self._runs.clear()
            run = functools.partial(self.compiled(args, self.config(*args)), _launcher=Launch(device))
            return run if torch.cuda.device_count() == 1 else functools.partial(_on_device, device, run)

    def compiled(self, args: tuple, config: dict[str, object]) -> Callable:
        """The callable for arguments of the class of `args` with a config; positional arguments, current device."""
        # Helion decides on 64-bit offsets by element counts, which miss strides and outputs
        wide = _reach(args) > _INT32_MAX
        # Helion 1.4 may compile sizes and strides of 0 and 1 in without keying on them: one object for each pattern
        pattern = [tuple(min(n, 2) for n in (*x.shape, *x.stride())) for x in args if isinstance(x, torch.Tensor)]
        settings = self.settings_for(args)
        key = wide, tuple(pattern), settings.get("dot_precision"), repr(sorted(config.items()))
        if key not in self._fixed:
            # told its config, Helion drops guards that other configs need (on B and H, say) and the search's heuristics
            fixed = {"config": config, "disable_autotuner_heuristics": True}
            if wide:
                fixed["index_dtype"] = torch.int64
            self._fixed[key] = helion.kernel(self.fn, **fixed, **settings)
        device = next(x.device for x in args if isinstance(x, torch.Tensor))
        return assembled_right(self._fixed[key].bind(args).compile_config(config), device)

    def settings_for(self, args: tuple) -> dict[str, object]:
        """The Helion settings of a call."""
        first = next(x for x in args if isinstance(x, torch.Tensor))
        return self.fp32_settings if first.dtype == torch.float32 else self.settings

    def config(self, *args: object) -> dict[str, object]:
        """The config that a call with these CUDA tensors runs with."""
        device = next(x.device for x in args if isinstance(x, torch.Tensor))
        return getattr(_rendered(pathlib.Path(self.fn.__code__.co_filename), device), f"autotune_{self.name}")(*args)


def kernel(**settings: object) -> Callable[[Callable], Kernel]:
    """Decorator: Helion settings of the kernel, such as `dot_precision`, and what else Kernel takes."""
    return lambda fn: Kernel(fn, **settings)
