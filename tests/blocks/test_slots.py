"""`SlotMemory`: the output of one memory is the query of the next, through slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect as rc
from recollect.blocks import Sequential, SlotMemory, build, read_mixer

TOL = {"atol": 1e-10, "rtol": 1e-10}  # float64, sums of order 1


def tokens(rows: int, length: int) -> Tensor:
    return torch.randn(rows, length, 16, dtype=torch.float64)


def heads_of(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys, values and decays per slot of one sequence ``[T, H, ·]``."""
    u = nn.functional.silu(x @ layer.first.qkv.weight.T)
    q, k, v = (part.unflatten(-1, (2, -1)) for part in u.split(layer.first.qkv_sizes, dim=-1))
    gate = layer.first.gates["log_decay"]
    logits = (x @ gate.weight.T).unflatten(-1, (2, -1)) + gate.bias
    return q, k, v, torch.sigmoid(logits) ** (1 / 8)


def output(layer: Any, y: list[Tensor]) -> Tensor:
    """Norm per head and the output map, of outputs ``[H, V]`` per token."""
    stacked = torch.stack(y)
    normed = stacked / (stacked.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return (normed * layer.first.norm.weight).flatten(1) @ layer.first.out.weight.T


def gated_slots(layer: Any, x: Tensor, top_k: int | None = None, heads: Any = None) -> Tensor:
    """Zhang et al. 2024, section 3; with the slots of a token chosen by a router, if any."""
    q, k, v, alpha = heads or heads_of(layer, x)
    m = alpha.shape[-1]
    K = [k.new_zeros(m, k.shape[-1]) for _ in range(2)]
    V = [v.new_zeros(m, v.shape[-1]) for _ in range(2)]
    outputs = []
    for t in range(len(x)):
        heads = []
        for h in range(2):
            a = alpha[t, h]
            if top_k is not None:
                r = torch.sigmoid(layer.router.scores.weight[h * m : (h + 1) * m] @ x[t])
                threshold = r.sort(descending=True).values[top_k - 1]
                r = torch.where(r >= threshold, r, 0.0)
                a = a ** (r / r.sum())
            K[h] = a[:, None] * K[h] + torch.outer(1 - a, k[t, h])
            V[h] = a[:, None] * V[h] + torch.outer(1 - a, v[t, h])
            heads.append(V[h].T @ (K[h] @ q[t, h]).softmax(0))
        outputs.append(torch.stack(heads))
    return output(layer, outputs)


def delta_slots(layer: Any, x: Tensor) -> Tensor:
    """Two delta rules without decays, with slots from the token."""
    first, second = layer.first, layer.second
    u = nn.functional.silu(x @ first.qkv.weight.T)
    q, k, v = (part.unflatten(-1, (2, -1)) for part in u.split(first.qkv_sizes, dim=-1))
    m = layer.router.scores.weight.shape[0] // 2
    M, N = [[x.new_zeros(a, b) for _ in range(2)] for a, b in ((m, 8), (v.shape[-1], m))]
    rates = [part.gates["lr"](x[None])[0] for part in (first, second)]
    outputs = []
    for t in range(len(x)):
        heads = []
        for h in range(2):
            s = torch.sigmoid(layer.router.scores.weight[h * m : (h + 1) * m] @ x[t])
            s = s / s.sum()
            unit = k[t, h] / (k[t, h].square().sum() + 1e-12).sqrt()
            query = q[t, h] / (q[t, h].square().sum() + 1e-12).sqrt()
            M[h] = M[h] - rates[0][t, h] * torch.outer(M[h] @ unit - s, unit)
            N[h] = N[h] - rates[1][t, h] * torch.outer(N[h] @ s - v[t, h], s)
            heads.append(N[h] @ (M[h] @ query).softmax(0))
        outputs.append(torch.stack(heads))
    return output(layer, outputs)


def bounded(layer: Any, x: Tensor) -> Tensor:
    """Peng et al. 2021, section 4: slots are means of keys and values, weighted by exp(W x)."""
    first, m = layer.first, layer.router.scores.weight.shape[0] // 2
    q, k, v = (
        part.unflatten(-1, (2, -1))
        for part in (x @ first.qkv.weight.T).split(first.qkv_sizes, dim=-1)
    )
    outputs = []
    for t in range(len(x)):
        heads = []
        for h in range(2):
            z = x[: t + 1] @ layer.router.scores.weight[h * m : (h + 1) * m].T
            phi = z.softmax(0)  # [t + 1, m], over the tokens so far
            K, V = phi.T @ k[: t + 1, h], phi.T @ v[: t + 1, h]
            heads.append(V.T @ (K @ q[t, h] / k.shape[-1] ** 0.5).softmax(0))
        outputs.append(torch.stack(heads))
    return torch.stack(outputs).flatten(1) @ first.out.weight.T


def ravens(layer: Any, x: Tensor) -> Tensor:
    """Slots of a router around queries and keys of root mean square 1."""
    q, k, v, alpha = heads_of(layer, x)
    q, k = (z / (z.square().mean(-1, keepdim=True) + 1e-12 / z.shape[-1]).sqrt() for z in (q, k))
    return gated_slots(layer, x, top_k=3, heads=(q, k, v, alpha))


PLAIN = rc.LayerOptions(conv_size=0, output_gate="none")
GSA = rc.zoo.get("gated_slot_attention").mixer
CASES: dict[str, tuple[SlotMemory, Callable[[Any, Tensor], Tensor]]] = {
    "gated_slot_attention": (replace(GSA, num_slots=5), gated_slots),
    "slots of a router": (
        replace(GSA, num_slots=5, top_k=2),
        lambda layer, x: gated_slots(layer, x, top_k=2),
    ),
    "abc": (replace(rc.zoo.get("abc").mixer, num_slots=5), bounded),
    "raven": (replace(rc.zoo.get("raven").mixer, num_slots=5, top_k=3), ravens),
    "delta rules": (
        SlotMemory((rc.Recipe(), PLAIN), rc.Recipe(), num_slots=5),
        delta_slots,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_the_loop_of_its_equations(name: str) -> None:
    mixer, loop = CASES[name]
    layer = build(mixer, 16, 2, value_dim=6).double()
    with torch.no_grad():
        if layer.first.norm is not None:
            layer.first.norm.weight.uniform_(0.5, 1.5)
    x = tokens(2, 13).requires_grad_()
    y = layer(x)[0]
    expected = torch.stack([loop(layer, row) for row in x])
    torch.testing.assert_close(y, expected, **TOL)
    weights, leaves = torch.randn_like(y), [x, *layer.parameters()]
    ours = torch.autograd.grad((y * weights).sum(), leaves)
    theirs = torch.autograd.grad((expected * weights).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)
        assert b.abs().max() > 1e-6


@pytest.mark.parametrize("name", CASES)
def test_the_engines_equal_the_reference(name: str) -> None:
    layer = build(CASES[name][0], 16, 2, value_dim=6).double()
    reference = build(CASES[name][0], 16, 2, value_dim=6, engine="reference").double()
    reference.load_state_dict(layer.state_dict())
    x = tokens(2, 71)
    (y, state), (expected, last) = layer(x), reference(x)
    torch.testing.assert_close(y, expected, **TOL)
    for name, tensor in last.to_dict().items():
        torch.testing.assert_close(state.to_dict()[name], tensor, **TOL)


def test_unselected_slots_are_unchanged() -> None:
    layer = build(replace(GSA, num_slots=5, top_k=1), 16, 2).double()
    _, state = layer(tokens(1, 7))
    _, final_state = layer(tokens(1, 1), state)
    previous, final = (x.parts["first"].memory.weights[0] for x in (state, final_state))
    assert (previous != final).any(-1).sum(-1).tolist() == [[1, 1]]  # of [1, H, m, K]


def test_one_slot_is_the_gated_average_of_values() -> None:
    """The softmax of one number is 1, so y is the second memory at its only slot."""
    layer = build(replace(GSA, num_slots=1), 16, 2).double()
    x = tokens(1, 9)
    _, _, v, alpha = heads_of(layer, x[0])
    average, outputs = v.new_zeros(2, 8), []
    for t in range(9):
        average = alpha[t] * average + (1 - alpha[t]) * v[t]
        outputs.append(average)
    torch.testing.assert_close(layer(x)[0][0], output(layer, outputs), **TOL)


def test_cost_and_state_are_those_of_the_two_memories() -> None:
    layer = build(replace(GSA, num_slots=5), 16, 2, value_dim=6)
    _, state = layer(torch.randn(1, 11, 16))
    price = rc.cost(layer.mixer, K=8, V=6, H=2, T=11)
    assert price.state_bytes == state.nbytes
    first, second = layer.mixer.first.recipe, layer.mixer.second.recipe
    parts = rc.cost(first, K=8, V=5, H=2, T=11), rc.cost(second, K=5, V=6, H=2, T=11)
    assert price.total == sum(part.total for part in parts)
    assert price.state_bytes_per_token == 0
    assert rc.cost(layer, K=8, V=6, H=2, T=11).total == price.total


def test_explain_prints_the_slots() -> None:
    text = str(rc.explain("gated_slot_attention"))
    assert "s_t = 1 − α_t" in text
    assert "M learns (k_t, s_t), N learns (s_t, v_t), with the first's log_decay" in text
    assert "y_t = N_t(softmax(M_t(q_t)))" in text
    routed = replace(GSA, top_k=2).equations
    assert routed[:2] == (
        "w_t = the 2 largest of σ(W x_t), divided by their sum",
        "s_t = 1 − α_t, α_t ← α_t^(w_t)",
    )


@pytest.mark.parametrize("mixer", [case[0] for case in CASES.values()])
def test_it_is_saved_as_data(mixer: SlotMemory) -> None:
    assert read_mixer(mixer.to_dict()) == mixer


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: SlotMemory(Sequential("gla"), "gla"), "rc.blocks.Sequential is a composition"),
        (lambda: SlotMemory("gla", "delta_product"), "use updates_per_token=1"),
        (lambda: SlotMemory("gla", "rg_lru"), "has one weight per channel: take a matrix"),
        (lambda: SlotMemory("ffn_relu", "gla"), "is never written: leave it out"),
        (lambda: SlotMemory("oja", "gla"), "SlotMemory(first=...) reads M q"),
        (lambda: SlotMemory("gla", "oja"), "SlotMemory(second=...) reads M q"),
        (lambda: SlotMemory("gla", "gla", num_slots=0), "must be a whole number >= 1, not 0"),
        (
            lambda: SlotMemory("gla", "gla", top_k=3, write="running_softmax"),
            "leave top_k out, or take another write",
        ),
        (lambda: SlotMemory("gla", "gla", write="complement"), "take retention.Decay(per='value')"),
        (lambda: SlotMemory("gla", "gla", share=["log_decay"]), "both have: none"),
        (lambda: build(SlotMemory("gla", "hgrn2"), 16, 2), "receives its keys"),
    ],
)
def test_a_composition_that_is_impossible_is_refused(
    make: Callable[[], Any], sentence: str
) -> None:
    with pytest.raises(rc.RecipeError) as caught:
        make()
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_the_first_layer_alone_is_refused() -> None:
    layer = build(replace(GSA, num_slots=5), 16, 2)
    with pytest.raises(ValueError, match="call the layer of the composition"):
        layer.first(torch.randn(1, 3, 16))
