"""Chunked linear attention in Helion: seven operators, forward and backward, tuned configs included.

Loaded with `kernels.get_kernel("HelionDSL/linear-attention", version=0)`. Every operator takes q, k [B,T,H,K] and
v [B,T,H,V], the gated delta rule and KDA [B,T,HV,V], and returns `(o, final_state)`; `layers` holds the modules for
`kernels.kernelize`.
"""
from . import layers
from .ops.delta_rule import chunk_delta_rule
from .ops.gated_delta_rule import chunk_gated_delta_rule
from .ops.gla import chunk_gla
from .ops.kda import chunk_kda
from .ops.linear_attn import chunk_linear_attn
from .ops.retention import chunk_retention
from .ops.simple_gla import chunk_simple_gla

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_simple_gla",
    "layers",
]
