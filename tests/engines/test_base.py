"""Memories with a base of learned weights: against autograd, and with decay towards the base."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.contracts import generate
from tests.precision.setting import Watch
from torch import Tensor
from torch.nn import functional

import recollect as rc
from recollect.choices.matmul_precision import matmul_precision
from recollect.engines.deep.chain.forward import apply_transition

B, T, H, D, M = 2, 11, 2, 4, 8
algorithm, memory, retention = rc.algorithm, rc.memory, rc.retention


def _normal(*shape: int, seed: int, size: float = 1.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (size * torch.randn(*shape, dtype=torch.float64, generator=g)).requires_grad_()


def _perceptron(A: list[Tensor], x: Tensor) -> Tensor:
    h = torch.einsum("bhoi,bhi->bho", A[0], x)
    return x + torch.einsum("bhoi,bhi->bho", A[1], functional.gelu(h))


def _gated(A: list[Tensor], x: Tensor) -> Tensor:
    gate, h = (torch.einsum("bhoi,bhi->bho", a, x) for a in A[:2])
    return x + torch.einsum("bhoi,bhi->bho", A[2], functional.silu(gate) * h)


CASES = {
    "perceptron": (memory.MLP(expansion=2, static_weights=True), _perceptron, ("W2", "W1")),
    "gated": (memory.GatedMLP(expansion=2, static_weights=True), _gated, ("W2", "W3", "W1")),
}


@pytest.mark.parametrize("method", ["auto", "reference"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_decay_towards_the_base(name: str, batch: int, method: str) -> None:
    """A_t = W̄ + α_t (A_(t−1) − W̄) + S_t, S_t = θ_t S_(t−1) − η_t ∇ℓ(A°), A_0 = W̄, by autograd."""
    member, says, maps = CASES[name]
    recipe = rc.Recipe(
        memory=member, retention=retention.Decay(), algorithm=algorithm.Momentum(batch_size=batch)
    )
    q, k, v = (_normal(B, T, H, D, seed=seed) for seed in range(3))
    shapes = member.shapes(D, D)
    base = [_normal(H, *shape, seed=3 + i, size=0.5) for i, shape in enumerate(shapes)]
    gates = {
        "log_decay": _normal(B, T, H, seed=9),
        "lr": _normal(B, T, H, seed=10),
        "momentum": _normal(B, T, H, seed=11),
    }
    alpha, eta, theta = (
        torch.sigmoid(gates["log_decay"]),
        0.05 * torch.sigmoid(gates["lr"]),
        0.8 * torch.sigmoid(gates["momentum"]),
    )
    params = {f"base_{one}": w for one, w in zip(maps, base, strict=True)}
    result, state = rc.recall(
        recipe,
        *(q, k, v),
        {"log_decay": alpha.log(), "lr": eta, "momentum": theta},
        params=params,
        engine=method,
    )
    assert state is not None

    start = [w.expand(B, *w.shape) for w in base]
    A, S, outputs = start, [torch.zeros_like(w) for w in start], []
    fixed = A
    for t in range(T):
        if t % batch == 0:
            fixed = A
        loss = (says(fixed, k[:, t]) - v[:, t]).square().sum() / 2
        g = torch.autograd.grad(loss, fixed, create_graph=True)
        a, e, m = (x[:, t, :, None, None] for x in (alpha, eta, theta))
        S = [m * s - e * one for s, one in zip(S, g, strict=True)]
        A = [w + a * (old - w) + s for w, old, s in zip(start, A, S, strict=True)]
        outputs.append(says(A, q[:, t]))
    expected = torch.stack(outputs, 1)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-11)
    inputs = [q, k, v, *gates.values(), *base]
    weight = torch.randn_like(expected)
    of_ours, of_theirs = (
        torch.autograd.grad((y * weight).sum(), inputs, retain_graph=True)
        for y in (result, expected)
    )
    for one, other in zip(of_ours, of_theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    # The weights of a state are those at the start of the open batch.
    for last, one, w in zip(A if batch == 1 else fixed, state.weights, start, strict=True):
        torch.testing.assert_close(one, last - w, rtol=1e-9, atol=1e-10)


def test_decays_are_multiplied_in_float32() -> None:
    """W is the difference of two stacks, and rounding it at every boundary would lose digits."""
    out, T, M = (torch.empty(shape, device="meta") for shape in ((2, 2, 6), (2, 2, 2), (2, 2, 6)))
    with Watch() as watch, matmul_precision("tf32", "meta"):
        apply_transition(T, M, out)
    assert watch.forward <= {"ieee", "none"} and watch.forward


@pytest.mark.parametrize("T", [1, 5])
def test_padding_and_open_batches_leave_the_memory_unchanged(T: int) -> None:
    """Padding, and tokens of an open inner batch, leave W unchanged to the last bit."""
    recipe = rc.zoo.get("titans_with_base").recipe
    x = generate.inputs(recipe, B=2, T=48, H=2, K=8, V=8, dtype=torch.float32)
    with torch.no_grad():
        _, initial_state = generate.run_recall(recipe, x, engine="deep")
        mask = torch.ones(2, T, dtype=torch.bool)
        mask[1, T // 2 :] = False
        gates = {one: t[:, :T] for one, t in x.gates.items()}
        _, later = rc.recall(
            recipe, x.q[:, :T], x.k[:, :T], x.v[:, :T], gates,
            params=x.params, state=initial_state, attention_mask=mask, engine="deep",
        )  # fmt: skip
    assert any(w.any() for w in initial_state.weights)
    for w, old in zip(later.weights, initial_state.weights, strict=True):
        assert torch.equal(w, old)


@pytest.mark.parametrize("method", ["auto", "reference"])
def test_base_without_decay_is_an_initial_memory(method: str) -> None:
    """W̄ + W from W_0 = 0 equals A from A_0 = W̄, and W is the difference."""
    step = algorithm.GradientDescent(batch_size=4, lr=0.1, normalized_steps=True)
    q, k, v = (_normal(B, T, H, D, seed=seed).detach() for seed in range(3))
    start = tuple(_normal(H, *s, seed=3).detach() for s in memory.MLP().shapes(D, D))
    plain = rc.Recipe(memory=memory.MLP(), algorithm=step)
    ours = rc.Recipe(memory=memory.MLP(static_weights=True), algorithm=step)
    expected, expected_state = rc.recall(plain, q, k, v, initial_memory=start, engine=method)
    params = dict(zip(("base_W2", "base_W1"), start, strict=True))
    y, state = rc.recall(ours, q, k, v, params=params, engine=method)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-11)
    assert expected_state is not None
    assert state is not None
    for w, A, moved in zip(start, expected_state.weights, state.weights, strict=True):
        torch.testing.assert_close(moved, A - w, rtol=1e-9, atol=1e-11)


def test_a_layer_draws_its_base_and_learns_an_initial_memory_from_zero() -> None:
    recipe = rc.Recipe(memory=memory.MLP(static_weights=True), features=rc.features.Polynomial())
    assert not recipe.needs_init()
    assert recipe.learns_init
    assert rc.Recipe(memory=memory.MLP()).needs_init()
    torch.manual_seed(0)
    layer = rc.MemoryLayer(64, 2, recipe)
    assert layer.initial_memory is not None
    assert not any(w.any() for w in layer.initial_memory)
    sizes = {name: x.std().item() for name, x in layer.named_parameters() if "base" in name}
    # Features have the norm of the 32 channels before them; there are 128 hidden units.
    assert sizes["params.base_W2.bias"] == pytest.approx(32**-0.5, rel=0.05)
    assert sizes["params.base_W1.bias"] == pytest.approx(128**-0.5, rel=0.05)
    params = rc.initial_params(recipe, H=2, K=32, V=32)
    assert params["base_W2"].std().item() == pytest.approx(32**-0.5, rel=0.05)
    y, state = layer(torch.randn(2, 5, 64))
    y.square().sum().backward()
    for name, x in layer.named_parameters():
        assert x.grad is not None, name
        assert x.grad.abs().sum() > 0, name
    assert any(w.abs().sum() > 0 for w in state.memory.weights)


@pytest.mark.parametrize("biases", [False, True])
def test_base_starts_as_an_initial_memory(biases: bool) -> None:
    torch.manual_seed(0)
    recipe = rc.Recipe(memory=memory.MLP(static_weights=True, bias=biases))
    params = rc.initial_params(recipe, H=64, K=4, V=4)
    plain = rc.MemoryLayer(256, 64, rc.Recipe(memory=memory.MLP(bias=biases)))
    assert plain.initial_memory is not None
    for base, start in zip(
        (params["base_W2"], params["base_W1"]), plain.initial_memory, strict=True
    ):
        assert base.shape == start.shape
        assert base.std().item() == pytest.approx(start.std().item(), rel=0.05)


def test_options_of_random_initial_weights_are_refused_with_a_base() -> None:
    recipe = rc.Recipe(memory=memory.MLP(static_weights=True))
    for options, words in (
        (rc.LayerOptions(memory_init_scale=2.0), "memory_init_scale=2.* begins with zeros here"),
        (
            rc.LayerOptions(last_map_init_scale=0.5),
            "last_map_init_scale=0.5.* without static weights",
        ),
    ):
        with pytest.raises(rc.RecipeError, match=words):
            rc.MemoryLayer(8, 2, recipe, options)


def test_state_of_another_memory_is_refused() -> None:
    """A plain memory's weights differ in shape from those of a memory with a base."""
    plain = rc.MemoryLayer(8, 2, rc.Recipe(memory=memory.MLP()))
    ours = rc.MemoryLayer(8, 2, rc.Recipe(memory=memory.MLP(static_weights=True)))
    x = torch.randn(1, 3, 8)
    for one, other in ((plain, ours), (ours, plain)):
        with pytest.raises(ValueError, match="state"):
            one(x, other(x)[1])


class _Sized(rc.memory.Memory):
    """W x + U x with a param U of the given axes."""

    def shapes(self, F: int, V: int) -> tuple[tuple[int, ...], ...]:
        return ((V, F),)

    def forward(
        self, weights: Sequence[Tensor], x: Tensor, raw: Tensor, params: Mapping[str, Tensor]
    ) -> Tensor:
        return x @ (weights[0] + params["fixed"]).mT


@pytest.mark.parametrize(
    ("axes", "param", "words"),
    [
        ({"mine": 0}, {"axes": ("V", "F")}, "axes: mine must be a whole number >= 1, not 0"),
        ({"K": 9}, {"axes": ("V", "F")}, "gives the axis 'K' a size, which the recipe has"),
        ({}, {"axes": ("V", "mien")}, "has the axis 'mien' of unknown size"),
        ({}, {"axes": ("V", "F"), "draw": "fan_in", "fan": "mien"}, "has the axis 'mien'"),
    ],
)
def test_sizes_of_custom_axes_are_checked(
    axes: dict[str, int], param: dict[str, Any], words: str
) -> None:
    @rc.member
    class OddlySized(_Sized):
        """`_Sized` with a param of the wrong size."""

        def axes(self, K: int, F: int, V: int) -> dict[str, int]:
            return axes

        def params(self) -> tuple[rc.Param, ...]:
            return (rc.Param(name="fixed", owner=self.title, **param),)

    with pytest.raises(rc.RecipeError, match=words):  # of a recipe, or of its sizes
        rc.initial_params(rc.Recipe(memory=OddlySized()), H=1, K=4, V=4)


def test_params_of_a_memory_may_have_every_axis_of_a_recipe() -> None:
    """A memory's axes are all axes of the recipe, which two modules list."""
    names = tuple(rc.Recipe().axes(4, 4))
    assert len(names) > 5

    @rc.member
    class Wide(_Sized):
        """`_Sized` with a param of every axis."""

        def params(self) -> tuple[rc.Param, ...]:
            fixed = rc.Param(name="fixed", owner=self.title, axes=("V", "F"))
            wide = [rc.Param(name=f"of_{x}", owner=self.title, axes=(x,)) for x in names]
            return (fixed, *wide)

    initial = rc.initial_params(rc.Recipe(memory=Wide()), H=1, K=4, V=4)
    assert len(initial) == 1 + len(names)


def test_fan_requires_a_random_init() -> None:
    with pytest.raises(ValueError, match="fan='K' needs draw='fan_in'"):
        rc.Param(name="fixed", owner="me", axes=("V",), fan="K")


def test_a_kernel_has_no_base() -> None:
    for member in (memory.MLP(static_weights=True), memory.GatedMLP(static_weights=True)):
        with pytest.raises(
            rc.RecipeError, match=r"infinitely many features of features\.Exponential"
        ):
            rc.Recipe(memory=member, features=rc.features.Exponential())


def test_equations_name_the_base() -> None:
    explanation = rc.explain(rc.Recipe(memory=memory.GatedMLP(static_weights=True)))
    assert "(W̄1 + W1)(silu((W̄2 + W2) q_t) ⊙ (W̄3 + W3) q_t)" in str(explanation)
    assert "the base is learned, not memory" in str(explanation)
    for depth, kind in itertools.product((1, 3), ("layer", None)):
        mlp = memory.MLP(depth=depth, norm=kind, static_weights=True)
        assert mlp.prediction_text("k").count("W̄") == depth
