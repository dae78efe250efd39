"""Render the configs of `configs/` into the files that Helion's documented look-up finds beside the kernels.

    python tools/render_configs.py            write torch-ext/linear_attention/ops/_helion_aot_*.py
    python tools/render_configs.py --check    write nothing; exit 1 if a file is stale or a kernel has no entry
    python tools/render_configs.py --sync     first give new kernels safe configs, drop entries that fit none any more

A rendered file is self-contained (torch only, no relative imports).  For each kernel it defines
`autotune_<kernel>(*args)`, the config of a call, and `key_<kernel>(*args)`, a number that tells configs apart.
"""
from __future__ import annotations

import argparse
import ast
import functools
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
OPS = ROOT / "torch-ext" / "linear_attention" / "ops"
CONFIGS = ROOT / "configs"
REQUIRED = ("sm90", "sm100")
ITEM_SIZES = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "i64": 8, "i32": 4}

SELECTION = '''
def _pick(kernel, args):
    """The number of the config for a call: its tuned shape, else the nearest legal one, else the safe default.

    A call is its size (sizes 0 to 2 of the first tensor: batch, tokens, heads; 1 where it has fewer) and its form (for
    each argument the item size and the widths of a tensor, an integer up to 128, or None).  A tuned form is legal for a
    call if nothing of the call's is wider or larger: then what fitted in shared memory still does.
    """
    size = (*args[0].shape, 1, 1)[:3]
    form = [(x.element_size(), *x.shape[3:]) if isinstance(x, torch.Tensor)
            else x if isinstance(x, int) and x <= 128 else None for x in args]
    best = None
    if torch.cuda.get_device_capability(args[0].device) == CAPABILITY:
        for tuned_form, sizes in kernel["tuned"].items():
            far = _distance(form, tuned_form)
            for tuned_size, number in sizes.items() if far is not None else ():
                rows = math.log2(max(size[0] * size[2], 1) / (tuned_size[0] * tuned_size[2]))
                rank = (*far, abs(rows) + abs(math.log2(max(size[1], 1) / tuned_size[1])) / 8)
                if best is None or rank < best[0]:
                    best = rank, number
    if best is not None:
        return best[1]
    row = form[0][0] * max((_round_up(n) for x in form if isinstance(x, tuple) for n in x[1:]), default=1)
    return next(number for limit, number in kernel["safe"].items() if row <= limit)


def _distance(form, tuned):
    """How far a call's form is from a tuned one: (widths, other differences), or None where the config may not fit.

    An integer from 16 to 128 is a chunk's length and sizes tiles; smaller ones do not, larger ones are lengths of
    sequences and make no difference, and a vector's items do not size tiles.
    """
    width = other = 0
    for x, y in zip(form, tuned):
        if isinstance(x, tuple) and isinstance(y, tuple):
            if len(x) > 1 and x[0] > y[0] or any(_round_up(a) > _round_up(b) for a, b in zip(x[1:], y[1:])):
                return None
            width += sum(math.log2(_round_up(b) / _round_up(a)) for a, b in zip(x[1:], y[1:]))
            other += x[0] != y[0]
        elif isinstance(x, int) and isinstance(y, int) and x > y >= 16:
            return None
        else:
            other += x != y
    return width, other


def _round_up(n):
    """The power of two that a tile of n columns takes."""
    return 1 << max(n - 1, 0).bit_length()
'''


@functools.cache
def functions() -> dict[str, list[ast.FunctionDef]]:
    """The kernels of each module of ops, in order: functions with the decorator `kernel(...)`."""
    found = {}
    for path in sorted(OPS.glob("*.py")):
        nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef) and any(
            isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "kernel"
            for call in node.decorator_list)]
        if nodes:
            found[path.stem] = nodes
    return found


def kernels() -> dict[str, list[str]]:
    """The names of the kernels of each module of ops."""
    return {module: [node.name for node in nodes] for module, nodes in functions().items()}


def form_of(args: list[object]) -> tuple[tuple[int, ...], tuple[object, ...]]:
    """Size and form (see SELECTION) of recorded arguments such as ["bf16[1,8192,96,128]", null, 0.088, 64]."""
    size, form = None, []
    for x in args:
        match = re.fullmatch(r"(\w+)\[([\d,]*)\].*", x) if isinstance(x, str) else None
        if match:
            shape = tuple(int(n) for n in match[2].split(",") if n)
            size = size or (*shape, 1, 1)[:3]
            form.append((ITEM_SIZES[match[1]], *shape[3:]))
        else:
            form.append(x if isinstance(x, int) and x <= 128 else None)
    return size, tuple(form)


def read(folder: str, module: str) -> dict:
    path = CONFIGS / folder / f"{module}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def safe_rows(kernel: str) -> list[dict[str, object]]:
    return next(read("default", module)[kernel] for module, names in kernels().items() if kernel in names)


def safe_config(kernel: str, item_size: int, widths: list[int]) -> dict[str, object]:
    """The safe config for a call whose first tensor has items of that size and whose tensors have those widths."""
    row = item_size * max((1 << (n - 1).bit_length() for n in widths), default=1)
    return next(limit["config"] for limit in safe_rows(kernel) if row <= limit["row_bytes"])


def dump(store: dict[str, object]) -> str:
    """A store in JSON, one run, one entry a line."""
    kernels = ",\n".join(
        f"    {json.dumps(name)}: [\n" + ",\n".join(f"      {json.dumps(entry)}" for entry in entries) + "\n    ]"
        for name, entries in sorted(store["kernels"].items()))
    runs = ",\n".join(f"    {json.dumps(run)}" for run in store["runs"])
    return f'{{\n  "runs": [\n{runs}\n  ],\n  "kernels": {{\n{kernels}\n  }}\n}}\n'


def fits(entry: dict[str, object], node: ast.FunctionDef) -> bool:
    """Whether an entry is one of the kernel as it is: as many arguments, as many block sizes."""
    return len(entry["args"]) == len(node.args.args) and len(entry["config"].get("block_sizes", [])) == blocks_of(node)


def blocks_of(node: ast.FunctionDef) -> int:
    return sum(ast.unparse(x.func) == "hl.register_block_size" for x in ast.walk(node) if isinstance(x, ast.Call))


def sync() -> None:
    """Tiles of 16 without pipelining for kernels that have no safe config; entries that do not fit a kernel leave."""
    for path in CONFIGS.glob("*/*.json"):
        if path.stem not in functions():
            path.unlink()
    for module, nodes in functions().items():
        safe = read("default", module)
        rows = []
        for node in nodes:
            blocks = blocks_of(node)
            old = [row for row in safe.get(node.name, []) if len(row["config"].get("block_sizes", [])) == blocks]
            sizes = {"block_sizes": [16] * blocks} if blocks else {}
            new = [{"row_bytes": limit, "config": {**sizes, "indexing": "pointer", "num_stages": 1, "num_warps": warps}}
                   for limit, warps in ((256, 4), (1024, 8))]
            text = ",\n".join(f"    {json.dumps(row)}" for row in old or new)
            rows.append(f"  {json.dumps(node.name)}: [\n{text}\n  ]")
        (CONFIGS / "default" / f"{module}.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")
        for path in CONFIGS.glob(f"cuda_*/{module}.json"):
            store = json.loads(path.read_text())
            store["kernels"] = {
                node.name: entries for node in nodes if (entries := [
                    entry for entry in store["kernels"].get(node.name, []) if fits(entry, node)])}
            path.write_text(dump(store))


def render(module: str, architecture: str, names: list[str]) -> str:
    """The text of one rendered file; KeyError names a kernel without a safe config."""
    store, safe = read(f"cuda_{architecture}", module), read("default", module)
    measured = sorted({f"measured on {run['gpu']}" if run["measured"] else "derived, not measured"
                       for run in store.get("runs", [])})
    lines = [
        f'"""Configs of the kernels of {module}.py for {architecture} ({"; ".join(measured)}).',
        "",
        "Rendered by tools/render_configs.py from configs/: edit those, not this file.",
        '"""',
        "import math",
        "",
        "import torch",
        "",
        f"CAPABILITY = {divmod(int(architecture[2:]), 10)}",
    ]
    for name in names:
        entries = store.get("kernels", {}).get(name, [])
        if name not in safe:
            raise KeyError(f"configs/default/{module}.json has no entry for {name}")
        configs: list[str] = []

        def number(config: dict[str, object], configs: list[str] = configs) -> int:
            text = repr(dict(sorted(config.items())))
            if text not in configs:
                configs.append(text)
            return configs.index(text)

        tuned: dict[object, dict[object, int]] = {}
        for entry in entries:
            size, form = form_of(entry["args"])
            tuned.setdefault(form, {})[size] = number(entry["config"])
        limits = {row["row_bytes"]: number(row["config"]) for row in safe[name]}
        lines += ["", f"{name.upper()} = {{", '    "configs": [', *(f"        {text}," for text in configs), "    ],"]
        lines += [f'    "safe": {limits},  # bytes of the widest row -> config', '    "tuned": {']
        for form, sizes in tuned.items():
            lines += [f"        {form}: {{", *(f"            {size}: {n}," for size, n in sizes.items()), "        },"]
        lines += ["    },", "}"]
    lines += ["", SELECTION]
    for name in names:
        lines += [
            "", f"def key_{name}(*args):", f"    return _pick({name.upper()}, args)", "",
            "", f"def autotune_{name}(*args):",
            f'    return dict({name.upper()}["configs"][_pick({name.upper()}, args)])', "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def rendered_files() -> dict[pathlib.Path, str]:
    architectures = {*REQUIRED, *(path.name.removeprefix("cuda_") for path in CONFIGS.glob("cuda_sm*"))}
    return {
        OPS / f"_helion_aot_{module}_cuda_{architecture}.py": render(module, architecture, names)
        for module, names in kernels().items() for architecture in sorted(architectures)
    }


def missing() -> list[str]:
    """Kernels that an architecture of the package has no entry for."""
    return [f"configs/cuda_{architecture}/{module}.json has no entry for {name}"
            for architecture in REQUIRED for module, names in kernels().items() for name in names
            if not read(f"cuda_{architecture}", module).get("kernels", {}).get(name)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--sync", action="store_true")
    options = parser.parse_args()
    if options.sync:
        sync()
    try:
        files = rendered_files()
    except KeyError as error:
        print(error.args[0])
        return 1
    for line in missing():
        print(line)
    left = set(OPS.glob("_helion_aot_*.py")) - set(files)
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    if options.check:
        for path in sorted([*stale, *left]):
            print(f"stale: {path.relative_to(ROOT)}; run python tools/render_configs.py")
        return 1 if stale or left or missing() else 0
    for path in left:
        path.unlink()
    for path in stale:
        path.write_text(files[path])
    print(f"{len(files)} files, {len(stale)} written, {len(left)} removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
