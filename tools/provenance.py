"""Which sources and configs a test run or a measurement was made with; needs no git, so that a plain copy can tell."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_TRACKED = {"__pycache__", "_ops.py"}  # bytecode, and what a build generates


def git_tree_hash(folder: Path) -> str:
    """git's object name of a folder as it is on disk.

    Equals `git rev-parse HEAD:<folder>` when everything in it is committed; any other state has another name.
    """
    entries = []
    for path in folder.iterdir():
        if path.name in NOT_TRACKED:
            continue
        if path.is_dir():
            name, mode, digest = path.name + "/", "40000", git_tree_hash(path)
            if digest == EMPTY_TREE:  # git knows files only
                continue
        else:
            content = path.read_bytes()
            name, mode = path.name, "100755" if path.stat().st_mode & 0o100 else "100644"
            digest = _sha1("blob", content)
        entries.append((name, mode, digest))
    return _sha1("tree", b"".join(
        f"{mode} {name.rstrip('/')}\0".encode() + bytes.fromhex(digest) for name, mode, digest in sorted(entries)
    ))


def _sha1(kind: str, content: bytes) -> str:
    return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content).hexdigest()


EMPTY_TREE = _sha1("tree", b"")


def torch_ext_tree(root: Path = ROOT) -> str:
    """The name git gives the package's sources, rendered configs included: `git rev-parse HEAD:torch-ext`."""
    return git_tree_hash(root / "torch-ext")


def configs_sha256(root: Path = ROOT) -> str:
    """SHA-256 over the path and the content of every JSON file in configs/."""
    digest = hashlib.sha256()
    for path in sorted(p for p in (root / "configs").rglob("*.json") if p.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def provenance(root: Path = ROOT) -> dict[str, str]:
    """Both, by the names under which reports record them."""
    return {"torch_ext_tree": torch_ext_tree(root), "configs_sha256": configs_sha256(root)}


if __name__ == "__main__":
    for name, value in provenance().items():
        print(name, value)
