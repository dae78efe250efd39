"""Write the package as the Hub serves it into build/: what the Nix builder of `kernels` makes, without Nix.

For each backend of build.toml there is one folder, build/torch-<backend>, with the Python files of torch-ext/<name>, a
generated `_ops.py`, and `metadata.json` with the SHA-256 digest of every other file. The same sources give the same
bytes. The one thing left out is `provenance`, in which the builder records its own version and commit.
"""
from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import tomlkit

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".pyi"}
# The builder asks for this version of `kernels` unless a kernel depends on other kernels.
KERNELS_MINVER = "0.14.0"

OPS_PY = '''"""Generated with the build: the namespace that the torch operators of this build are registered in."""
import torch

_NAMESPACE = "{id}"

ops = getattr(torch.ops, _NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """The full name of the operator `op_name` of this build."""
    return f"{{_NAMESPACE}}::{{op_name}}"
'''


def package_files(package: Path) -> dict[str, bytes]:
    """Path inside the package to content, for every file that ships, sorted by path."""
    files = {
        path.relative_to(package).as_posix(): path.read_bytes()
        for path in package.rglob("*")
        if path.is_file() and path.suffix in SUFFIXES
    }
    files.pop("_ops.py", None)
    return dict(sorted(files.items()))


def unique_id(files: dict[str, bytes], build_toml: bytes) -> str:
    """Ten hex digits that change with any shipped byte.

    The builder takes the commit here. A digest of the content also tells two uncommitted states apart, which matters
    because `kernels` keeps a loaded build in `sys.modules` under this name.
    """
    digest = hashlib.sha256(build_toml)
    for path, content in files.items():
        digest.update(f"\0{path}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:10]


def metadata(general: dict, backend: str, kernel_id: str, files: dict[str, bytes]) -> bytes:
    """metadata.json of one variant, its keys in the builder's order."""
    content = {
        "name": general["name"],
        "id": kernel_id,
        "version": general["version"],
        "kernels-minver": KERNELS_MINVER,
        "license": general["license"],
        "python-depends": general.get("python-depends", []),
        "kernel-depends": [],
        "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {path: base64.b64encode(hashlib.sha256(files[path]).digest()).decode() for path in sorted(files)},
        },
    }
    return json.dumps(content, indent=2).encode()


def stage(root: Path = ROOT, out: Path | None = None) -> list[Path]:
    """Build every variant of the project at `root` into `out` (default: root/build) and return their folders.

    A variant that is up to date is left untouched, so that others may be reading it.
    """
    out = out or root / "build"
    build_toml = (root / "build.toml").read_bytes()
    general = tomlkit.parse(build_toml.decode()).unwrap()["general"]
    module = general["name"].replace("-", "_")
    sources = package_files(root / "torch-ext" / module)
    if "__init__.py" not in sources:
        raise FileNotFoundError(f"torch-ext/{module}/__init__.py is missing in {root}")
    suffix = unique_id(sources, build_toml)
    variants = []
    for backend in general["backends"]:
        kernel_id = f"_{module}_{backend}_{suffix}"
        files = {**sources, "_ops.py": OPS_PY.format(id=kernel_id).encode()}
        files["metadata.json"] = metadata(general, backend, kernel_id, files)
        variants.append(out / f"torch-{backend}")
        if not up_to_date(variants[-1], files):
            replace(variants[-1], files)
    return variants


def up_to_date(variant: Path, files: dict[str, bytes]) -> bool:
    """Whether `variant` holds exactly `files`, bytecode aside."""
    present = {p.relative_to(variant).as_posix(): p for p in variant.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    return present.keys() == files.keys() and all(present[name].read_bytes() == files[name] for name in files)


def replace(variant: Path, files: dict[str, bytes]) -> None:
    """Put `files` into the folder `variant` in one step, in place of whatever is there."""
    variant.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=variant.parent, prefix=".stage-") as work:
        fresh = Path(work) / "fresh"
        for name, content in files.items():
            path = fresh / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if variant.exists():
            shutil.move(variant, Path(work) / "stale")
        fresh.rename(variant)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder to build into (default: build)")
    for variant in stage(out=parser.parse_args().out):
        kernel_id = json.loads((variant / "metadata.json").read_bytes())["id"]
        print(f"{variant}  {kernel_id}")


if __name__ == "__main__":
    main()
