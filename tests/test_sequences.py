"""Sequences of any lengths in one row: the bits of each sequence alone, states for each, and nothing after the last."""

from __future__ import annotations

import importlib

import pytest
import torch
from cases import DELTA, GATED, OPERATORS, Case, make
from numerics import poisoned, run
from test_ops import DEVICES, check, operator

LENGTHS = {
    "ragged": [37, 64, 1, 63, 65, 15, 200],
    "one": [100],
    "empty": [0, 20, 0, 0, 70, 0],
    "all_empty": [0, 0, 0],
}


def packed(op, lengths, tail, device, **special):
    """Inputs and gradients of a packed call, and the same of each sequence; the tail of what comes in is NaN."""
    T, N = sum(lengths) + tail, len(lengths)
    case = Case(op, T=max(T, 1), K=20, V=24, **special)
    inputs, do, dht = make(case, device)
    states = torch.randn(N, case.H, case.K, case.V, device=device)
    inputs["initial_state"], dht = states, torch.randn_like(states)
    tokens = [name for name in ("q", "k", "v", "g", "beta") if name in inputs]
    for x in (*(inputs[name] for name in tokens), do):
        x[:, T - tail:] = torch.nan
    alone, begin = [], 0
    for n, length in enumerate(lengths):
        part = {name: x[:, begin:begin + length] if name in tokens else x for name, x in inputs.items()}
        part["initial_state"] = states[n:n + 1]
        alone.append((part, do[:, begin:begin + length], dht[n:n + 1]))
        begin += length
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    return inputs, do, dht, ends, alone


def assert_same(got, alone, T):
    """Each sequence's part of the packed results has the bits of the sequence alone; the rest is zero."""
    begin = 0
    for n, single in enumerate(alone):
        end = begin + single["o"].size(1)
        for name, x in single.items():
            part = got[name][n:n + 1] if name in ("ht", "dinitial_state") else got[name][:, begin:end]
            assert torch.equal(part, x), f"{name} of sequence {n}"
        begin = end
    for name, x in got.items():
        assert name in ("ht", "dinitial_state") or not x[:, begin:].any(), f"{name} after the last sequence"


@pytest.mark.parametrize("lengths, tail, device", [
    *((lengths, tail, "cpu") for lengths in LENGTHS for tail in (0, 1, 130)),
    *(pytest.param(lengths, tail, "cuda", marks=pytest.mark.gpu) for lengths, tail in zip(LENGTHS, (130, 0, 130, 1))),
])
@pytest.mark.parametrize("op", OPERATORS)
def test_each_sequence_as_if_alone(op, lengths, tail, device, package):
    options = {"l2norm": True} if op in DELTA else {}
    inputs, do, dht, ends, alone = packed(op, LENGTHS[lengths], tail, device, **options)
    fn = operator(package, op, output_final_state=True)
    with poisoned():
        got = run(lambda **inputs: fn(**inputs, cu_seqlens=ends), inputs, do, dht)
        single = [run(fn, *arguments) for arguments in alone]
    assert_same(got, single, inputs["q"].size(1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", ["linear_attn", "retention", "simple_gla", "gla"])
@pytest.mark.parametrize("special", [
    {"B": 2, "T": 300}, {"T": 200, "dtype": "fp32", "gate": "some_inf"}, {"lengths": (70, 0, 200, 64, 129), "tail": 20},
    {"T": 200, "K": 136},
], ids=str)
def test_walks_in_segments(special, op, device, package, reference, monkeypatch):
    """Sequences in as many segments as they have chunks, as only long ones have otherwise."""
    segments = importlib.import_module(f"{package.__name__}.ops._segments")
    monkeypatch.setattr(segments, "_chunks_of_a_segment", lambda tiles, chunks: 1)
    if op not in GATED:
        special = {name: x for name, x in special.items() if name != "gate"}
    case = Case(op, **special)
    check(case, *make(case, device), package, reference)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths, tail", [
    ((0, 0, 0), 5), ((0, 0, 0), 300), ((100,), 0), ((100, 70), 200), ((37, 64, 1, 63, 65, 15, 200), 30),
    ((0, 40, 130) * 30, 0),
])
def test_table_of_segments(lengths, tail, device, package):
    """Every sequence's segments in order, one of an empty sequence; then what only writes zeros, and empty rows."""
    ops = {name: importlib.import_module(f"{package.__name__}.ops.{name}") for name in ("_sequences", "_segments")}
    T, C, size = sum(lengths) + tail, 32, 2
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device)
    sequences = ops["_sequences"].sequence_tables(ends, T, C).sequences
    got = ops["_segments"].segment_table_kernel(sequences, T, C, size * C).tolist()
    wanted = []
    for n, (begin, end, fill, chunk, chunks) in enumerate(sequences.tolist()):
        first, count = len(wanted), max(1, -(-(end - begin) // (size * C)))
        for i in range(max(count, -(-chunks // size))):
            ends = (first, first + count) if i < count else (len(wanted) + 1, len(wanted))
            wanted.append([begin + i * size * C, end, fill, n, *ends, chunk + i * size, min(size, chunks - i * size)])
    assert got[:len(wanted)] == wanted
    for n, (*_, first, stop, _, chunks) in enumerate(got[len(wanted):], len(wanted)):
        assert first == n + 1 and stop == n and chunks == 0, "a row that stands for nothing"


@pytest.mark.parametrize("device", DEVICES)
def test_segments_of_what_falls_stay_inside(device, package):
    """Sums of segments have T // L rows, s - n for segment s of sequence n, also where cu_seqlens falls."""
    ops = {name: importlib.import_module(f"{package.__name__}.ops.{name}") for name in ("_sequences", "_segments")}
    T, C = 64, 16
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(2, 9, (30,), generator=generator).tolist()
    falling = [torch.randint(-10, T + 10, (n,), generator=generator) for n in sizes]
    for ends in (torch.tensor([0, 64, 0, 64, 0, 64]), *falling):
        sequences = ops["_sequences"].sequence_tables(ends.to(device), T, C).sequences
        for size in (1, 2):
            for s, row in enumerate(ops["_segments"].segment_table_kernel(sequences, T, C, size * C).tolist()):
                n, first, stop = row[3:6]
                if first <= s < stop:
                    assert 0 <= first - n and stop - 2 - n < T // (size * C), (ends.tolist(), s, row)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("B, T, H, packed", [(2, 0, 2, 0), (0, 5, 2, 0), (2, 5, 0, 0), (1, 0, 2, 3), (1, 5, 0, 2)])
@pytest.mark.parametrize("op", OPERATORS)
def test_empty(op, B, T, H, packed, device, package):
    """Nothing in, nothing out, and the final state is the initial one, as its gradient is the incoming one."""
    K, V, N = 20, 24, packed or B
    shapes = {"q": (K,), "k": (K,), "v": (V,)} | ({"beta": ()} if op in DELTA else {})
    shapes |= {"head": {"g": ()}, "channel": {"g": (K,)}}.get(GATED.get(op), {})
    inputs = {name: torch.ones(B, T, H, *rest, device=device) for name, rest in shapes.items()}
    inputs["initial_state"] = torch.randn(N, H, K, V, device=device)
    options = {"cu_seqlens": torch.zeros(N + 1, dtype=torch.int32, device=device)} if packed else {}
    fn = operator(package, op, output_final_state=True, **options)
    got = run(fn, inputs, torch.ones(B, T, H, V, device=device), torch.ones(N, H, K, V, device=device))
    assert got["o"].shape == (B, T, H, V)
    assert torch.equal(got["ht"], inputs["initial_state"])
    assert torch.equal(got["dinitial_state"], torch.ones_like(got["ht"]))
    assert all(got[f"d{name}"].shape == inputs[name].shape for name in shapes)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    for result in fn(**leaves):  # which all that came in takes part in
        assert all(not dx.any() or name == "initial_state" for name, dx in zip(
            leaves, torch.autograd.grad(result.sum(), list(leaves.values()), materialize_grads=True)))
        assert result.grad_fn is not None
    if op in GATED:  # these have state_v_first
        state = inputs["initial_state"].detach().mT.contiguous()
        assert torch.equal(fn(**inputs | {"initial_state": state}, state_v_first=True)[1], state)
    del inputs["initial_state"]
    assert not fn(**inputs)[1].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths, dtype, limit", [
    ((40, 30), torch.float32, 1e-5), ((70,), torch.float32, 1e-5), ((0, 33, 0, 20), torch.float32, 1e-5),
    ((40, 30), torch.bfloat16, 2e-2), ((40, 30), torch.float16, 1e-3)])
def test_normalised(lengths, dtype, limit, device, package, reference):
    """Linear attention over the sum of its weights, with the pair of states that the next call goes on from."""
    torch.manual_seed(0)
    N, H, K, V, T = len(lengths), 2, 20, 24, sum(lengths)
    q, k = torch.rand(2, 1, T, H, K, device=device).to(dtype).unbind()
    v, states = torch.randn(1, T, H, V, device=device).to(dtype), torch.randn(N, H, K, V, device=device)
    keys = torch.rand(N, 1, H, K, device=device)
    ends = torch.tensor((0, *lengths), device=device).cumsum(0)

    def results(fn, exact=False, **options):
        leaves = [(x.double() if exact else x.detach().clone()).requires_grad_() for x in (q, k, v, states, keys)]
        o, (S, z) = fn(*leaves[:3], initial_state=tuple(leaves[3:]), normalize=True, cu_seqlens=ends, **options)
        sums = [x.to(torch.float64 if exact else torch.float32).square().sum() for x in (o, S, z)]
        return [o, S, z, *torch.autograd.grad(sums, leaves)]

    for x, exact in zip(results(package.chunk_linear_attn, output_final_state=True), results(
            reference.linear_attn, exact=True)):
        assert (x - exact).norm() <= limit * exact.norm()
    with torch.no_grad():
        o, none = package.chunk_linear_attn(q, k, v, cu_seqlens=ends)  # normalize is the default
    assert none is None and o.dtype == dtype
    exact = reference.linear_attn(q.double(), k.double(), v.double(), normalize=True, cu_seqlens=ends)[0]
    assert (o - exact).norm() <= limit * exact.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [8.0, 1e-3])
def test_normalised_beyond_the_range_of_fp16(value, device, package):
    """Of equal weights: the mean of what was so far."""
    x = torch.full((1, 200, 1, 64), value, device=device, dtype=torch.float16, requires_grad=True)
    v = torch.rand(1, 200, 1, 2, device=device, dtype=torch.float16)
    o, _ = package.chunk_linear_attn(x, x, v)
    mean = v.float().cumsum(1) / torch.arange(1, 201, device=device)[:, None, None]
    assert (o - mean).norm() <= 1e-3 * mean.norm()
    assert torch.autograd.grad(o.sum(), x)[0].isfinite().all()
