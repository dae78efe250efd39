"""The built tree is what `kernels` expects, loads in every way a user loads it, and keeps to itself."""
from __future__ import annotations

import ast
import json
import shutil
import sys
import textwrap
from importlib import import_module
from pathlib import Path

import jinja2
import pytest
from hub import REPO_ID, local_repository, publish, run_offline
from kernels import get_kernel, get_local_kernel
from kernels._rust import Backend, Build, Digest, DigestAlgorithm, DigestValidationError, Metadata
from stage import ROOT, stage

PACKAGE = ROOT / "torch-ext" / "linear_attention"
BACKENDS = ["cpu", "cuda"]
OPERATORS = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_simple_gla",
]

# Every operator, forward and backward, on small inputs; `check(kernel, device)` for the children below.
CHECK = textwrap.dedent("""
    import torch

    def check(kernel, device):
        q, k, v = (torch.rand(1, 20, 2, 16, device=device).div(4).requires_grad_() for _ in range(3))
        g = (-torch.rand(1, 20, 2, 16, device=device)).requires_grad_()
        beta = torch.rand(1, 20, 2, device=device, requires_grad=True)
        gate = g[..., 0]
        outputs = [
            kernel.chunk_linear_attn(q, k, v, normalize=False),
            kernel.chunk_retention(q, k, v),
            kernel.chunk_simple_gla(q, k, v, gate),
            kernel.chunk_gla(q, k, v, g),
            kernel.chunk_delta_rule(q, k, v, beta),
            kernel.chunk_gated_delta_rule(q, k, v, gate, beta),
            kernel.chunk_kda(q, k, v, g, beta),
        ]
        sum(o.sum() for o, _ in outputs).backward()
        assert all(x.grad.abs().sum() > 0 for x in (q, k, v, g, beta))
        return [o.double().norm().item() for o, _ in outputs]
""")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A build folder of our own, to be read or copied."""
    out = tmp_path_factory.mktemp("built") / "build"
    stage(out=out)
    return out


def sources() -> dict[str, str]:
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def test_build_toml():
    build = Build.open(ROOT)
    assert build.general.backends == [Backend.CPU, Backend.CUDA]
    assert build.all_kernel_depends(Backend.CUDA) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_metadata_and_digest(built, backend):
    variant = built / f"torch-{backend}"
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert metadata.id.isidentifier() and metadata.id.startswith(f"_linear_attention_{backend}_")
    assert (str(metadata.name), metadata.version, metadata.license) == ("linear-attention", 0, "Apache-2.0")
    assert metadata.python_depends == ["helion"] and metadata.kernel_depends == []
    assert metadata.backend.backend_type == Backend.from_str(backend) and metadata.backend.archs is None
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def test_digest_finds_a_changed_file(built, tmp_path):
    variant = tmp_path / "torch-cpu"
    shutil.copytree(built / "torch-cpu", variant)
    (variant / "layers.py").write_text("")
    digest = Metadata.read_from_file(variant / "metadata.json").digest
    with pytest.raises(DigestValidationError, match="layers.py"):
        digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ships_the_sources_and_two_generated_files(built, backend):
    variant = built / f"torch-{backend}"
    shipped = {path.relative_to(variant).as_posix() for path in variant.rglob("*") if path.is_file()}
    assert shipped == sources().keys() | {"_ops.py", "metadata.json"}
    assert all((variant / name).read_text() == text for name, text in sources().items() if name != "_ops.py")


def test_stage_is_reproducible_and_leaves_a_current_build_alone(built, tmp_path):
    again = stage(out=tmp_path / "build")
    for variant in again:
        for path in variant.rglob("*"):
            if path.is_file():
                assert path.read_bytes() == (built / path.relative_to(tmp_path / "build")).read_bytes()
    inodes = [variant.stat().st_ino for variant in again]
    assert [variant.stat().st_ino for variant in stage(out=tmp_path / "build")] == inodes
    (again[0] / "extra.py").touch()
    stage(out=tmp_path / "build")
    assert not (again[0] / "extra.py").exists()


def test_kernels_info(built, tmp_path):
    arguments = ["kernels", "info", str(built.parent), "--json"]
    code = f"import sys; from kernels.cli import main; sys.argv = {arguments}; main()"
    info = json.loads(run_offline(code, cwd=tmp_path))
    assert (info["name"], info["version"], info["backends"]) == ("linear-attention", 0, BACKENDS)
    assert info["python_depends"] == ["helion"]


def test_all_is_one_literal_list():
    assigned = [
        ast.literal_eval(node.value)
        for node in ast.parse((PACKAGE / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    ]
    assert assigned == [[*OPERATORS, "layers"]]


def test_card_fills_in():
    """With what the builder gives it, the card names the repository, every function and both layers."""
    card = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined).from_string(
        (ROOT / "CARD.md").read_text()
    )
    text = card.render(
        repo_id=REPO_ID, license="apache-2.0", functions=OPERATORS, layers=None, has_benchmark=True, upstream=None
    )
    assert text.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n")
    assert f'get_kernel("{REPO_ID}", version=0)' in text
    assert all(f"`{name}`" in text for name in (*OPERATORS, "chunk_kimi_delta_attention"))
    assert "{{" not in text and "{%" not in text


@pytest.mark.parametrize("name", sources())
def test_imports(name):
    """Inside the package imports are relative; outside it are the standard library, torch, Helion, and for two
    modules Triton, which both bring."""
    tree = ast.parse(sources()[name], feature_version=(3, 10))
    absolute = {
        alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    } | {
        node.module.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not node.level
    }
    triton = {"triton"} if name in ("ops/_ptxas.py", "ops/_launch.py") else set()
    assert absolute <= {*sys.stdlib_module_names, "torch", "helion"} | triton


def test_no_function_hides_a_module(package):
    """Generated code imports the module of a kernel by name, and must not find a function there."""
    ops = import_module(f"{package.__name__}.ops")
    for path in sorted((PACKAGE / "ops").glob("*.py")):
        if path.stem != "__init__" and not path.stem.startswith("_helion_aot_"):
            module = import_module(f"{ops.__name__}.{path.stem}")
            assert getattr(ops, path.stem) is module


def test_loads_from_a_folder(package):
    """By path, and by name with LOCAL_KERNELS in the environment, whatever revision is asked for."""
    assert get_local_kernel(local_repository()) is package
    assert get_kernel(REPO_ID, version=0) is package
    assert get_kernel(REPO_ID, revision="main") is package
    assert package.__all__ == [*OPERATORS, "layers"]
    assert all(callable(getattr(package, name)) for name in OPERATORS)


def test_operators_have_the_namespace_of_the_build(package):
    ops = import_module(f"{package.__name__}._ops")
    assert ops.add_op_namespace_prefix("x") == f"{package.__name__}::x"


@pytest.fixture(scope="module")
def next_version(tmp_path_factory) -> Path:
    """The build folder of a changed project, one version on."""
    root = tmp_path_factory.mktemp("next")
    shutil.copytree(ROOT / "torch-ext", root / "torch-ext", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "build.toml").write_text((ROOT / "build.toml").read_text().replace("version = 0", "version = 1"))
    with (root / "torch-ext" / "linear_attention" / "__init__.py").open("a") as init:
        init.write("\nnext_version = True\n")
    return stage(root)[0].parent


def test_hub_cache_and_two_versions_in_one_process(built, next_version, tmp_path):
    """Offline from the Hub's cache: by version, by commit, and two versions side by side that both work."""
    cache = tmp_path / "cache"
    commit = publish(cache, built, "v0")
    assert publish(cache, next_version, "v1") != commit
    code = CHECK + textwrap.dedent(f"""
        import json, sys
        from kernels import LayerRepository, get_kernel
        old = get_kernel({REPO_ID!r}, version=0)
        pinned = get_kernel({REPO_ID!r}, revision={commit!r})
        new = get_kernel({REPO_ID!r}, version=1)
        layer = LayerRepository({REPO_ID!r}, layer_name="chunk_gated_delta_rule", version=0).load()
        norms = []
        for kernel in (old, new):
            torch.manual_seed(0)
            norms.append(check(kernel, "cpu"))
        print(json.dumps({{
            "pinned": pinned is old,
            "layer": layer is old.layers.chunk_gated_delta_rule,
            "names": [old.__name__, new.__name__],
            "modules": [sys.modules[old.__name__] is old, sys.modules[new.__name__] is new],
            "next": [hasattr(old, "next_version"), hasattr(new, "next_version")],
            "norms": norms,
        }}))
    """)
    seen = json.loads(run_offline(code, cwd=tmp_path, cache=cache).splitlines()[-1])
    assert seen["pinned"] and seen["layer"]
    assert seen["names"][0] != seen["names"][1] and seen["modules"] == [True, True]
    assert seen["next"] == [False, True]
    assert seen["norms"][0] == seen["norms"][1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_leaves_no_trace(package, tmp_path, device):
    """In a read-only folder: no file appears, the environment stays, and importing costs under 2 s of its own."""
    here, home = tmp_path / "here", tmp_path / "home"
    here.mkdir()
    home.mkdir()
    code = CHECK + textwrap.dedent(f"""
        import json, os, time
        import helion, kernels
        before = dict(os.environ)
        start = time.process_time()
        kernel = kernels.get_kernel({REPO_ID!r}, version=0)
        seconds = time.process_time() - start
        check(kernel, {device!r})
        changed = sorted(set(before.items()) ^ set(os.environ.items()))
        print(json.dumps({{"seconds": seconds, "changed": changed}}))
    """)
    compilers = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
    caches = {name: str(tmp_path / "caches") for name in compilers}
    here.chmod(0o555)
    try:
        out = run_offline(code, cwd=here, HOME=str(home), **caches)
    finally:
        here.chmod(0o755)
    seen = json.loads(out.splitlines()[-1])
    assert seen["changed"] == []
    assert list(here.iterdir()) == [] and list(home.iterdir()) == []
    assert seen["seconds"] < 2
