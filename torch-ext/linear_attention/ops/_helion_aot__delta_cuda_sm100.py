"""Configs of the kernels of _delta.py for sm100 (derived, not measured).

Rendered by tools/render_configs.py from configs/: edit those, not this file.
"""
import math

import torch

CAPABILITY = (10, 0)

DELTA_FWD_O_KERNEL = {
    "configs": [
        {'block_sizes': [16], 'indexing': 'pointer', 'num_stages': 1, 'num_warps': 4},
        {'block_sizes': [16], 'indexing': 'pointer', 'num_stages': 1, 'num_warps': 8},
        {'block_sizes': [32], 'indexing': 'pointer', 'num_stages': 2, 'num_warps': 4},
        {'block_sizes': [32], 'indexing': 'pointer', 'num_stages': 3, 'num_warps': 4},
        {'block_sizes': [16], 'indexing': 'pointer', 'num_stages': 3, 'num_warps': 4},
        {'block_sizes': [64], 'indexing': 'pointer', 'num_stages': 2, 'num_warps': 4},
    ],
    "safe": {256: 0, 1024: 1},  # bytes of the widest row -> config
    "tuned": {
        ((2, 128), (2, 128), None, (2, 128), (2, 64), (2, 128), (4,), None, None, None, None, None, 1): {
            (1, 8192, 96): 0,
            (2, 16384, 16): 2,
            (4, 2048, 16): 5,
            (4, 4096, 64): 0,
        },
        ((2, 128), (2, 128), None, (2, 128), (2, 64), (2, 128), (4,), (4,), None, None, None, None, 1): {
            (1, 8192, 96): 0,
            (2, 16384, 16): 2,
            (4, 2048, 16): 5,
            (4, 4096, 64): 0,
        },
        ((2, 128), (2, 128), (2, 128), (2, 128), (2, 64), (2, 128), (4,), None, (4, 128), None, None, None, 1): {
            (1, 8192, 96): 0,
            (2, 16384, 16): 3,
            (4, 2048, 16): 2,
            (4, 4096, 64): 0,
        },
        ((2, 256), (2, 256), None, (2, 256), (2, 64), (2, 128), (4,), None, None, None, None, None, 1): {
            (8, 2048, 32): 1,
        },
        ((2, 256), (2, 256), None, (2, 256), (2, 64), (2, 128), (4,), (4,), None, None, None, None, 1): {
            (8, 2048, 32): 1,
        },
        ((2, 256), (2, 256), (2, 256), (2, 256), (2, 64), (2, 128), (4,), None, (4, 256), None, None, None, 1): {
            (8, 2048, 32): 1,
        },
        ((2, 64), (2, 64), None, (2, 64), (2, 64), (2, 128), (4,), None, None, None, None, None, 1): {
            (8, 1024, 8): 4,
        },
        ((2, 64), (2, 64), None, (2, 64), (2, 64), (2, 128), (4,), (4,), None, None, None, None, 1): {
            (8, 1024, 8): 4,
        },
        ((2, 64), (2, 64), (2, 64), (2, 64), (2, 64), (2, 128), (4,), None, (4, 64), None, None, None, 1): {
            (8, 1024, 8): 3,
        },
    },
}

DELTA_FWD_STATE_KERNEL = {
    "configs": [
        {'block_sizes': [64], 'indexing': 'pointer', 'num_stages': 2, 'num_warps': 4},
        {'block_sizes': [64], 'indexing': 'pointer', 'num_stages': 2, 'num_warps': 8},
        {'block_sizes': [32], 'indexing': 'pointer', 'num_stages': 3, 'num_warps': 4},
        {'block_sizes': [16], 'indexing': 'pointer', 'num_stages': 3, 'num_warps': 4},
        {'block_sizes': [32], 'indexing': 'pointer', 'num_stages': 2, 'num_warps': 4},
        {'block_sizes': [128], 'indexing': 'pointer', 'num_stages': 2, 'num_warps': 8},
        {'block_sizes': [16], 'indexing': 'pointer', 'num_stages': 1, 'num_warps': 4},
        {'block_sizes': [16], 'indexing': 'pointer', 'num_stages': 1, 'num_warps': 8},
    ],
    "safe": {256: 6, 1024: 7},  # bytes of the widest row -> config
    "tuned": {
        ((2, 128), None, (2, 128), (2, 128), (4,), None, None, None, None, 1): {
            (1, 8192, 96): 0,
            (2, 16384, 16): 2,
            (4, 2048, 16): 0,
            (4, 4096, 64): 5,
        },
        ((2, 128), None, (2, 128), (2, 128), (4,), (4,), None, None, None, 1): {
            (1, 8192, 96): 0,
            (2, 16384, 16): 2,
            (4, 2048, 16): 0,
            (4, 4096, 64): 0,
        },
        ((2, 128), (2, 128), (2, 128), (2, 128), (4,), None, (4, 128), None, None, 1): {
            (1, 8192, 96): 0,
            (2, 16384, 16): 2,
            (4, 2048, 16): 2,
            (4, 4096, 64): 0,
        },
        ((2, 256), None, (2, 256), (2, 128), (4,), None, None, None, None, 1): {
            (8, 2048, 32): 1,
        },
        ((2, 256), None, (2, 256), (2, 128), (4,), (4,), None, None, None, 1): {
            (8, 2048, 32): 1,
        },
        ((2, 256), (2, 256), (2, 256), (2, 128), (4,), None, (4, 256), None, None, 1): {
            (8, 2048, 32): 1,
        },
        ((2, 64), None, (2, 64), (2, 128), (4,), None, None, None, None, 1): {
            (8, 1024, 8): 3,
        },
        ((2, 64), None, (2, 64), (2, 128), (4,), (4,), None, None, None, 1): {
            (8, 1024, 8): 3,
        },
        ((2, 64), (2, 64), (2, 64), (2, 128), (4,), None, (4, 64), None, None, 1): {
            (8, 1024, 8): 4,
        },
    },
}

DELTA_BWD_STATE_KERNEL = {
    "configs": [
        {'block_sizes': [16], 'indexing': 'pointer', 'num_stages': 1, 'num_warps': 4},
        {'block_sizes': [16], 'indexing': 'pointer', 'num_stages': 1, 'num_warps': 8},
        {'block_sizes': [32], 'indexing': 'pointer', 'num_stages': 3, 'num_warps': 4},
        {'block_sizes': [16], 'indexing': 'pointer', 'num_stages': 3, 'num_warps': 4},
        {'block_sizes': [32], 'indexing': 'pointer', 'num_stages': 2, 'num_warps': 4},
    ],
    "safe": {256: 0, 1024: 1},  # bytes of the widest row -> config
    "tuned": {
        ((2, 128), (2, 128), None, (2, 64), (2, 128), (4,), (2, 128), None, None, None, None, None, None, 1): {
            (1, 8192, 96): 0,
            (2, 16384, 16): 2,
            (4, 2048, 16): 4,
            (4, 4096, 64): 0,
        },
        ((2, 128), (2, 128), None, (2, 64), (2, 128), (4,), (2, 128), (4,), None, None, None, None, None, 1): {
            (1, 8192, 96): 0,
            (2, 16384, 16): 3,
            (4, 2048, 16): 0,
            (4, 4096, 64): 0,
        },
        ((2, 128), (2, 128), (2, 128), (2, 64), (2, 128), (4,), (2, 128), None, (4, 128), None, None, None, None, 1): {
            (1, 8192, 96): 0,
            (2, 16384, 16): 0,
            (4, 2048, 16): 0,
            (4, 4096, 64): 0,
        },
        ((2, 256), (2, 256), None, (2, 64), (2, 128), (4,), (2, 256), None, None, None, None, None, None, 1): {
            (8, 2048, 32): 1,
        },
        ((2, 256), (2, 256), None, (2, 64), (2, 128), (4,), (2, 256), (4,), None, None, None, None, None, 1): {
            (8, 2048, 32): 1,
        },
        ((2, 256), (2, 256), (2, 256), (2, 64), (2, 128), (4,), (2, 256), None, (4, 256), None, None, None, None, 1): {
            (8, 2048, 32): 1,
        },
        ((2, 64), (2, 64), None, (2, 64), (2, 128), (4,), (2, 64), None, None, None, None, None, None, 1): {
            (8, 1024, 8): 3,
        },
        ((2, 64), (2, 64), None, (2, 64), (2, 128), (4,), (2, 64), (4,), None, None, None, None, None, 1): {
            (8, 1024, 8): 3,
        },
        ((2, 64), (2, 64), (2, 64), (2, 64), (2, 128), (4,), (2, 64), None, (4, 64), None, None, None, None, 1): {
            (8, 1024, 8): 2,
        },
    },
}


def _pick(kernel, args):
    """The number of the config for a call: its tuned shape, else the nearest legal one, else the safe default.

    A call is its size (sizes 0 to 2 of the first tensor: batch, tokens, heads; 1 where it has fewer) and its form (for
    each argument the item size and the widths of a tensor, an integer up to 128, or None).  A tuned form is legal for a
    call if nothing of the call's is wider or larger: then what fitted in shared memory still does.
    """
    size = (*args[0].shape, 1, 1)[:3]
    form = [(x.element_size(), *x.shape[3:]) if isinstance(x, torch.Tensor)
            else x if isinstance(x, int) and x <= 128 else None for x in args]
    best = None
    if torch.cuda.get_device_capability(args[0].device) == CAPABILITY:
        for tuned_form, sizes in kernel["tuned"].items():
            far = _distance(form, tuned_form)
            for tuned_size, number in sizes.items() if far is not None else ():
                rows = math.log2(max(size[0] * size[2], 1) / (tuned_size[0] * tuned_size[2]))
                rank = (*far, abs(rows) + abs(math.log2(max(size[1], 1) / tuned_size[1])) / 8)
                if best is None or rank < best[0]:
                    best = rank, number
    if best is not None:
        return best[1]
    row = form[0][0] * max((_round_up(n) for x in form if isinstance(x, tuple) for n in x[1:]), default=1)
    return next(number for limit, number in kernel["safe"].items() if row <= limit)


def _distance(form, tuned):
    """How far a call's form is from a tuned one: (widths, other differences), or None where the config may not fit.

    An integer from 16 to 128 is a chunk's length and sizes tiles; smaller ones do not, larger ones are lengths of
    sequences and make no difference, and a vector's items do not size tiles.
    """
    width = other = 0
    for x, y in zip(form, tuned):
        if isinstance(x, tuple) and isinstance(y, tuple):
            if len(x) > 1 and x[0] > y[0] or any(_round_up(a) > _round_up(b) for a, b in zip(x[1:], y[1:])):
                return None
            width += sum(math.log2(_round_up(b) / _round_up(a)) for a, b in zip(x[1:], y[1:]))
            other += x[0] != y[0]
        elif isinstance(x, int) and isinstance(y, int) and x > y >= 16:
            return None
        else:
            other += x != y
    return width, other


def _round_up(n):
    """The power of two that a tile of n columns takes."""
    return 1 << max(n - 1, 0).bit_length()


def key_delta_fwd_o_kernel(*args):
    return _pick(DELTA_FWD_O_KERNEL, args)


def autotune_delta_fwd_o_kernel(*args):
    return dict(DELTA_FWD_O_KERNEL["configs"][_pick(DELTA_FWD_O_KERNEL, args)])


def key_delta_fwd_state_kernel(*args):
    return _pick(DELTA_FWD_STATE_KERNEL, args)


def autotune_delta_fwd_state_kernel(*args):
    return dict(DELTA_FWD_STATE_KERNEL["configs"][_pick(DELTA_FWD_STATE_KERNEL, args)])


def key_delta_bwd_state_kernel(*args):
    return _pick(DELTA_BWD_STATE_KERNEL, args)


def autotune_delta_bwd_state_kernel(*args):
    return dict(DELTA_BWD_STATE_KERNEL["configs"][_pick(DELTA_BWD_STATE_KERNEL, args)])
