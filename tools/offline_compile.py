"""Compile Helion kernels for an NVIDIA GPU that this machine does not have.

    python offline_compile.py path/to/mod.py:kernel --device h200 \
        --args 'bf16[2,1024,4,64]' 'f32[2,1024,4]' None 0.125 64 \
        [--config '{"block_sizes": [64], "num_warps": 8}'] [--random 20] [--jobs 2] [--dump DIR]

As a library, in a process that has not yet used CUDA:

    import offline_compile as oc
    oc.pretend("h200")                       # before or after `import helion`
    job = oc.Job(my_kernel, (oc.fake("bf16[2,1024,4,64]"), 64))
    print(job.source(config))                # Helion's Triton source
    for config, report in job.screen([None, *job.random_configs(20)], jobs=2, timeout=120): ...

Helion binds and generates code on fake CUDA tensors, the generated host function runs
on those tensors, and every Triton launch is turned into Triton's own "warmup" compile
for the pretended target.  Nothing touches a driver: ptxas comes with the Triton wheel.
"""
from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import dataclasses
import importlib
import importlib.util
import io
import json
import multiprocessing as mp
import multiprocessing.connection
import operator
import os
import pathlib
import random
import re
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable

import torch
import torch._subclasses.fake_tensor as fake_tensor
import triton
from pipeline_races import pipeline_races
from torch.utils._python_dispatch import _disable_current_modes
from triton import knobs
from triton.backends.compiler import GPUTarget

KIB, GIB = 2**10, 2**30
DEVICES = {  # torch's name, sm, SMs, memory, KiB of shared memory a block can have, threads of an SM
    "a100": ("NVIDIA A100-SXM4-80GB", 80, 108, 80 * GIB, 163, 2048),
    "a10": ("NVIDIA A10", 86, 72, 24 * GIB, 99, 1536),
    "l4": ("NVIDIA L4", 89, 58, 24 * GIB, 99, 1536),
    "h100": ("NVIDIA H100 80GB HBM3", 90, 132, 80 * GIB, 227, 2048),
    "h200": ("NVIDIA H200", 90, 132, 141 * GIB, 227, 2048),
    "b200": ("NVIDIA B200", 100, 148, 180 * GIB, 227, 2048),
    "b300": ("NVIDIA B300", 103, 148, 270 * GIB, 227, 2048),
    "rtx5090": ("NVIDIA GeForce RTX 5090", 120, 170, 32 * GIB, 99, 1536),
}
DTYPES = {
    "bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8,
    "u8": torch.uint8, "b1": torch.bool, "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2,
}
INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async", "mma": r"\bmma\.sync", "tcgen05": r"\btcgen05\.mma",
    "tma_load": r"cp\.async\.bulk\.tensor\S*\.shared::c(?:ta|luster)\.global",
    "tma_store": r"cp\.async\.bulk\.tensor\S*\.global\.shared::cta",
    "cp_async": r"\bcp\.async\.c[ag]", "setmaxnreg": r"\bsetmaxnreg", "ldmatrix": r"\bldmatrix",
    "atomic": r"\b(?:atom|red)\.(?:global|async|relaxed|acq|release|gpu)", "local": r"\b(?:ld|st)\.local",
}
FAKE_MODE = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
_device: types.SimpleNamespace | None = None


_plain_dispatch = fake_tensor.FakeTensorMode.dispatch


def _dispatch(self: object, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
    """Let torch.tensor(2.0, device="cuda").item(), as Inductor rounds constants, stay a number."""
    out = _plain_dispatch(self, func, types, args, kwargs or {})
    if func is torch.ops.aten._to_copy.default:
        constant = getattr(args[0], "constant", None)
        if constant is not None and constant.numel() == 1:
            with _disable_current_modes():
                out.item_memo = constant.to(out.dtype).item()
    return out


def pretend(device: str = "h200", cuda_version: str = "13.0") -> None:
    """Make torch, Inductor, Triton and Helion see `device`.  One device per process."""
    global _device
    name, sm, sms, memory, shared, threads = DEVICES[device]
    if _device is not None:
        if _device.name != name:
            raise RuntimeError(f"this process already pretends to have {_device.name}")
        return
    major, minor = divmod(sm, 10)
    props = _device = types.SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=sms, total_memory=memory,
        warp_size=32, regs_per_multiprocessor=65536, max_threads_per_multi_processor=threads,
        max_threads_per_block=1024, shared_memory_per_block=48 * KIB,
        shared_memory_per_block_optin=shared * KIB, shared_memory_per_multiprocessor=(shared + 1) * KIB,
        L2_cache_size=50 * 2**20,
    )
    fakes = {
        "is_available": lambda: True, "is_initialized": lambda: True, "_lazy_init": lambda: None,
        "device_count": lambda: 1, "current_device": lambda: 0, "set_device": lambda device: None,
        "synchronize": lambda device=None: None, "get_device_name": lambda device=None: name,
        "get_device_properties": lambda device=None: props,
        "get_device_capability": lambda device=None: (major, minor),
    }
    from torch._dynamo.device_interface import CudaInterface

    for key, value in fakes.items():
        setattr(torch.cuda, key, value)
        if key in vars(CudaInterface):  # Inductor bound the originals at import
            setattr(CudaInterface, key, staticmethod(value))
    torch.version.cuda = cuda_version
    fake_tensor.init_gpu_context = lambda *args: None
    fake_tensor.FakeTensorMode.avoid_device_init = True
    fake_tensor.FakeTensorMode.dispatch = _dispatch
    # A CPU build of torch has no device guard for CUDA, and indexing or .contiguous() of even a
    # fake CUDA tensor asks for one: lend it the no-op guard of the meta device.
    libc10 = ctypes.CDLL(f"{torch.__path__[0]}/lib/libc10.so")
    guards = (ctypes.c_void_p * 16).in_dll(libc10, "_ZN3c104impl26device_guard_impl_registryE")
    guards[1] = guards[14]  # c10::DeviceType: CUDA, Meta
    # Helion and Triton refuse TMA on a base whose alignment they cannot see, and tell fake
    # tensors by class name.  Give them an address: storages 256-byte aligned, as CUDA's are.
    fake_tensor.FakeTensor.__name__ = "PretendTensor"
    fake_tensor.FakeTensor.data_ptr = (
        lambda self: 0x7F0000000000 + int(self.storage_offset()) * self.element_size())
    triton.runtime.driver.set_active(types.SimpleNamespace(  # what compiling asks of a driver
        get_current_target=lambda: GPUTarget("cuda", sm, 32), get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0, get_active_torch_device=lambda: torch.device("cuda", 0)))
    if sm == 90:  # as ops/_ptxas.py does for the package's kernels on such a GPU
        knobs.nvidia.ptxas = knobs.nvidia.ptxas_blackwell.path
    with contextlib.suppress(ImportError):  # answers cached before the pretence
        import helion._compat
        import helion._hardware

        for module in (helion._compat, helion._hardware):
            for value in vars(module).values():
                getattr(value, "cache_clear", lambda: None)()


def _bind_as_real() -> None:
    """Give sizes of fake arguments symbols, as those of real ones have.

    Helion takes a FakeTensor's sizes as concrete even with static_shapes=False: the code then
    lacks the tail masks that a dynamic T needs, and another T would reuse it.
    """
    from helion._compiler import compile_environment

    environment = compile_environment.CompileEnvironment
    plain = environment._to_fake_tensor
    if getattr(plain, "binds_as_real", False):
        return

    class NoTensor:
        pass

    def to_fake_tensor(self: object, tensor: torch.Tensor, source: object) -> torch.Tensor:
        if self.settings.static_shapes or not isinstance(tensor, fake_tensor.FakeTensor):
            return plain(self, tensor, source)
        converter, kept = self.fake_mode.fake_tensor_converter, compile_environment.FakeTensor
        convert = converter.from_real_tensor

        def from_real_tensor(mode: object, value: torch.Tensor, **kwargs: object) -> torch.Tensor:
            with _disable_current_modes():
                meta = torch.empty_strided(
                    tuple(value.size()), tuple(value.stride()), dtype=value.dtype, device="meta")
            symbolic = convert(mode, meta, **kwargs)
            with self.fake_mode:
                return torch.empty_strided(
                    symbolic.size(), symbolic.stride(), dtype=value.dtype, device=value.device)

        converter.from_real_tensor, compile_environment.FakeTensor = from_real_tensor, NoTensor
        try:
            return plain(self, tensor, source)
        finally:
            compile_environment.FakeTensor = kept
            del converter.from_real_tensor

    to_fake_tensor.binds_as_real = True
    environment._to_fake_tensor = to_fake_tensor


def fake(spec: str) -> object:
    """'bf16[2,64]' or 'f32[4,64]@64,1' (strides) -> fake CUDA tensor; else a Python literal."""
    match = re.fullmatch(r"(\w+)\[([\d,\s]*)\](?:@([\d,\s]+))?", spec.strip())
    if match is None:
        return ast.literal_eval(spec)
    dtype, shape = DTYPES[match[1]], [int(n) for n in match[2].split(",") if n.strip()]
    with FAKE_MODE:
        if match[3]:
            return torch.empty_strided(shape, [int(n) for n in match[3].split(",")], dtype=dtype, device="cuda")
        return torch.empty(shape, dtype=dtype, device="cuda")


def fakes(specs: list[object]) -> tuple[object, ...]:
    """Arguments of a kernel call: strings by `fake`, everything else as it is."""
    return tuple(fake(x) if isinstance(x, str) else x for x in specs)


@dataclasses.dataclass
class Launch:
    """One compiled Triton kernel of a Helion kernel."""

    name: str
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    regs: int
    stack_bytes: int  # the runtime's n_spills is this / 4
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    tmem_cols: int
    blocks_per_sm: int  # by registers, shared and tensor memory, threads; 0 cannot launch
    instructions: dict[str, int]
    races: list[str]  # see pipeline_races.py
    stage_ms: dict[str, float]


@dataclasses.dataclass
class Report:
    config: dict[str, object]
    device: str
    ok: bool
    seconds: float
    launches: list[Launch]
    error: str = ""


def _inspect(kernel: object, log: str, grid: tuple[int, ...], times: object) -> Launch:
    meta, ptx = kernel.metadata, kernel.asm["ptx"]
    number = lambda pattern: int(re.search(pattern, log)[1])  # noqa: E731
    regs, warps = number(r"Used (\d+) registers"), meta.num_warps  # warp specialization adds warps
    tmem = getattr(meta, "tmem_size", 0) or 0
    return Launch(
        name=meta.name, grid=tuple(grid), num_warps=warps, num_stages=meta.num_stages, regs=regs,
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_store_bytes=number(r"(\d+) bytes spill stores"),
        spill_load_bytes=number(r"(\d+) bytes spill loads"),
        shared_bytes=meta.shared, tmem_cols=tmem,
        blocks_per_sm=0 if warps > 32 else min(
            65536 // (-(-regs // 8) * 8 * 32 * warps), _device.max_threads_per_multi_processor // (32 * warps),
            512 // (tmem or 16),
            _device.shared_memory_per_multiprocessor // (meta.shared + KIB)),
        instructions={k: n for k, p in INSTRUCTIONS.items() if (n := len(re.findall(p, ptx)))},
        races=pipeline_races(kernel.asm["ttgir"]),
        stage_ms={stage: round(us / 1000, 1) for stage, us in times.lowering_stages},
    )


@contextlib.contextmanager
def recording(dump: pathlib.Path | None = None):
    """Compile instead of launching, for any code run inside on fake tensors: one Helion
    kernel, or a whole pipeline of them.  Yields the list that the launches are added to."""
    _bind_as_real()
    launches: list[Launch] = []
    times: list[object] = []
    run = triton.runtime.jit.JITFunction.run

    def compile_only(jit: object, *args: object, grid: object, warmup: bool, **kwargs: object) -> object:
        log = io.StringIO()
        jit.device_caches.clear()  # compile a repeated launch again
        with contextlib.redirect_stdout(log), _disable_current_modes():
            compiled = run(jit, *args, grid=grid, warmup=True, **kwargs)
        launches.append(_inspect(compiled, log.getvalue(), grid, times.pop()))
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)
            for ext in ("ttgir", "ptx", "cubin"):
                data = compiled.asm[ext]
                (dump / f"{len(launches)}_{compiled.metadata.name}.{ext}").write_bytes(
                    data if isinstance(data, bytes) else data.encode())
        return compiled

    knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
    knobs.compilation.listener = lambda **event: times.append(event["times"])
    triton.runtime.jit.JITFunction.run = compile_only
    try:
        with FAKE_MODE:
            yield launches
    finally:
        triton.runtime.jit.JITFunction.run = run
        knobs.compilation.listener = None


@contextlib.contextmanager
def not_launching():
    """Fake tensors throughout, and launches left out: Helion's host code then only allocates."""
    _bind_as_real()
    run = triton.runtime.jit.JITFunction.run
    triton.runtime.jit.JITFunction.run = lambda *args, **kwargs: None
    try:
        with FAKE_MODE:
            yield
    finally:
        triton.runtime.jit.JITFunction.run = run


def report(
    compiled: Callable[[], Callable], args: tuple[object, ...], config: dict[str, object],
    dump: pathlib.Path | None = None,
) -> Report:
    """Compile every launch that `compiled()`, Helion's host code for `config`, makes with fake `args`."""
    start, found = time.perf_counter(), Report(config, _device.name, False, 0.0, [])
    try:
        with recording(dump) as found.launches:
            compiled()(*args)
        reasons = [f"{k.name}: too many registers, shared or tensor memory" for k in found.launches
                   if not k.blocks_per_sm]
        reasons += [f"{k.name}: race on {race}" for k in found.launches for race in k.races]
        found.ok, found.error = not reasons, "; ".join(reasons)
    except Exception as error:
        found.error = f"{type(error).__name__}: {error}"[-4000:]
        if dump is not None:
            (dump / "error.txt").write_text(traceback.format_exc())
    found.seconds = round(time.perf_counter() - start, 2)
    return found


class Job:
    """A Helion kernel bound to example arguments (see `fake`) on the pretended device."""

    def __init__(self, kernel: object, args: tuple[object, ...]) -> None:
        """`kernel` is Helion's, or has the same `bind` and `normalize_args`."""
        assert _device is not None, "call pretend() first"
        _bind_as_real()
        self.args = kernel.normalize_args(*args)
        self.bound = kernel.bind(self.args)
        self.spec = self.bound.config_spec

    def config(self, config: object = None) -> object:
        import helion

        if config is None:
            return self.spec.default_config()
        return config if isinstance(config, helion.Config) else helion.Config(**config)

    def source(self, config: object = None) -> str:
        return self.bound.to_triton_code(self.config(config))

    def random_configs(self, count: int, seed: int = 0) -> list[object]:
        """Configs as the autotuner would draw them, without duplicates."""
        random.seed(seed)
        generator = self.spec.create_config_generation()
        return list(dict.fromkeys(generator.random_config() for _ in range(count)))

    def compile(self, config: object = None, dump: pathlib.Path | None = None) -> Report:
        """Generate, launch on fake tensors, compile each launch.  An LLVM abort ends the process."""
        config = self.config(config)
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)
            (dump / "triton_source.py").write_text(self.source(config))
        return report(
            lambda: self.bound.compile_config(config, allow_print=False), self.args, dict(config.config), dump)

    def screen(self, configs: list[object], jobs: int = 2, timeout: float = 300.0,
               dump: pathlib.Path | None = None):
        """Yield each config and its Report, compiled in a forked child that may crash or hang."""
        context, queue, running = mp.get_context("fork"), list(enumerate(configs)), {}

        def work(sender: object, stderr: object, config: object, where: pathlib.Path | None) -> None:
            os.dup2(stderr.fileno(), 2)  # MLIR and LLVM write their reasons there
            sender.send(self.compile(config, where))

        while queue or running:
            while queue and len(running) < jobs:
                index, config = queue.pop(0)
                receiver, sender = context.Pipe(duplex=False)
                stderr = tempfile.TemporaryFile("w+", errors="replace")
                child = context.Process(
                    target=work, args=(sender, stderr, config, dump and dump / f"{index:03d}"))
                child.start(), sender.close()
                running[receiver] = child, config, stderr, time.perf_counter()
            ready = mp.connection.wait(list(running), timeout=0.2)
            for receiver, (child, config, stderr, start) in list(running.items()):
                seconds = time.perf_counter() - start
                if receiver not in ready and seconds < timeout:
                    continue
                report = Report(dict(self.config(config).config), _device.name, False, round(seconds, 2), [])
                try:
                    if receiver in ready:
                        report = receiver.recv()
                    else:
                        report.error = f"timeout after {timeout} s"
                except EOFError:
                    child.join()
                    report.error = f"compiler crashed, exit code {child.exitcode}"
                if not report.ok:
                    stderr.seek(0)
                    reasons = [x.strip() for x in stderr if re.search(r"error:|LLVM ERROR|[Aa]ssert", x)]
                    report.error = "\n".join([report.error, *reasons])[:4000]
                child.kill(), child.join(), receiver.close(), stderr.close()
                del running[receiver]
                yield config, report


def _load(target: str) -> object:
    path, name = target.rsplit(":", 1)
    if path.endswith(".py"):
        spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # Helion reads kernels through sys.modules
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(path)
    return operator.attrgetter(name)(module)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", help="path/to/mod.py:name or package.mod:name.attribute")
    parser.add_argument("--args", nargs="*", default=[], help="bf16[2,64], f32[4,64]@64,1 or a literal")
    parser.add_argument("--device", choices=DEVICES, default="h200")
    parser.add_argument("--config", action="append", default=[], help="JSON, 'default' or 'source' (print it)")
    parser.add_argument("--random", type=int, default=0, help="add N random configs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--dump", type=pathlib.Path, help="folder for source, ttgir, ptx and cubin")
    options = parser.parse_args()
    pretend(options.device)
    job = Job(_load(options.kernel), tuple(fake(text) for text in options.args))
    if "source" in options.config:
        print(job.source())
        options.config.remove("source")
    configs = [None if text == "default" else json.loads(text) for text in options.config]
    configs += job.random_configs(options.random, options.seed)
    for _, report in job.screen(configs, options.jobs, options.timeout, options.dump):
        print(json.dumps(dataclasses.asdict(report), default=str), flush=True)


if __name__ == "__main__":
    main()
