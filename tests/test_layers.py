"""`kernelize` puts the layers in place of a model's own functions, for training and for inference."""
from __future__ import annotations

import inspect

import pytest
import torch
from cases import Case, make
from hub import local_repository
from kernels import (
    LocalLayerRepository,
    Mode,
    kernelize,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
    use_kernelized_func,
)
from torch import nn

LAYERS = {"chunk_gated_delta_rule": "gated_delta_rule", "chunk_kimi_delta_attention": "kda"}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
H, K, V = 2, 16, 24
# What model code hands down and a layer must not mind.
CLUTTER = {
    "cu_seqlens": None,
    "cu_seq_lens_q": None,
    "cu_seq_lens_k": None,
    "max_length_q": 40,
    "seq_idx": None,
    "use_cache": False,
    "num_items_in_batch": torch.tensor(80),
}


@pytest.fixture(scope="module", params=LAYERS)
def name(request) -> str:
    return request.param


@pytest.fixture
def model(reference, name):
    """A mixer in the shape of a model's: its own attention function, which `kernelize` may replace."""
    recurrence = getattr(reference, LAYERS[name])

    @use_kernel_forward_from_hub(name)
    def attention(
        query,
        key,
        value,
        g,
        beta,
        chunk_size=64,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        o, state = recurrence(
            query, key, value, g, beta, initial_state=initial_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel
        )
        return o.to(query.dtype), state if output_final_state else None

    @use_kernelized_func(attention)
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_function = attention
            self.width = K if name == "chunk_kimi_delta_attention" else 1
            self.project = nn.Linear(8, H * (2 * K + V + self.width + 1), dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor, **kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
            # the layout after a short convolution over time: channels first, so that tokens are adjacent in memory
            mixed = self.project(x).transpose(1, 2).contiguous().transpose(1, 2)
            q, k, v, g, beta = mixed.split([H * K, H * K, H * V, H * self.width, H], dim=-1)
            q, k, v, g = (y.unflatten(-1, (H, -1)) for y in (q, k, v, g))
            assert q.stride(-1) == x.size(1)
            g = nn.functional.logsigmoid(g.float())
            g = g.squeeze(-1) if self.width == 1 else g
            return attention(q, k, v, g, beta.sigmoid(), use_qk_l2norm_in_kernel=True, **kwargs)

    torch.manual_seed(0)
    return Mixer()


def kernelized(model: nn.Module, name: str, mode: Mode, device: str) -> nn.Module:
    mapping = {name: {device: LocalLayerRepository(local_repository(), layer_name=name)}}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        return kernelize(model.to(device), mode=mode, device=device, use_fallback=False)


def inputs(device: str) -> torch.Tensor:
    return torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def test_contract(package, name):
    """A class of its own, without state, whose forward takes what the replaced function takes."""
    layer = getattr(package.layers, name)
    assert layer.__module__ == f"{package.__name__}.layers" and layer.__init__ is nn.Module.__init__
    assert set(dir(layer)) - set(dir(nn.Module)) == {"has_backward", "can_torch_compile"}
    assert layer.has_backward is True and layer.can_torch_compile is False
    parameters = inspect.signature(layer.forward).parameters.values()
    assert [(p.name, p.default) for p in parameters if p.default is not p.empty] == [
        ("chunk_size", 64),
        ("initial_state", None),
        ("output_final_state", False),
        ("use_qk_l2norm_in_kernel", False),
    ]
    assert [p.name for p in parameters if p.default is p.empty] == [
        "self", "query", "key", "value", "g", "beta", "kwargs",
    ]  # fmt: skip


def test_options_that_change_the_result_are_passed_on(package, name):
    inputs, _, _ = make(Case(LAYERS[name], T=20, H=H, K=K, V=V, h0=False))
    options = {"scale": 0.5, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    o, _ = getattr(package.layers, name)().forward(*inputs.values(), **CLUTTER, **options)
    expected, _ = getattr(package, f"chunk_{LAYERS[name]}")(**inputs, **options)
    assert torch.equal(o, expected) and not torch.equal(o, getattr(package.layers, name)().forward(*inputs.values())[0])
    with pytest.raises(TypeError, match="scale"):
        getattr(package.layers, name)().forward(*inputs.values(), scale="half")


def test_options_of_the_other_operator_mean_nothing(package):
    inputs, _, _ = make(Case("gated_delta_rule", T=20, H=H, K=K, V=V, h0=False))
    layer = package.layers.chunk_gated_delta_rule()
    o, _ = layer.forward(*inputs.values(), safe_gate=True, lower_bound=-5.0)
    assert o.any() and torch.equal(o, layer.forward(*inputs.values())[0])


@pytest.mark.parametrize("device", DEVICES)
def test_training(package, model, name, device):
    x = inputs(device)
    model = model.to(device)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        o, state = model(x, output_final_state=True, **CLUTTER)
        (o.float().square().mean() + state.float().square().mean()).backward()
        return o.detach(), state.detach(), model.project.weight.grad.clone()

    expected = run()
    model = kernelized(model, name, Mode.TRAINING, device)
    assert model.attention_function.forward.__func__ is getattr(package.layers, name).forward
    actual = run()
    assert [x.dtype for x in actual] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert max(map(relative_rms, actual, expected)) < 0.02


@pytest.mark.parametrize("device", DEVICES)
def test_inference_carries_the_state(model, name, device):
    """Two halves with the state in between give what the whole gives."""
    x = inputs(device)
    with torch.inference_mode():
        expected, expected_state = model.to(device)(x, output_final_state=True)
        model = kernelized(model, name, Mode.INFERENCE, device)
        first, state = model(x[:, :23], output_final_state=True, **CLUTTER)
        second, state = model(x[:, 23:], initial_state=state, output_final_state=True, **CLUTTER)
    assert relative_rms(torch.cat([first, second], dim=1), expected) < 0.02
    assert relative_rms(state, expected_state) < 0.02


def test_returns_no_state_unless_asked(model, name):
    with torch.no_grad():
        _, state = kernelized(model, name, Mode.INFERENCE, "cpu")(inputs("cpu"))
    assert state is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keyword", ["cu_seqlens", "cu_seq_lens_q"])
def test_packed_sequences_are_separate(model, name, keyword, device):
    model = kernelized(model, name, Mode.TRAINING, device)
    x = inputs(device)[:1]
    ends = [0, 10, 10, 33, 40]
    packing = {**CLUTTER, keyword: torch.tensor(ends, dtype=torch.int32, device=device)}
    o, states = model(x, output_final_state=True, **packing)
    assert states.shape == (4, H, K, V)
    for n, (begin, end) in enumerate(zip(ends, ends[1:])):
        if begin < end:
            alone, state = model(x[:, begin:end], output_final_state=True, **CLUTTER)
            assert torch.equal(o[:, begin:end], alone) and torch.equal(states[n:n + 1], state)


def test_torch_compile_keeps_the_model_function(model, name):
    with pytest.raises(ValueError, match="mode"):
        kernelized(model, name, Mode.TRAINING | Mode.TORCH_COMPILE, "cpu")
