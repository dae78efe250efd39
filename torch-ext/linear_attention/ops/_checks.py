"""Argument checks of the public functions, made before any launch.

Every message names the argument, what was expected and what came.  TypeError: not a tensor, or a dtype that no kernel
takes.  ValueError: shape, device or value.  NotImplementedError: an option, legal in flash-linear-attention, not built
here yet.  Nothing here reads the data of a tensor that may be on a GPU, so nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CHUNK_SIZES = (16, 32, 64, 128)
MAX_K = 256


def _described(x: object) -> str:
    if isinstance(x, torch.Tensor) and x.is_nested:
        return f"a nested {x.dtype} tensor on {x.device}"
    if isinstance(x, torch.Tensor):
        return f"a {x.dtype} tensor of shape {list(x.shape)} on {x.device}"
    text = " ".join(repr(x).split())
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(x).__name__})"


def _is_dense(x: torch.Tensor) -> bool:
    return x.layout == torch.strided and not x.is_nested


def _check_tensor(x: object, name: str, layout: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor {layout}, got {_described(x)}")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: expected bfloat16, float16 or float32, got {_described(x)}")
    if not _is_dense(x):
        raise TypeError(f"{name}: expected a dense tensor, got {'a nested one' if x.is_nested else x.layout}")


def _check_like(x: object, name: str, layout: str, shape: Sequence[int], like: torch.Tensor, like_name: str) -> None:
    _check_tensor(x, name, layout)
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: expected {layout} = {list(shape)}, got {_described(x)}")
    if x.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like_name}'s device {like.device}, got {_described(x)}")


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grouped: bool = False) -> None:
    """q, k [B, T, H, K] and v [B, T, H, V]: one dtype, one device, K in 1..256, V >= 1.

    grouped: v may be [B, T, HV, V] with HV a multiple of H.
    """
    v_layout = "[B, T, HV, V]" if grouped else "[B, T, H, V]"
    for x, name, layout in ((q, "q", "[B, T, H, K]"), (k, "k", "[B, T, H, K]"), (v, "v", v_layout)):
        _check_tensor(x, name, layout)
        if x.dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions {layout}, got {_described(x)}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected q's dtype {q.dtype}, got {_described(x)}")
        if x.device != q.device:
            raise ValueError(f"{name}: expected a tensor on q's device {q.device}, got {_described(x)}")
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"q: expected a tensor on a CPU or CUDA device, got {_described(q)}")
    B, T, H, K = q.shape
    if k.shape != q.shape:
        wrong = "q" if v.shape[:2] == k.shape[:2] != q.shape[:2] else "k"  # v says which, where it can
        raise ValueError(f"{wrong}: expected q and k of one shape [B, T, H, K], not {_described(q)}, {_described(k)}")
    if tuple(v.shape[:2]) != (B, T):
        raise ValueError(f"v: expected {v_layout} with B = {B} and T = {T} as in q, got {_described(v)}")
    HV = v.size(2)
    if HV != H and not grouped:
        raise ValueError(f"v: expected H = {H} heads as in q, got {_described(v)}")
    if HV != H and (H == 0 or HV == 0 or HV % H):
        raise ValueError(f"v: expected HV heads, a multiple of q's H = {H}, got {_described(v)}")
    if not 1 <= K <= MAX_K:
        raise ValueError(f"q: expected K, its last dimension, in 1..{MAX_K}, got {_described(q)}")
    if v.size(3) < 1:
        raise ValueError(f"v: expected V, its last dimension, of at least 1, got {_described(v)}")


def check_sequences(cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | None, q: torch.Tensor) -> int:
    """The number of sequences N: B, or for cu_seqlens int32 or int64 [N+1] on q's device, which takes B = 1, its N.

    cu_seqlens_cpu: None, or the same on the CPU.  Values on the CPU are checked: from 0, not falling, at most T, and
    both the same.
    """
    B, T = q.shape[:2]
    for x, name in ((cu_seqlens, "cu_seqlens"), (cu_seqlens_cpu, "cu_seqlens_cpu")):
        if x is None:
            continue
        if not isinstance(x, torch.Tensor) or x.dtype not in (torch.int32, torch.int64) or not _is_dense(x):
            raise TypeError(f"{name}: expected an int32 or int64 tensor [N+1], got {_described(x)}")
        if x.dim() != 1 or x.numel() < 2:
            raise ValueError(f"{name}: expected [N+1] with N of at least 1, got {_described(x)}")
    if cu_seqlens is None:
        if cu_seqlens_cpu is not None:
            raise ValueError("cu_seqlens: expected a tensor beside cu_seqlens_cpu, got None")
        return B
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens: expected a tensor on q's device {q.device}, got {_described(cu_seqlens)}")
    if B != 1:
        raise ValueError(f"q: expected B = 1, all sequences in one row, beside cu_seqlens, got {_described(q)}")
    if cu_seqlens_cpu is not None and (
            cu_seqlens_cpu.device.type != "cpu" or cu_seqlens_cpu.shape != cu_seqlens.shape):
        raise ValueError(f"cu_seqlens_cpu: expected cu_seqlens, {list(cu_seqlens.shape)}, on the CPU, "
                         f"got {_described(cu_seqlens_cpu)}")
    for x, name in ((cu_seqlens, "cu_seqlens"), (cu_seqlens_cpu, "cu_seqlens_cpu")):
        # a subclass may have no values, as a fake tensor
        values = x.tolist() if type(x) is torch.Tensor and x.device.type == "cpu" else [0]
        if values[0] != 0 or values[-1] > T or any(a > b for a, b in zip(values, values[1:])):
            raise ValueError(f"{name}: expected values from 0, not falling, up to T = {T} at most, got "
                             f"{values if len(values) < 20 else _described(x)}")
    if cu_seqlens_cpu is not None and cu_seqlens.device.type == "cpu" and type(cu_seqlens) is torch.Tensor:
        if cu_seqlens.tolist() != cu_seqlens_cpu.tolist():
            raise ValueError(f"cu_seqlens_cpu: expected the values of cu_seqlens, got {_described(cu_seqlens_cpu)}")
    return cu_seqlens.numel() - 1


def check_hints(chunk_indices: torch.Tensor | None = None, max_num_seqs: int | None = None) -> None:
    """What results do not depend on: a tensor, or a number of at least 1, or None."""
    if chunk_indices is not None and not isinstance(chunk_indices, torch.Tensor):
        raise TypeError(f"chunk_indices: expected None or a tensor, got {_described(chunk_indices)}")
    if max_num_seqs is None:
        return
    if not isinstance(max_num_seqs, int) or isinstance(max_num_seqs, bool):
        raise TypeError(f"max_num_seqs: expected None or an int, got {_described(max_num_seqs)}")
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs: expected at least 1, got {_described(max_num_seqs)}")


def check_gate(g: torch.Tensor, shape: Sequence[int], q: torch.Tensor, name: str = "g", layout: str = "") -> None:
    """A log decay of the given shape ([B, T, H], [B, T, H, K] or [H]) on q's device, in any of the three dtypes."""
    _check_like(g, name, layout or {1: "[H]", 3: "[B, T, H]", 4: "[B, T, H, K]"}[len(shape)], shape, q, "q")


def check_gate_parameters(
    use_gate_in_kernel: bool, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, v: torch.Tensor,
    channels: int = 1, A_optional: bool = False,
) -> None:
    """A_log [HV] and dt_bias [HV], or [HV * K] for K channels, or None: only of a gate made in the kernel."""
    HV = v.size(2)
    if not use_gate_in_kernel:
        for x, name in ((A_log, "A_log"), (dt_bias, "dt_bias")):
            if x is not None:
                raise ValueError(f"{name}: expected None without use_gate_in_kernel, got {_described(x)}")
        return
    if A_log is not None:
        _check_like(A_log, "A_log", "[HV]", (HV,), v, "v")
    elif not A_optional:
        raise ValueError("A_log: expected a tensor [HV] with use_gate_in_kernel, got None")
    if dt_bias is not None:
        _check_like(dt_bias, "dt_bias", "[HV]" if channels == 1 else "[HV * K]", (HV * channels,), v, "v")


def check_lower_bound(lower_bound: float | None, safe_gate: bool, use_gate_in_kernel: bool) -> None:
    """lower_bound: None, or a finite number below 0."""
    if lower_bound is not None:
        if not isinstance(lower_bound, Real) or isinstance(lower_bound, bool):
            raise TypeError(f"lower_bound: expected None or a number, got {_described(lower_bound)}")
        if not torch.finfo(torch.float32).min <= lower_bound < 0:
            raise ValueError(f"lower_bound: expected a finite number below 0, got {_described(lower_bound)}")
    elif safe_gate and use_gate_in_kernel:
        raise ValueError("lower_bound: expected a number with safe_gate and use_gate_in_kernel, got None")


def check_beta(beta: torch.Tensor, v: torch.Tensor, in_kernel: bool = False, doubled: bool = False) -> None:
    """beta [B, T, HV] on v's device, in any of the three dtypes; doubled only if its sigmoid is taken in the kernel."""
    _check_like(beta, "beta", "[B, T, HV]", v.shape[:3], v, "v")
    if doubled and not in_kernel:
        raise ValueError("allow_neg_eigval: expected False without use_beta_sigmoid_in_kernel, got True")


def check_state(
    initial_state: torch.Tensor | None, N: int, q: torch.Tensor, v: torch.Tensor, v_first: bool = False
) -> None:
    """initial_state: None, or [N, HV, K, V], v_first [N, HV, V, K], on q's device, in any of the three dtypes."""
    if initial_state is not None:
        HV, V, K = v.size(2), v.size(3), q.size(3)
        layout = f"[N, {'H' if HV == q.size(2) else 'HV'}, {'V, K' if v_first else 'K, V'}]"
        _check_like(initial_state, "initial_state", layout, (N, HV, V, K) if v_first else (N, HV, K, V), q, "q")


def check_pair(initial_state: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A state and a sum of keys."""
    if len(initial_state) != 2:
        raise ValueError(f"initial_state: expected a pair (state, sum of keys), got {len(initial_state)} values")
    return tuple(initial_state)


def check_key_sum(keys: torch.Tensor | None, N: int, q: torch.Tensor) -> None:
    """The second one of a pair initial_state: None, or [N, 1, H, K] on q's device, in any of the three dtypes."""
    if keys is not None:
        _check_like(keys, "initial_state[1]", "[N, 1, H, K]", (N, 1, q.size(2), q.size(3)), q, "q")


def check_flags(**flags: bool) -> None:
    """Each one True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected True or False, got {_described(value)}")


def check_scale(scale: float | None) -> None:
    """scale: None, or a number that is finite in fp32 (a tensor would have to be read back from the GPU)."""
    if scale is None:
        return
    if not isinstance(scale, Real) or isinstance(scale, bool):
        raise TypeError(f"scale: expected None or a number, got {_described(scale)}")
    if not abs(scale) <= torch.finfo(torch.float32).max:  # a NaN is not, and an int may be larger than any float
        raise ValueError(f"scale: expected a number that is finite in fp32, got {_described(scale)}")


def check_chunk_size(chunk_size: int | None) -> None:
    """chunk_size: None or one of CHUNK_SIZES.  It is a hint: results do not depend on it."""
    if chunk_size is None:
        return
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool):
        raise TypeError(f"chunk_size: expected None or an int, got {_described(chunk_size)}")
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size: expected one of {list(CHUNK_SIZES)}, got {_described(chunk_size)}")


def not_yet(**options: object) -> None:
    """Raise NotImplementedError for the first option that is set, that is neither None nor False."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name}: expected {'False' if value is True else 'None'} "
                                      f"(not supported yet), got {_described(value)}")
