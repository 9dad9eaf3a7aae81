"""MAC, MAG and MAL are their equations, token by token, and what they become at special values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.blocks import loops
from torch import Tensor

import recollect as rc
from recollect.blocks import AsContext, Chain, Gated, build

# A dozen tokens through sums of a few dozen products of order 1 in float64: 1e-13 is what rounding
# leaves, and a wrong mask or order changes the first digit.
TOL = {"atol": 1e-9, "rtol": 1e-9}
WINDOW = 3

CASES: dict[str, tuple[Any, Callable[[Any, Tensor], Tensor]]] = {
    "mac": (AsContext(loops.memory(), loops.attention(), segment=4), loops.mac),
    "mac with persistent tokens": (
        AsContext(loops.memory(), loops.attention(), segment=4, persistent=2),
        loops.mac,
    ),
    "mac of one-token segments": (
        AsContext(loops.memory(), loops.attention(), segment=1, persistent=1),
        loops.mac,
    ),
    "mag": (
        Gated(loops.memory(), loops.attention(WINDOW)),
        lambda layer, x: loops.mag(layer, x, WINDOW),
    ),
    "mag with persistent tokens": (
        Gated(loops.memory(), loops.attention(WINDOW, 2), persistent=2),
        lambda layer, x: loops.mag(layer, x, WINDOW),
    ),
    "mal": (
        Chain(loops.memory(), loops.attention(WINDOW)),
        lambda layer, x: loops.mal(layer, x, WINDOW),
    ),
    "mal with persistent tokens": (
        Chain(loops.memory(), loops.attention(WINDOW, 2), persistent=2),
        lambda layer, x: loops.mal(layer, x, WINDOW),
    ),
}


def made(mixer: Any, width: int = 8) -> Any:
    """A float64 layer whose norms are not 1, so that a norm on the wrong side is seen."""
    layer = build(mixer, width, 2).double()
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    return layer


@pytest.mark.parametrize("name", CASES)
def test_a_composition_is_the_loop_of_its_equations(name: str) -> None:
    mixer, loop = CASES[name]
    layer = made(mixer)
    x = torch.randn(2, 11, 8, dtype=torch.float64, requires_grad=True)
    y = layer(x)[0]
    expected = torch.stack([loop(layer, row) for row in x])
    torch.testing.assert_close(y, expected, **TOL)
    weights = torch.randn_like(y)
    leaves = [x, *layer.parameters()]
    ours = torch.autograd.grad((y * weights).sum(), leaves)
    theirs = torch.autograd.grad((expected * weights).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **TOL)
        assert b.abs().max() > 1e-6, "a parameter that nothing depends on tests nothing"


def test_mac_without_retrievals_is_attention_to_the_segment_and_as_many_zeros() -> None:
    """A memory that reads 0 gives keys and values 0: logits 0 that share the softmax.

    Attention has no biases here, so the retrieved zeros are the only trace of the memory.
    """
    layer = made(AsContext(loops.memory(), loops.attention(), segment=4))
    with torch.no_grad():
        layer.parts["memory"].out.weight.zero_()
    x = torch.randn(1, 10, 8, dtype=torch.float64)
    seen: list[Tensor] = []
    hook = layer.parts["attention"].register_forward_hook(lambda m, i, out: seen.append(out[0]))
    layer(x)
    hook.remove()
    y = torch.cat([piece[:, 1::2] for piece in seen], 1)
    attention = layer.parts["attention"]
    q, k, v = (attention.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)).unbind(0)
    for start in range(0, 10, 4):
        at = slice(start, min(start + 4, 10))
        n = at.stop - start
        zeros = torch.zeros_like(k[:, :, at])
        past = torch.ones(n, n, dtype=torch.bool).tril()
        plain = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, at],
            torch.cat([zeros, k[:, :, at]], 2),
            torch.cat([zeros, v[:, :, at]], 2),
            attn_mask=torch.cat([past, past], 1),
        )
        expected = attention.out(plain.transpose(1, 2).flatten(2))
        torch.testing.assert_close(y[:, at], expected, **TOL)


class _Away(torch.nn.Module):
    """Keys of retrievals that no query likes: they leave the softmax."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__()
        self.inner, self.weight = inner, inner.weight

    def forward(self, x: Tensor) -> Tensor:
        u = self.inner(x)
        nothing = (x == 0).all(-1, keepdim=True)
        # q ≥ 0 below, so a key of −1e4 in every channel has a weight of exp(−large) = 0.
        D = u.shape[-1] // 3
        key = torch.where(nothing, -1e4, u[..., D : 2 * D])
        return torch.cat([u[..., :D].abs() + 0.1, key, u[..., 2 * D :]], -1)


def test_mac_that_recalls_nothing_is_segment_attention() -> None:
    """Where the zeros that are recalled get no weight, y is plain attention to the segment."""
    layer = made(AsContext(loops.memory(), loops.attention(), segment=5))
    attention = layer.parts["attention"]
    with torch.no_grad():
        layer.parts["memory"].out.weight.zero_()
    attention.qkv = _Away(attention.qkv)
    x = torch.randn(1, 13, 8, dtype=torch.float64)
    seen: list[Tensor] = []
    hook = attention.register_forward_hook(lambda m, i, out: seen.append(out[0]))
    layer(x)
    hook.remove()
    y = torch.cat([piece[:, 1::2] for piece in seen], 1)
    alone = torch.cat([attention(x[:, at : at + 5])[0] for at in range(0, 13, 5)], 1)
    torch.testing.assert_close(y, alone, **TOL)


def test_mag_with_a_constant_gate_is_sliding_window_attention() -> None:
    layer = made(Gated(loops.memory(), loops.attention(WINDOW)))
    with torch.no_grad():
        layer.gate.memory_norm.weight.zero_()  # σ(0) = ½, whatever the memory says
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    alone = layer.parts["attention"](x)[0]
    expected = loops.rms(alone, layer.gate.attention_norm.weight) / 2
    torch.testing.assert_close(layer(x)[0], expected, **TOL)


@pytest.mark.parametrize("name", ["gated_delta_net", "titans", "mamba2", "softmax_attention"])
def test_a_chain_of_one_is_the_recipe_itself(name: str) -> None:
    torch.manual_seed(3)
    chain = build(Chain(name), 8, 2)
    torch.manual_seed(3)
    alone = rc.zoo.get(name).build(8, 2)
    x = torch.randn(2, 9, 8)
    assert torch.equal(chain(x)[0], alone(x)[0])
    assert {n.removeprefix("parts.0.") for n in chain.state_dict()} == set(alone.state_dict())


@pytest.mark.parametrize(("size", "first"), [(3, 2), (1, 1), (4, 5), (2, 0)])
@pytest.mark.parametrize("method", ["auto", "reference"])
@pytest.mark.parametrize("cut", [(14,), (1,) * 14, (1, 0, 4, 3, 2, 4), (6, 8)])
def test_a_sink_window_is_a_band_and_a_front(
    size: int, first: int, method: str, cut: tuple[int, ...]
) -> None:
    recipe, T = loops.attention(size, first)[0], 14
    q, k, v = torch.randn(3, 2, T, 2, 4, dtype=torch.float64)
    i = torch.arange(T)
    mask = (i <= i[:, None]) & ((i < first) | (i > i[:, None] - size))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
    ).transpose(1, 2)
    parts, state, done = [], None, 0
    for n in cut:
        at = slice(done, done + n)
        y, state = rc.recall(recipe, q[:, at], k[:, at], v[:, at], state=state, method=method)
        parts.append(y)
        done += n
    torch.testing.assert_close(torch.cat(parts, 1), expected, **TOL)
    assert state is not None and state.buffer is not None
    assert state.buffer.k.shape[1] == size + first
    again = rc.read(recipe, q[:, -1:], state=state)
    torch.testing.assert_close(again, expected[:, -1:], **TOL)
