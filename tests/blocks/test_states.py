"""Compositions across states: splits, decoding, padding, packing, beams, files."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.blocks import loops
from torch import Tensor

import recollect as rc
from recollect.blocks import (
    CachedMemory,
    Levels,
    LocalMemories,
    MemoryAsContext,
    MemoryAsGate,
    MixerState,
    MixtureOfMemories,
    ResidualMemory,
    SelfModifyingMemory,
    Sequential,
    SlotMemory,
    build,
)

TOL = {"atol": 1e-9, "rtol": 1e-9}  # float64, sums of order 1
T, D = 17, 8
LENGTHS = (17, 6, 11)

MIXERS: dict[str, Any] = {
    "chain": Sequential("gated_delta_net", loops.attention(5)),
    "chain behind tokens": Sequential("gla", loops.attention(3, 3), persistent=3),
    "chain of three": Sequential("gla", "delta_net", loops.attention(4)),
    "gated": MemoryAsGate("titans", loops.attention(5)),
    "gated behind tokens": MemoryAsGate("gla", "softmax_attention", persistent=3),
    "context": MemoryAsContext("gated_delta_net", "softmax_attention", segment=4),
    "context of a deep memory": MemoryAsContext(
        "titans", "softmax_attention", segment=5, persistent=2
    ),
    "context with a window": MemoryAsContext("gla", loops.attention(3, 2), segment=6, persistent=2),
    "context of attention": MemoryAsContext("softmax_attention", "softmax_attention", segment=4),
    "context around a gate": MemoryAsContext(
        "atlas", MemoryAsGate("gla", "softmax_attention", persistent=1), segment=3, persistent=2
    ),
    "chain around a context": Sequential(
        MemoryAsContext("hgrn2", "softmax_attention", segment=4, persistent=1), "gla", persistent=2
    ),
    "boosted": ResidualMemory(
        "gated_delta_net",
        "gated_delta_net",
        clip=0.5,
        read="before",
        share=["log_decay"],
        weigh_first="log_decay",
        weigh_second="lr",
    ),
    "boosted attention": ResidualMemory("softmax_attention", "titans"),
    "slots": SlotMemory("gated_delta_net", "titans", num_slots=4),
    "chosen slots": dataclasses.replace(
        rc.zoo.get("gated_slot_attention").mixer, num_slots=5, top_k=2
    ),
    "means in slots": rc.zoo.get("abc").mixer,
    "local": LocalMemories("gated_delta_net", ["gla", "delta_net"], segment=4),
    "local around batches": LocalMemories("titans", ["titans"], segment=16, project_queries=False),
    "cached": CachedMemory("gated_delta_net", segment=4),
    "cached and chosen": CachedMemory("titans", segment=3, top_k=2),
    "cached and continued": CachedMemory("gla", segment=5, restart=False, weights="mean"),
    "cached attention": CachedMemory("softmax_attention", segment=4, weights="sum"),
    "self-modifying": SelfModifyingMemory(loops.self_modifying(4)),
    "self-modifying by token": SelfModifyingMemory(loops.self_modifying(1)),
    "levels": Levels("gated_delta_net", num_levels=4),
    "levels in chunks": Levels("mamba2"),
    "levels in a chain": Sequential(Levels("gla", num_levels=6), loops.attention(3)),
    "routed": MixtureOfMemories(["gated_delta_net", "titans", "softmax_attention"], top=2),
    "routed beside a shared one": MixtureOfMemories(
        ["gla", loops.attention(3), Sequential("delta_net", loops.attention(2, 1), persistent=1)],
        top=1,
        shared="softmax_attention",
    ),
    "context around the new": MemoryAsContext(
        "gla",
        MixtureOfMemories(["softmax_attention", ResidualMemory("softmax_attention", "gla")], top=1),
        segment=3,
        persistent=1,
    ),
}
LONG = ("context around a gate", "context of a deep memory")
# Compositions of mixers that other names test alone, by a chain that other names test too.
JOINED = ("chain of three", "levels in a chain")
COMPOSITIONS = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in (*LONG, *JOINED) else ())
        for name in MIXERS
    ],
)


def make(name: str) -> Any:
    chunk_size = 4 if name == "levels in chunks" else None
    return build(MIXERS[name], D, 2, chunk_size=chunk_size).double()


def tokens(rows: int = 3, length: int = T) -> Tensor:
    return torch.randn(rows, length, D, dtype=torch.float64)


@COMPOSITIONS
@pytest.mark.parametrize("cut", [(1, 0, 6, 2, 3, 5), (1,) * T, (4, 4, 4, 4, 1)])
def test_splits_and_decoding_equal_one_call(name: str, cut: tuple[int, ...]) -> None:
    layer, x = make(name), tokens()
    full, last = layer(x)
    parts, state, done = [], None, 0
    for n in cut:
        y, state = layer(x[:, done : done + n], state)
        parts.append(y)
        done += n
    torch.testing.assert_close(torch.cat(parts, 1), full, **TOL)
    more = tokens(length=5)
    torch.testing.assert_close(layer(more, state)[0], layer(more, last)[0], **TOL)
    assert torch.equal(state.position, torch.full((3,), T))


@COMPOSITIONS
def test_gradients_go_through_states(name: str) -> None:
    layer, x = make(name), tokens(2, 9)
    weights = torch.randn(2, 9, D, dtype=torch.float64)
    full = torch.autograd.grad((layer(x)[0] * weights).sum(), [*layer.parameters()])
    first, state = layer(x[:, :5])
    rest, _ = layer(x[:, 5:], state)
    split = torch.autograd.grad(
        (torch.cat([first, rest], 1) * weights).sum(), [*layer.parameters()]
    )
    for a, b in zip(full, split, strict=True):
        torch.testing.assert_close(a, b, **TOL)


@COMPOSITIONS
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_and_their_states_equal_single_rows(name: str, side: str) -> None:
    layer, x, more = make(name), tokens(), tokens(length=6)
    mask, padded = torch.zeros(3, T), torch.full_like(x, torch.nan)
    places = [slice(T - n, T) if side == "left" else slice(0, n) for n in LENGTHS]
    for row, (n, at) in enumerate(zip(LENGTHS, places, strict=True)):
        mask[row, at], padded[row, at] = 1, x[row, :n]
    y, state = layer(padded, None, mask)
    assert torch.equal(state.position, torch.tensor(LENGTHS))
    decoded = []
    for t in range(6):  # rows are at different positions of their segments
        out, state = layer(more[:, t : t + 1], state)
        decoded.append(out)
    for row, (n, at) in enumerate(zip(LENGTHS, places, strict=True)):
        single, later = layer(x[row : row + 1, :n])
        torch.testing.assert_close(y[row : row + 1, at], single, **TOL)
        then, _ = layer(more[row : row + 1], later)
        torch.testing.assert_close(torch.cat(decoded, 1)[row : row + 1], then, **TOL)
    assert (y[mask == 0] == 0).all()


@COMPOSITIONS
def test_packed_documents_and_their_states_equal_single_documents(name: str) -> None:
    layer, x, more = make(name), tokens(), tokens(4, 3)
    packed = torch.cat([x[row, :n] for row, n in enumerate(LENGTHS)])[None]
    borders = torch.tensor([0, 17, 23, 23, 34])  # the third document is empty
    y, state = layer(packed, None, None, borders)
    single = [layer(x[row : row + 1, :n]) for row, n in enumerate(LENGTHS)]
    torch.testing.assert_close(y[0], torch.cat([out[0] for out, _ in single]), **TOL)
    repeated, _ = layer(more.reshape(1, 12, D), state, None, torch.tensor([0, 3, 6, 9, 12]))
    states = [single[0][1], single[1][1], None, single[2][1]]
    for row, initial in enumerate(states):
        expected, _ = layer(more[row : row + 1], initial)
        torch.testing.assert_close(repeated[:, 3 * row : 3 * row + 3], expected, **TOL)


@COMPOSITIONS
def test_packed_documents_without_states(name: str) -> None:
    """Training without states: documents of similar lengths are batched if that is cheaper."""
    layer, x = make(name), tokens()
    packed = torch.cat([x[row, :n] for row, n in enumerate(LENGTHS)])[None].requires_grad_()
    borders = torch.tensor([0, 17, 23, 23, 34])
    shapes = []
    for output_final_state in (True, False):
        y, state = layer(packed, None, None, borders, output_final_state=output_final_state)
        assert (state is None) != output_final_state
        shapes.append([y, *torch.autograd.grad((y * y.detach().cos()).sum(), packed)])
    for a, b in zip(*shapes, strict=True):
        torch.testing.assert_close(a, b, **TOL)


def test_short_documents_are_not_padded_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = build(MemoryAsContext("gated_delta_net", "softmax_attention", segment=4), 8, 2)
    run, ran = type(layer).forward_rows, []

    def counted(self: Any, x: torch.Tensor, *rest: Any, **options: Any) -> Any:
        ran.append(x.shape[0] * x.shape[1])
        return run(self, x, *rest, **options)

    monkeypatch.setattr(type(layer), "forward_rows", counted)
    lengths = torch.tensor([40, *[2] * 30, 5, 0])
    borders = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    layer(torch.randn(1, int(borders[-1]), 8), cu_seqlens=borders, output_final_state=False)
    assert sum(ran) < 2 * int(borders[-1])


@COMPOSITIONS
def test_no_token_changes_an_output_before_it(name: str) -> None:
    layer, x = make(name), tokens(1)
    initial = layer(x)[0]
    for place in range(0, T, 2):
        changed = x.clone()
        changed[:, place] += 1
        later = layer(changed)[0]
        torch.testing.assert_close(later[:, :place], initial[:, :place], atol=1e-12, rtol=0)
        assert (later[:, place:] - initial[:, place:]).abs().max() > 1e-6


@COMPOSITIONS
def test_states_are_selected_repeated_reset_and_saved(name: str) -> None:
    layer, x, more = make(name), tokens(), tokens(length=4)
    _, state = layer(x)
    assert isinstance(state, MixerState) and state.rows == 3
    expected, _ = layer(more, state)
    order = torch.tensor([2, 0, 0])
    torch.testing.assert_close(layer(more[order], state.select(order))[0], expected[order], **TOL)
    twice = layer(more.repeat_interleave(2, 0), state.repeat(2))[0]
    torch.testing.assert_close(twice, expected.repeat_interleave(2, 0), **TOL)
    flat = state.to_dict()
    starts = [tensor.data_ptr() for tensor in flat.values() if tensor.numel()]
    assert len(set(starts)) == len(starts), "files hold no tensor twice"
    repeated = MixerState.from_dict(flat)
    torch.testing.assert_close(layer(more, repeated)[0], expected, **TOL)
    assert repeated.nbytes == state.nbytes > 0
    restarted = state.reset(torch.tensor([True, False, True]), layer.initial_memory)
    out, _ = layer(more, restarted)
    torch.testing.assert_close(out[1], expected[1], **TOL)
    torch.testing.assert_close(out[[0, 2]], layer(more[[0, 2]])[0], **TOL)


@pytest.mark.parametrize("rows", [1, 2])
def test_the_state_of_a_context_does_not_grow_with_the_text(rows: int) -> None:
    """All rows together, and rows that begin their segments at different tokens."""
    layer = build(MemoryAsContext("titans", "softmax_attention", segment=4, persistent=2), D, 2)
    mask = torch.ones(rows, 7)
    mask[-1, : 3 * (rows - 1)] = 0
    sizes = []
    with torch.no_grad():
        _, state = layer(torch.randn(rows, 7, D), None, mask)
        for _ in range(40):
            _, state = layer(torch.randn(rows, 1, D), state)
            sizes.append(state.nbytes)
    # The memory's inner batches of 16 tokens open and close.
    assert max(sizes[16:]) <= max(sizes[:16])
    assert state.parts["attention"].memory.buffer.k.shape[1] <= 2 + 2 * 4


def test_arguments_are_checked() -> None:
    layer = build(MIXERS["context"], D, 2)
    chain = build(MIXERS["chain"], D, 2)
    x = torch.randn(2, 5, D)
    _, state = layer(x)
    with pytest.raises(ValueError, match=r"x must have shape \[B, T, 8\]"):
        layer(torch.randn(2, 5, D + 1))
    with pytest.raises(ValueError, match="the state has 2 rows, and this call has 1"):
        layer(x[:1], state)
    with pytest.raises(ValueError, match="belongs to another layer"):
        chain(x, state)
    with pytest.raises(ValueError, match="must be a state that this layer returned"):
        layer(x, rc.zoo.get("gla").build(D, 2)(x)[1])
    with pytest.raises(ValueError, match="not part of a recollect state"):
        MixerState.from_dict({**state.to_dict(), "odd": torch.zeros(1)})
    y, nothing = layer(x, output_final_state=False)
    assert nothing is None and y.shape == x.shape
