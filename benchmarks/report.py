"""Render the results of compare.py: the README's table, between its markers, and a plot.

    python benchmarks/report.py             # benchmarks/results/NVIDIA_H200.json into README.md, and a PNG beside it
                                            # also the errors that gpu-tests.xml, in the same folder, tells of
    python benchmarks/report.py --check     # only say whether the README is what the results give

A ratio is FLA's figure over ours, so above 1 is better; means are geometric.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
NONE = "–"
# What the tests compare with fp64, as they name it.
COMPARED = ("o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state", "dA_log", "ddt_bias")


class Measure(NamedTuple):
    """A figure that the two packages are compared by."""

    key: str
    title: str


FORWARD = Measure("fwd_gpu_ms", "forward")
BOTH = Measure("fb_gpu_ms", "forward + backward")
WALL_FORWARD = Measure("fwd_wall_ms", "forward, wall")
WALL_BOTH = Measure("fb_wall_ms", "forward + backward, wall")
MEMORY = Measure("peak_mb", "peak memory")
MEASURES = (FORWARD, BOTH, WALL_FORWARD, WALL_BOTH, MEMORY)


def ratio(row: Mapping[str, dict | None], measure: Measure) -> float | None:
    """FLA's figure over ours, None where one is missing."""
    ours, fla = ((row.get(side) or {}).get(measure.key) for side in ("ours", "fla"))
    return fla / ours if ours and fla else None


class Summary(NamedTuple):
    """The ratios of some rows: their geometric mean, and the smallest one with its row."""

    mean: float
    worst: float
    row: Mapping[str, object]


def summarise(rows: Iterable[Mapping[str, object]], measure: Measure) -> Summary | None:
    """Over those rows that have a ratio; None if none has."""
    pairs = [(r, row) for row in rows if (r := ratio(row, measure)) is not None]
    if not pairs:
        return None
    worst, row = min(pairs, key=lambda pair: pair[0])
    return Summary(geometric_mean(r for r, _ in pairs), worst, row)


def operators(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """Their operators, in the order of the rows."""
    return list(dict.fromkeys(row["op"] for row in rows))


def number(x: float | None, digits: int = 2) -> str:
    return NONE if x is None else f"{x:.{digits}f}"


def milliseconds(x: float | None) -> str:
    """Three significant digits or so."""
    return NONE if x is None else f"{x:.3f}" if x < 1 else f"{x:.2f}" if x < 100 else f"{x:.0f}"


def table(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    align = ["---" if name in ("operator", "shape") else "---:" for name in header]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, align, *body))


def summary_table(rows: Sequence[Mapping[str, object]]) -> str:
    """One line an operator: mean and worst ratio of each measure."""

    def line(name: str, some: Sequence[Mapping[str, object]]) -> list[str]:
        found = [summarise(some, measure) for measure in MEASURES]
        return [name, *(NONE if s is None else f"{s.mean:.2f} ({s.worst:.2f})" for s in found)]

    body = [line(f"`chunk_{op}`", [row for row in rows if row["op"] == op]) for op in operators(rows)]
    if len(body) > 1:
        body.append([f"**{cell}**" for cell in line(f"all {len(rows)} cells", rows)])
    return table(["operator", *(measure.title for measure in MEASURES)], body)


def cell_table(rows: Sequence[Mapping[str, object]]) -> str:
    """One line a cell: the figures themselves."""
    header = ["operator", "shape"]
    for measure in (FORWARD, BOTH, WALL_FORWARD, WALL_BOTH):
        header += [f"{measure.title} ms", "FLA", "ratio"]
    header += ["peak MiB", "FLA", "largest error / limit"]

    def line(row: Mapping[str, dict]) -> list[str]:
        ours, fla = row["ours"], row.get("fla") or {}
        cells = [row["op"], row["shape"]]
        for measure in (FORWARD, BOTH, WALL_FORWARD, WALL_BOTH):
            cells += [milliseconds(side.get(measure.key)) for side in (ours, fla)] + [number(ratio(row, measure))]
        return cells + [number(side.get("peak_mb"), 0) for side in (ours, fla)] + [largest_error(row)]

    return table(header, map(line, rows))


def largest_error(row: Mapping[str, dict]) -> str:
    """The result that comes closest to its limit."""
    if any(error is None for error in row["errors"].values()):
        return "not finite"
    limits = row["error_limits"]
    name = max(row["errors"], key=lambda name: row["errors"][name] / limits[name])
    return f"{name} {row['errors'][name]:.1e} / {limits[name]:.1e}"


def eager_table(rows: Sequence[Mapping[str, object]]) -> str:
    """How many times as fast as the eager chunked form, where that was measured."""
    body = []
    for row in rows:
        if eager := row.get("eager"):
            ratios = (
                ratio({"ours": row["ours"], "fla": eager}, measure) for measure in (FORWARD, BOTH, WALL_BOTH, MEMORY)
            )
            body.append([row["op"], row["shape"], *(number(r, 1) for r in ratios)])
    return table(
        ["operator", "shape", "forward", "forward + backward", "forward + backward, wall", "peak memory"], body
    )


def errors_table(report: Path, ops: Iterable[str]) -> str:
    """One line an operator: the GPU tests that compared results with fp64, and the largest error over its bound.

    Before them the sources that were tested, which may be others than those that were timed.
    """
    cases: Counter[str] = Counter()
    worst: dict[tuple[str, str], float] = {}
    root = ElementTree.parse(report).getroot()
    tested = {x.get("name"): x.get("value")[:12] for x in root.iterfind(".//testsuite/properties/property")}
    for test in root.iter("testcase"):
        found = [x.get("name").split()[1:] + [x.get("value")] for x in test.iter("property")
                 if x.get("name").startswith("error/bound")]
        cases.update({op for op, _, _ in found})
        for op, name, value in found:
            worst[op, name] = max(worst.get((op, name), 0.0), float(value))
    body = [[op, str(cases[op]), *(number(worst.get((op, name))) for name in COMPARED)] for op in ops if op in cases]
    sources = f"Sources `{tested.get('torch_ext_tree')}`, configs `{tested.get('configs_sha256')}`."
    return sources + "\n\n" + table(["operator", "tests", *COMPARED], body)


def first_call_sentence(rows: Sequence[Mapping[str, dict]]) -> str:
    seconds = [(s, row["op"]) for row in rows if (s := row["ours"].get("first_call_s")) is not None]
    if not seconds:
        return ""
    (least, fast), (most, slow) = min(seconds), max(seconds)
    span = f"{least:.1f} s ({fast}) to {most:.1f} s ({slow})"
    return f"The first forward plus backward with empty compile caches takes {span}. "


def worst_sentence(rows: Sequence[Mapping[str, object]]) -> str:
    """Where FLA is closest, or ahead."""
    parts = []
    for measure in (FORWARD, BOTH, MEMORY):
        if s := summarise(rows, measure):
            parts.append(f"{measure.title} {s.worst:.2f} (`chunk_{s.row['op']}`, `{s.row['shape']}`)")
    return f"Worst cells: {'; '.join(parts)}. " if parts else ""


def render(results: Mapping[str, dict], image: str | None = None, tests: Path | None = None) -> str:
    """The README's block, without its markers; `tests` is the JUnit report of the GPU tests."""
    meta, rows, extra = results["meta"], results["rows"], results.get("extra") or []
    versions = ", ".join(f"{name} {meta['versions'][name]}" for name in sorted(meta["versions"]))
    parts = [
        f"{meta['gpu']}, {meta['date']}, bf16, against flash-linear-attention (FLA): FLA's figure over ours, geometric "
        "mean over the shapes and, in brackets, the worst one. Above 1 is faster, or takes less memory. Times are GPU "
        "time (CUDA graphs, L2 flushed) except where they say wall (eager calls, Python included).",
        summary_table(rows),
        (worst_sentence(rows) + first_call_sentence(rows)).strip(),
        f"![FLA's time over ours, by operator and shape]({image})" if image else "",
        f"<details><summary>All {len(rows)} cells</summary>\n\n{cell_table(rows)}\n\n</details>",
    ]
    if any(row.get("eager") for row in rows):
        title = "Against the eager chunked form in PyTorch (tests/eager.py)"
        parts.append(f"<details><summary>{title}</summary>\n\n{eager_table(rows)}\n\n</details>")
    if extra:
        title = "With the options that models use"
        parts.append(f"<details><summary>{title}</summary>\n\n{cell_table(extra)}\n\n</details>")
    if tests:
        title = "Errors in the GPU tests: the largest one of each result, over its bound"
        parts.append(f"<details><summary>{title}</summary>\n\n{errors_table(tests, operators(rows))}\n\n</details>")
    parts.append(
        f"Errors are relative RMS errors against fp64. Measured with {versions}; sources "
        f"`{meta['torch_ext_tree'][:12]}`, configs `{meta['configs_sha256'][:12]}`; `{meta['command']}`."
    )
    return "\n\n".join(part for part in parts if part)


def insert(readme: str, block: str) -> str:
    """`readme` with `block` between its markers."""
    begin, end = readme.find(BEGIN), readme.find(END)
    if begin < 0 or end < begin:
        raise ValueError(f"the README has no {BEGIN} followed by {END}")
    return readme[: begin + len(BEGIN)] + "\n" + block + "\n" + readme[end:]


def plot(results: Mapping[str, dict], path: Path) -> None:
    """Ratios of GPU time, a bar a cell and a line at the mean of each operator, forward above forward plus backward."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    rows = results["rows"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    ops = operators(rows)
    width = 0.8 / len(shapes)
    colours = dict(
        zip(shapes, plt.get_cmap("viridis")([i / max(1, len(shapes) - 1) * 0.9 for i in range(len(shapes))]))
    )
    figure, panels = plt.subplots(2, 1, figsize=(11, 6.5), sharex=True, layout="constrained")
    for panel, measure in zip(panels, (FORWARD, BOTH)):
        ratios = {(row["op"], row["shape"]): r for row in rows if (r := ratio(row, measure)) is not None}
        for i, shape in enumerate(shapes):
            at = [(j + (i + 0.5) * width - 0.4, ratios[op, shape]) for j, op in enumerate(ops) if (op, shape) in ratios]
            # bars start at 1, where both take the same time
            panel.bar([x for x, _ in at], [r - 1 for _, r in at], width, 1, color=colours[shape], label=shape)
        for j, op in enumerate(ops):
            if s := summarise([row for row in rows if row["op"] == op], measure):
                panel.hlines(s.mean, j - 0.42, j + 0.42, color="black", linewidth=1.2)
                panel.annotate(f"{s.mean:.2f}", (j + 0.43, s.mean), fontsize=7, va="center")
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.set_yscale("log")
        ticks = [t for t in (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8) if _near(t, ratios.values())]
        panel.yaxis.set_major_locator(FixedLocator(ticks))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}×"))
        panel.grid(axis="y", linewidth=0.3)
        panel.set_axisbelow(True)
        panel.set_title(f"{measure.title}: FLA's GPU time over ours", fontsize=10)
    panels[-1].set_xticks(range(len(ops)), ops)
    panels[0].legend(fontsize=7, ncols=3)
    meta = results["meta"]
    figure.suptitle(f"{meta['gpu']}, bf16, {meta['date']}; lines are geometric means", fontsize=9)
    # no date or version in the file: the same results give the same image
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _near(tick: float, ratios: Iterable[float]) -> bool:
    """Whether a tick falls between the extremes, widened by a half."""
    low, high = min([1.0, *ratios]), max([1.0, *ratios])
    return low / 1.5 <= tick <= high * 1.5


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ROOT / "benchmarks" / "results" / "NVIDIA_H200.json"
    parser.add_argument("results", nargs="?", type=Path, default=default, help=f"default: {default.relative_to(ROOT)}")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the README is out of date")
    parser.add_argument("--no-plot", action="store_true", help="keep the PNG as it is")
    args = parser.parse_args(argv)

    if not args.results.exists():
        parser.error(f"no results at {args.results}: compare.py writes them on a GPU")
    results = json.loads(args.results.read_text())
    image = args.results.with_suffix(".png")
    readme = args.readme.read_text()
    try:
        shown = image.resolve().relative_to(args.readme.resolve().parent).as_posix()
    except ValueError:
        shown = image.as_posix()
    tests = args.results.with_name("gpu-tests.xml")
    fresh = insert(readme, render(results, shown, tests if tests.exists() else None))
    if args.check:
        sys.stdout.writelines(
            difflib.unified_diff(readme.splitlines(True), fresh.splitlines(True), "README", "results")
        )
        return int(fresh != readme)
    args.readme.write_text(fresh)
    if not args.no_plot:
        plot(results, image)
    return 0


if __name__ == "__main__":
    sys.exit(main())
