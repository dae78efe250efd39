"""The token recurrences against identities and finite differences, and the eager chunked form against them."""

from __future__ import annotations

import pytest
import torch
from cases import DELTA, GATED, INTERPRETER, OPERATORS, Case, make
from numerics import gate_terms, in_fp64, rms, run, run_eager, run_exact


def fp64_inputs(op, gate="model", T=5, H=2, K=3, V=2, **fields):
    case = Case(op, B=2, T=T, H=H, K=K, V=V, gate=gate if op in GATED else "model", **fields)
    inputs, _, _ = make(case)
    return {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


@pytest.mark.parametrize("op, l2norm", [(op, False) for op in OPERATORS] + [(op, True) for op in DELTA])
def test_gradients_are_those_of_finite_differences(reference, op, l2norm):
    inputs = fp64_inputs(op, l2norm=l2norm, scale=0.7)
    tensors = {name: x.requires_grad_() for name, x in inputs.items() if isinstance(x, torch.Tensor)}

    def results(*tensors_of_call):
        return getattr(reference, op)(**{**inputs, **dict(zip(tensors, tensors_of_call))})

    assert torch.autograd.gradcheck(results, tuple(tensors.values()))


@pytest.mark.parametrize("op", GATED)
def test_gates_of_minus_infinity_have_finite_results_and_gradients(reference, op):
    inputs = fp64_inputs(op, T=40)
    cut = {**inputs, "g": inputs["g"].clone()}
    cut["g"][:, 20] = -torch.inf
    do, dht = torch.randn(2, 40, 2, 2).double(), torch.randn(2, 2, 3, 2).double()
    results = run_exact(reference, op, cut, do, dht)
    assert all(x.isfinite().all() for x in results.values())
    assert rms(results["dg"][:, 20]) == 0
    after = {name: x[:, 20:] for name, x in inputs.items() if name != "initial_state"}
    torch.testing.assert_close(getattr(reference, op)(**after)[0], results["o"][:, 20:])


@pytest.mark.parametrize("ungated, gated", [
    ("linear_attn", "simple_gla"), ("linear_attn", "gla"), ("delta_rule", "gated_delta_rule"), ("delta_rule", "kda"),
])
def test_a_gate_of_zero_is_no_gate(reference, ungated, gated):
    inputs = fp64_inputs(gated, gate="zero")
    expected = getattr(reference, ungated)(**{name: x for name, x in inputs.items() if name != "g"})
    torch.testing.assert_close(getattr(reference, gated)(**inputs), expected)


@pytest.mark.parametrize("scalar, channel", [("simple_gla", "gla"), ("gated_delta_rule", "kda")])
def test_equal_channel_gates_are_a_scalar_gate(reference, scalar, channel):
    inputs = fp64_inputs(scalar)
    expanded = {**inputs, "g": inputs["g"][..., None].expand_as(inputs["q"])}
    torch.testing.assert_close(getattr(reference, channel)(**expanded), getattr(reference, scalar)(**inputs))


def test_retention_is_simple_gla_with_its_gamma(reference):
    inputs = fp64_inputs("retention")
    gamma = 1 - 2.0 ** (-5 - torch.arange(2.0, dtype=torch.float64))
    torch.testing.assert_close(reference.simple_gla(**inputs, g_gamma=gamma.log()), reference.retention(**inputs))
    both = reference.simple_gla(**inputs, g=torch.full((2, 5, 2), -0.1), g_gamma=gamma.log())
    torch.testing.assert_close(reference.simple_gla(**inputs, g=gamma.log().expand(2, 5, 2) - 0.1), both)


def test_a_delta_rule_with_one_key_replaces_the_value_at_it(reference):
    k = torch.tensor([1.0, 0.0])[None, None, None].expand(1, 3, 1, 2)
    v = torch.randn(1, 3, 1, 4)
    o, state = reference.delta_rule(k, k, v, torch.ones(1, 3, 1), scale=1.0)
    torch.testing.assert_close(o, v.double())
    torch.testing.assert_close(state[0, 0], torch.stack([v[0, 2, 0], torch.zeros(4)]).double())


@pytest.mark.parametrize("op", OPERATORS)
def test_a_sequence_may_be_split_at_a_state(reference, op):
    fn, inputs = getattr(reference, op), fp64_inputs(op, T=7)
    o, state = fn(**inputs)
    first = {name: x[:, :4] if name != "initial_state" else x for name, x in inputs.items()}
    rest = {name: x[:, 4:] for name, x in inputs.items() if name != "initial_state"}
    o_first, between = fn(**first)
    o_rest, last = fn(**rest, initial_state=between)
    torch.testing.assert_close((torch.cat([o_first, o_rest], 1), last), (o, state))


@pytest.mark.parametrize("op", OPERATORS)
def test_grouped_heads_are_repeated_heads(reference, op):
    inputs = fp64_inputs(op, H=4)
    grouped = {**inputs, "q": inputs["q"][:, :, ::2], "k": inputs["k"][:, :, ::2]}
    repeated = {**inputs, **{name: grouped[name].repeat_interleave(2, 2) for name in ("q", "k")}}
    torch.testing.assert_close(getattr(reference, op)(**grouped), getattr(reference, op)(**repeated))


@pytest.mark.parametrize("op", OPERATORS)
def test_fp32(reference, op):
    inputs, _, _ = make(Case(op))
    o, state = getattr(reference, op)(**inputs, dtype=torch.float32)
    assert o.dtype == state.dtype == torch.float32
    torch.testing.assert_close((o.double(), state.double()), getattr(reference, op)(**inputs), rtol=1e-4, atol=1e-5)


CHUNKED = [c for c in INTERPRETER if c.dtype == "bf16" and c.layout == "dense" and c.wanted == Case("kda").wanted
           and not c.tail]


@pytest.mark.parametrize("case", CHUNKED, ids=str)
def test_exact_chunked_form(reference, case):
    """In fp64 the chunked form is the token loop, gradients and all."""
    inputs, do, dht = make(case)
    expected = run(getattr(reference, case.op), in_fp64(inputs), do, dht)
    got = run_eager(case.op, inputs, do, dht, exact=True)
    terms = gate_terms(case.op, inputs, do, dht) if "dg" in got else {}
    for name, x in expected.items():
        scale = rms(terms.get(name, x))
        # a gate sum of a thousand rounds to 1e-13 in fp64; parallel keys amplify by as much as they do in any precision
        assert rms(got[name] - x) <= 1e-11 * scale + 1e-40, name


TOLERANCES = {"o": 0.005, "ht": 0.005, "dq": 0.008, "dk": 0.008, "dv": 0.008, "dinitial_state": 0.008, "dg": 0.02,
              "dbeta": 0.02}  # flash-linear-attention's own, relative RMS


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("op, lowest", [(op, 0) for op in OPERATORS] + [(op, g) for op in GATED for g in (-0.1, -1)])
def test_eager_form_meets_the_usual_tolerances(reference, op, lowest, dtype):
    inputs, do, dht = make(Case(op, T=200, K=64, V=64, dtype=dtype))
    if op in GATED:
        inputs["g"] = lowest * torch.rand_like(inputs["g"])
    exact = run_exact(reference, op, inputs, do, dht)
    got = run_eager(op, inputs, do, dht)
    errors = {name: rms(got[name] - x) / rms(x) for name, x in exact.items()}
    limit = 1.0 if dtype == "bf16" else 0.25 if dtype == "fp16" else 1e-3
    assert all(error <= limit * TOLERANCES[name] for name, error in errors.items()), errors
    assert got["o"].dtype == inputs["q"].dtype and got["ht"].dtype == torch.float32
    assert all(got["d" + name].dtype == x.dtype for name, x in inputs.items())


@pytest.mark.parametrize("gate", ["strong", "fifty", "some_inf", "all_inf"])
@pytest.mark.parametrize("op", GATED)
def test_eager_form_is_stable_under_strong_gates(reference, op, gate):
    inputs, do, dht = make(Case(op, T=200, K=64, V=64, gate=gate))
    exact = run_exact(reference, op, inputs, do, dht)
    got, terms = run_eager(op, inputs, do, dht), gate_terms(op, inputs, do, dht)
    for name, x in exact.items():
        assert rms(got[name] - x) <= 0.01 * rms(terms.get(name, x)), name
