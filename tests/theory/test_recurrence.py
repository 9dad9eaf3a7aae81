"""S_t = A S B + C: AM's table 2 by hand against recipes, and the objective's gradient."""

from __future__ import annotations

import pytest
import torch

import recollect as rc
from recollect.choices import algorithm, bias, retention
from recollect.theory import general_form

T, K, V = 5, 4, 3
R = rc.Recipe
HEBB = {"bias": bias.DotProduct(), "algorithm": algorithm.GradientDescent(lr=1.0)}


def random_inputs(recipe: rc.Recipe, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(T, K, generator=g, dtype=torch.float64)
    v = torch.randn(T, V, generator=g, dtype=torch.float64)
    sizes = recipe.axes(K, V)
    gates = {}
    for gate in recipe.gates():
        shape = (1, T, 1, *(sizes[axis] for axis in gate.axes))
        x = torch.rand(shape, generator=g, dtype=torch.float64)
        gates[gate.name] = -x if gate.name.startswith("log_") else x
    return k, v, gates


def eye(n: int) -> torch.Tensor:
    return torch.eye(n, dtype=torch.float64)


TABLE = {
    "linear attention": (
        R(**HEBB),
        lambda k, v, g: (eye(V), eye(K), torch.outer(v, k)),
    ),
    "gated linear attention, over values": (
        R(**HEBB, retention=retention.Decay(per="value")),
        lambda k, v, g: (g["log_decay"].exp().diag(), eye(K), torch.outer(v, k)),
    ),
    "gated linear attention, over keys": (
        R(**HEBB, retention=retention.Decay(per="key")),
        lambda k, v, g: (eye(V), g["log_decay"].exp().diag(), torch.outer(v, k)),
    ),
    "DeltaNet": (
        R(),
        lambda k, v, g: (eye(V), eye(K) - g["lr"] * torch.outer(k, k), g["lr"] * torch.outer(v, k)),
    ),
    "gated DeltaNet": (
        R(retention=retention.Decay(when="before")),
        lambda k, v, g: (
            eye(V),
            g["log_decay"].exp() * (eye(K) - g["lr"] * torch.outer(k, k)),
            g["lr"] * torch.outer(v, k),
        ),
    ),
    "leaky LMS": (
        R(retention=retention.Decay()),
        lambda k, v, g: (
            eye(V),
            g["log_decay"].exp() * eye(K) - g["lr"] * torch.outer(k, k),
            g["lr"] * torch.outer(v, k),
        ),
    ),
}


def product(form) -> torch.Tensor:
    """Return Aᵀ ⊗ B, which does not depend on the split into A and B."""
    return torch.kron(form[0].contiguous(), form[1].contiguous())


@pytest.mark.parametrize("name", TABLE)
def test_table_2(name: str) -> None:
    recipe, by_hand = TABLE[name]
    k, v, gates = random_inputs(recipe)
    forms = general_form(recipe, k, v, gates=gates)
    S = torch.zeros(V, K, dtype=torch.float64)
    for t, form in enumerate(forms):
        now = {name: x[0, t, 0] for name, x in gates.items()}
        A, B, C = by_hand(k[t], v[t], now)
        torch.testing.assert_close(product((form.A, form.B)), product((A, B)), atol=1e-10, rtol=0)
        torch.testing.assert_close(form.C, C, atol=1e-10, rtol=0)
        torch.testing.assert_close(form.previous, S, atol=1e-10, rtol=0)
        S = A @ S @ B + C
        torch.testing.assert_close(form.current, S, atol=1e-10, rtol=0)


def test_one_side_is_the_identity_if_possible() -> None:
    for name, side in (("DeltaNet", "A"), ("gated linear attention, over values", "B")):
        recipe, _ = TABLE[name]
        k, v, gates = random_inputs(recipe)
        form = general_form(recipe, k, v, gates=gates)[2]
        one = getattr(form, side)
        torch.testing.assert_close(one, eye(len(one)), atol=1e-10, rtol=0)


def test_momentum_of_the_write_is_in_c() -> None:
    """AM: C_t = η_t C_{t−1} + β_t v_t k_tᵀ, and the erasure is DeltaNet's."""
    recipe = R(algorithm=algorithm.Momentum(momentum_on="value"))
    k, v, gates = random_inputs(recipe)
    C = torch.zeros(V, K, dtype=torch.float64)
    for t, form in enumerate(general_form(recipe, k, v, gates=gates)):
        theta, lr = gates["momentum"][0, t, 0], gates["lr"][0, t, 0]
        C = theta * C + lr * torch.outer(v[t], k[t])
        torch.testing.assert_close(form.C, C, atol=1e-10, rtol=0)
        erased = eye(K) - lr * torch.outer(k[t], k[t])
        torch.testing.assert_close(product((form.A, form.B)), product((eye(V), erased)))


def test_several_associations_are_one_step() -> None:
    recipe = R(algorithm=algorithm.GradientDescent(updates_per_token=2))
    g = torch.Generator().manual_seed(0)
    k = torch.randn(3, 2, K, generator=g, dtype=torch.float64)
    v = torch.randn(3, 2, V, generator=g, dtype=torch.float64)
    lr = torch.full((1, 3, 1, 2), 0.3, dtype=torch.float64)
    form = general_form(recipe, k, v, gates={"lr": lr})[1]
    one, two = (eye(K) - 0.3 * torch.outer(x, x) for x in k[1])
    torch.testing.assert_close(product((form.A, form.B)), product((eye(V), one @ two)))


@pytest.mark.parametrize("name", TABLE)
def test_the_objective_s_step_is_the_recurrence(name: str) -> None:
    recipe, _ = TABLE[name]
    k, v, gates = random_inputs(recipe, seed=1)
    for form in general_form(recipe, k, v, gates=gates):
        assert form.symmetric
        S = torch.randn(V, K, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        S.requires_grad_()
        (gradient,) = torch.autograd.grad(form.objective(S), S)
        stepped = S.detach() - gradient
        torch.testing.assert_close(stepped, form.A @ S.detach() @ form.B + form.C)


def test_delta_net_s_objective_is_its_regression_problem() -> None:
    """Up to ½‖v‖², which no step sees: ½‖S k − v‖² for a step of 1."""
    recipe = R(algorithm=algorithm.GradientDescent(lr=1.0))
    k, v, _ = random_inputs(recipe)
    form = general_form(recipe, k, v)[3]
    S = torch.randn(V, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    regression = (S @ k[3] - v[3]).square().sum() / 2 - v[3].square().sum() / 2
    torch.testing.assert_close(form.objective(S), regression)


def test_other_recipes_are_refused() -> None:
    def refused(recipe: rc.Recipe, message: str) -> None:
        k, v, gates = random_inputs(recipe)
        params = rc.initial_params(recipe, H=1, K=K, V=V, dtype=torch.float64)
        with pytest.raises(rc.RecipeError, match=message):
            general_form(recipe, k, v, gates=gates, params=params)

    refused(R(retention=retention.Decay(per="entry")), "no product A S B")
    refused(R(retention=retention.Decay(per="value")), "no product A S B")
    refused(R(bias=bias.Lp(p=3.0)), "affine|no product")
    refused(rc.zoo.get("rls").recipe, "one step per token")
    refused(R(algorithm=algorithm.GradientDescent(batch_size=4)), "one step per token")
    with pytest.raises(rc.RecipeError, match="no single matrix"):
        general_form(rc.zoo.get("titans").recipe, *(torch.zeros(1, 4).double(),) * 2)


def test_asymmetric_forms_have_no_objective() -> None:
    recipe = rc.zoo.get("rwkv7").recipe
    k = torch.randn(2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes = recipe.axes(4, 4)
    g = torch.Generator().manual_seed(1)
    gates = {}
    for gate in recipe.gates():
        shape = (1, 2, 1, *(sizes[axis] for axis in gate.axes))
        x = torch.rand(shape, generator=g, dtype=torch.float64)
        gates[gate.name] = -x if gate.name.startswith("log_") else x
    params = rc.initial_params(recipe, H=1, K=4, V=4, dtype=torch.float64)
    form = general_form(recipe, k, k.flip(0), gates=gates, params=params)[1]
    assert not form.symmetric
    with pytest.raises(rc.RecipeError, match="needs symmetric"):
        form.objective(form.previous)
