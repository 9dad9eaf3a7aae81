"""`CachedMemory`: a memory that is read together with its states of earlier segments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.blocks import loops
from torch import Tensor, nn

import recollect as rc
from recollect.blocks import CachedMemory, Sequential, build, read_mixer

TOL = {"atol": 1e-10, "rtol": 1e-10}  # float64, sums of order 1
C = 4


def tokens(rows: int, length: int) -> Tensor:
    return torch.randn(rows, length, 8, dtype=torch.float64)


def weights_of(layer: Any, x: Tensor, t: int) -> Tensor:
    """γ of the segments up to that of token t (Behrouz et al. 2026, eqs. 9, 10 and 17)."""
    mixer, s = layer.mixer, t // C
    if mixer.weights == "sum":
        return x.new_ones(s + 1)
    if mixer.weights == "mean":
        return x.new_full((s + 1,), 1 / (s + 1))
    u = layer.connector.weight @ x[t]
    means = [x[i * C : min((i + 1) * C, t + 1)].mean(0) for i in range(s + 1)]
    r = torch.stack([u @ mean for mean in means])
    if mixer.top_k is not None and mixer.top_k < s:
        for i in range(s):
            if (r[:s] > r[i]).sum() >= mixer.top_k:
                r = r.index_fill(0, torch.tensor([i]), -torch.inf)
    return r.softmax(0)


def cached(layer: Any, x: Tensor) -> Tensor:
    """Gated DeltaNet of one sequence, whose states at the ends of segments are read as well."""
    memory = loops.Memory(layer.memory)
    inner, zero = layer.memory, memory.W
    earlier: list[Any] = []
    outputs = []
    for t, token in enumerate(x):
        if t and t % C == 0:
            earlier.append(memory.W)
            if layer.mixer.restart:
                memory.W = zero
        memory.learn(token)
        q, gamma = memory.numbers(token)[0], weights_of(layer, x, t)
        heads = []
        for h in range(memory.H):
            states = [W[h] for W in (*earlier, memory.W)]
            y = sum(g * W @ q[h] for g, W in zip(gamma, states, strict=True))
            heads.append(loops.rms(y, inner.norm.weight))
        gate = nn.functional.silu(inner.output_gate.weight @ token)
        outputs.append(inner.out.weight @ (torch.cat(heads) * gate))
    return torch.stack(outputs)


FORMS = [
    {"weights": "softmax"},
    {"weights": "softmax", "top_k": 1},
    {"weights": "softmax", "top_k": 2},
    {"weights": "sum"},
    {"weights": "mean"},
]


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_the_layer_is_the_loop_of_its_equations(form: dict[str, Any], restart: bool) -> None:
    mixer = CachedMemory(loops.memory(), segment=C, restart=restart, **form)
    layer = build(mixer, 8, 2).double()
    with torch.no_grad():
        layer.memory.norm.weight.uniform_(0.5, 1.5)
    x = tokens(2, 19).requires_grad_()
    y = layer(x)[0]
    expected = torch.stack([cached(layer, row) for row in x])
    torch.testing.assert_close(y, expected, **TOL)
    leaves = [x, *layer.parameters()]
    direction = torch.randn_like(y)
    ours = torch.autograd.grad((y * direction).sum(), leaves)
    theirs = torch.autograd.grad((expected * direction).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)
        assert b.abs().max() > 1e-6


def by_recall(layer: Any, x: Tensor) -> Tensor:
    """`rc.recall` of every segment, and `rc.read` of the states at the ends of earlier ones."""
    inner = layer.memory
    inputs = inner.memory_inputs(x)
    states: list[Any] = []
    outputs = []
    for t in range(x.shape[1]):
        q, k, v = (part[:, t : t + 1] for part in (inputs.q, inputs.k, inputs.v))
        gates = {name: gate[:, t : t + 1] for name, gate in inputs.gates.items()}
        first = t % C == 0
        state = None if first and (layer.mixer.restart or t == 0) else states[-1]
        init = None if state is not None else inner.initial_memory
        y, state = rc.recall(
            inner.recipe,
            *(q, k, v, gates),
            params=inputs.params or None,
            state=state,
            initial_memory=init,
        )
        states = [*states, state] if first else [*states[:-1], state]
        reads = [
            rc.read(inner.recipe, q, gates=gates, state=one, params=inputs.params or None)
            for one in states[:-1]
        ]
        gamma = torch.stack([weights_of(layer, row, t) for row in x])
        parts = zip(gamma.unbind(1), (*reads, y), strict=True)
        outputs.append(sum(g[:, None, None, None] * part for g, part in parts))
    return inner.output(torch.cat(outputs, 1), inputs)


MEMORIES = ["titans", "normalized_linear_attention", "softmax_attention", "rls", "ttt_mlp"]


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("name", MEMORIES)
def test_any_memory_is_cached(name: str, restart: bool) -> None:
    layer = build(CachedMemory(name, segment=C, restart=restart), 8, 2).double()
    x = tokens(2, 14).requires_grad_()
    y, expected = layer(x)[0], by_recall(layer, x)
    torch.testing.assert_close(y, expected, **TOL)
    leaves, direction = [x, *layer.parameters()], torch.randn_like(y)
    ours = torch.autograd.grad((y * direction).sum(), leaves)
    theirs = torch.autograd.grad((expected * direction).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)


def test_cached_sums_of_linear_attention_are_one_memory() -> None:
    """Without decay, the sum of the states of all segments is the memory of all tokens."""
    recipe, options = rc.zoo.get("linear_attention").recipe, rc.LayerOptions()
    layer = build(CachedMemory((recipe, options), segment=C, weights="sum"), 8, 2).double()
    x = tokens(2, 18)
    torch.testing.assert_close(layer(x)[0], layer.memory(x)[0], **TOL)


def test_one_segment_equals_the_memory() -> None:
    layer = build(CachedMemory("titans", segment=32), 8, 2).double()
    x = tokens(2, 18)
    torch.testing.assert_close(layer(x)[0], layer.memory(x)[0], **TOL)


@pytest.mark.parametrize("restart", [True, False])
def test_the_state_has_the_stated_size(restart: bool) -> None:
    mixer = CachedMemory(loops.memory(), segment=C, restart=restart)
    layer, T = build(mixer, 16, 2), 19
    _, state = layer(torch.randn(1, T, 16))
    memories = sum(part.nbytes for part in state.parts.values())
    price = rc.cost(mixer, K=8, V=8, H=2, T=T)
    assert price.state_bytes == memories
    single = rc.cost(mixer.memory.recipe, K=8, V=8, H=2, T=T)
    assert price.state_bytes == 5 * single.state_bytes  # 4 earlier segments and the open one
    assert price.state_bytes_per_token == single.state_bytes // C
    assert price.forward_flops["memory retrieval"] == 2 * 8 * 8 * 2 * sum(t // C for t in range(T))
    assert price.decode == single.decode + 4 * 2 * 8 * 8 * 2
    assert mixer.grows
    # The means of 4 segments, the sum of the open one, and the position.
    assert state.nbytes == memories + 5 * 16 * 4 + 8


def test_explain_prints_the_segments() -> None:
    text = str(rc.explain(CachedMemory("titans", segment=64, top_k=3)))
    assert "M starts every segment of 64 tokens with the initial memory" in text
    assert "S_t = the 3 earlier segments with the largest ⟨W x_t, x̄_i⟩" in text
    assert "y_t = γ_(t,s) M_t(q_t) + Σ_(i ∈ S_t) γ_(t,i) M^i(q_t)" in text
    assert "memory of earlier segments: " in text
    continued = CachedMemory("titans", segment=64, restart=False, weights="mean").equations
    assert continued == (
        "M starts every segment of 64 tokens with the last state of the segment before",
        "y_t = 1/s (M_t(q_t) + Σ_(i < s) M^i(q_t))",
    )


def test_it_is_saved_as_data() -> None:
    mixer = CachedMemory("titans", segment=64, restart=False, top_k=3)
    assert read_mixer(mixer.to_dict()) == mixer


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: CachedMemory(Sequential("gla"), segment=4), "Sequential is a composition"),
        (lambda: CachedMemory("rwkv6", segment=4), "own association with a bonus"),
        (lambda: CachedMemory("ffn_relu", segment=4), "is never written: leave it out"),
        (lambda: CachedMemory("gla", segment=0), "must be a whole number >= 1, not 0"),
        (lambda: CachedMemory("gla", segment=4, top_k=2, weights="sum"), "take weights='softmax'"),
    ],
)
def test_a_composition_that_is_impossible_is_refused(make: Any, sentence: str) -> None:
    with pytest.raises(rc.RecipeError) as caught:
        make()
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
