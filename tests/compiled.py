"""Compile the kernels for a GPU that is not there; print what does not compile, or would not launch, and exit with 1.

    python compiled.py h200 shipped          every config of configs/cuda_sm90, at the largest form it is shipped for
    python compiled.py h200 bf16/128 ...     what a call of every operator selects, with initial and final states
    python compiled.py h200 bf16/128/packed  the same with sequences in one row, grouped heads, raw gates and beta
"""
from __future__ import annotations

import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent / "tools")]

import offline_compile  # noqa: E402
import render_configs  # noqa: E402
import torch  # noqa: E402
import workloads  # noqa: E402


def shipped() -> list[tuple[object, tuple, dict[str, object]]]:
    """(kernel, arguments, config) for every config of this GPU's architecture."""
    architecture = "sm{}{}".format(*torch.cuda.get_device_capability())
    found = {}
    for module, names in render_configs.kernels().items():
        store = render_configs.read(f"cuda_{architecture}", module)["kernels"]
        for name in names:
            for entry in store[name]:
                form = render_configs.form_of(entry["args"])[1]
                weight = sum(sum(x) for x in form if isinstance(x, tuple))
                key = name, str(entry["config"])
                if key not in found or found[key][0] < weight:
                    found[key] = weight, module, name, entry
    return [(workloads.kernel(module, name), offline_compile.fakes(entry["args"]), entry["config"])
            for _, module, name, entry in found.values()]


def selected(dtype: str, width: int, packed: bool) -> list[tuple[object, tuple, dict[str, object]]]:
    """(kernel, arguments, config) for every distinct kernel call of the operators at K = V = width."""
    found = {}
    for op in workloads.OPERATORS:
        sizes = {"B": 2, "T": 1000, "H": 4, "K": width, "V": width}
        calls = workloads.recorded_offline(
            op, sizes, dtype=workloads.DTYPES[dtype], state=True, l2norm=op in workloads.L2NORM, packed=packed)
        for kernel, args in calls:
            found.setdefault((kernel.name, str(workloads.describe(args))), (kernel, args, kernel.config(*args)))
    return list(found.values())


def main(device: str, *cases: str) -> int:
    offline_compile.pretend(device)
    tried = failed = 0
    for case in cases:
        dtype, *width = case.split("/")
        calls = shipped() if case == "shipped" else selected(dtype, int(width[0]), "packed" in width)
        for kernel, args, config in calls:
            report = offline_compile.Job(workloads.flexible(kernel, args, config["indexing"]), args).compile(config)
            tried += 1
            if not report.ok:
                failed += 1
                print(f"{kernel.name} {workloads.describe(args)} {config}: {report.error[:500]}", flush=True)
    print(f"{tried} compiled for {device}, {failed} failed")
    return 1 if failed or not tried else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
