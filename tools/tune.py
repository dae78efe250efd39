"""Time configs of every kernel on this GPU and keep the fastest one whose numbers are right.

    python tools/tune.py                                    all operators at the shapes of configs/shapes.json
    python tools/tune.py --ops kda gla --shapes B1_T8192_H96_D128 --kernels kda_solve --budget-s 300
    python tools/tune.py --shapes B2_T4096_H8_K96_V128      a shape of your own
    python tools/tune.py --screen --device h200             no GPU: compile candidates, keep those that do not spill
    python tools/tune.py --derive --device b200             no GPU: sm90's entries for another one, as not measured

Each kernel call of a forward and backward is timed by itself, with the operator's own tensors.  Results go into
configs/cuda_<arch>/<module>.json one shape at a time: stop when you like, and run again to go on (`--again` measures
what is there already).  Then tools/render_configs.py makes the files that the package reads.

Candidates come from `--candidates FILE`, as `--screen` writes it with the generated code, or else from a grid over
block sizes, warps, stages and indexing.  Other processes compile them ahead, into Triton's cache.
"""
from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import functools
import gzip
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
import time

import render_configs
import torch
import workloads

TOLERANCE = 5e-3  # relative RMS distance from the safe config's output; configs differ in the order of their sums
SPILL = 64  # bytes a thread that a screened candidate may spill
KEPT = 6  # candidates of a call that screening keeps


def grid(blocks: int, width: int) -> list[dict[str, object]]:
    """All configs for a kernel with that many block sizes over dimensions of at most `width`."""
    sizes = [n for n in (16, 32, 64, 128) if n <= width]
    found = []
    for block_sizes in itertools.product(sizes, repeat=blocks):
        if blocks == 2 and max(block_sizes) > 4 * min(block_sizes):
            continue
        for warps, stages, indexing in itertools.product((4, 8), (1, 2, 3), ("pointer", "tensor_descriptor")):
            config = {"indexing": indexing, "num_stages": stages, "num_warps": warps}
            found.append({"block_sizes": list(block_sizes), **config} if blocks else config)
    return found


def shapes(names: list[str] | None) -> dict[str, dict[str, int]]:
    """Sizes by name: names of configs/shapes.json, or B1_T8192_H8_D64 and B1_T8192_H8_K64_V128 spelled out."""
    known, found = workloads.shapes(), {}
    for name in names or known:
        sizes = known.get(name) or {key: int(n) for key, n in re.findall(r"([BTHDKV])(\d+)", name)}
        width = sizes.pop("D", None)
        found[name] = sizes if width is None else {**sizes, "K": width, "V": width}
    return found


def wanted(kernel: str, options: argparse.Namespace) -> bool:
    return any(part in kernel for part in options.kernels)


class Store:
    """configs/cuda_<arch>/<module>.json of one architecture; every change is written at once."""

    def __init__(self, folder: pathlib.Path, run: dict[str, object]) -> None:
        self.folder = folder
        self.run = run
        self.modules = {name: module for module, names in render_configs.kernels().items() for name in names}

    def _read(self, kernel: str) -> dict[str, object]:
        path = self.folder / f"{self.modules[kernel]}.json"
        return json.loads(path.read_text()) if path.exists() else {"runs": [], "kernels": {}}

    def measured(self, kernel: str, args: list[object]) -> bool:
        store = self._read(kernel)
        key = render_configs.form_of(args)
        return any(render_configs.form_of(entry["args"]) == key and entry.get("ms") is not None
                   for entry in store["kernels"].get(kernel, []))

    def put(self, kernel: str, entry: dict[str, object]) -> None:
        """Add an entry of this run, in place of another one of the same form and size."""
        store = self._read(kernel)
        if self.run not in store["runs"]:
            store["runs"].append(self.run)
        key = render_configs.form_of(entry["args"])
        entries = [x for x in store["kernels"].get(kernel, []) if render_configs.form_of(x["args"]) != key]
        store["kernels"][kernel] = [*entries, {**entry, "run": store["runs"].index(self.run)}]
        self._write(kernel, store)

    def keep(self, kernel: str, calls: list[list[object]]) -> None:
        """Drop the entries of other calls."""
        store = self._read(kernel)
        keys = [render_configs.form_of(args) for args in calls]
        store["kernels"][kernel] = [
            entry for entry in store["kernels"].get(kernel, []) if render_configs.form_of(entry["args"]) in keys]
        self._write(kernel, store)

    def _write(self, kernel: str, store: dict[str, object]) -> None:
        self._drop_unused_runs(store)
        path = self.folder / f"{self.modules[kernel]}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(render_configs.dump(store))
        part.replace(path)

    @staticmethod
    def _drop_unused_runs(store: dict[str, object]) -> None:
        entries = [entry for entries in store["kernels"].values() for entry in entries]
        used = sorted({entry["run"] for entry in entries})
        store["runs"] = [store["runs"][n] for n in used]
        for entry in entries:
            entry["run"] = used.index(entry["run"])


def portable(config: dict[str, object]) -> dict[str, object]:
    """A config without what fits only calls with the same optional tensors: a list of indexing modes has one a load."""
    kept = {key: config[key] for key in ("block_sizes", "num_stages", "num_warps", "pid_type", "maxnreg")
            if config.get(key) not in (None, [])}
    modes = config.get("indexing", "pointer")
    modes = [modes] if isinstance(modes, str) else modes
    return {**kept, "indexing": max(sorted(set(modes)), key=modes.count)}


def collected(path: pathlib.Path) -> dict[str, list[dict[str, object]]]:
    """What `HELION_AOT_MODE=collect` recorded (tuned_configs_<gpu>.json), as a file of candidates."""
    names = {str(dtype): name for name, dtype in workloads.DTYPES.items()}
    arity = {node.name: len(node.args.args) for nodes in render_configs.functions().values() for node in nodes}
    found: dict[str, list[dict[str, object]]] = {}
    for kernel, records in json.loads(path.read_text()).items():
        for record in records if kernel in arity else ():
            features, args = record["shape_features"], []
            for n in range(arity[kernel]):
                shape = [features[f"arg{n}_dim{d}"] for d in range(features.get(f"arg{n}_ndim", 0))]
                args.append(f"{names[features[f'arg{n}_dtype']]}[{','.join(map(str, shape))}]" if shape
                            else features.get(f"arg{n}_scalar"))
            found.setdefault(kernel, []).append(
                {"args": args, "candidates": [{"config": portable(record["config"])}]})
    return found


def candidates(kernel: object, args: tuple, screened: dict[str, list]) -> list[dict[str, object]]:
    """For a call, {"config", and "source" if the code is there already}: the safe config first."""
    form = render_configs.form_of(workloads.describe(args))[1]
    groups = [group for group in screened.get(kernel.name, []) if render_configs.form_of(group["args"])[1] == form]
    safe = {"config": workloads.safe_config(kernel, args)}
    found = [x for group in groups for x in group["candidates"]]
    if not found:
        width = max((n for x in args if isinstance(x, torch.Tensor) for n in x.shape[3:]), default=64)
        found = [{"config": config} for config in grid(len(safe["config"].get("block_sizes", [])), width)]
    unique = {}
    for x in [*(group["safe"] for group in groups if "safe" in group), safe, *found]:
        unique.setdefault(str(sorted(x["config"].items())), x)
    return list(unique.values())


def read(path: pathlib.Path) -> dict[str, list]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return json.load(file)


def write(path: pathlib.Path, found: dict[str, list]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        json.dump(found, file, indent=1)


@functools.cache
def load(source: str, name: str) -> object:
    """The host function `name` of a kernel's generated code."""
    path = pathlib.Path(tempfile.gettempdir()) / "tuned-sources" / f"s{hashlib.sha256(source.encode()).hexdigest()}.py"
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(source)
        part.replace(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def compiled(kernel: object, args: tuple, candidate: dict[str, object]) -> object:
    """The callable of a candidate, from its source if the file of candidates has that: Helion takes a second or two."""
    from linear_attention.ops._ptxas import assembled_right

    config = candidate["config"]
    if "source" in candidate:
        host = load(candidate["source"], kernel.name)
    else:
        bound = workloads.flexible(kernel, args, config["indexing"]).bind(args)
        host = bound.compile_config(config, allow_print=False)
    return assembled_right(host, next(x.device for x in args if isinstance(x, torch.Tensor)))


# ---- without a GPU


def screen(options: argparse.Namespace) -> None:
    """Compile candidates for a GPU that is not there; the file lists, for each call, the best that do not spill."""
    import offline_compile

    offline_compile.pretend(options.device)
    path = pathlib.Path(options.candidates)
    found = read(path) if path.exists() else {}
    for operator, sizes, l2norm in work(options):
        for kernel, args in workloads.recorded_offline(operator, sizes, l2norm=l2norm):
            described = workloads.describe(args)
            form = render_configs.form_of(described)[1]
            groups = found.setdefault(kernel.name, [])
            if not wanted(kernel.name, options) or any(
                    render_configs.form_of(group["args"])[1] == form for group in groups):
                continue
            start = time.perf_counter()
            jobs = {indexing: offline_compile.Job(workloads.flexible(kernel, args, indexing), args)
                    for indexing in ("pointer", "tensor_descriptor")}
            good, tried = _screened(jobs, [x["config"] for x in candidates(kernel, args, {})], options.jobs)
            safe = {"config": workloads.safe_config(kernel, args)}
            for x in [safe, *good]:
                x["source"] = jobs[x["config"]["indexing"]].source(x["config"])
            groups.append({"operator": operator, "args": described, "safe": safe, "candidates": good})
            write(path, found)
            print(f"{operator} {kernel.name} {described}: {len(good)} of {tried} kept, "
                  f"{time.perf_counter() - start:.0f} s", flush=True)


def _screened(
    jobs: dict[str, object], configs: list[dict[str, object]], processes: int
) -> tuple[list[dict[str, object]], int]:
    """The most promising configs and how many were compiled: block sizes and warps first, the rest for the best."""
    # one stage, with which no loop is pipelined: see pipeline_races.py
    base = [c for c in configs if (c["num_stages"], c["indexing"]) == (1, "pointer")]
    first = sorted(_compiled(jobs, base, processes), key=_cost)
    best = [x for warps in (4, 8) for x in [y for y in first if y["config"]["num_warps"] == warps][:2]]
    kin = [c for c in configs if c not in base and any(
        c.get("block_sizes") == x["config"].get("block_sizes") and c["num_warps"] == x["config"]["num_warps"]
        for x in best)]
    second = _compiled(jobs, kin, processes)
    return sorted([*best, *second], key=_cost)[:KEPT], len(base) + len(kin)


def _compiled(jobs: dict[str, object], configs: list[dict[str, object]], processes: int) -> list[dict[str, object]]:
    found = []
    for indexing, job in jobs.items():
        for config, report in job.screen([c for c in configs if c["indexing"] == indexing], processes, timeout=180):
            if report.ok and max(x.spill_store_bytes for x in report.launches) <= SPILL:
                x = report.launches[0]
                found.append({"config": config, "regs": x.regs, "spill": x.spill_store_bytes, "shared": x.shared_bytes,
                              "blocks_per_sm": x.blocks_per_sm, "wgmma": x.instructions.get("wgmma", 0)})
    return found


def _cost(found: dict[str, object]) -> tuple[float, ...]:
    """Spills first; then few, large tiles on many warps of an SM: a guess, which the GPU corrects."""
    config = found["config"]
    tile = 1
    for n in config.get("block_sizes", []):
        tile *= n
    return found["spill"] > 0, -(tile ** 0.5) * min(found["blocks_per_sm"] * config["num_warps"], 16), found["regs"]


# ---- on a GPU


def work(options: argparse.Namespace) -> list[tuple[str, dict[str, int], bool]]:
    """(operator, sizes, l2norm): the operators that normalise q and k do so in tuning, which adds two kernels."""
    return [(operator, sizes, operator in workloads.L2NORM)
            for sizes in shapes(options.shapes).values() for operator in options.ops or workloads.OPERATORS]


def _compile_ahead(device: tuple, module: str, name: str, described: list[object], candidate: dict[str, object]) -> str:
    """In a worker: compile into Triton's cache; "" or the reason why the candidate is out."""
    import offline_compile

    offline_compile.DEVICES["this"] = device
    offline_compile.pretend("this")
    args, kernel = offline_compile.fakes(described), workloads.kernel(module, name)
    report = offline_compile.report(lambda: compiled(kernel, args, candidate), args, candidate["config"])
    spill = max((x.spill_store_bytes for x in report.launches), default=0)
    return report.error[:200] or (f"spills {spill} bytes" if spill > 16 * SPILL else "")


def _class(described: list[object]) -> str:
    """What of a call decides its machine code: the form, and which sizes Triton sees as 1 or as multiples of 16."""
    size, form = render_configs.form_of(described)
    return str((form, [(n == 1, n % 16 == 0) for n in size]))


def _elapsed(call: object) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def milliseconds(call: object, best: float = float("inf")) -> float:
    """Median time of a call, by replays of a CUDA graph of five; infinite at once if it cannot be the best."""
    call()
    torch.cuda.synchronize()
    if min(_elapsed(call), _elapsed(call)) > 1.3 * best + 0.1:  # a launch costs up to 0.1 ms of Python
        return float("inf")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            call()
    times, begin = [], time.perf_counter()
    while len(times) < 4 or (len(times) < 20 and time.perf_counter() - begin < 0.03):
        times.append(_elapsed(graph.replay) / 5)
    return sorted(times)[len(times) // 2]


def _outputs(call: object) -> list[torch.Tensor]:
    """A call's outputs, with NaN where it does not write."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        out = call()
    finally:
        torch.use_deterministic_algorithms(False)
    return [out] if isinstance(out, torch.Tensor) else list(out)


def wrong(got: list[torch.Tensor], want: list[torch.Tensor]) -> str:
    """What is wrong with a config's outputs against the safe config's; "" if nothing."""
    for n, (x, y) in enumerate(zip(got, want)):
        if x.shape != y.shape:  # one part a tile
            x, y = x.sum(0), y.sum(0)
        if not torch.equal(x.isfinite(), y.isfinite()):
            return f"output {n} is not finite where it should be"
        x, y = (torch.nan_to_num(a, nan=0.0, posinf=0.0, neginf=0.0).float() for a in (x, y))
        rms = y.square().mean().sqrt()
        error = (x - y).square().mean().sqrt()
        if error > TOLERANCE * rms or (x - y).abs().amax() > y.abs().amax() / 32:
            return f"output {n} is off by {(error / rms).item():.1e}"
    return ""


def tune_call(
    kernel: object, args: tuple, ahead: list[tuple[dict[str, object], concurrent.futures.Future]]
) -> dict[str, object]:
    """The store's entry for one kernel call: its fastest right config; the first candidate is the safe one."""
    best = {"args": workloads.describe(args)}
    for candidate, future in ahead:
        config = candidate["config"]
        try:
            reason = future.result(timeout=180)
            if not reason or "ms" not in best:
                run = compiled(kernel, args, candidate)
                call = lambda: run(*args)  # noqa: B023, E731
                if "ms" not in best:
                    want = _outputs(call)
                    best |= {"config": config, "ms": milliseconds(call)}
                    best["safe_ms"] = best["ms"]
                    continue
                ms = milliseconds(call, best["ms"])
                reason = wrong(_outputs(call), want) if ms < best["ms"] else ""
        except torch.AcceleratorError:
            raise  # the context is gone
        except Exception as error:
            if "ms" not in best:
                raise
            reason = f"{type(error).__name__}: {error}"[:200]
        if reason:
            print(f"    {config}: {reason}", flush=True)
        elif ms < best["ms"]:
            best |= {"config": config, "ms": ms}
    return {**best, "ms": round(best["ms"], 5), "safe_ms": round(best["safe_ms"], 5)}


def derive(options: argparse.Namespace) -> None:
    """Another architecture's entries from sm90's: compiled for it, not measured; the safe config where that fails."""
    import offline_compile

    offline_compile.pretend(options.device)
    properties = torch.cuda.get_device_properties()
    store = Store(pathlib.Path(options.out) / f"cuda_sm{properties.major}{properties.minor}", {
        "gpu": properties.name, "measured": False, "from": "cuda_sm90", "date": datetime.date.today().isoformat()})
    good = {}
    for module, names in render_configs.kernels().items():
        source = render_configs.read("cuda_sm90", module).get("kernels", {})
        for name in names:
            kernel = workloads.kernel(module, name)
            for entry in source.get(name, []) if wanted(name, options) else ():
                key = name, str(render_configs.form_of(entry["args"])[1]), str(entry["config"])
                args = offline_compile.fakes(entry["args"])
                if key not in good:
                    report = offline_compile.report(
                        lambda: kernel.compiled(args, entry["config"]), args, entry["config"])  # noqa: B023
                    spill = max((x.spill_store_bytes for x in report.launches), default=0)
                    good[key] = report.ok and spill <= 4 * SPILL
                    print(f"{name} {entry['args']} {entry['config']}: "
                          f"{'kept' if good[key] else report.error[:200] or f'spills {spill} bytes'}", flush=True)
                config = entry["config"] if good[key] else workloads.safe_config(kernel, args)
                store.put(name, {"args": entry["args"], "config": config})
            if wanted(name, options):
                store.keep(name, [entry["args"] for entry in source.get(name, [])])


def tune(options: argparse.Namespace) -> None:
    begin = time.perf_counter()
    properties = torch.cuda.get_device_properties(0)
    architecture = f"sm{properties.major}{properties.minor}"
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton", "helion")}
    store = Store(pathlib.Path(options.out) / f"cuda_{architecture}", {
        "gpu": properties.name, "measured": True, "date": datetime.date.today().isoformat(), "versions": versions})
    device = (properties.name, properties.major * 10 + properties.minor, properties.multi_processor_count,
              properties.total_memory, properties.shared_memory_per_block_optin // 1024,
              properties.max_threads_per_multi_processor)
    screened = read(pathlib.Path(options.candidates)) if options.candidates else {}
    for path in options.collected or ():
        for name, groups in collected(pathlib.Path(path)).items():
            screened.setdefault(name, []).extend(groups)
    pool = concurrent.futures.ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"))
    futures: dict[tuple[str, ...], concurrent.futures.Future] = {}

    def ahead(name: str, described: list[object], candidate: dict[str, object]) -> concurrent.futures.Future:
        key = name, _class(described), str(candidate["config"])
        if key not in futures:
            futures[key] = pool.submit(_compile_ahead, device, store.modules[name], name, described, candidate)
        return futures[key]

    done = 0
    try:
        for name, groups in screened.items():  # before anything is known about their sizes: workers start at once
            for group in groups if wanted(name, options) and name in store.modules else ():
                if group.get("operator") in (options.ops or workloads.OPERATORS):
                    for candidate in [group["safe"], *group["candidates"]]:
                        ahead(name, group["args"], candidate)
        for operator, sizes, l2norm in work(options):
            size = "_".join(f"{key}{n}" for key, n in sizes.items())
            calls = {}
            arguments = workloads.inputs(operator, **sizes, device="cuda", l2norm=l2norm)
            for kernel, args in workloads.recorded(operator, arguments, lambda kernel, args: compiled(
                    kernel, args, candidates(kernel, args, screened)[0])(*args)):
                described = workloads.describe(args)
                if kernel.fn.__annotations__["return"] == "None":
                    continue  # adds to its arguments, and only where gates are strong: keeps the config it has
                if wanted(kernel.name, options) and (options.again or not store.measured(kernel.name, described)):
                    calls.setdefault((kernel.name, str(render_configs.form_of(described))), (kernel, args, [
                        (x, ahead(kernel.name, described, x)) for x in candidates(kernel, args, screened)]))
            del arguments
            for kernel, args, configs in calls.values():
                if time.perf_counter() - begin > options.budget_s:
                    print(f"out of time after {done} calls; run again to go on", flush=True)
                    return
                entry = tune_call(kernel, args, configs)
                store.put(kernel.name, entry)
                done += 1
                print(f"{time.perf_counter() - begin:6.0f} s  {operator} {size} {kernel.name}: {entry['ms']} ms, safe "
                      f"{entry['safe_ms']} ms, {entry['config']}", flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="*", choices=workloads.OPERATORS)
    parser.add_argument("--shapes", nargs="*")
    parser.add_argument("--kernels", nargs="*", default=[""], help="only kernels with one of these in their names")
    parser.add_argument("--candidates", help="file that --screen writes and a GPU run reads")
    parser.add_argument("--collected", nargs="*", help="tuned_configs_*.json of HELION_AOT_MODE=collect: candidates")
    parser.add_argument("--screen", action="store_true")
    parser.add_argument("--derive", action="store_true")
    parser.add_argument("--device", default="h200", help="the GPU to compile for without having it")
    parser.add_argument("--out", default=str(render_configs.CONFIGS))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    options = parser.parse_args()
    if options.screen:
        options.candidates = options.candidates or "candidates.json"
        screen(options)
    elif options.derive:
        derive(options)
    elif torch.cuda.is_available():
        tune(options)
    else:
        parser.error("no CUDA device to time configs on; --screen and --derive need none")


if __name__ == "__main__":
    sys.exit(main())
