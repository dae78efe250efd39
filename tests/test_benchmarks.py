"""The benchmark scripts as far as they run without a GPU: inputs, errors, files, processes, report."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import compare  # noqa: E402
import report  # noqa: E402
import timing  # noqa: E402
from cells import EAGER_SHAPES, EXTRA_WORKLOADS, SHAPES, WORKLOADS, Shape, make_inputs  # noqa: E402
from errors import yardstick  # noqa: E402

ALL = WORKLOADS | EXTRA_WORKLOADS
SMALL = Shape(2, 70, 3, 16)
PACKED = (Shape.parse("N3x20_H3_D16"), Shape.parse("N30+1+2x7_H3_D16"))
GROUPED = Shape.parse("N30+9_H3_HV6_D16")
META = {
    "gpu": "NVIDIA H200",
    "date": "2026-12-01",
    "command": "python benchmarks/compare.py",
    "versions": {"torch": "2.11.0", "fla-core": "0.6.0"},
    "package": "staged build",
    "torch_ext_tree": "a" * 40,
    "configs_sha256": "b" * 64,
}


@pytest.fixture
def peer(reference):
    """A package that has the operators' functions, all of them the token recurrence."""

    def function(op):
        def call(normalize=None, safe_gate=None, lower_bound=None, **arguments):
            o, state = getattr(reference, op)(**arguments)
            return o.to(arguments["q"].dtype), state

        return call

    return types.SimpleNamespace(**{f"chunk_{op}": function(op) for op in WORKLOADS})


def make_row(op, shape, ours=1.0, fla=2.0, error=0.001):
    """A row in which every figure of a side is the same number."""
    figures = dict.fromkeys(compare.FIELDS)
    sides = {name: figures | dict.fromkeys(compare.FIELDS[:-1], x) for name, x in (("ours", ours), ("fla", fla))}
    names = WORKLOADS[op].outputs
    errors = {"errors": dict.fromkeys(names, error), "error_limits": dict.fromkeys(names, 0.01), "fla_errors": None}
    return {"op": op, "shape": str(shape), **errors, **sides, "eager": None}


# What is measured


def test_the_cells_are_seven_operators_at_six_shapes():
    args = compare.parse([])
    assert len(args.ops) * len(args.shapes) == 42
    assert [str(shape) for shape in EAGER_SHAPES] == ["B4_T2048_H16_D128", "B8_T1024_H8_D64"]
    assert len(compare.parse(["--extra"]).ops) == 9
    assert compare.parse(["--ops", "kda", "--shapes", "B1_T64_H2_D32"]).shapes == [Shape(1, 64, 2, 32)]


@pytest.mark.parametrize("name, shape", (
    ("B4_T2048_H16_D128", Shape(4, 2048, 16, 128)),
    ("B1_T8192_H16_HV32_D128", Shape(1, 8192, 16, 128, 32)),
    ("N8x1024_H96_D128", Shape(1, 8192, 96, 128, lengths=(1024,) * 8)),
    ("N1300+2x7+1_H8_HV32_D64", Shape(1, 1315, 8, 64, 32, (1300, 7, 7, 1))),
))
def test_names_of_shapes(name, shape):
    assert Shape.parse(name) == shape and str(shape) == name


@pytest.mark.parametrize("name", ("N_H4_D64", "N8x_H4_D64", "B1_N8_H4_D64", "B1_T8_H4_HV6_D64", "B1_T8_H4"))
def test_names_of_no_shape(name):
    with pytest.raises(ValueError, match="shape"):
        Shape.parse(name)


@pytest.mark.parametrize("argv", (["--ops", "mamba"], ["--shapes", "64x64"], ["--sides", "theirs"]))
def test_bad_arguments_are_refused(argv, capsys):
    with pytest.raises(SystemExit):
        compare.parse(argv)
    assert argv[1] in capsys.readouterr().err


@pytest.mark.parametrize("name", ALL)
def test_inputs(name):
    workload = ALL[name]
    tensors = make_inputs(workload, SMALL, "cpu")
    assert set(tensors) == {*workload.inputs, "do"}
    assert all(x.dtype == (torch.float32 if name == "g" else torch.bfloat16) for name, x in tensors.items())
    assert tensors["k"].float().norm(dim=-1).sub(1).abs().max() < 0.01
    if "g" in tensors:
        assert tensors["g"].max() <= 0
        assert tensors["g"].shape == tensors["q"].shape[: 4 if workload.gate == "channel" else 3]


@pytest.mark.parametrize("name, shape", (
    *((name, shape) for name in ALL for shape in (SMALL, *PACKED)), ("gated_delta_rule", GROUPED), ("kda", GROUPED)))
def test_errors_are_those_against_the_reference(name, shape, peer):
    workload = ALL[name]
    tensors = make_inputs(workload, shape, "cpu")
    doubles = {key: x.double() if x.is_floating_point() else x for key, x in tensors.items()}
    exact = compare.Calls(workload, peer, doubles).both()
    right = yardstick(workload, tensors)
    assert tuple(right.limits) == tuple(exact) == workload.outputs
    assert max(right.errors(exact).values()) < 1e-12
    assert all(0.001 < limit < 0.1 for limit in right.limits.values()), right.limits
    wrong = right.errors(exact | {"dk": exact["dk"] * 1.5})
    assert wrong["dk"] == pytest.approx(0.5)
    assert math.isnan(right.errors(exact | {"dv": exact["dv"] * math.nan})["dv"])


# Measuring, with the clock and the GPU taken away


@pytest.fixture
def no_gpu(monkeypatch):
    """timing.py without a GPU: calls are made, figures are made up. A watch that sees no tuning."""
    monkeypatch.setattr(timing, "capture", lambda call: (call(), call)[1])
    monkeypatch.setattr(timing, "replay_ms", lambda graphs, replays: dict.fromkeys(graphs, 0.123456))
    monkeypatch.setattr(timing, "wall_ms", lambda call, calls: (call(), 2.0)[1])
    monkeypatch.setattr(timing, "peak_mb", lambda call: (call(), 1234.56)[1])
    return types.SimpleNamespace(settle=lambda call: (call(), 0)[1])


@pytest.mark.parametrize("name", ("retention", "kda"))
def test_a_cell_gives_a_row(name, peer, no_gpu):
    measured = compare.measure(ALL[name], SMALL, {"ours": peer, "fla": peer}, no_gpu, with_eager=True, device="cpu")
    row = json.loads(json.dumps(compare.to_row(name, SMALL, measured)))
    assert list(row) == ["op", "shape", "errors", "error_limits", "fla_errors", "ours", "fla", "eager"]
    assert row["shape"] == "B2_T70_H3_D16"
    assert tuple(row["errors"]) == tuple(row["error_limits"]) == tuple(row["fla_errors"]) == ALL[name].outputs
    for side in ("ours", "fla", "eager"):
        assert tuple(row[side]) == compare.FIELDS
        assert row[side]["fb_gpu_ms"] == 0.1235 and row[side]["peak_mb"] == 1235 and row[side]["first_call_s"] is None
    assert compare.wrong(row) == []
    assert "2.000 / 2.000 (1.00)" in compare.progress(row)


def test_a_wrong_result_is_told(peer, no_gpu):
    broken = types.SimpleNamespace(chunk_gla=lambda **x: (peer.chunk_gla(**x)[0] * 1.2, None))
    measured = compare.measure(WORKLOADS["gla"], SMALL, {"ours": broken, "fla": peer}, no_gpu, device="cpu")
    assert set(compare.wrong(compare.to_row("gla", SMALL, measured))) == set(WORKLOADS["gla"].outputs)
    measured["errors"]["ours"]["dg"] = math.nan
    row = compare.to_row("gla", SMALL, measured)
    assert row["errors"]["dg"] is None and row["eager"] is None and "dg" in compare.wrong(row)
    json.dumps(row, allow_nan=False)


def test_an_autotuner_is_watched(monkeypatch):
    from triton.runtime.autotuner import Autotuner

    monkeypatch.setattr(Autotuner, "_bench", lambda tuner: "measured")
    watch = timing.TuningWatch()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tuner = types.SimpleNamespace(base_fn=test_bad_arguments_are_refused)
    todo = [3, 2]

    def call():
        for _ in range(todo.pop() if todo else 0):
            assert Autotuner._bench(tuner) == "measured"

    assert watch.settle(call) == 5
    assert watch.settle(call) == 0
    with watch.forbidden(), pytest.raises(timing.TuningWanted, match="test_bad_arguments"):
        Autotuner._bench(tuner)
    assert Autotuner._bench(tuner) == "measured"


# The results file


def test_rows_are_merged_in_order(tmp_path):
    path = tmp_path / "results.json"
    results = compare.Results(path, META)
    results.add(make_row("kda", SHAPES[0]))
    timed = make_row("gla", SHAPES[1])
    timed["ours"]["first_call_s"] = 3.5
    results.add(timed)
    results.add(make_row("gla", SHAPES[0]))

    again = compare.Results(path, META | {"date": "2026-12-02", "command": "python benchmarks/compare.py --ops gla"})
    again.add(make_row("gla", SHAPES[1], ours=0.5))
    content = json.loads(path.read_text())
    assert [(row["op"], row["shape"]) for row in content["rows"]] == [
        ("gla", str(SHAPES[0])),
        ("gla", str(SHAPES[1])),
        ("kda", str(SHAPES[0])),
    ]
    assert content["rows"][1]["ours"] == dict.fromkeys(compare.FIELDS, 0.5) | {"first_call_s": 3.5}
    assert content["meta"]["date"] == "2026-12-02"
    assert content["meta"]["command"] == "python benchmarks/compare.py; python benchmarks/compare.py --ops gla"
    assert again.find("kda", SHAPES[0]) and not again.find("kda", SHAPES[1])

    again.add(make_row("gla", SMALL))
    content = json.loads(path.read_text())
    assert len(content["rows"]) == 3 and [row["shape"] for row in content["extra"]] == [str(SMALL)]


def test_rows_of_other_sources_are_not_kept(tmp_path, capsys):
    path = tmp_path / "results.json"
    compare.Results(path, META).add(make_row("kda", SHAPES[0]))
    results = compare.Results(path, META | {"torch_ext_tree": "c" * 40})
    assert results.content["rows"] == []
    assert "afresh" in capsys.readouterr().err


# The processes

FAKE = """
import json, sys, time
op = sys.argv[1]
if op == "delta_rule":
    sys.exit(3)
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    row = json.loads(sys.argv[2]) | {"op": op, "shape": line.strip()}
    print(json.dumps({"error": "no luck"} if line.startswith("B8_T2048") else row), flush=True)
"""


@pytest.fixture
def fake_run(monkeypatch, tmp_path):
    """compare.run with processes that answer at once; the operator delta_rule fails, and so does the shape B8_T2048."""

    def child(role, op, shapes, args):
        if role == "first-call":
            return [sys.executable, "-c", "print('{\"first_call_s\": 4.567}')"]
        return [sys.executable, "-c", FAKE, op, json.dumps(make_row(op, SHAPES[0]))]

    monkeypatch.setattr(compare, "child", child)
    monkeypatch.setattr(compare, "stage", lambda root: None)
    monkeypatch.setattr(compare, "describe", lambda: {"gpu": META["gpu"], "versions": META["versions"]})
    monkeypatch.setattr(compare.os, "cpu_count", lambda: 2)
    path = tmp_path / "out.json"

    def run(*argv):
        status = compare.run(compare.parse([*argv, "--out", str(path)]))
        return status, json.loads(path.read_text()) if path.exists() else None

    return run


def test_a_run(fake_run, capsys):
    status, content = fake_run("--ops", "kda", "--shapes", str(SHAPES[2]), str(SHAPES[5]))
    assert status == 0
    assert [row["shape"] for row in content["rows"]] == [str(SHAPES[2]), str(SHAPES[5])]
    assert [row["ours"]["first_call_s"] for row in content["rows"]] == [4.57, None]
    assert content["meta"]["gpu"] == "NVIDIA H200" and len(content["meta"]["torch_ext_tree"]) == 40
    assert "[2/2] kda B8_T1024_H8_D64" in capsys.readouterr().out

    status, content = fake_run("--ops", "gla", "kda", "--shapes", str(SHAPES[2]), "--resume", "--first-call", "none")
    assert status == 0 and len(content["rows"]) == 3
    assert "[1/1] gla" in capsys.readouterr().out


def test_failures_are_told_and_the_rest_is_measured(fake_run, capsys):
    status, content = fake_run("--ops", "delta_rule", "kda", "--shapes", *map(str, SHAPES[3:5]), "--first-call", "none")
    assert status == 1
    assert [(row["op"], row["shape"]) for row in content["rows"]] == [("kda", str(SHAPES[3]))]
    err = capsys.readouterr().err
    assert "status 3" in err and "no luck" in err


def test_the_budget_ends_a_run(fake_run, capsys):
    status, content = fake_run("--ops", "kda", "--shapes", str(SHAPES[0]), "--budget-s", "0", "--first-call", "none")
    assert status == 1 and content is None
    assert "left out" in capsys.readouterr().err


@pytest.mark.parametrize("out", [["--out", "/some/where.json"], ["--out=/some/where.json"]])
def test_recorded_command_names_no_folder(out, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare.py", "--ops", "kda", "gla", *out, "--first-call", "op"])
    command = compare.make_meta({}, source=True)["command"]
    assert command == "python benchmarks/compare.py --ops kda gla --first-call op"


# The report


@pytest.fixture
def results():
    """Two operators; ours is 1, FLA 2 and 8 (mean 4) for kda, 0.5 for gla; nothing of FLA for one cell of gla."""
    rows = [
        make_row("gla", SHAPES[0], fla=0.5),
        make_row("gla", SHAPES[1], fla=None),
        make_row("kda", SHAPES[0], fla=2.0),
        make_row("kda", SHAPES[1], fla=8.0, error=None),
    ]
    rows[0]["ours"]["first_call_s"] = 2.0
    rows[2]["ours"]["first_call_s"] = 9.0
    rows[2]["eager"] = dict.fromkeys(compare.FIELDS, 30.0)
    return {"meta": META, "rows": rows, "extra": [make_row("kda", SHAPES[2]) | {"op": "kda+l2norm+safe_gate"}]}


def test_ratios(results):
    rows = results["rows"]
    assert [report.ratio(row, report.FORWARD) for row in rows] == [0.5, None, 2.0, 8.0]
    kda = report.summarise(rows[2:], report.BOTH)
    assert kda.mean == pytest.approx(4.0) and kda.worst == 2.0 and kda.row is rows[2]
    assert report.summarise(rows, report.BOTH).mean == pytest.approx(2.0)
    assert report.summarise(rows[1:2], report.BOTH) is None


def test_rendering(results):
    lines = report.render(results, "plot.png").splitlines()
    text = "\n".join(lines)
    assert "| `chunk_kda` |" + " 4.00 (2.00) |" * 5 in lines
    assert "| `chunk_gla` |" + " 0.50 (0.50) |" * 5 in lines
    assert "| **all 4 cells** |" + " **2.00 (0.50)** |" * 5 in lines
    assert "| kda | B1_T8192_H96_D128 |" + " 1.00 | 2.00 | 2.00 |" * 4 + " 1 | 2 | o 1.0e-03 / 1.0e-02 |" in lines
    assert "| gla | B2_T16384_H16_D128 |" + " 1.00 | – | – |" * 4 + " 1 | – | o 1.0e-03 / 1.0e-02 |" in lines
    assert any(line.startswith("| kda | B2_T16384_H16_D128") and line.endswith("| not finite |") for line in lines)
    assert "| kda | B1_T8192_H96_D128 | 30.0 | 30.0 | 30.0 | 30.0 |" in lines
    assert "forward 0.50 (`chunk_gla`, `B1_T8192_H96_D128`)" in text
    assert "takes 2.0 s (gla) to 9.0 s (kda)" in text
    assert "NVIDIA H200, 2026-12-01" in text and "fla-core 0.6.0, torch 2.11.0" in text
    assert "![FLA's time over ours, by operator and shape](plot.png)" in lines
    assert "| kda+l2norm+safe_gate | B4_T2048_H16_D128 |" in text


def test_readme_block(results, tmp_path, capsys):
    path, readme = tmp_path / "results.json", tmp_path / "README.md"
    path.write_text(json.dumps(results))
    readme.write_text(f"# Title\n{report.BEGIN}\nold\n{report.END}\nrest\n")
    argv = [str(path), "--readme", str(readme), "--no-plot"]
    assert report.main([*argv, "--check"]) == 1
    assert "-old" in capsys.readouterr().out and "old" in readme.read_text()
    assert report.main(argv) == 0
    text = readme.read_text()
    assert text.startswith(f"# Title\n{report.BEGIN}\nNVIDIA H200") and text.endswith(f"\n{report.END}\nrest\n")
    assert "old" not in text and "(results.png)" in text
    assert report.main([*argv, "--check"]) == 0
    with pytest.raises(ValueError, match="results:begin"):
        report.insert("no markers", "x")
    with pytest.raises(SystemExit):
        report.main([str(tmp_path / "none.json"), *argv[1:]])
    assert "none.json" in capsys.readouterr().err


def test_errors_of_the_gpu_tests(results, tmp_path):
    path, tests = tmp_path / "results.json", tmp_path / "gpu-tests.xml"
    path.write_text(json.dumps(results))
    cases = [[("gla o", 0.5), ("gla dg", 0.25)], [("gla o", 0.75)], [("kda o", 0.125)], []]
    sources = "<properties><property name='torch_ext_tree' value='0123456789abcdef'/></properties>"
    tests.write_text(f"<testsuites><testsuite>{sources}" + "".join(
        "<testcase><properties><property name='kernels' value='3'/>" + "".join(
            f"<property name='error/bound {name}' value='{value}'/>" for name, value in case
        ) + "</properties></testcase>" for case in cases) + "</testsuite></testsuites>")
    lines = report.render(results, None, tests).splitlines()
    assert "| gla | 2 | 0.75 |" + " – |" * 4 + " 0.25 |" + " – |" * 4 in lines
    assert "| kda | 1 | 0.12 |" + " – |" * 9 in lines
    assert "Sources `0123456789ab`, configs `None`." in lines


def test_plot(results, tmp_path):
    pytest.importorskip("matplotlib")
    paths = [tmp_path / name for name in ("a.png", "b.png")]
    for path in paths:
        report.plot(results, path)
    images = [path.read_bytes() for path in paths]
    assert images[0].startswith(b"\x89PNG") and images[0] == images[1]


def test_the_committed_results_are_whole():
    content = json.loads((ROOT / "benchmarks/results/NVIDIA_H200.json").read_text())
    assert {"gpu", "date", "command", "versions", "torch_ext_tree", "configs_sha256"} <= content["meta"].keys()
    cells = [(row["op"], row["shape"]) for row in content["rows"]]
    assert cells == [(op, str(shape)) for op in WORKLOADS for shape in SHAPES]
    for row in content["rows"]:
        assert compare.wrong(row) == []
        assert tuple(row["errors"]) == WORKLOADS[row["op"]].outputs
        for side in ("ours", "fla", *(("eager",) if Shape.parse(row["shape"]) in EAGER_SHAPES else ())):
            assert tuple(row[side]) == compare.FIELDS
            assert all(row[side][key] > 0 for key in compare.FIELDS[:-1])


# What `kernels benchmark` runs


@pytest.fixture
def hub_benchmark(peer, monkeypatch):
    """Run benchmark.py by the runner of `kernels`, at its CPU sizes, on a stand-in for the package."""
    from kernels.cli import benchmark as runner

    monkeypatch.setattr("kernels.get_local_kernel", lambda path: peer)
    peer.__name__ = "linear_attention_0123456789"
    classes = runner.discover_benchmark_classes(ROOT / "benchmarks" / "benchmark.py", ROOT)

    def run(cls):
        return runner.run_benchmark_class(cls, 1, 1, str(ROOT), is_local=True, revision="local")[0]

    return classes, run


def test_every_operator_has_a_hub_benchmark(hub_benchmark, peer):
    classes, run = hub_benchmark
    assert {cls.function for cls in classes} == {workload.function for workload in WORKLOADS.values()}
    for cls in classes:
        timings = run(cls)
        assert {name: timing.verified for name, timing in timings.items()} == {
            "forward": True,
            "forward_backward": True,
        }


def test_a_hub_benchmark_finds_a_wrong_result(hub_benchmark, peer):
    classes, run = hub_benchmark
    right = peer.chunk_kda
    peer.chunk_kda = lambda **x: (right(**x | {"beta": x["beta"] * 0.9})[0], None)
    with pytest.raises(RuntimeError, match="Verification failed"):
        run(next(cls for cls in classes if cls.function == "chunk_kda"))
