"""The stored configs, the rendered files, and which config a call gets."""
from __future__ import annotations

import importlib.util
import json
import re
import sys

import pytest
import render_configs
import torch
import tune

KERNELS = [(module, name) for module, names in render_configs.kernels().items() for name in names]
ARCHITECTURES = [pytest.param("sm90", (9, 0), id="sm90"), pytest.param("sm100", (10, 0), id="sm100")]
BF16 = {"num_warps": 8}
WIDE = {"num_warps": 16}
SAFE = {"num_warps": 4}


def meta(spec):
    """An argument as the store describes it, without memory."""
    match = re.fullmatch(r"(\w+)\[([\d,]*)\](?:@([\d,]+))?", spec) if isinstance(spec, str) else None
    if match is None:
        return spec
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "i32": torch.int32}[match[1]]
    shape = [int(n) for n in match[2].split(",")]
    return torch.empty(shape, dtype=dtype, device="meta")


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def capability(monkeypatch):
    """Sets the compute capability that torch reports."""
    return lambda *value: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: value)


def test_every_kernel_has_entries():
    assert not render_configs.missing()


def test_rendered_files_are_current():
    files = render_configs.rendered_files()
    assert {path.name for path in render_configs.OPS.glob("_helion_aot_*.py")} == {path.name for path in files}
    stale = [path.name for path, text in files.items() if path.read_text() != text]
    assert not stale, "run python tools/render_configs.py"


def test_a_kernel_without_entries_is_named(monkeypatch):
    with pytest.raises(KeyError, match="new_kernel"):
        render_configs.render("_l2norm", "sm90", ["new_kernel"])
    monkeypatch.setattr(render_configs, "kernels", lambda: {"_l2norm": ["new_kernel"]})
    assert len(render_configs.missing()) == 2 and "new_kernel" in render_configs.missing()[0]


@pytest.mark.parametrize("architecture, value", ARCHITECTURES)
@pytest.mark.parametrize("module, name", KERNELS)
def test_every_tuned_shape_gets_its_config(module, name, architecture, value, capability):
    capability(*value)
    rendered = load(render_configs.OPS / f"_helion_aot_{module}_cuda_{architecture}.py")
    for entry in render_configs.read(f"cuda_{architecture}", module)["kernels"][name]:
        args = [meta(x) for x in entry["args"]]
        assert getattr(rendered, f"autotune_{name}")(*args) == entry["config"]
        hash(getattr(rendered, f"key_{name}")(*args))


@pytest.mark.parametrize("module, name", KERNELS)
def test_another_gpu_gets_the_safe_config(module, name, capability):
    capability(10, 3)  # Helion hands it sm100's file
    rendered = load(render_configs.OPS / f"_helion_aot_{module}_cuda_sm100.py")
    entry = render_configs.read("cuda_sm100", module)["kernels"][name][0]
    args = [meta(x) for x in entry["args"]]
    widths = [n for x in args if isinstance(x, torch.Tensor) for n in x.shape[3:]]
    safe = render_configs.safe_config(name, args[0].element_size(), widths)
    assert getattr(rendered, f"autotune_{name}")(*args) == safe
    assert safe["num_stages"] == 1 and all(n <= 32 for n in safe.get("block_sizes", []))


def test_entries_fit_the_kernels():
    nodes = {node.name: node for nodes in render_configs.functions().values() for node in nodes}
    for module, name in KERNELS:
        for architecture in render_configs.REQUIRED:
            for entry in render_configs.read(f"cuda_{architecture}", module)["kernels"][name]:
                assert render_configs.fits(entry, nodes[name]), f"{architecture} {name}: {entry}"


def test_measured_entries_say_where():
    for architecture in render_configs.REQUIRED:
        for module in render_configs.kernels():
            for run in render_configs.read(f"cuda_{architecture}", module)["runs"]:
                assert {"gpu", "measured", "date"} <= run.keys()
                assert not run["measured"] or {"torch", "triton", "helion"} <= run["versions"].keys()


TABLE = {
    "configs": [BF16, WIDE, SAFE],
    "safe": {4096: 2},
    "tuned": {
        ((2, 64), (2, 64), (4,), None, 64): {(8, 1024, 8): 0, (1, 8192, 96): 1},
        ((2, 128), (2, 128), (4,), None, 64): {(1, 8192, 96): 1},
        ((2, 128), (2, 128), None, None, 64): {(1, 8192, 96): 0},
    },
}


def test_lengths_are_no_part_of_a_form():
    described = ["bf16[1,8192,96,128]", None, 64, False, 4096]
    assert render_configs.form_of(described) == render_configs.form_of([*described[:-1], 576])
    assert render_configs.form_of(described) != render_configs.form_of([*described[:2], 32, *described[3:]])


def pick(B, T, H, K, V, dtype=torch.bfloat16, gate=True, state=False, C=64):
    """The config that TABLE gives a call on sm90."""
    space = {"torch": torch, "math": __import__("math"), "CAPABILITY": (9, 0)}
    exec(render_configs.SELECTION, space)
    empty = lambda *shape, dtype=dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    args = [empty(B, T, H, K), empty(B, T, H, V), empty(B, T, H, dtype=torch.float32) if gate else None,
            empty(B, H, K, V, dtype=torch.float32) if state else None, C]
    return TABLE["configs"][space["_pick"](TABLE, args)]


@pytest.mark.parametrize("call, config", [
    pytest.param(dict(B=8, T=1024, H=8, K=64, V=64), BF16, id="the tuned shape"),
    pytest.param(dict(B=1, T=8192, H=96, K=64, V=64), WIDE, id="the other tuned shape"),
    pytest.param(dict(B=2, T=100, H=16, K=64, V=64), BF16, id="fewer heads are nearer to few"),
    pytest.param(dict(B=1, T=100, H=96, K=64, V=64), WIDE, id="many heads are nearer to many"),
    pytest.param(dict(B=8, T=1024, H=8, K=128, V=128), WIDE, id="the tuned width comes before the tuned size"),
    pytest.param(dict(B=8, T=1024, H=8, K=100, V=70), WIDE, id="widths round up"),
    pytest.param(dict(B=8, T=1024, H=8, K=50, V=64, state=True), BF16, id="an option that was not there"),
    pytest.param(dict(B=1, T=8192, H=96, K=128, V=128, gate=False), BF16, id="without a gate"),
    pytest.param(dict(B=8, T=1024, H=8, K=64, V=64, dtype=torch.float16), BF16, id="another dtype of the same size"),
    pytest.param(dict(B=8, T=1024, H=8, K=64, V=64, dtype=torch.float32), SAFE, id="a wider dtype"),
    pytest.param(dict(B=8, T=1024, H=8, K=256, V=64), SAFE, id="a wider K"),
    pytest.param(dict(B=8, T=1024, H=8, K=64, V=129), SAFE, id="a wider V"),
    pytest.param(dict(B=8, T=1024, H=8, K=64, V=64, C=128), SAFE, id="a longer chunk"),
    pytest.param(dict(B=0, T=1024, H=8, K=64, V=64), BF16, id="an empty batch"),
])
def test_selection(call, config, capability):
    capability(9, 0)
    assert pick(**call) is config


def test_selection_on_another_gpu(capability):
    capability(8, 9)
    assert pick(B=8, T=1024, H=8, K=64, V=64) is SAFE


def test_what_helion_collected_becomes_candidates(tmp_path):
    path = tmp_path / "tuned_configs_cuda_sm90.json"
    features = {"arg0_ndim": 4, "arg1_ndim": 4}
    features |= {f"arg{n}_dim{d}": size for n in (0, 1) for d, size in enumerate((2, 100, 4, 64))}
    features |= {"arg0_dtype": "torch.bfloat16", "arg1_dtype": "torch.float32"}
    config = {"block_sizes": [32], "num_warps": 8, "num_stages": 2, "pid_type": "flat", "range_num_stages": [0],
              "indexing": ["pointer", "tensor_descriptor", "tensor_descriptor"]}
    path.write_text(json.dumps({"l2norm_fwd_kernel": [{"config": config, "shape_features": features}], "other": [{}]}))
    assert tune.collected(path) == {"l2norm_fwd_kernel": [{
        "args": ["bf16[2,100,4,64]", "f32[2,100,4,64]"],
        "candidates": [{"config": {"block_sizes": [32], "num_warps": 8, "num_stages": 2, "pid_type": "flat",
                                   "indexing": "tensor_descriptor"}}]}]}


def test_a_stopped_run_goes_on(tmp_path):
    """Entries are written one at a time; an entry that is not measured is measured, a measured one only again."""
    derived = {"gpu": "NVIDIA H200", "measured": False, "date": "2026-01-01"}
    measured = {**derived, "measured": True, "versions": {"torch": "2", "triton": "3", "helion": "1"}}
    args = ["bf16[2,100,4,64]", "bf16[2,100,4,64]"]
    tune.Store(tmp_path, derived).put("l2norm_fwd_kernel", {"args": args, "config": SAFE})
    store = tune.Store(tmp_path, measured)
    assert not store.measured("l2norm_fwd_kernel", args)
    store.put("l2norm_fwd_kernel", {"args": args, "config": BF16, "ms": 1.0})
    assert store.measured("l2norm_fwd_kernel", args) and not store.measured("l2norm_bwd_kernel", args)
    written = json.loads((tmp_path / "_l2norm.json").read_text())
    assert written == {"runs": [measured], "kernels": {
        "l2norm_fwd_kernel": [{"args": args, "config": BF16, "ms": 1.0, "run": 0}]}}


@pytest.mark.parametrize("change, reason", [
    pytest.param(lambda x: x * (1 + 1e-3), "", id="rounding"),
    pytest.param(lambda x: x * 1.01, "off by", id="scale"),
    pytest.param(lambda x: x.index_fill(0, torch.tensor([7]), 0), "off by", id="a lost row"),
    pytest.param(lambda x: x.index_fill(0, torch.tensor([7]), torch.nan), "not finite", id="not written"),
])
def test_wrong_numbers_are_not_kept(change, reason):
    x = torch.randn(4096, 64)
    assert reason in tune.wrong([change(x)], [x]) and bool(reason) == bool(tune.wrong([change(x)], [x]))


def test_tuning_takes_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["tune.py"])
    with pytest.raises(SystemExit):
        tune.main()
    assert "no CUDA device" in capsys.readouterr().err
