"""Compositions equal their equations, token by token, and other layers at special values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.blocks import loops
from torch import Tensor

import recollect as rc
from recollect.blocks import (
    Levels,
    MemoryAsContext,
    MemoryAsGate,
    MixtureOfMemories,
    ResidualMemory,
    Sequential,
    build,
)

# A dozen tokens through sums of a few dozen products of order 1 in float64: 1e-13 is rounding, and
# a wrong mask or order changes the first digit.
TOL = {"atol": 1e-9, "rtol": 1e-9}
WINDOW = 3
LINEAR = ["gated_delta_net", "mamba2", "kimi_delta_attention", "dpfp", "q_delta", "nlms"]

CASES: dict[str, tuple[Any, Callable[[Any, Tensor], Tensor]]] = {
    "mac": (MemoryAsContext(loops.memory(), loops.attention(), segment=4), loops.mac),
    "mac with persistent tokens": (
        MemoryAsContext(loops.memory(), loops.attention(), segment=4, persistent=2),
        loops.mac,
    ),
    "mac of one-token segments": (
        MemoryAsContext(loops.memory(), loops.attention(), segment=1, persistent=1),
        loops.mac,
    ),
    "mag": (
        MemoryAsGate(loops.memory(), loops.attention(WINDOW)),
        lambda layer, x: loops.mag(layer, x, WINDOW),
    ),
    "mag with persistent tokens": (
        MemoryAsGate(loops.memory(), loops.attention(WINDOW, 2), persistent=2),
        lambda layer, x: loops.mag(layer, x, WINDOW),
    ),
    "mal": (
        Sequential(loops.memory(), loops.attention(WINDOW)),
        lambda layer, x: loops.mal(layer, x, WINDOW),
    ),
    "mal with persistent tokens": (
        Sequential(loops.memory(), loops.attention(WINDOW, 2), persistent=2),
        lambda layer, x: loops.mal(layer, x, WINDOW),
    ),
    "boosted": (
        ResidualMemory(loops.memory(), loops.memory(), clip=100.0),
        lambda layer, x: loops.boosted(layer, x, clip=100.0, published=False),
    ),
    "boosted as published": (
        ResidualMemory(
            *(loops.memory(), loops.memory()),
            clip=0.2,
            read="before",
            share=["log_decay"],
            weigh_first="log_decay",
            weigh_second="lr",
        ),
        lambda layer, x: loops.boosted(layer, x, clip=0.2, published=True),
    ),
    "levels": (Levels(loops.memory(), num_levels=5), loops.at_levels),
    "levels of which the last is shared": (Levels(loops.memory(), num_levels=3), loops.at_levels),
    "routed": (
        MixtureOfMemories([loops.memory()] * 3, top=2),
        lambda layer, x: loops.routed(layer, x, 2),
    ),
    "routed beside a shared one": (
        MixtureOfMemories([loops.memory()] * 4, top=2, shared=loops.memory()),
        lambda layer, x: loops.routed(layer, x, 2),
    ),
}


def make(mixer: Any, width: int = 8) -> Any:
    """Return a float64 layer whose norms are not 1, so that a misplaced norm is detected."""
    layer = build(mixer, width, 2).double()
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            if "norm" in name or name == "level_weights.bias":
                weight.uniform_(0.5, 1.5)
    return layer


@pytest.mark.parametrize("name", CASES)
def test_a_composition_is_the_loop_of_its_equations(name: str) -> None:
    mixer, loop = CASES[name]
    layer = make(mixer)
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
    """A memory that reads 0 gives zero keys and values: logits of 0 in the softmax.

    Attention has no biases here, so only the retrieved zeros depend on the memory.
    """
    layer = make(MemoryAsContext(loops.memory(), loops.attention(), segment=4))
    with torch.no_grad():
        layer.parts["memory"].out.weight.zero_()
    x = torch.randn(1, 10, 8, dtype=torch.float64)
    recorded: list[Tensor] = []
    hook = layer.parts["attention"].register_forward_hook(lambda m, i, out: recorded.append(out[0]))
    layer(x)
    hook.remove()
    y = torch.cat([piece[:, 1::2] for piece in recorded], 1)
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
    """Keys of retrievals with large negative logits, which leave the softmax."""

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


def test_mac_without_recall_is_segment_attention() -> None:
    """Retrieved zeros without weight leave plain attention to the segment."""
    layer = make(MemoryAsContext(loops.memory(), loops.attention(), segment=5))
    attention = layer.parts["attention"]
    with torch.no_grad():
        layer.parts["memory"].out.weight.zero_()
    attention.qkv = _Away(attention.qkv)
    x = torch.randn(1, 13, 8, dtype=torch.float64)
    recorded: list[Tensor] = []
    hook = attention.register_forward_hook(lambda m, i, out: recorded.append(out[0]))
    layer(x)
    hook.remove()
    y = torch.cat([piece[:, 1::2] for piece in recorded], 1)
    single = torch.cat([attention(x[:, at : at + 5])[0] for at in range(0, 13, 5)], 1)
    torch.testing.assert_close(y, single, **TOL)


def test_outputs_of_the_parts_of_mac_may_have_any_size() -> None:
    """No other part of the layer bounds the sizes of their last maps, which grow in training."""
    layer = make(MemoryAsContext(loops.memory(), loops.attention(), segment=5))
    x, outputs = torch.randn(2, 13, 8, dtype=torch.float64), []
    for _ in range(2):
        with torch.no_grad():
            for part in layer.parts.values():
                part.out.weight.mul_(1e4)  # the ε of the norms is negligible at the second scale
        outputs.append(layer(x)[0])
    torch.testing.assert_close(*outputs, atol=1e-6, rtol=1e-6)


def test_mag_with_a_constant_gate_is_sliding_window_attention() -> None:
    layer = make(MemoryAsGate(loops.memory(), loops.attention(WINDOW)))
    with torch.no_grad():
        layer.gate.memory_norm.weight.zero_()  # σ(0) = ½, for any output of the memory
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    single = layer.parts["attention"](x)[0]
    expected = loops.rms(single, layer.gate.attention_norm.weight) / 2
    torch.testing.assert_close(layer(x)[0], expected, **TOL)


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("chunk_size", [None, 6])
def test_levels_of_equal_weights_equal_the_memory(name: str, chunk_size: int | None) -> None:
    layer = build(Levels(name, num_levels=5), 8, 2, chunk_size=chunk_size).double()
    with torch.no_grad():
        layer.level_weights.weight.zero_()
    x = torch.randn(2, 75, 8, dtype=torch.float64)
    single, state = layer.memory(x)
    y, levels = layer(x)
    torch.testing.assert_close(y, single, **TOL)
    total = levels.parts["memory"].memory.weights[0].unflatten(2, (5, -1)).sum(2)
    torch.testing.assert_close(total, state.memory.weights[0], **TOL)


def test_log_linear_attention_is_masked_by_decays_and_levels() -> None:
    """Guo et al. 2025: O = (Q Kᵀ ⊙ M^S ⊙ M^H) V, M^S of the decays and M^H of the levels."""
    layer = rc.zoo.get("log_linear_attention").build(8, 2).double()
    T, x = 70, torch.randn(1, 70, 8, dtype=torch.float64)
    inputs, factors = layer.memory.memory_inputs(x), layer.level_weights(x)
    t = torch.arange(T)
    levels = torch.zeros(T, T, dtype=torch.long)
    for level in range(1, 8):  # the half-open parts of 2^(level − 1) tokens that t reads
        size = 1 << (level - 1)
        start = (t // size - 1) * size
        reads = (t // size % 2 == 1)[:, None]
        levels += level * (reads & (t >= start[:, None]) & (t < start[:, None] + size)).long()
    total = inputs.gates["log_decay"].cumsum(1)
    decay = (total[:, :, None] - total[:, None]).exp()  # [1, t, s, H]
    hierarchy = factors.gather(-1, levels[None, :, None].expand(1, T, 2, T)).transpose(2, 3)
    scores = torch.einsum("bthk,bshk->btsh", inputs.q, inputs.k) * decay * hierarchy
    scores = scores * (t <= t[:, None])[None, :, :, None]
    v = inputs.gates["lr"].unsqueeze(-1) * inputs.v
    expected = layer.memory.output(torch.einsum("btsh,bshv->bthv", scores, v), inputs)
    torch.testing.assert_close(layer(x)[0], expected, **TOL)


@pytest.mark.parametrize("name", ["gated_delta_net", "titans", "mamba2", "softmax_attention"])
def test_chain_of_one_equals_the_recipe(name: str) -> None:
    torch.manual_seed(3)
    chain = build(Sequential(name), 8, 2)
    torch.manual_seed(3)
    single = rc.zoo.get(name).build(8, 2)
    x = torch.randn(2, 9, 8)
    assert torch.equal(chain(x)[0], single(x)[0])
    assert {n.removeprefix("parts.0.") for n in chain.state_dict()} == set(single.state_dict())


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
        y, state = rc.recall(recipe, q[:, at], k[:, at], v[:, at], state=state, engine=method)
        parts.append(y)
        done += n
    torch.testing.assert_close(torch.cat(parts, 1), expected, **TOL)
    assert state is not None and state.buffer is not None
    assert state.buffer.k.shape[1] == size + first
    repeated = rc.read(recipe, q[:, -1:], state=state)
    torch.testing.assert_close(repeated, expected[:, -1:], **TOL)


def test_a_sink_window_compares_each_token_with_a_window_and_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pairs of query and key that attention compares: twice as many for twice the tokens."""
    from recollect.engines.kernel import attention

    met = 0

    def counted(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        nonlocal met
        met += q.shape[0] * q.shape[2] * k.shape[2]
        return sdpa(q, k, v, **how)

    sdpa = attention.sdpa
    monkeypatch.setattr(attention, "sdpa", counted)
    recipe, result = loops.attention(16, 4)[0], {}
    for T in (512, 1024):
        met = 0
        q, k, v = torch.randn(3, 1, T, 1, 4, dtype=torch.float64)
        y, state = rc.recall(recipe, q, k, v)
        result[T] = met
        assert rc.cost(recipe, K=4, V=4, T=T).forward_flops["attention"] == 4 * 4 * met
        more = torch.randn(3, 1, 256, 1, 4, dtype=torch.float64)
        met = 0
        rest, _ = rc.recall(recipe, *more, state=state)
        assert met <= 256 * (2 * 64 + 24), "a prompt that is read on compares as few"
        joined = [
            torch.cat([a, b], 1).transpose(1, 2) for a, b in zip((q, k, v), more, strict=True)
        ]
        i = torch.arange(T + 256)
        mask = (i <= i[:, None]) & ((i < 4) | (i > i[:, None] - 16))
        full = torch.nn.functional.scaled_dot_product_attention(*joined, attn_mask=mask)
        torch.testing.assert_close(torch.cat([y, rest], 1), full.transpose(1, 2), **TOL)
    assert result[1024] == 2 * result[512]
    assert result[512] <= 512 * (2 * 64 + 4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sink_window_of_padded_rows(side: str) -> None:
    """Rows of any length, whose first associations are in the prompt or after it."""
    recipe, T, lengths = loops.attention(5, 4)[0], 40, (40, 2, 0, 17)
    q, k, v = torch.randn(3, 4, T, 2, 4, dtype=torch.float64)
    q2, k2, v2 = torch.randn(3, 4, 20, 2, 4, dtype=torch.float64)
    mask = torch.zeros(4, T)
    for row, n in enumerate(lengths):
        mask[row, T - n if side == "left" else 0 : T if side == "left" else n] = 1
    leaves = [x.requires_grad_() for x in (q, k, v, q2, k2, v2)]
    y, state = rc.recall(recipe, q, k, v, attention_mask=mask)
    more, _ = rc.recall(recipe, q2, k2, v2, state=state)
    expected, later = [torch.zeros_like(y[row]) for row in range(4)], []
    for row, n in enumerate(lengths):
        real = mask[row].bool()
        a, b, c = (
            torch.cat([x[row, real], z[row]]).transpose(0, 1)
            for x, z in ((q, q2), (k, k2), (v, v2))
        )
        i = torch.arange(n + 20)
        recorded = (i <= i[:, None]) & ((i < 4) | (i > i[:, None] - 5))
        out = torch.nn.functional.scaled_dot_product_attention(a, b, c, attn_mask=recorded)
        expected[row] = expected[row].index_put((real.nonzero()[:, 0],), out.transpose(0, 1)[:n])
        later.append(out.transpose(0, 1)[n:])
    torch.testing.assert_close(y, torch.stack(expected), **TOL)
    torch.testing.assert_close(more, torch.stack(later), **TOL)
    ours = torch.autograd.grad(y.sin().sum() + more.sin().sum(), leaves)
    theirs = torch.autograd.grad(
        torch.stack(expected).sin().sum() + torch.stack(later).sin().sum(), leaves
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **TOL)
