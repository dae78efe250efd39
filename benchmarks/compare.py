"""Compare the package with flash-linear-attention (FLA) on a GPU: time, memory and error, cell by cell.

    python benchmarks/compare.py                                  # all 42 cells, into benchmarks/results/<gpu>.json
    python benchmarks/compare.py --ops kda gla --shapes B8_T1024_H8_D64 --out kda.json --first-call none
    python benchmarks/compare.py --ops kda --shapes N8x1024_H96_D128 N1300+547+2048+963+271+3063_H96_D128

A cell is an operator at a shape, of a batch or of packed sequences. Each operator has one process with both packages in
it. They all start at once and compile, then take turns on a GPU that is otherwise idle. For each of ours, FLA and (at
the two small shapes) the eager chunked form:

    fwd_gpu_ms, fb_gpu_ms      median CUDA-graph replay of the forward, and of forward plus backward; L2 flushed
    fwd_wall_ms, fb_wall_ms    100 eager calls and one synchronisation, over 100
    peak_mb                    peak MiB of forward plus backward above the inputs, no gradient allocated before
    first_call_s               first forward plus backward in a child process with empty compile caches; ours only

`errors` is the relative RMS error of our `o` and every gradient against fp64, over all tokens of batches {0, B-1} and
heads {0, H-1}, `error_limits` what the tests allow, `fla_errors` FLA's on the same inputs.

The file is written after every cell. Rows of an earlier run stay if they were measured with the same sources, configs,
versions and GPU. The exit status is 1 if a cell failed, was wrong, or was left out for --budget-s.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib
import importlib.metadata
import json
import math
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import IO

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks", "tools", "tests")]

import eager  # noqa: E402
import timing  # noqa: E402
from cells import EAGER_SHAPES, EXTRA_WORKLOADS, SHAPES, WORKLOADS, Shape, Workload, make_inputs  # noqa: E402
from errors import yardstick  # noqa: E402
from provenance import provenance  # noqa: E402
from stage import stage  # noqa: E402

REPO_ID = "HelionDSL/linear-attention"
FIELDS = ("fwd_gpu_ms", "fwd_wall_ms", "fb_gpu_ms", "fb_wall_ms", "peak_mb", "first_call_s")
SIDES = ("ours", "fla", "eager")
ALL_WORKLOADS = WORKLOADS | EXTRA_WORKLOADS
# Where the first call is measured when one shape an operator will do.
FIRST_CALL_SHAPE = SHAPES[2]


# Measuring one cell


def load_package(source: bool) -> ModuleType:
    """The package as users load it, from the staged build; with `source` from the working tree."""
    if source:
        sys.path.insert(0, str(ROOT / "torch-ext"))
        return importlib.import_module("linear_attention")
    # read when `kernels` is imported: the build takes the place of the Hub
    os.environ |= {"LOCAL_KERNELS": f"{REPO_ID}={ROOT}", "HF_HUB_OFFLINE": "1"}
    from kernels import get_kernel

    return get_kernel(REPO_ID, version=0)


class Calls:
    """The two calls that are measured of one package: `forward()` and `both()`, forward plus backward."""

    def __init__(self, workload: Workload, package: ModuleType, tensors: Mapping[str, torch.Tensor]) -> None:
        self._leaves = {name: tensors[name].detach().requires_grad_() for name in workload.inputs}
        self._do = tensors["do"]
        self._call = workload.bind(package, {**tensors, **self._leaves})

    def forward(self) -> torch.Tensor:
        """`o`, with nothing saved for a backward."""
        with torch.no_grad():
            return self._call()

    def both(self) -> dict[str, torch.Tensor]:
        """`o` and the gradient of every input, all of them new tensors."""
        o = self._call()
        gradients = torch.autograd.grad(o, tuple(self._leaves.values()), self._do)
        return {"o": o.detach()} | {f"d{name}": dx for name, dx in zip(self._leaves, gradients, strict=True)}


class EagerCalls:
    """The same of the eager chunked form, whose backward is written out."""

    def __init__(self, workload: Workload, tensors: Mapping[str, torch.Tensor]) -> None:
        self._op = workload.op
        self._inputs = {name: tensors[name] for name in workload.inputs} | workload.reference_options
        self._do = tensors["do"]

    def forward(self) -> torch.Tensor:
        return eager.forward(self._op, self._inputs)[0]

    def both(self) -> dict[str, torch.Tensor]:
        o, _, saved = eager.forward(self._op, self._inputs)
        return {"o": o} | {f"d{name}": dx for name, dx in eager.backward(saved, self._do).items()}


def measure(
    workload: Workload,
    shape: Shape,
    packages: Mapping[str, ModuleType],
    watch: timing.TuningWatch,
    with_eager: bool = False,
    replays: int = 50,
    calls: int = 100,
    device: str = "cuda",
) -> dict[str, dict]:
    """The errors, their limits and the figures of one cell, for each package by its side's name."""
    tensors = make_inputs(workload, shape, device)
    sides: dict[str, Calls | EagerCalls] = {side: Calls(workload, p, tensors) for side, p in packages.items()}
    for side, side_calls in sides.items():
        measured = watch.settle(side_calls.forward) + watch.settle(side_calls.both)
        if measured:
            print(f"{workload.op} {shape}: {side}'s autotuner measured {measured} candidates", file=sys.stderr)

    right = yardstick(workload, tensors)
    errors = {side: right.errors(side_calls.both()) for side, side_calls in sides.items()}
    limits = right.limits
    del right

    figures: dict[str, dict[str, float | None]] = {}

    def time_sides(sides: Mapping[str, Calls | EagerCalls]) -> None:
        for side, side_calls in sides.items():
            figures[side] = dict.fromkeys(FIELDS)
            figures[side]["peak_mb"] = timing.peak_mb(side_calls.both)
            figures[side]["fwd_wall_ms"] = timing.wall_ms(side_calls.forward, calls)
            figures[side]["fb_wall_ms"] = timing.wall_ms(side_calls.both, calls)
        for key, name in (("fwd_gpu_ms", "forward"), ("fb_gpu_ms", "both")):
            graphs = {side: timing.capture(getattr(side_calls, name)) for side, side_calls in sides.items()}
            for side, ms in timing.replay_ms(graphs, replays).items():
                figures[side][key] = ms

    time_sides(sides)
    if with_eager:
        # last and apart, so that it can spoil nothing: no product depends on its figures
        try:
            time_sides({"eager": EagerCalls(workload, tensors)})
        except RuntimeError as error:
            print(f"{workload.op} {shape}: the eager form failed: {error}", file=sys.stderr)
    return {"errors": errors, "limits": limits, "figures": figures}


def to_row(op: str, shape: Shape, measured: Mapping[str, dict]) -> dict[str, object]:
    """What `measure` returned as a row of the results file: four significant digits, None for what is not finite."""

    def tidy(x: float | None) -> float | None:
        return float(f"{x:.4g}") if x is not None and math.isfinite(x) else None

    def tidy_all(values: Mapping[str, float | None] | None) -> dict[str, float | None] | None:
        return values and {name: tidy(x) for name, x in values.items()}

    errors, figures = measured["errors"], measured["figures"]
    return {
        "op": op,
        "shape": str(shape),
        "errors": tidy_all(errors["ours"]),
        "error_limits": tidy_all(measured["limits"]),
        "fla_errors": tidy_all(errors.get("fla")),
        **{side: tidy_all(figures.get(side)) for side in SIDES},
    }


def wrong(row: Mapping[str, dict]) -> list[str]:
    """The results that are further from exact than they may be, or not finite."""
    return [name for name, error in row["errors"].items() if error is None or error > row["error_limits"][name]]


# The processes: one an operator, which is told when to measure what


@contextlib.contextmanager
def json_lines() -> Iterator[Callable[[object], None]]:
    """A function that sends one JSON line to stdout; whatever else this process prints goes to stderr."""
    with os.fdopen(os.dup(1), "w") as stream:
        os.dup2(2, 1)

        def send(message: object) -> None:
            stream.write(json.dumps(message) + "\n")
            stream.flush()

        yield send


def describe() -> dict[str, object]:
    """The GPU and the versions of what runs on it."""
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda, "torch": torch.__version__}
    for name in ("triton", "helion", "fla-core", "kernels"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {"gpu": torch.cuda.get_device_name(), "versions": versions}


def compile_all(
    workload: Workload, shapes: Sequence[Shape], packages: Mapping[str, ModuleType], watch: timing.TuningWatch
) -> None:
    """Run every cell once, beside the other processes, so that nothing is left to compile when its turn comes.

    A failure is left for the cell to meet again; so is an autotuner that wants to measure.
    """
    for shape in shapes:
        tensors = make_inputs(workload, shape, "cuda")
        for side, package in packages.items():
            calls = Calls(workload, package, tensors)
            try:
                with watch.forbidden():
                    calls.forward()
                    calls.both()
                    torch.cuda.synchronize()
            except Exception as error:
                print(f"{workload.op} {shape}: compiling {side} ahead: {error!r}", file=sys.stderr)
        del tensors, calls
        gc.collect()
        torch.cuda.empty_cache()


def work(args: argparse.Namespace) -> None:
    """A process of one operator: compile, say so, then measure each shape that comes in on stdin."""
    workload = ALL_WORKLOADS[args.ops[0]]
    with json_lines() as send:
        packages = {"ours": load_package(args.source)}
        if "fla" in args.sides:
            packages["fla"] = workload.fla()
        watch = timing.TuningWatch()
        compile_all(workload, args.shapes, packages, watch)
        if args.role == "helper":
            return
        # what the imports made stays: no collection need look at it again
        gc.collect()
        gc.freeze()
        send({"ready": True})
        for line in sys.stdin:
            shape = Shape.parse(line.strip())
            with_eager = "eager" in args.sides and shape in EAGER_SHAPES
            try:
                send(to_row(args.ops[0], shape, measure(workload, shape, packages, watch, with_eager, args.replays)))
            except Exception:
                send({"error": traceback.format_exc()})
            gc.collect()
            torch.cuda.empty_cache()


def time_first_call(args: argparse.Namespace) -> None:
    """A process with empty caches: seconds of the first forward plus backward."""
    workload = ALL_WORKLOADS[args.ops[0]]
    with json_lines() as send:
        package = load_package(args.source)
        tensors = make_inputs(workload, args.shapes[0], "cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        Calls(workload, package, tensors).both()
        torch.cuda.synchronize()
        send({"first_call_s": time.perf_counter() - start})


class Process:
    """A child process of this script that answers in JSON lines."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self._answers: queue.Queue[dict] = queue.Queue()
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._answers.put(json.loads(line))
        self._answers.put({"error": f"the process ended with status {self._process.wait()}"})

    def receive(self, timeout: float) -> dict:
        """The next answer; {"error": text} if the process failed, ended or took too long (it is ended then)."""
        try:
            return self._answers.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            self.close()
            return {"error": f"no answer within {timeout:.0f} s"}

    def ask(self, line: str, timeout: float) -> dict:
        """The answer to a line on the process's stdin."""
        if self._process.poll() is not None:
            return {"error": f"the process has ended with status {self._process.returncode}"}
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        return self.receive(timeout)

    def close(self, patience: float = 0.0) -> None:
        """Let the process end by itself for `patience` seconds, then end it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def child(role: str, op: str, shapes: Iterable[Shape], args: argparse.Namespace) -> list[str]:
    """The command of a process of this script."""
    command = [sys.executable, __file__, "--role", role, "--ops", op, "--shapes", *map(str, shapes)]
    command += ["--sides", *args.sides, "--replays", str(args.replays)]
    return command + ["--source"] * args.source


def first_calls(cells: Sequence[tuple[str, Shape]], args: argparse.Namespace, deadline: float) -> dict:
    """Seconds of the first call in every cell, measured side by side: it is the compiler that takes them."""

    def run(cell: tuple[str, Shape]) -> float | None:
        op, shape = cell
        with tempfile.TemporaryDirectory(prefix="first-call-") as caches:
            folders = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HELION_CACHE_DIR", "XDG_CACHE_HOME")
            env = os.environ | {name: str(Path(caches) / name.lower()) for name in folders}
            process = Process(child("first-call", op, [shape], args), env)
            answer = process.receive(deadline - time.monotonic())
            process.close()
        if "error" in answer:
            print(f"{op} {shape}: first call: {answer['error']}", file=sys.stderr)
            return None
        return round(answer["first_call_s"], 2)

    # a core for the Python of each, one for the assembler that it calls
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        return dict(zip(cells, pool.map(run, cells), strict=True))


# The results file


class Results:
    """The results file: `meta`, `rows` (the table) and `extra` (other workloads or shapes), one row a cell."""

    def __init__(self, path: Path, meta: Mapping[str, object]) -> None:
        self.path = path
        self.content: dict = {"meta": dict(meta), "rows": [], "extra": []}
        if path.exists():
            old = json.loads(path.read_text())
            if identity(old["meta"]) == identity(meta):
                self.content |= {"rows": old["rows"], "extra": old.get("extra", [])}
                commands = [*old["meta"]["command"].split("; "), meta["command"]]
                self.content["meta"]["command"] = "; ".join(dict.fromkeys(commands))
            else:
                print(f"{path}: measured with other sources, versions or GPU: starting afresh", file=sys.stderr)

    def find(self, op: str, shape: Shape) -> dict | None:
        """The row of a cell."""
        rows = self.content["rows"] + self.content["extra"]
        return next((row for row in rows if (row["op"], row["shape"]) == (op, str(shape))), None)

    def add(self, row: dict) -> None:
        """Put a row in its place, instead of an earlier one of the same cell, and write the file.

        What the earlier row knows and the new one does not measure (the first call) is kept.
        """
        old = self.find(row["op"], Shape.parse(row["shape"]))
        if old and old["ours"] and row["ours"] and row["ours"]["first_call_s"] is None:
            row["ours"]["first_call_s"] = old["ours"]["first_call_s"]
        in_table = row["op"] in WORKLOADS and Shape.parse(row["shape"]) in SHAPES
        table = self.content["rows" if in_table else "extra"]
        table[:] = [other for other in table if other is not old] + [row]
        order = {(op, str(shape)): i for i, (op, shape) in enumerate((o, s) for o in ALL_WORKLOADS for s in SHAPES)}
        table.sort(key=lambda r: order.get((r["op"], r["shape"]), len(order)))
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1) + "\n")
        part.replace(self.path)


def identity(meta: Mapping[str, object]) -> tuple:
    """What two runs must share for their rows to stand in one table."""
    return tuple(meta.get(key) for key in ("gpu", "versions", "package", "torch_ext_tree", "configs_sha256"))


def make_meta(described: Mapping[str, object], source: bool) -> dict[str, object]:
    """`meta` of a run that is starting; its command without `--out`, which is a matter of one machine."""
    out = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    out.add_argument("--out")
    return {
        **described,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": " ".join(["python", "benchmarks/compare.py", *out.parse_known_args()[1]]),
        "package": "torch-ext" if source else "staged build",
        **provenance(ROOT),
    }


# The run


def progress(row: Mapping[str, dict]) -> str:
    """One line about a row: times, their ratios, memory, the largest error."""
    ours, fla = row["ours"], row.get("fla") or {}
    parts = []
    for label, key in (("fwd", "fwd_gpu_ms"), ("f+b", "fb_gpu_ms"), ("wall", "fb_wall_ms"), ("MB", "peak_mb")):
        mine, theirs = ours[key], fla.get(key)
        digits = 0 if key == "peak_mb" else 3
        parts.append(f"{label} {mine:.{digits}f}" + (f" / {theirs:.{digits}f} ({theirs / mine:.2f})" if theirs else ""))
    name, error = max(row["errors"].items(), key=lambda item: math.inf if item[1] is None else item[1])
    return "  ".join([*parts, f"{name} {'not finite' if error is None else f'{error:.1e}'}"])


def run(args: argparse.Namespace) -> int:
    """Measure the cells that `args` asks for; the exit status."""
    begin = time.monotonic()
    deadline = begin + args.budget_s
    if not args.source:
        stage(ROOT)
    described = describe()
    out = args.out or ROOT / "benchmarks" / "results" / f"{described['gpu'].replace(' ', '_')}.json"
    results = Results(out, make_meta(described, args.source))
    cells = [(op, shape) for op in args.ops for shape in args.shapes]
    if args.resume:
        cells = [cell for cell in cells if not results.find(*cell)]
    shapes = {op: [shape for other, shape in cells if other == op] for op, _ in cells}

    first: dict[tuple[str, Shape], float | None] = {}
    if args.first_call != "none":
        one = [(op, FIRST_CALL_SHAPE if FIRST_CALL_SHAPE in of_op else of_op[0]) for op, of_op in shapes.items()]
        first = first_calls(cells if args.first_call == "all" else one, args, deadline)
        print(f"first calls: {', '.join(f'{op} {shape} {s} s' for (op, shape), s in first.items())}", flush=True)

    print(f"compiling {len(cells)} cells of {len(shapes)} operators …", flush=True)
    workers = compile_side_by_side(shapes, args, deadline)
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)

    failures, longest = 0, 0.0
    for number, (op, shape) in enumerate(cells, 1):
        label = f"[{number}/{len(cells)}] {op} {shape}"
        started = time.monotonic()
        if started + longest > deadline:
            print(f"{label}: left out, {args.budget_s:.0f} s are over", file=sys.stderr)
            failures += 1
            continue
        row = workers[op].ask(str(shape), deadline - started + 30)
        longest = max(longest, time.monotonic() - started)
        if "error" in row:
            print(f"{label}: failed\n{row['error']}", file=sys.stderr)
            failures += 1
        else:
            row["ours"]["first_call_s"] = first.get((op, shape))
            results.add(row)
            print(f"{label}  {progress(row)}  {time.monotonic() - begin:.0f} s", flush=True)
            if bad := wrong(row):
                print(f"{label}: WRONG {bad}: {row['errors']}, limits {row['error_limits']}", file=sys.stderr)
                failures += 1
        if shape == shapes[op][-1]:
            workers[op].close(patience=10)
    for worker in workers.values():
        worker.close()
    print(f"{out}: {len(results.content['rows'])} rows, {failures} failures, {time.monotonic() - begin:.0f} s")
    return 1 if failures else 0


def compile_side_by_side(
    shapes: Mapping[str, Sequence[Shape]], args: argparse.Namespace, deadline: float
) -> dict[str, Process]:
    """A process for each operator, once all have compiled and nothing runs. Spare cores start from other shapes."""
    workers = {op: Process(child("worker", op, of_op, args)) for op, of_op in shapes.items()}
    helpers = []
    spare = ((os.cpu_count() or 1) - len(workers)) // max(1, len(workers))
    for op, of_op in shapes.items():
        count = max(0, min(spare, len(of_op) - 1))
        for turn in (i * len(of_op) // (count + 1) for i in range(1, count + 1)):
            # what it compiles the worker finds in Triton's cache
            helpers.append(Process(child("helper", op, [*of_op[turn:], *of_op[:turn]], args)))
    for op, worker in workers.items():
        answer = worker.receive(deadline - time.monotonic())
        if "error" in answer:
            print(f"{op}: {answer['error']}", file=sys.stderr)
    for helper in helpers:
        helper.close()
    return workers


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", choices=ALL_WORKLOADS, default=list(WORKLOADS), metavar="OP")
    parser.add_argument("--shapes", nargs="+", type=Shape.parse, default=list(SHAPES), metavar="SHAPE")
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=list(SIDES), help="what to measure; ours always is"
    )
    parser.add_argument("--extra", action="store_true", help="also with the options that models use")
    parser.add_argument("--first-call", choices=("none", "op", "all"), default="op", help="at one shape, or at all")
    parser.add_argument("--resume", action="store_true", help="skip cells that the results file has")
    parser.add_argument("--budget-s", type=float, default=1500.0, help="start no cell that would end after this")
    parser.add_argument("--replays", type=int, default=50, help="graph replays a figure")
    parser.add_argument("--source", action="store_true", help="load torch-ext/, not the staged build")
    parser.add_argument("--out", type=Path, help="results file (default: benchmarks/results/<gpu>.json)")
    parser.add_argument(
        "--role", choices=("main", "worker", "helper", "first-call"), default="main", help=argparse.SUPPRESS
    )
    args = parser.parse_args(argv)
    if args.extra:
        args.ops += [op for op in EXTRA_WORKLOADS if op not in args.ops]
    return args


def main() -> int:
    args = parse()
    if args.role in ("worker", "helper"):
        work(args)
    elif args.role == "first-call":
        time_first_call(args)
    elif not torch.cuda.is_available():
        print("compare.py needs a CUDA GPU", file=sys.stderr)
        return 2
    else:
        return run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
