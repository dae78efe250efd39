"""Races that Triton's software pipeliner leaves in a loop on Hopper, found in a kernel's TTGIR.

An asynchronous product of matrices reads its operands from shared memory while the loop goes on.  Copies that prefetch
d iterations ahead therefore need d + 1 buffers: with d, the next copy lands where the product still reads.  Triton adds
that buffer for loads that only products use, and leaves it out for a load that has another use too (Triton 3.7; its
issue 6691 may be the same).  The result is a rare wrong tile, another one in each run.
"""
from __future__ import annotations

import re

_NAME = r"%[\w$.-]+"


def pipeline_races(ttgir: str) -> list[str]:
    """One line for each buffer that a copy may overwrite while a product reads it; empty if there is none."""
    buffers: dict[str, int] = {}  # allocation -> how many buffers it has
    root: dict[str, str] = {}  # view of an allocation -> the allocation
    copied: dict[str, list[int]] = {}  # allocation -> the lines that copy into it
    products: list[tuple[int, list[str]]] = []  # line and shared operands of each asynchronous product
    waits: list[tuple[int, int]] = []  # line, and how many products it leaves unfinished
    loops, open_regions = [], []  # (first, last) line
    lines = ttgir.splitlines()
    for n, line in enumerate(lines):
        if found := re.match(rf"\s*({_NAME}) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x", line):
            buffers[found[1]] = int(found[2])
            root[found[1]] = found[1]
        elif found := re.match(rf"\s*({_NAME}) = ttg\.memdesc_\w+ ({_NAME})", line):
            if found[2] in root:
                root[found[1]] = root[found[2]]
        elif "copy_global_to_local" in line:
            for name in re.findall(_NAME, line.split("copy_global_to_local", 1)[1]):
                if name in root:
                    copied.setdefault(root[name], []).append(n)
        elif found := re.search(rf"ttng\.warp_group_dot ({_NAME}), ({_NAME}),.*isAsync = true", line):
            products.append((n, [root[x] for x in found.groups() if x in root]))
        elif "ttng.warp_group_dot_wait" in line:
            waits.append((n, int(re.search(r"pendings = (\d+)", line)[1])))
        if "scf.for" in line:
            open_regions.append((n, len(line) - len(line.lstrip())))
        elif open_regions and re.match(r"\s*\}", line) and len(line) - len(line.lstrip()) == open_regions[-1][1]:
            loops.append((open_regions.pop()[0], n))
    races = set()
    for first, last in loops:
        for n, pending in waits:
            if not first < n < last:
                continue
            before = [operands for line, operands in products if first < line < n]
            for name in {name for operands in before[max(len(before) - pending, 0):] for name in operands}:
                ahead = sum(line < first for line in copied.get(name, []))
                if any(first < line < last for line in copied.get(name, [])) and buffers[name] <= ahead:
                    races.add(f"{name}: {buffers[name]} buffers, filled {ahead} iterations ahead, read by a product "
                              "that is not waited for")
    return sorted(races)
