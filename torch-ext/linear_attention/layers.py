"""Layers that `kernels.kernelize` puts in place of a model's own attention functions.

Each class carries the name of the function that it replaces and takes its arguments. The layers hold no state, since
`kernels` binds `forward` to the module being replaced: it may use nothing but its arguments and the globals here.

Model code passes its whole keyword bundle down, most of which means nothing here (`cu_seq_lens_k`, `max_length_q`,
`seq_idx`, `use_cache`, the Trainer's `num_items_in_batch`, ...). What changes the result is passed on: the packing of
sequences, under both names in use, `cu_seqlens` and `cu_seq_lens_q`, and the operators' own options.
"""
from __future__ import annotations

import torch
from torch import nn

from .ops.gated_delta_rule import chunk_gated_delta_rule as _chunk_gated_delta_rule
from .ops.kda import chunk_kda

_OPTIONS = {
    "scale", "state_v_first", "use_gate_in_kernel", "A_log", "dt_bias", "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval", "cp_context",
}
_KDA_OPTIONS = _OPTIONS | {"lower_bound", "safe_gate"}


def _options(kwargs: dict[str, object], names: set[str]) -> dict[str, object]:
    """An operator's options among a model's keywords."""
    return {name: x for name, x in kwargs.items() if name in names}


def _cu_seqlens(kwargs: dict[str, object]) -> torch.Tensor | None:
    """The cumulative sequence lengths among a model's keywords, or None when every row is one sequence."""
    cu_seqlens = kwargs.get("cu_seqlens")
    return kwargs.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens


class chunk_gated_delta_rule(nn.Module):
    """Gated delta rule, one decay a head and token.

    query, key [B,T,H,K], value [B,T,HV,V] in bf16, fp16 or fp32, with any strides, HV a multiple of H; g [B,T,HV]
    natural-log decay (<= 0); beta [B,T,HV] after the sigmoid; initial_state [N,HV,K,V], with N = B, or the number of
    sequences in the one row of a packed batch. `chunk_size` is a hint. Returns the output [B,T,HV,V] in the query's
    dtype and the final state, fp32 [N,HV,K,V], or None unless `output_final_state`.
    """

    has_backward = True
    can_torch_compile = False

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        chunk_size: int = 64,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _chunk_gated_delta_rule(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=_cu_seqlens(kwargs),
            chunk_size=chunk_size,
            **_options(kwargs, _OPTIONS),
        )


class chunk_kimi_delta_attention(nn.Module):
    """Kimi delta attention: the gated delta rule with one decay a key channel, g [B,T,HV,K].

    Otherwise as `chunk_gated_delta_rule`.
    """

    has_backward = True
    can_torch_compile = False

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        chunk_size: int = 64,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return chunk_kda(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=_cu_seqlens(kwargs),
            chunk_size=chunk_size,
            **_options(kwargs, _KDA_OPTIONS),
        )
