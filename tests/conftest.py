"""The package as users load it: staged into a temporary folder, then `get_kernel`."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path

import pytest
from _pytest.junitxml import xml_key

ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "HelionDSL/linear-attention"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

_hub = tempfile.TemporaryDirectory(prefix="linear-attention-")
# `kernels` reads both when it is imported: the folder stands for the Hub, and nothing is downloaded
os.environ["LOCAL_KERNELS"] = f"{REPO_ID}={_hub.name}"
os.environ["HF_HUB_OFFLINE"] = "1"

import numerics  # noqa: E402
import provenance  # noqa: E402
import stage  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)  # two busy threads on two busy cores slow each other down many times over


def pytest_sessionstart(session):
    """Name the sources and the configs in the JUnit report, by its writer: fixtures cannot reach it under xdist."""
    writer = session.config.stash.get(xml_key, None)
    if writer is not None:
        for name, value in provenance.provenance(ROOT).items():
            writer.add_global_property(name, value)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def errors_in_the_report(record_property):
    """Keep in the JUnit report how far within their bounds a test's results were: report.py makes a table of it."""
    numerics.worst.clear()
    yield
    for name, ratio in numerics.worst.items():
        record_property(f"error/bound {name}", f"{ratio:.3f}")


@pytest.fixture(scope="session")
def package():
    """The package by `get_kernel`, from a build of the sources as they are."""
    from kernels import get_kernel

    stage.stage(ROOT, Path(_hub.name) / "build")
    return get_kernel(REPO_ID, version=0)


@pytest.fixture(scope="session")
def reference(package):
    """The token recurrences that the package ships."""
    return importlib.import_module(f"{package.__name__}.reference")
