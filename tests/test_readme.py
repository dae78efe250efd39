"""What the README shows runs as it stands."""
from __future__ import annotations

import re
import subprocess

import pytest
from hub import publish, run_offline
from stage import ROOT, stage

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.M | re.S)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_example(tmp_path, device):
    """The first block at its full size, on a CPU without looking for a GPU, from a Hub cache that holds this build."""
    publish(tmp_path / "cache", stage(out=tmp_path / "build")[0].parent, "v0")
    shown = "device, tuple(out.shape), out.dtype, out.isfinite().all().item(), out.float().std().item()"
    code = f"{BLOCKS[0]}\nprint({shown})"
    visible = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    last = run_offline(code, cwd=tmp_path, cache=tmp_path / "cache", **visible).splitlines()[-1]
    seen, spread = last.rsplit(" ", 1)
    assert seen == f"{device} (2, 1024, 8, 64) torch.bfloat16 True"
    assert float(spread) > 0.01


def test_other_blocks(tmp_path):
    """The rest of the Python, with a model to work on and a commit to pin."""
    commit = publish(tmp_path / "cache", stage(out=tmp_path / "build")[0].parent, "v0")
    code = "\n".join(["import torch", "from kernels import get_kernel", "model = torch.nn.Identity()", *BLOCKS[1:]])
    assert "<commit>" in code
    run_offline(code.replace("<commit>", commit), cwd=tmp_path, cache=tmp_path / "cache")


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z-]+)", README))))
def test_make_targets(target):
    subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


def test_links():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_results_have_a_place():
    assert README.count("<!-- results:begin -->") == README.count("<!-- results:end -->") == 1
