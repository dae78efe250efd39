"""Sequences of any lengths in one row: the bits of each sequence alone, states for each, and nothing after the last."""

from __future__ import annotations

import pytest
import torch
from cases import DELTA, GATED, OPERATORS, Case, make
from numerics import poisoned, run
from test_ops import DEVICES, operator

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
    del inputs["initial_state"]
    assert not fn(**inputs)[1].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [(40, 30), (70,), (0, 33, 0, 20)])
def test_normalised(lengths, device, package, reference):
    """Linear attention over the sum of its weights, with the pair of states that the next call goes on from."""
    torch.manual_seed(0)
    N, H, K, V, T = len(lengths), 2, 20, 24, sum(lengths)
    q, k = torch.rand(2, 1, T, H, K, device=device).unbind()
    v, states = torch.randn(1, T, H, V, device=device), torch.randn(N, H, K, V, device=device)
    keys = torch.rand(N, 1, H, K, device=device)
    ends = torch.tensor((0, *lengths), device=device).cumsum(0)

    def results(fn, dtype, **options):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, states, keys)]
        o, (S, z) = fn(*leaves[:3], initial_state=tuple(leaves[3:]), normalize=True, cu_seqlens=ends, **options)
        return [o, S, z, *torch.autograd.grad((o.square().sum(), S.square().sum(), z.square().sum()), leaves)]

    got = results(package.chunk_linear_attn, torch.float32, output_final_state=True)
    for x, exact in zip(got, results(reference.linear_attn, torch.float64)):
        assert (x - exact).norm() <= 1e-5 * exact.norm()
    with torch.no_grad():
        o, none = package.chunk_linear_attn(q, k, v, cu_seqlens=ends)  # normalize is the default
    assert none is None
    exact = reference.linear_attn(q, k, v, normalize=True, cu_seqlens=ends)[0]
    assert (o - exact).norm() <= 1e-5 * exact.norm()
