"""A Hub cache on disk, as `kernels` finds it offline, and child processes that see nothing else of the Hub."""
from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPO_ID = "HelionDSL/linear-attention"


def local_repository() -> Path:
    """The folder that stands for the Hub in these tests: what `package` was staged into and loaded from."""
    return Path(os.environ["LOCAL_KERNELS"].partition("=")[2])


def publish(cache: Path, build: Path, branch: str) -> str:
    """Put the variants in `build` on `branch` of the cached repository; returns the commit."""
    repository = cache / f"kernels--{REPO_ID.replace('/', '--')}"
    metadata = b"".join(path.read_bytes() for path in sorted(build.glob("*/metadata.json")))
    commit = hashlib.sha1(metadata).hexdigest()
    shutil.copytree(build, repository / "snapshots" / commit / "build", ignore=shutil.ignore_patterns("__pycache__"))
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / branch).write_text(commit)
    return commit


def run_offline(code: str, *, cwd: Path, cache: Path | None = None, **environment: str) -> str:
    """Standard output of `code` in a fresh interpreter, which finds the package in `cache`, or else where we do."""
    environment = {**os.environ, **environment}
    if cache:
        del environment["LOCAL_KERNELS"]
        environment["HF_HUB_CACHE"] = str(cache)
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert child.returncode == 0, child.stderr
    return child.stdout
