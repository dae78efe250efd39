"""On a Hopper GPU the package's kernels are compiled with an assembler that gets them right, and no others are.

    python assembled.py 13000     the CUDA version up to which the driver loads code; below 13000 there is a warning
    python assembled.py absent    Triton packed without the newer assembler: a warning

The kernel is one that ptxas 12.8 gets wrong: an operand's address comes from a uniform register that nothing wrote.
"""
from __future__ import annotations

import logging
import os
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent / "tools")]

import offline_compile  # noqa: E402
import workloads  # noqa: E402
from triton import knobs  # noqa: E402


def unwritten_reads(cubin: pathlib.Path) -> list[str]:
    """Instructions that read a uniform register which no instruction before them in the code writes."""
    code = subprocess.run([knobs.nvidia.nvdisasm.path, "-c", cubin], capture_output=True, text=True, check=True).stdout
    written, found = set(), []
    for op, rest in re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;", code):
        operands = re.split(r",\s*(?![^\[]*\])", rest)
        target = re.fullmatch(r"UR(\d+)", operands[0]) if op.startswith(("U", "R2UR", "S2UR")) else None
        for operand in operands[1:] if target else operands:
            first = [int(n) for n in re.findall(r"UR(\d+)", operand)]
            if "gdesc" in operand:  # four registers, of which a first operand in registers leaves two unused
                begin = first[0] + 2 * bool(re.fullmatch(r"R\d+", operands[1]))
                first = range(begin, (begin | 3) + 1)
            if not written.issuperset(first):
                found.append(f"{op} {rest}")
        if target:
            written |= {int(target[1]) + n for n in range(2 if re.search(r"64|WIDE", op) else 1)}
    return found


def main(driver: str) -> None:
    offline_compile.pretend("h200")
    del knobs.nvidia.ptxas, os.environ["TRITON_PTXAS_PATH"]
    from linear_attention.ops import _ptxas

    if driver == "absent":
        vars(type(knobs.nvidia))["ptxas_blackwell"].default_path = "absent"
        driver = "13000"
        right = False
    else:
        right = int(driver) >= 13000
    _ptxas._driver = lambda: int(driver)
    lines = []
    _ptxas._log.addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())

    kernel = workloads.kernel("_scalar_gate", "scalar_bwd_qk_kernel")
    x, s = "bf16[8,1024,8,64]", "bf16[8,16,8,64,64]"
    args = offline_compile.fakes([x, x, x, "f32[8,8,1024]", x, s, s, None, 0.125, 1.0, 64, False])
    config = {"block_sizes": [32, 64], "num_warps": 4, "num_stages": 2, "indexing": "pointer"}
    before, usual = dict(os.environ), knobs.nvidia.ptxas.version
    with tempfile.TemporaryDirectory() as folder:
        run = kernel.compiled(args, config)
        with offline_compile.recording(pathlib.Path(folder)):
            run(*args)
        (cubin,) = pathlib.Path(folder).glob("*.cubin")
        reads = unwritten_reads(cubin)
    assert knobs.nvidia.ptxas.version == usual
    assert {name for name in {*before, *os.environ} if "PTXAS" in name} <= {"TRITON_DUMP_PTXAS_LOG"}
    if right or _ptxas._version(knobs.nvidia.ptxas) >= _ptxas._RIGHT:
        assert not reads, reads
        assert not lines, lines
    else:
        assert len(lines) == 1 and "TRITON_PTXAS_PATH" in lines[0], lines


if __name__ == "__main__":
    main(*sys.argv[1:])
