"""Bad arguments are refused before any launch, by a message that names the argument, the expectation and what came."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest
import torch
from cases import DELTA, GATED, OPERATORS, Case, make

B, T, H, K, V = 2, 5, 2, 16, 24
CHUNK_SIZED = ("retention", "simple_gla", *DELTA)


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
    with refused(ValueError, "v", f"H = {H}", [B, T, 2 * H, V]):
        call(op, v=tensor(B, T, 2 * H, V))
    with refused(ValueError, "v", "at least 1", [B, T, H, 0]):
        call(op, v=tensor(B, T, H, 0))


@EVERY
@pytest.mark.parametrize("K", [0, 257])
def test_key_dimension(call, op, K):
    with refused(ValueError, "q", "1..256", [B, T, H, K]):
        call(op, q=tensor(B, T, H, K), k=tensor(B, T, H, K))


@EVERY
@pytest.mark.parametrize("size", [(0, T, H), (B, 0, H), (B, T, 0)])
def test_empty(call, op, size):
    with refused(NotImplementedError, "q", "at least 1", [*size, K]):
        call(op, q=tensor(*size, K), k=tensor(*size, K), v=tensor(*size, V))


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


def test_normalize(package):
    inputs, _, _ = make(Case("linear_attn", T=T))
    for extra in ({}, {"normalize": True}):
        with refused(NotImplementedError, "normalize", "normalize=False"):
            package.chunk_linear_attn(**inputs, **extra)


LENGTHS = torch.tensor([0, T])
NOT_YET = {
    "cu_seqlens": (OPERATORS, LENGTHS),
    "cu_seqlens_cpu": (("simple_gla", "gla", *DELTA), LENGTHS),
    "state_v_first": (("simple_gla", "gla", "gated_delta_rule", "kda"), True),
    "use_beta_sigmoid_in_kernel": (("gated_delta_rule", "kda"), True),
    "allow_neg_eigval": (("gated_delta_rule", "kda"), True),
    "use_gate_in_kernel": (("gated_delta_rule", "kda"), True),
    "A_log": (("gated_delta_rule", "kda"), torch.zeros(H)),
    "dt_bias": (("gated_delta_rule", "kda"), torch.zeros(H)),
    "chunk_indices": (("gated_delta_rule",), LENGTHS),
    "cp_context": (("gated_delta_rule", "kda"), object()),
    "disable_recompute": (("kda",), True),
    "return_intermediate_states": (("kda",), True),
    "use_graph": (("kda",), True),
    "max_num_seqs": (("kda",), 4),
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
    names = list(inspect.signature(getattr(package, f"chunk_{op}")).parameters)
    common = ["scale", "initial_state", "output_final_state"]
    l2norm, lengths = ["use_qk_l2norm_in_kernel"], ["cu_seqlens", "cu_seqlens_cpu"]
    sigmoid = ["use_beta_sigmoid_in_kernel", "allow_neg_eigval"]
    expected = {
        "linear_attn": [*common, "normalize", "cu_seqlens"],
        "retention": [*common, "cu_seqlens", "chunk_size"],
        "simple_gla": ["g", "g_gamma", *common, "state_v_first", *lengths, "chunk_size"],
        "gla": ["g", *common, "state_v_first", *lengths],
        "delta_rule": ["beta", *common, *l2norm, *lengths, "chunk_size"],
        "gated_delta_rule": ["g", "beta", *common, *l2norm, *sigmoid, "state_v_first", *lengths, "chunk_indices",
                             "cp_context", "chunk_size", "use_gate_in_kernel", "A_log", "dt_bias"],
        "kda": ["g", "beta", *common, *l2norm, "use_gate_in_kernel", *sigmoid, "safe_gate", "lower_bound",
                "disable_recompute", "return_intermediate_states", "state_v_first", *lengths, "cp_context", "use_graph",
                "max_num_seqs", "chunk_size", "A_log", "dt_bias"],
    }[op]
    assert names[:3] == ["q", "k", "v"] and names[3:] == expected
