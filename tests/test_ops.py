"""The seven operators against their recurrences: results and every gradient, in the interpreter and on a GPU.

A GPU run covers the whole table of cases.py and the production shapes; the interpreter runs the small cases.
"""

from __future__ import annotations

import functools

import pytest
import torch
from cases import DELTA, DTYPES, GATED, GPU, INTERPRETER, OPERATORS, PRODUCTION, TOKENS, Case, make, without_tail
from numerics import UNIT, assert_within, gate_terms, poisoned, run, run_eager, run_exact

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _memory():
    """Give GPU memory back after each test: several processes share the card."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def operator(package, op, **options):
    """The operator, with the options that its recurrence has no use for."""
    if op == "linear_attn":
        options["normalize"] = False
    return functools.partial(getattr(package, f"chunk_{op}"), **options)


def v_first(fn):
    """An operator with state_v_first=True, from and to states in the usual order."""

    def swapped(initial_state=None, **arguments):
        state = None if initial_state is None else initial_state.mT.contiguous()
        o, final_state = fn(initial_state=state, state_v_first=True, **arguments)
        return o, final_state if final_state is None else final_state.mT

    return swapped


def check(case, inputs, do, dht, package, reference, slack=1):
    """Results, shapes and dtypes, and that inputs are only read; outputs are allocated full of NaN.

    slack multiplies the rounding floor, for results of so few numbers that their RMS is not an average.
    """
    options = {"output_final_state": case.ht} | ({"chunk_size": case.chunk_size} if case.chunk_size else {})
    before = {name: x.clone() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    fn = operator(package, case.op, **options)
    with poisoned():
        got = run(v_first(fn) if case.v_first else fn, inputs, do, dht, case.wanted)
    for name, x in before.items():
        assert torch.equal(x.nan_to_num(7), inputs[name].nan_to_num(7)), f"{name} was written to"
    assert got["o"].dtype == inputs["q"].dtype
    assert ("ht" in got) == case.ht and ("ht" not in got or got["ht"].dtype == torch.float32)
    inputs, do = without_tail(inputs, do)
    exact = run_exact(reference, case.op, inputs, do, dht, case.wanted)
    rounded = run_eager(case.op, inputs, do, dht)
    terms = gate_terms(case.op, inputs, do, dht) if any(name in got for name in ("dg", "dA_log", "ddt_bias")) else None
    assert_within(str(case), got, rounded, exact, slack * UNIT[DTYPES[case.dtype]], terms)
    if case.lengths:
        for name in ("o", *(f"d{name}" for name in TOKENS)):
            assert name not in got or not got[name][:, sum(case.lengths):].any(), f"{name} after the last sequence"


@pytest.mark.parametrize("case", INTERPRETER, ids=str)
def test_in_the_interpreter(case, package, reference):
    check(case, *make(case), package, reference)


def _grouped(case):
    """With pytest -n and --dist loadgroup, cases with much the same kernels run in one process, which then has them."""
    alike = (case.op, case.K, case.V, case.dtype, case.h0, bool(case.lengths), case.B, case.layout)
    return pytest.param(case, marks=pytest.mark.xdist_group("-".join(map(str, alike))), id=str(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [_grouped(case) for case in GPU])
def test_on_the_gpu(case, package, reference):
    check(case, *make(case, "cuda"), package, reference)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPERATORS)
def test_offsets_past_2_to_the_31(op, package, reference):
    """Rows that are further apart in memory than 32-bit offsets reach."""
    case = Case(op, B=2)
    inputs, do, dht = make(case, "cuda")
    memory = torch.empty(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    begin = 0

    def far(x):
        nonlocal begin
        place = memory.as_strided(x.shape, (2**31, *x.stride()[1:]), begin)
        begin += x[0].numel()
        return place.copy_(x)

    inputs |= {name: far(inputs[name]) for name in ("q", "k", "v")}
    check(case, inputs, far(do), dht, package, reference)


def heads(x, rows, columns, per_head=False):
    """The batch rows and heads of x [B, T, H, ...], or of a state [B, H, K, V] (per_head)."""
    return x[rows][:, columns] if per_head else x[rows][:, :, columns]


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("shape", PRODUCTION)
def test_production_shape(shape, op, package, reference):
    """All tokens of the first and last batch row and head; and the same bits again: small shapes hide races."""
    B, T, H, D = PRODUCTION[shape]
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs = {"q": q, "k": torch.nn.functional.normalize(k, dim=-1), "v": v}
    if op in GATED:
        g = torch.randn(B, T, H, *([D] if GATED[op] == "channel" else []), device="cuda")
        inputs["g"] = torch.nn.functional.logsigmoid(g).clamp(min=-5)
    if "delta" in op or op == "kda":
        inputs["beta"] = torch.randn(B, T, H, device="cuda", dtype=torch.bfloat16).sigmoid()
    inputs["initial_state"] = torch.randn(B, H, D, D, device="cuda")
    dht = torch.randn(B, H, D, D, device="cuda")
    fn = operator(package, op, output_final_state=True)
    with poisoned():
        results = run(fn, inputs, do, dht)
        for name, x in run(fn, inputs, do, dht).items():
            assert torch.equal(x, results[name]), f"{name} is not the same again"
        del x

    rows, columns = sorted({0, B - 1}), sorted({0, H - 1})
    is_state = {"initial_state", "dinitial_state", "ht"}
    part = {name: heads(x, rows, columns, name in is_state) for name, x in inputs.items()}
    got = {name: heads(x, rows, columns, name in is_state) for name, x in results.items()}
    if op == "retention":  # its gamma depends on which head it is
        op, gamma = "simple_gla", 1 - 2.0 ** (-5 - torch.tensor(columns, device="cuda", dtype=torch.float64))
        part["g_gamma"] = gamma.log()
    do, dht = heads(do, rows, columns), heads(dht, rows, columns, per_head=True)
    exact, rounded = run_exact(reference, op, part, do, dht), run_eager(op, part, do, dht)
    terms = gate_terms(op, part, do, dht) if "dg" in got else None
    assert_within(f"{op}-{shape}", got, rounded, exact, UNIT[torch.bfloat16], terms)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op, without", [
    ("simple_gla", "linear_attn"), ("gla", "linear_attn"), ("gated_delta_rule", "delta_rule"), ("kda", "delta_rule")])
def test_gates_of_zero_change_nothing(op, without, device, package, reference):
    """They give the results of the operator that has no gate."""
    inputs, do, dht = make(Case(op, B=2, T=150, gate="zero"), device)
    got = run(operator(package, op, output_final_state=True), inputs, do, dht)
    assert got.pop("dg").isfinite().all()
    del inputs["g"]
    exact, rounded = run_exact(reference, without, inputs, do, dht), run_eager(without, inputs, do, dht)
    assert_within(f"{op}-without", got, rounded, exact, UNIT[inputs["q"].dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPERATORS)
def test_same_bits_twice(op, device, package):
    inputs, do, dht = make(Case(op, B=2, T=150), device)
    first, second = (run(operator(package, op, output_final_state=True), inputs, do, dht) for _ in range(2))
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPERATORS)
def test_inference_has_the_bits_of_training(op, device, package):
    inputs, do, dht = make(Case(op, B=2, T=150), device)
    fn = operator(package, op, output_final_state=True)
    trained = run(fn, inputs, do, dht)
    with torch.no_grad():
        o, ht = fn(**inputs)
    assert torch.equal(o, trained["o"]) and torch.equal(ht, trained["ht"])


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPERATORS)
def test_cuda_graph(op, package):
    """Forward and backward can be captured, and a replay reads what its inputs hold by then."""
    inputs, do, dht = make(Case(op, B=2, T=150), "cuda")
    fn = operator(package, op, output_final_state=True)
    run(fn, inputs, do, dht)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(fn, inputs, do, dht)
    for x in (*inputs.values(), do):
        x.copy_(x.flip(0))
    graph.replay()
    for name, x in run(fn, inputs, do, dht).items():
        assert torch.equal(x, captured[name]), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("t", [1, 37, 64, 149])
@pytest.mark.parametrize("op", OPERATORS)
def test_nothing_depends_on_later_tokens(op, t, device, package):
    """Bit for bit: o and dq before t stay when inputs from t on change, and with do zero from t on all gradients do.

    The gradients from t on are then zero.
    """
    inputs, do, _ = make(Case(op, B=2, T=150), device)
    do[:, t:] = 0
    changed = {name: x if name == "initial_state" else torch.cat([x[:, :t], x[:, t:].flip(0)], 1)
               for name, x in inputs.items()}
    fn = operator(package, op)
    expected, got = run(fn, inputs, do, None), run(fn, changed, do, None)
    assert torch.equal(expected["dinitial_state"], got.pop("dinitial_state"))
    for name, x in got.items():
        assert torch.equal(x[:, :t], expected[name][:, :t]), name
        assert x[:, :t].any(), f"{name} is zero"
        assert name == "o" or not x[:, t:].any(), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPERATORS)
def test_nothing_depends_on_a_later_token_out_of_range(op, device, package):
    """In fp16 a value may leave the range within a chunk: what came before it stays, bit for bit, and finite."""
    inputs, do, _ = make(Case(op, T=100, dtype="fp16"), device)
    if op in DELTA:
        inputs["beta"] = torch.full_like(inputs["beta"], 1.5)
    t, fn = 40, operator(package, op)
    do[:, t:] = 0
    expected = run(fn, inputs, do, None)
    inputs["v"] = inputs["v"].clone()
    inputs["v"][:, t] = 6e4
    got = run(fn, inputs, do, None)
    assert torch.equal(expected.pop("dinitial_state"), got.pop("dinitial_state"))
    for name, x in got.items():
        assert torch.equal(x[:, :t], expected[name][:, :t]), name
        assert x[:, :t].any(), f"{name} is zero"
        assert x[:, :t].isfinite().all() and (name == "o" or not x[:, t:].any()), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", ["linear_attn", "retention", "simple_gla"])
def test_no_output_depends_on_a_later_key_out_of_range(op, device, package):
    """q . k of a later key is infinite in fp32; no mask may be a factor."""
    inputs, _, _ = make(Case(op, T=100), device)
    t, fn = 40, operator(package, op)
    expected, _ = fn(**inputs)
    inputs["k"] = inputs["k"].clone()
    inputs["k"][:, t] = 3e38
    o, _ = fn(**inputs)
    assert torch.equal(o[:, :t], expected[:, :t]) and o[:, :t].any() and o[:, :t].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPERATORS)
def test_a_batch_row_does_not_depend_on_another(op, device, package):
    inputs, do, dht = make(Case(op, B=2, T=150), device)
    spoilt = {name: x.clone() for name, x in inputs.items()}
    for x in spoilt.values():
        x[1] = torch.nan
    fn = operator(package, op, output_final_state=True)
    expected, got = run(fn, inputs, do, dht), run(fn, spoilt, do, dht)
    for name, x in got.items():
        assert torch.equal(x[0], expected[name][0]), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("total", [-60.0, -75.0])
@pytest.mark.parametrize("op", ["gla", "kda"])
def test_large_numbers(op, total, device, package, reference):
    """The factors by which a gate a channel is taken apart stay in range beside large inputs and gradients.

    `total` is what a chunk's gates sum to: both sides of where the way of taking apart changes.
    """
    inputs, do, dht = make(Case(op, T=128, K=32, V=48), device)
    inputs["g"] = torch.full_like(inputs["g"], total / 64)
    for name in ("q", "v", "initial_state"):
        inputs[name] = inputs[name] * 1e5
    do, dht = do * 1e5, dht * 1e5
    check(Case(op, T=128, K=32, V=48), inputs, do, dht, package, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_around(package, dtype):
    """torch.compile breaks its graph at an operator, and a process's default dtype does not matter."""
    q, k, v, g = (torch.randn(1, 20, 2, 16, dtype=torch.float32) for _ in range(4))
    beta = torch.rand(1, 20, 2, dtype=torch.float32)
    q.requires_grad_()

    def loss(q):
        o, _ = package.chunk_kda(2 * q, k, v, -g.abs(), beta, use_qk_l2norm_in_kernel=True)
        return o.sum()

    expected = torch.autograd.grad(loss(q), q)[0]
    assert expected.any()
    torch.set_default_dtype(dtype)
    try:
        got = torch.autograd.grad(torch.compile(loss, backend="eager")(q), q)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got, expected)
