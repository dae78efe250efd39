"""Around the operators: autocast, inference mode, checkpoints, one tensor twice, CUDA graphs, large sizes, compiles."""

from __future__ import annotations

import gc
import importlib
import tempfile
from pathlib import Path

import pytest
import torch
from cases import DELTA, GATED, OPERATORS, Case, make
from filelock import FileLock
from numerics import in_fp64, rms, run
from test_ops import DEVICES, operator
from torch.utils.checkpoint import checkpoint

EVERY = pytest.mark.parametrize("op", OPERATORS)
ON = pytest.mark.parametrize("device", DEVICES)


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@ON
@EVERY
def test_autocast_changes_nothing(op, device, package):
    inputs, do, dht = make(Case(op, l2norm=op in DELTA), device)
    fn = operator(package, op, output_final_state=True)
    expected = run(fn, inputs, do, dht)
    with torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16):
        got = run(fn, inputs, do, dht)
    assert_same(got, expected)


@ON
@EVERY
def test_inference_mode(op, device, package):
    inputs, do, dht = make(Case(op), device)
    fn = operator(package, op, output_final_state=True)
    expected = run(fn, inputs, do, dht)
    with torch.inference_mode():
        o, ht = fn(**inputs)
    assert torch.equal(o, expected["o"]) and torch.equal(ht, expected["ht"])


@ON
@EVERY
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(op, device, reentrant, package):
    inputs, do, dht = make(Case(op), device)
    fn = operator(package, op, output_final_state=True)
    names = list(inputs)

    def checkpointed(**inputs):
        return checkpoint(lambda *values: fn(**dict(zip(names, values))), *inputs.values(), use_reentrant=reentrant)

    if reentrant:  # which only backward() goes through
        def gradients(fn):
            leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
            o, ht = fn(**leaves)
            torch.autograd.backward((o, ht), (do, dht))
            return {"o": o} | {name: x.grad for name, x in leaves.items()}

        assert_same(gradients(checkpointed), gradients(fn))
    else:
        assert_same(run(checkpointed, inputs, do, dht), run(fn, inputs, do, dht))


@ON
@EVERY
def test_one_tensor_for_all(op, device, package):
    """q, k and v may be one tensor: the results are those of copies, the gradient the sum of theirs."""
    inputs, do, dht = make(Case(op, K=32, V=32), device)
    x = torch.nn.functional.normalize(inputs["q"].float(), dim=-1).to(inputs["q"].dtype)
    fn = operator(package, op, output_final_state=True)
    rest = {name: y for name, y in inputs.items() if name not in "qkv"}
    apart = run(fn, {name: x.clone() for name in "qkv"} | rest, do, dht)

    def together(v, **rest):
        return fn(q=v, k=v, v=v, **rest)

    got = run(together, {"v": x} | rest, do, dht)
    for name in got:
        total = sum(apart[f"d{y}"].float() for y in "qkv") if name == "dv" else apart[name]
        torch.testing.assert_close(got[name].float(), total.float(), rtol=2e-2, atol=1e-2 if name == "dv" else 0)


@ON
@pytest.mark.parametrize("op", [op for op in OPERATORS if op not in DELTA])
def test_scores_that_fp16_holds_with_their_scale_alone(op, device, package, reference):
    """Each token's own q . k is 204800, which is beyond fp16's range; o and all gradients are within it."""
    inputs, do, _ = make(Case(op, T=96, K=128, dtype="fp16", h0=False, ht=False, roots="o"), device)
    keys = 40 * inputs["k"].sign()
    inputs |= {"q": keys.clone(), "k": keys, "v": inputs["v"] / 100}
    do = do / 100
    got = run(operator(package, op), inputs, do, None, ("q", "k", "v"))
    exact = run(getattr(reference, op), in_fp64(inputs), do, None, ("q", "k", "v"))
    for name, x in got.items():
        assert rms(x - exact[name]) <= 2e-3 * rms(exact[name]), name


@ON
@EVERY
def test_what_fp16_does_not_hold_stays_where_it_is(op, device, package):
    """A gradient of 30000 at one token, four times that with the scale, is none of later tokens' and NaN nowhere."""
    case = Case(op, T=100, H=1, K=16, V=16, dtype="fp16", h0=False, ht=False, roots="o", scale=4.0)
    inputs, do, _ = make(case, device)
    do[:, 40] = 30000
    for name, x in run(operator(package, op), inputs, do, None).items():
        assert not x.isnan().any(), name
        assert x[:, 41:].any() and x[:, 41:].isfinite().all(), name


@ON
@EVERY
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_infinite_value_is_seen(op, dtype, device, package):
    """What v holds of infinity is not made finite on its way to o and the final state; no other column has it."""
    inputs, _, _ = make(Case(op, T=70, H=1, K=16, V=16, dtype=dtype), device)
    inputs["v"][:, 5, :, 3] = torch.inf
    o, ht = operator(package, op, output_final_state=True)(**inputs)
    assert not o[:, 5:, :, 3].isfinite().any() and not ht[..., 3].isfinite().any()
    others = torch.arange(16, device=device) != 3
    assert o[..., others].isfinite().all() and ht[..., others].isfinite().all()


@pytest.mark.gpu
@EVERY
def test_cuda_graph_of_sequences(op, package):
    """A replay takes the lengths that cu_seqlens holds by then, with a tail where there was none."""
    special = {"HV": 4, "preamble": "gate+rate+bias+beta"} if op in ("gated_delta_rule", "kda") else {}
    inputs, do, dht = make(Case(op, lengths=(70, 30, 0, 50), l2norm=op in DELTA, **special), "cuda")
    fn = operator(package, op, output_final_state=True)
    run(fn, inputs, do, dht)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(fn, inputs, do, dht)
    inputs["cu_seqlens"].copy_(torch.tensor([0, 0, 65, 66, 140]))
    for x in (inputs["q"], inputs["k"], inputs["v"], do):
        x.copy_(x.flip(1))
    graph.replay()
    assert_same(captured, run(fn, inputs, do, dht))


def long_row(op, T, H, D):
    """One batch row for the operator."""

    def random(*shape, dtype=torch.bfloat16):
        return torch.randn(1, T, H, *shape, device="cuda", dtype=dtype)

    inputs = {"q": random(D), "k": torch.nn.functional.normalize(random(D), dim=-1), "v": random(D)}
    if op in GATED:
        g = random(D) if GATED[op] == "channel" else random(dtype=torch.float32)
        inputs["g"] = torch.nn.functional.logsigmoid(g)
    if op in DELTA:
        inputs["beta"] = random().sigmoid()
    return inputs


@pytest.mark.gpu
@EVERY
def test_tensors_past_2_to_the_31(op, package):
    """Two equal rows of 2^30 elements and a few more: the second one has the bits of the first, and what it has alone.

    Alone only within rounding: another size may have another config.
    """
    T, H, D = 65600, 128, 128
    torch.manual_seed(0)
    with FileLock(Path(tempfile.gettempdir()) / "linear-attention-large.lock"):  # one at a time: some 90 GB
        row = long_row(op, T, H, D)
        do = torch.randn(1, T, H, D, device="cuda", dtype=torch.bfloat16)
        fn = operator(package, op)
        alone = run(fn, row, do, None)
        got = run(fn, {name: torch.cat([x, x]) for name, x in row.items()}, do.expand(2, -1, -1, -1), None)
        for name, x in alone.items():
            first, second = got.pop(name).split(1)
            assert torch.equal(first, second), name
            assert (first - x).norm(dtype=torch.float32) <= 5e-2 * x.norm(dtype=torch.float32), name
        del row, do, alone, x, first, second
        torch.cuda.empty_cache()


@pytest.mark.gpu
@EVERY
def test_thousands_of_sequences(op, package, monkeypatch):
    """Many short ones and a few long ones: each of some has the bits that it has alone, in segments of the same length.

    Of itself a long one beside others has longer segments, and other bits.
    """
    segments = importlib.import_module(f"{package.__name__}.ops._segments")
    monkeypatch.setattr(segments, "_chunks_of_a_segment", lambda tiles, chunks: 10)
    generator = torch.Generator().manual_seed(0)
    lengths = [*torch.randint(0, 40, (3000,), generator=generator).tolist(), 5000, *[1] * 1000, 3000, 64, 0]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    inputs, do, _ = make(Case(op, T=ends[-1].item(), H=2, K=32, V=32, h0=False), "cuda")
    fn = operator(package, op)
    whole = run(lambda **x: fn(**x, cu_seqlens=ends.cuda()), inputs, do, None)
    for n in (0, 1, 2999, 3000, 3001, 4000, 4001, 4002):
        begin, end = ends[n], ends[n + 1]
        if begin == end:
            continue
        part = {name: x[:, begin:end] for name, x in inputs.items()}
        for name, x in run(fn, part, do[:, begin:end], None).items():
            assert torch.equal(whole[name][:, begin:end], x), f"{name} of sequence {n}"


@pytest.mark.gpu
@EVERY
def test_new_lengths_compile_nothing(op, package, monkeypatch, record_property):
    """Twenty sizes and packings after the first few: no kernel is bound or compiled again."""
    aot = importlib.import_module(f"{package.__name__}.ops._aot")
    for kernel in (x for x in gc.get_objects() if isinstance(x, aot.Kernel)):  # as in a new process
        monkeypatch.setattr(kernel, "_runs", {})
        monkeypatch.setattr(kernel, "_fixed", {})
    compiles, compiled = [], aot.Kernel.compiled

    def counted(self, args, config):
        before = len(self._fixed)
        run = compiled(self, args, config)
        compiles.extend([self.name] * (len(self._fixed) - before))
        return run

    monkeypatch.setattr(aot.Kernel, "compiled", counted)
    fn = operator(package, op, output_final_state=True)

    def call(B, T, *lengths):
        case = Case(op, B=B, T=T, H=2, K=32, V=32, lengths=lengths, tail=T if lengths else 0)
        run(fn, *make(case, "cuda"))

    for sizes in ((1, 200), (2, 200), (1, 40), (2, 40), (1, 192), (1, 10, 70, 60), (1, 10, 30, 20)):
        call(*sizes)
    record_property("kernels compiled for all lengths", first := len(compiles))
    # a batch of one and of several rows, of one and of several chunks, and packed sequences
    assert 0 < first <= 5 * len(set(compiles))
    for sizes in ((1, 3000), (2, 3000), (1, 10, 3000, 300)):
        call(*sizes)
    # the same in several segments: four kernels at most walk along them
    assert len(compiles) <= first + 3 * 4
    compiles.clear()
    for B, T in ((1, 201), (1, 1000), (1, 65), (1, 128), (1, 4096), (3, 77), (4, 5000), (5, 1024), (2, 63), (7, 20)):
        call(B, T)
    for lengths in ((5, 80), (1, 2, 200), (64, 64, 64), (300, 1), (129, 0, 3), (100,) * 7, (1,) * 70, (0, 0, 90),
                    (33, 44), (5000, 20)):
        call(1, 10, *lengths)
    assert compiles == [], f"{first} of the first calls, then {compiles}"
