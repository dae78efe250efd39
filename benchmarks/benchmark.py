"""What `kernels benchmark HelionDSL/linear-attention` runs: every operator, forward and forward plus backward.

Self-contained, as the Hub serves it beside the build. The runner holds `self.out` against what `verify_…` returns, to
within 1e-2: here those are the relative RMS errors of every result, against the token recurrence in fp64, and zeros.
The time that it shows for the reference is that recurrence's, one Python step a token: no yardstick of speed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None = None, beta: torch.Tensor | None = None
) -> torch.Tensor:
    """`o` [B,T,H,V] token by token, for g [B,T,H], [B,T,H,K] or None and beta [B,T,H] or None."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    decay = None if g is None else g.exp().reshape(*q.shape[:3], -1, 1)
    outputs = []
    for t in range(q.shape[1]):
        key, value = k[:, t, :, :, None], v[:, t, :, None, :]
        if decay is not None:
            state = decay[:, t] * state
        if beta is not None:
            value = beta[:, t, :, None, None] * (value - key.mT @ state)
        state = state + key * value
        outputs.append((q[:, t, :, None, :] @ state).squeeze(-2))
    return q.shape[-1] ** -0.5 * torch.stack(outputs, 1)


class Workload:
    """Inputs, calls and checks that the operators share; no `Benchmark` itself, or the runner would run it."""

    seed = 0
    function: str
    gates: str | None = None  # one a "head", one a "channel", or none
    delta = False  # takes beta
    options: dict[str, object] = {}

    def setup(self) -> None:
        # on a CPU the kernels run in an interpreter
        B, T, H, D = (2, 1024, 8, 64) if self.device == "cuda" else (1, 64, 1, 16)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, device=self.device)

        tensors = {
            "q": normal(B, T, H, D).bfloat16(),
            "k": F.normalize(normal(B, T, H, D), dim=-1).bfloat16(),
            "v": normal(B, T, H, D).bfloat16(),
        }
        if self.gates is not None:
            # decays around 0.95 a token
            tensors["g"] = F.logsigmoid(3 + (normal(B, T, H) if self.gates == "head" else normal(B, T, H, D)))
        if self.delta:
            tensors["beta"] = normal(B, T, H).sigmoid().bfloat16()
        self.inputs = {name: x.requires_grad_() for name, x in tensors.items()}
        self.do = normal(B, T, H, D).bfloat16()

    def call(self) -> torch.Tensor:
        return getattr(self.kernel, self.function)(**self.inputs, **self.options)[0]

    def exact(self, **inputs: torch.Tensor) -> torch.Tensor:
        return recurrence(**inputs)

    def benchmark_forward(self) -> None:
        with torch.no_grad():
            self.results = (self.call(),)

    def verify_forward(self) -> torch.Tensor:
        with torch.no_grad():
            return self.compare((self.exact(**{name: x.double() for name, x in self.inputs.items()}),))

    def benchmark_forward_backward(self) -> None:
        o = self.call()
        self.results = (o.detach(), *torch.autograd.grad(o, tuple(self.inputs.values()), self.do))

    def verify_forward_backward(self) -> torch.Tensor:
        leaves = {name: x.detach().double().requires_grad_() for name, x in self.inputs.items()}
        o = self.exact(**leaves)
        return self.compare((o.detach(), *torch.autograd.grad(o, tuple(leaves.values()), self.do.double())))

    def compare(self, exact: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Put the error of every result in `self.out`, for the runner to compare with the zeros that this returns."""
        errors = [(found.double() - right).norm() / right.norm() for found, right in zip(self.results, exact)]
        self.out = torch.stack(errors)
        return torch.zeros_like(self.out)


class LinearAttention(Workload, Benchmark):
    function = "chunk_linear_attn"
    options = {"normalize": False}


class Retention(Workload, Benchmark):
    function = "chunk_retention"

    def exact(self, **inputs: torch.Tensor) -> torch.Tensor:
        q = inputs["q"]
        gamma = 1 - torch.exp2(-5.0 - torch.arange(q.shape[2], dtype=q.dtype, device=q.device))
        return recurrence(**inputs, g=gamma.log().expand(q.shape[:3]))


class SimpleGLA(Workload, Benchmark):
    function = "chunk_simple_gla"
    gates = "head"


class GLA(Workload, Benchmark):
    function = "chunk_gla"
    gates = "channel"


class DeltaRule(Workload, Benchmark):
    function = "chunk_delta_rule"
    delta = True


class GatedDeltaRule(Workload, Benchmark):
    function = "chunk_gated_delta_rule"
    gates = "head"
    delta = True


class KimiDeltaAttention(Workload, Benchmark):
    function = "chunk_kda"
    gates = "channel"
    delta = True
