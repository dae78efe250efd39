"""The names of sources and configs that reports carry."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from provenance import configs_sha256, git_tree_hash, torch_ext_tree


@pytest.mark.skipif(not shutil.which("git"), reason="needs git to compare with")
def test_tree_hash_is_gits(tmp_path):
    package = tmp_path / "torch-ext" / "package"
    for name in ("a.py", "a/b.py", "a-b.py", "a0.py", "ops/x.py", "run"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(name * 3)
    (package / "run").chmod(0o755)
    for command in ("init -q", "add .", "-c user.name=n -c user.email=e commit -qm all"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    (package / "ops" / "__pycache__").mkdir()
    (package / "ops" / "__pycache__" / "x.pyc").write_bytes(b"x")
    (package / "empty" / "__pycache__").mkdir(parents=True)
    name = subprocess.run(
        ["git", "rev-parse", "HEAD:torch-ext"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout.strip()
    assert torch_ext_tree(tmp_path) == name
    (package / "a.py").write_text("changed")
    assert git_tree_hash(tmp_path / "torch-ext") != name


def test_configs_hash_is_of_names_and_contents(tmp_path):
    (tmp_path / "configs" / "x").mkdir(parents=True)
    hashes = {configs_sha256(tmp_path)}
    for name, content in (("a.json", "{}"), ("x/a.json", "{}"), ("a.json", "[]")):
        (tmp_path / "configs" / name).write_text(content)
        hashes.add(configs_sha256(tmp_path))
    assert len(hashes) == 4
