"""Bad arguments are refused before any launch, by a message that names the argument, the expectation and what came."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest
import torch
from cases import DELTA, GATED, OPERATORS, Case, make

B, T, H, K, V = 2, 5, 2, 16, 24
GROUPED = ("gated_delta_rule", "kda")
V_FIRST = ("simple_gla", "gla", *GROUPED)
CHUNK_SIZED = ("retention", "simple_gla", *DELTA)
SHARED = ["scale", "initial_state", "output_final_state"]
L2NORM, LENGTHS = ["use_qk_l2norm_in_kernel"], ["cu_seqlens", "cu_seqlens_cpu"]
SIGMOID = ["use_beta_sigmoid_in_kernel", "allow_neg_eigval"]
SIGNATURES = {op: ["q", "k", "v", *names] for op, names in {
    "linear_attn": [*SHARED, "normalize", "cu_seqlens"],
    "retention": [*SHARED, "cu_seqlens", "chunk_size"],
    "simple_gla": ["g", "g_gamma", *SHARED, "state_v_first", *LENGTHS, "chunk_size"],
    "gla": ["g", *SHARED, "state_v_first", *LENGTHS],
    "delta_rule": ["beta", *SHARED, *L2NORM, *LENGTHS, "chunk_size"],
    "gated_delta_rule": ["g", "beta", *SHARED, *L2NORM, *SIGMOID, "state_v_first", *LENGTHS, "chunk_indices",
                         "cp_context", "chunk_size", "use_gate_in_kernel", "A_log", "dt_bias"],
    "kda": ["g", "beta", *SHARED, *L2NORM, "use_gate_in_kernel", *SIGMOID, "safe_gate", "lower_bound",
            "disable_recompute", "return_intermediate_states", "state_v_first", *LENGTHS, "cp_context", "use_graph",
            "max_num_seqs", "chunk_size", "A_log", "dt_bias"],
}.items()}


@pytest.fixture
def call(package, monkeypatch):
    """Calls an operator with good arguments but for those given; fails if a kernel runs."""
    aot = importlib.import_module(f"{package.__name__}.ops._aot")
    monkeypatch.setattr(aot.Kernel, "__call__", lambda *_: pytest.fail("a kernel was launched"))

    def call(op, **changes):
        inputs, _, _ = make(Case(op, B=B, T=T, H=H, K=K, V=V))
        if op == "linear_attn":
            inputs["normalize"] = False
        return getattr(package, f"chunk_{op}")(**{**inputs, **changes})

    return call


def tensor(*shape, dtype=torch.bfloat16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def refused(error, name, *what):
    """The message begins with the argument's name and has every one of `what`."""
    return pytest.raises(error, match=f"^{name}\\b.*" + "".join(f"(?=.*{re.escape(str(x))})" for x in what))


EVERY = pytest.mark.parametrize("op", OPERATORS)


@EVERY
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_not_a_tensor(call, op, name):
    with refused(TypeError, name, "tensor", "list"):
        call(op, **{name: [1.0]})


@EVERY
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_rank(call, op, name):
    with refused(ValueError, name, 4, [B, T, K]):
        call(op, **{name: tensor(B, T, K)})


@EVERY
def test_shapes_of_q_k_v(call, op):
    with refused(ValueError, "k", [B, T, H, K], [B, T, H, 8]):
        call(op, k=tensor(B, T, H, 8))
    with refused(ValueError, "k", [B, T, H, K], [B, T, 1, K]):
        call(op, k=tensor(B, T, 1, K))
    with refused(ValueError, "v", f"T = {T}", [B, 4, H, V]):
        call(op, v=tensor(B, 4, H, V))
    with refused(ValueError, "v", f"B = {B}", [1, T, H, V]):
        call(op, v=tensor(1, T, H, V))
    for heads in (0, 2 * H + 1, *(() if op in GROUPED else (2 * H,))):
        with refused(ValueError, "v", f"H = {H}", [B, T, heads, V]):
            call(op, v=tensor(B, T, heads, V))
    with refused(ValueError, "v", "at least 1", [B, T, H, 0]):
        call(op, v=tensor(B, T, H, 0))


@EVERY
@pytest.mark.parametrize("K", [0, 257])
def test_key_dimension(call, op, K):
    with refused(ValueError, "q", "1..256", [B, T, H, K]):
        call(op, q=tensor(B, T, H, K), k=tensor(B, T, H, K))


@EVERY
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_dtype(call, op, name, dtype):
    with refused(TypeError, name, "bfloat16", dtype):
        call(op, **{name: tensor(B, T, H, V if name == "v" else K, dtype=dtype)})


@EVERY
@pytest.mark.parametrize("name", ["k", "v"])
def test_mixed_dtypes(call, op, name):
    with refused(TypeError, name, torch.bfloat16, torch.float16):
        call(op, **{name: tensor(B, T, H, V if name == "v" else K, dtype=torch.float16)})


@EVERY
@pytest.mark.parametrize("name", ["k", "v", "initial_state"])
def test_mixed_devices(call, op, name):
    shape = (B, H, K, V) if name == "initial_state" else (B, T, H, V if name == "v" else K)
    with refused(ValueError, name, "cpu", "meta"):
        call(op, **{name: tensor(*shape, device="meta")})


@EVERY
def test_other_devices(call, op):
    q, k, v = (tensor(B, T, H, n, device="meta") for n in (K, K, V))
    with refused(ValueError, "q", "CPU or CUDA", "meta"):
        call(op, q=q, k=k, v=v)


@EVERY
def test_sparse(call, op):
    with refused(TypeError, "k", "dense", "sparse"):
        call(op, k=tensor(B, T, H, K).to_sparse())


@EVERY
def test_initial_state(call, op):
    with refused(ValueError, "initial_state", [B, H, K, V], [B + 1, H, K, V]):
        call(op, initial_state=tensor(B + 1, H, K, V))
    with refused(ValueError, "initial_state", [B, H, K, V], [B, H, V, K]):
        call(op, initial_state=tensor(B, H, V, K))
    with refused(ValueError, "initial_state", [B, H, K, V], [H, K, V]):
        call(op, initial_state=tensor(H, K, V))
    with refused(TypeError, "initial_state", "float32", torch.float64):
        call(op, initial_state=tensor(B, H, K, V, dtype=torch.float64))
    with refused(TypeError, "initial_state", "tensor", "float"):
        call(op, initial_state=0.0)


@EVERY
def test_scale(call, op):
    with refused(TypeError, "scale", "number", "str"):
        call(op, scale="1")
    with refused(TypeError, "scale", "number", "tensor"):
        call(op, scale=torch.ones(()))
    with refused(ValueError, "scale", "finite", "inf"):
        call(op, scale=float("inf"))


@EVERY
def test_unknown_keyword(call, op):
    with pytest.raises(TypeError, match="colour"):
        call(op, colour="red")


@pytest.mark.parametrize("op", GATED)
def test_gate(call, op):
    right, wrong = ([B, T, H], [B, T, H, K]) if GATED[op] == "head" else ([B, T, H, K], [B, T, H])
    with refused(ValueError, "g", right, wrong):
        call(op, g=tensor(*wrong))
    with refused(ValueError, "g", right):
        call(op, g=tensor(B, T + 1, *right[2:]))
    with refused(TypeError, "g", "float32", torch.int64):
        call(op, g=tensor(*right, dtype=torch.int64))
    with refused(ValueError, "g", "cpu", "meta"):
        call(op, g=tensor(*right, device="meta"))


@pytest.mark.parametrize("op", ["gla", "gated_delta_rule", "kda"])
def test_gate_is_required(call, op):
    with refused(TypeError, "g", "tensor", "None"):
        call(op, g=None)


def test_g_gamma(call):
    with refused(ValueError, "g_gamma", [H], [H + 1]):
        call("simple_gla", g=None, g_gamma=tensor(H + 1))
    with refused(TypeError, "g_gamma", "tensor", "float"):
        call("simple_gla", g=None, g_gamma=0.5)


@pytest.mark.parametrize("op", DELTA)
def test_beta(call, op):
    with refused(ValueError, "beta", [B, T, H], [B, H, T]):
        call(op, beta=tensor(B, H, T))
    with refused(ValueError, "beta", [B, T, H], [B, T, H, 1]):
        call(op, beta=tensor(B, T, H, 1))
    with refused(TypeError, "beta", "float32", torch.float64):
        call(op, beta=tensor(B, T, H, dtype=torch.float64))
    with refused(TypeError, "beta", "tensor", "float"):
        call(op, beta=0.5)


@pytest.mark.parametrize("op", CHUNK_SIZED)
def test_chunk_size(call, op):
    for wrong in (0, 48, 1024):
        with refused(ValueError, "chunk_size", 64, wrong):
            call(op, chunk_size=wrong)
    with refused(TypeError, "chunk_size", "int", "float"):
        call(op, chunk_size=64.0)


def test_pair_of_states(call):
    state, keys = tensor(B, H, K, V), tensor(B, 1, H, K)
    with refused(ValueError, "initial_state", "pair", 3):
        call("linear_attn", normalize=True, initial_state=(state, keys, keys))
    with refused(ValueError, "initial_state", [B, 1, H, K], [B, H, K, V]):
        call("linear_attn", normalize=True, initial_state=(state, state))
    with refused(TypeError, "initial_state", "tensor", "tuple"):
        call("linear_attn", normalize=False, initial_state=(state, keys))


@pytest.mark.parametrize("op, name", [
    (op, name) for name, operators in {
        "output_final_state": OPERATORS, "use_qk_l2norm_in_kernel": DELTA, "state_v_first": V_FIRST,
        "use_gate_in_kernel": GROUPED, "use_beta_sigmoid_in_kernel": GROUPED, "allow_neg_eigval": GROUPED,
        "normalize": ("linear_attn",), "safe_gate": ("kda",), "use_graph": ("kda",),
    }.items() for op in operators])
def test_flags(call, op, name):
    for wrong, kind in ((None, "NoneType"), (1, "int"), ("yes", "str"), (torch.ones(()), "tensor")):
        with refused(TypeError, name, "True or False", kind):
            call(op, **{name: wrong})


def row(op):
    """Good arguments of a call with all sequences in one row."""
    inputs, _, _ = make(Case(op, T=T, H=H, K=K, V=V, lengths=(2, 3)))
    return inputs


@EVERY
def test_cu_seqlens(call, op):
    good = row(op)
    for wrong, what in ((tensor(3), "int32"), ([0, 2, 5], "int32")):
        with refused(TypeError, "cu_seqlens", what):
            call(op, **{**good, "cu_seqlens": wrong})
    for wrong in (tensor(1, dtype=torch.int32), tensor(3, 1, dtype=torch.int32)):
        with refused(ValueError, "cu_seqlens", "N", list(wrong.shape)):
            call(op, **{**good, "cu_seqlens": wrong})
    with refused(ValueError, "cu_seqlens", "cpu", "meta"):
        call(op, **{**good, "cu_seqlens": tensor(3, dtype=torch.int32, device="meta")})
    with refused(ValueError, "q", "B = 1", "cu_seqlens", [B, T, H, K]):
        call(op, cu_seqlens=torch.tensor([0, T]))
    with refused(ValueError, "initial_state", [2, H, K, V], [3, H, K, V]):
        call(op, **{**good, "initial_state": tensor(3, H, K, V)})


@pytest.mark.parametrize("op", ["simple_gla", "gla", *DELTA])
def test_cu_seqlens_cpu(call, op):
    good = row(op)
    with refused(ValueError, "cu_seqlens", "cu_seqlens_cpu", "None"):
        call(op, cu_seqlens_cpu=torch.tensor([0, T]))
    with refused(TypeError, "cu_seqlens_cpu", "int32", "list"):
        call(op, **good, cu_seqlens_cpu=[0, 2, 5])
    with refused(ValueError, "cu_seqlens_cpu", [3], [2]):
        call(op, **good, cu_seqlens_cpu=torch.tensor([0, 5]))
    with refused(ValueError, "cu_seqlens_cpu", "cu_seqlens", [3]):
        call(op, **good, cu_seqlens_cpu=torch.tensor([0, 3, 5]))
    for wrong in ([1, 2, 5], [0, 5, 2], [0, 2, T + 1], [0, -1, 5]):
        with refused(ValueError, "cu_seqlens_cpu", f"T = {T}", wrong):
            call(op, **good, cu_seqlens_cpu=torch.tensor(wrong))
        with refused(ValueError, "cu_seqlens", f"T = {T}", wrong):
            call(op, **{**good, "cu_seqlens": torch.tensor(wrong)})


@pytest.mark.parametrize("op", V_FIRST)
def test_state_v_first(call, op):
    with refused(ValueError, "initial_state", [B, H, V, K], [B, H, K, V]):
        call(op, state_v_first=True, initial_state=tensor(B, H, K, V))


@pytest.mark.parametrize("op", GROUPED)
def test_gate_parameters(call, op):
    width = H * K if op == "kda" else H
    good = {"use_gate_in_kernel": True, "A_log": tensor(H), "dt_bias": tensor(width)}
    for name in ("A_log", "dt_bias"):
        with refused(ValueError, name, "use_gate_in_kernel"):
            call(op, **{name: good[name]})
        with refused(ValueError, name, [good[name].numel()], [width + 1]):
            call(op, **{**good, name: tensor(width + 1)})
        with refused(TypeError, name, "float32", torch.int64):
            call(op, **{**good, name: torch.zeros(good[name].numel(), dtype=torch.int64)})
        with refused(ValueError, name, "cpu", "meta"):
            call(op, **{**good, name: tensor(good[name].numel(), device="meta")})
    with refused(ValueError, "A_log", "tensor", "None"):
        call(op, **{**good, "A_log": None})
    with refused(ValueError, "allow_neg_eigval", "use_beta_sigmoid_in_kernel"):
        call(op, allow_neg_eigval=True)


def test_lower_bound(call):
    for wrong in (0, 1.0, float("-inf"), float("nan")):
        with refused(ValueError, "lower_bound", "below 0", wrong):
            call("kda", lower_bound=wrong)
    with refused(TypeError, "lower_bound", "number", "str"):
        call("kda", lower_bound="-5")
    with refused(ValueError, "lower_bound", "safe_gate", "None"):
        call("kda", safe_gate=True, use_gate_in_kernel=True, A_log=tensor(H))


def base(op, name):
    """Good arguments of a call that has a good one for `name` too, if it is a tensor."""
    preamble = "gate+rate+bias" if name in ("A_log", "dt_bias") else ""
    gate = "both" if name == "g_gamma" else "model"
    lengths = (2, 3) if name.startswith("cu_seqlens") else ()
    inputs, _, _ = make(Case(op, B=B, T=T, H=H, K=K, V=V, preamble=preamble, gate=gate, lengths=lengths))
    if name == "cu_seqlens_cpu":
        inputs[name] = inputs["cu_seqlens"].clone()
    return inputs


def wrong_tensors(op, name, x):
    """x of other ranks, sizes, dtypes, layouts and devices, and no tensors."""
    yield from (x[None], x.flatten()[0], x.tolist(), "text", 0.5, object(), x.to("meta"), x.bool(), x.cfloat())
    if name.startswith("cu_seqlens"):  # another N is what the state has wrong
        yield from (x.float(), x.short(), x[:1], x[:0], x.to_sparse(), x.flip(0), x - 1, x + T)
        return
    yield from (x.double(), x.int(), x.to_sparse(), torch.nested.nested_tensor([x], layout=torch.jagged))
    if x.dim() > 1:
        yield x.flatten()
    for dim in range(x.dim()):
        if not (name == "v" and dim == 3 or name == "q" and dim == 2 and op in GROUPED):  # any V, and HV of v, is right
            shape = list(x.shape)
            shape[dim] += 1
            yield x.new_zeros(shape)


def wrong_values(op, name):
    """No good value of an argument that is no tensor."""
    yield from ("text", object(), [1], float("nan"))
    if name == "chunk_indices":
        yield 2
        return
    yield torch.ones(3)
    if name == "scale":
        yield from (float("inf"), 1e39, 10**400, True, 1j)
    elif name == "chunk_size":
        yield from (0, -64, 7, 64.0, True)
    elif name == "max_num_seqs":
        yield from (0, -1, 2.5, True)
    elif name == "lower_bound":
        yield from (0, 0.0, 1, float("-inf"), -10**400, True)
    else:
        yield from (2, -1)


@pytest.mark.parametrize(
    "op, name", [(op, name) for op in OPERATORS for name in SIGNATURES[op]])
def test_every_argument_in_turn_wrong(call, op, name):
    """Each time an error that names it, no launch, and the other arguments as they were."""
    good = base(op, name)
    tensors = {key: x for key, x in good.items() if isinstance(x, torch.Tensor)}
    values = list(wrong_tensors(op, name, good[name]) if name in tensors else wrong_values(op, name))
    if name in ("q", "k", "v", "beta") or name == "g" and op != "simple_gla":
        values.append(None)
    before = {key: x.clone() for key, x in tensors.items()}
    for wrong in values:
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=rf"\b{name}\b"):
            pytest.fail(f"{call(op, **good | {name: wrong})} for {name} = {wrong!r}")
    for key, x in before.items():
        assert torch.equal(x.nan_to_num(7), tensors[key].nan_to_num(7)), key


NOT_YET = {
    "cp_context": (GROUPED, object()),
    "disable_recompute": (("kda",), True),
    "return_intermediate_states": (("kda",), True),
}


@pytest.mark.parametrize(
    "op, name", [(op, name) for name, (operators, _) in NOT_YET.items() for op in operators]
)
def test_not_built_yet(call, op, name):
    with refused(NotImplementedError, name, "not supported yet"):
        call(op, **{name: NOT_YET[name][1]})


def test_a_promise_of_safe_gates_changes_nothing(package):
    inputs, _, _ = make(Case("kda", T=T))
    plain, promised = package.chunk_kda(**inputs), package.chunk_kda(**inputs, safe_gate=True, lower_bound=-5.0)
    assert torch.equal(plain[0], promised[0])


@EVERY
def test_signature_is_that_of_flash_linear_attention(package, op):
    assert list(inspect.signature(getattr(package, f"chunk_{op}")).parameters) == SIGNATURES[op]
