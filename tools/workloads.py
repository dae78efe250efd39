"""The operators at given shapes: inputs, a forward and backward, and the kernel calls that these make."""
from __future__ import annotations

import contextlib
import importlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator

import render_configs
import torch
from torch.utils._pytree import tree_map_only

ROOT = pathlib.Path(__file__).resolve().parent.parent
if str(ROOT / "torch-ext") not in sys.path:
    sys.path.insert(0, str(ROOT / "torch-ext"))
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
OPERATORS = ("linear_attn", "retention", "simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda")
L2NORM = ("delta_rule", "gated_delta_rule", "kda")  # the operators that take use_qk_l2norm_in_kernel


def shapes(names: list[str] | None = None) -> dict[str, dict[str, int]]:
    """Sizes B, T, H, K, V by name, from configs/shapes.json."""
    known = {x.pop("name"): x for x in json.loads((ROOT / "configs" / "shapes.json").read_text())}
    return {name: known[name] for name in names or known}


def inputs(
    operator: str, B: int, T: int, H: int, K: int, V: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu",
    state: bool = False, l2norm: bool = False, packed: bool = False,
) -> dict[str, object]:
    """Keyword arguments of an operator; tensors ask for gradients.

    k of unit length, g = logsigmoid of normal numbers in fp32 (not below -5 for a gate a channel), beta a sigmoid.
    packed: sequences of T/3 and 2T/3 tokens in each of B rows, one after the other in one row; and for the operators
    that take them two value heads a head, with raw g and beta.
    """
    q, k = torch.randn(2, B, T, H, K, device=device).unbind()
    tensors = {
        "q": q.to(dtype),
        "k": torch.nn.functional.normalize(k, dim=-1).to(dtype),
        "v": torch.randn(B, T, H, V, device=device).to(dtype),
    }
    if operator in ("simple_gla", "gated_delta_rule"):
        tensors["g"] = torch.nn.functional.logsigmoid(torch.randn(B, T, H, device=device))
    if operator in ("gla", "kda"):
        tensors["g"] = torch.nn.functional.logsigmoid(torch.randn(B, T, H, K, device=device)).clamp(min=-5)
    if operator in L2NORM:
        tensors["beta"] = torch.randn(B, T, H, device=device).sigmoid().to(dtype)
    if state:
        tensors["initial_state"] = torch.randn(B, H, K, V, device=device)
    options: dict[str, object] = {"use_qk_l2norm_in_kernel": True} if l2norm else {}
    if packed:
        ends = [n * T + part for n in range(B) for part in (0, T // 3)] + [B * T]
        options["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=device)
        tensors = {name: x.flatten(0, 1)[None] if name != "initial_state" else torch.cat([x, x]) for name, x in
                   tensors.items()}
        if operator in ("gated_delta_rule", "kda"):
            options |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
            for name in ("v", "g", "beta", "initial_state"):
                if name in tensors:
                    tensors[name] = tensors[name].repeat_interleave(2, 1 if name == "initial_state" else 2)
            tensors["A_log"] = torch.zeros(2 * H, device=device)
            tensors["dt_bias"] = torch.zeros(2 * H * (K if operator == "kda" else 1), device=device)
    if operator == "linear_attn":
        options["normalize"] = False
    return {**{name: x.detach().requires_grad_() for name, x in tensors.items()}, **options}


def run(operator: str, arguments: dict[str, object], backward: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Forward, and backward from gradients of ones on o and, where an initial state is given, on the final state."""
    import linear_attention

    state = "initial_state" in arguments
    o, final_state = getattr(linear_attention, f"chunk_{operator}")(**arguments, output_final_state=state)
    if backward:
        outputs = [o, final_state] if state else [o]
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    return o, final_state


def kernel(module: str, name: str) -> object:
    """The Kernel object `name` of a module of ops."""
    return getattr(importlib.import_module(f"linear_attention.ops.{module}"), name)


@contextlib.contextmanager
def replaced(call: Callable) -> Iterator[None]:
    """Every kernel call inside becomes `call(kernel, args)`."""
    from linear_attention.ops._aot import Kernel

    plain = Kernel.__call__
    Kernel.__call__ = lambda self, *args: call(self, args)
    try:
        yield
    finally:
        Kernel.__call__ = plain


_flexible: dict[tuple[str, str, str], object] = {}


def flexible(kernel: object, args: tuple, indexing: str = "pointer") -> object:
    """The Helion kernel bound to arguments, for trying configs with that indexing: its `compile_config` takes any.

    Told that all configs use pointers, Helion leaves out the guards of tensor descriptors, which bind anew for other
    sizes of B and H.
    """
    import helion

    settings = kernel.settings_for(args)
    key = kernel.name, indexing, str(settings)
    if key not in _flexible:
        rows = render_configs.safe_rows(kernel.name)
        pointers = {"configs": [row["config"] for row in rows]} if indexing == "pointer" else {}
        _flexible[key] = helion.kernel(kernel.fn, disable_autotuner_heuristics=True, **pointers, **settings)
    return _flexible[key]


def recorded(operator: str, arguments: dict[str, object], call: Callable) -> list[tuple[object, tuple]]:
    """(kernel, arguments) of every kernel call of a forward and backward, each made by `call(kernel, args)`."""
    calls = []

    def record(kernel: object, args: tuple) -> object:
        calls.append((kernel, args))
        return call(kernel, args)

    with replaced(record):
        run(operator, arguments)
    return calls


def recorded_offline(operator: str, sizes: dict[str, int], **options: object) -> list[tuple[object, tuple]]:
    """As `recorded`, with fake CUDA tensors on a machine without a GPU; `offline_compile.pretend` comes first.

    The operator runs on fake CPU tensors, since autograd asks for a driver when tensors are CUDA's; each kernel call
    is made with fake CUDA tensors of the same layout, by Helion's host code with launches left out.
    """
    import offline_compile

    def fake(device: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    calls = []

    def call(kernel: object, args: tuple) -> object:
        with torch.no_grad():
            args = tree_map_only(torch.Tensor, fake("cuda"), args)
            calls.append((kernel, args))
            host = flexible(kernel, args).bind(args).compile_config(safe_config(kernel, args), allow_print=False)
            return tree_map_only(torch.Tensor, fake("cpu"), host(*args))

    with offline_compile.not_launching(), replaced(call):
        run(operator, inputs(operator, **sizes, **options))
    return calls


def safe_config(kernel: object, args: tuple) -> dict[str, object]:
    """The config of configs/default for a call."""
    return render_configs.safe_config(kernel.name, args[0].element_size(), [
        n for x in args if isinstance(x, torch.Tensor) for n in x.shape[3:]])


def describe(args: tuple) -> list[object]:
    """Arguments in JSON, as `offline_compile.fake` reads them: "bf16[2,64]", "f32[4,64]@64,1" (strides), 0.5, None."""
    names = {dtype: name for name, dtype in (DTYPES | {"i32": torch.int32, "i64": torch.int64}).items()}

    def text(x: object) -> object:
        if not isinstance(x, torch.Tensor):
            return x
        shape = f"{names[x.dtype]}[{','.join(map(str, x.shape))}]"
        return shape if x.is_contiguous() else f"{shape}@{','.join(map(str, x.stride()))}"

    return [text(x) for x in args]
