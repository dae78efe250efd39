"""Argument checks of the public functions, made before any launch.

Every message names the argument, what was expected and what came.  TypeError: not a tensor, or a dtype that no kernel
takes.  ValueError: shape, device or value.  NotImplementedError: an option or an empty
input, legal in flash-linear-attention, not built here yet.
Nothing here reads a tensor's data, so nothing waits for the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CHUNK_SIZES = (16, 32, 64, 128)
MAX_K = 256


def _described(x: object) -> str:
    if isinstance(x, torch.Tensor):
        return f"a {x.dtype} tensor of shape {list(x.shape)} on {x.device}"
    text = repr(x)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(x).__name__})"


def _check_tensor(x: object, name: str, layout: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor {layout}, got {_described(x)}")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: expected bfloat16, float16 or float32, got {_described(x)}")
    if x.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got one of layout {x.layout}")


def _check_like(x: object, name: str, layout: str, shape: Sequence[int], like: torch.Tensor, like_name: str) -> None:
    _check_tensor(x, name, layout)
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: expected {layout} = {list(shape)}, got {_described(x)}")
    if x.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like_name}'s device {like.device}, got {_described(x)}")


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """q, k [B, T, H, K] and v [B, T, H, V]: one dtype, one device, K in 1..256, V >= 1.

    B, T or H of 0 raises NotImplementedError.
    """
    for x, name, layout in ((q, "q", "[B, T, H, K]"), (k, "k", "[B, T, H, K]"), (v, "v", "[B, T, H, V]")):
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
        raise ValueError(f"k: expected q's shape [B, T, H, K] = {[B, T, H, K]}, got {_described(k)}")
    if tuple(v.shape[:2]) != (B, T):
        raise ValueError(f"v: expected [B, T, H, V] with B = {B} and T = {T} as in q, got {_described(v)}")
    if v.size(2) != H:
        raise ValueError(
            f"v: expected H = {H} heads as in q (grouped heads, HV != H, are not supported yet), got {_described(v)}"
        )
    if not 1 <= K <= MAX_K:
        raise ValueError(f"q: expected K, its last dimension, in 1..{MAX_K}, got {_described(q)}")
    if v.size(3) < 1:
        raise ValueError(f"v: expected V, its last dimension, of at least 1, got {_described(v)}")
    if 0 in (B, T, H):
        raise NotImplementedError(f"q: expected B, T and H of at least 1 (empty input is not supported yet), "
                                  f"got {_described(q)}")


def check_gate(g: torch.Tensor, shape: Sequence[int], q: torch.Tensor, name: str = "g") -> None:
    """A log decay of the given shape ([B, T, H], [B, T, H, K] or [H]) on q's device, in any of the three dtypes."""
    layout = {1: "[H]", 3: "[B, T, H]", 4: "[B, T, H, K]"}[len(shape)]
    _check_like(g, name, layout, shape, q, "q")


def check_beta(beta: torch.Tensor, v: torch.Tensor) -> None:
    """beta [B, T, H] on v's device, in any of the three dtypes."""
    _check_like(beta, "beta", "[B, T, H]", v.shape[:3], v, "v")


def check_state(initial_state: torch.Tensor | None, shape: Sequence[int], q: torch.Tensor) -> None:
    """initial_state: None, or [B, H, K, V] = shape on q's device, in any of the three dtypes."""
    if initial_state is not None:
        _check_like(initial_state, "initial_state", "[B, H, K, V]", shape, q, "q")


def check_scale(scale: float | None) -> None:
    """scale: None, or a finite number (a tensor would have to be read back from the GPU)."""
    if scale is None:
        return
    if not isinstance(scale, Real) or isinstance(scale, bool):
        raise TypeError(f"scale: expected None or a number, got {_described(scale)}")
    if not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {_described(scale)}")


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
