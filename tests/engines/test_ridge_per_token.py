"""A ridge per token: every token reads the solution with its ridge, from shared statistics."""

from __future__ import annotations

import pytest
import torch
from tests.contracts import generate
from torch import Tensor

import recollect as rc

B, T, H, K, V = 2, 9, 2, 4, 3
TOL = {"atol": 1e-9, "rtol": 1e-9}
LeastSquares, Preconditioned = rc.algorithm.LeastSquares, rc.algorithm.Preconditioned
ALGORITHMS = {
    "constant": LeastSquares(ridge="input", ridge_schedule="constant"),
    "constant, per key": LeastSquares(ridge="input", ridge_schedule="constant", ridge_per="key"),
    "relative": LeastSquares(ridge="input", ridge_schedule="relative"),
    "spectral": Preconditioned(kind="spectral", power=0.5, ridge="input"),
    "diagonal": Preconditioned(kind="diagonal", power=0.5, ridge="input"),
}
EACH = pytest.mark.parametrize("name", ALGORITHMS)
METHODS = pytest.mark.parametrize("engine", ["reference", "least_squares"])


def recipe_of(name: str) -> rc.Recipe:
    return rc.Recipe(context=rc.context.Prefix(decay="input"), algorithm=ALGORITHMS[name])


def inputs(name: str) -> generate.Inputs:
    return generate.inputs(recipe_of(name), B=B, T=T, H=H, K=K, V=V, seed=3)


def power_of(system: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(system)
    return vectors @ torch.diag_embed(values**power) @ vectors.mT


def loop(name: str, x: generate.Inputs, keys: Tensor) -> Tensor:
    """y_t = W_0 q + E_t B_t q with B_t of λ_t, written out densely.

    The spectral form has no gradient, because equal eigenvalues have no unique vectors.
    """
    assert x.init is not None
    W, G, outputs = x.init[0], torch.zeros(B, H, K, K, dtype=torch.float64), []
    E = torch.zeros(B, H, V, K, dtype=torch.float64)
    for t in range(T):
        k, decay = keys[:, t], x.gates["log_decay"][:, t].exp()[..., None, None]
        error = x.v[:, t] - torch.einsum("hvk,bhk->bhv", W, k)
        G = decay * G + torch.einsum("bhi,bhj->bhij", k, k)
        E = decay * E + torch.einsum("bhv,bhk->bhvk", error, k)
        ridge = x.gates["ridge"][:, t]
        ridge = ridge if ridge.dim() == 3 else ridge.unsqueeze(-1).expand(-1, -1, K)
        if name == "relative":
            ridge = ridge * (torch.linalg.matrix_norm(G) + 1e-6).unsqueeze(-1)
        system, diagonal = G + torch.diag_embed(ridge), G.diagonal(dim1=-2, dim2=-1) + ridge
        inverse = {"spectral": power_of(system, -0.5), "diagonal": torch.diag_embed(diagonal**-0.5)}
        memory = W + E @ inverse.get(name, torch.linalg.inv(system))
        outputs.append(torch.einsum("bhvk,bhk->bhv", memory, x.q[:, t]))
    return torch.stack(outputs, 1)


@EACH
@METHODS
def test_equals_the_loop(name: str, engine: str) -> None:
    x = inputs(name)
    y, _ = generate.run_recall(recipe_of(name), x, engine=engine)
    torch.testing.assert_close(y, loop(name, x, x.k), **TOL)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "spectral"])
def test_gradients_of_ridges_and_keys(name: str) -> None:
    x = inputs(name)
    ridge, k = x.gates["ridge"].requires_grad_(), x.k.clone().requires_grad_()
    gradients = []
    for y in (
        rc.recall(recipe_of(name), x.q, k, x.v, x.gates, initial_memory=x.init)[0],
        loop(name, x, k),
    ):
        gradients.append(torch.autograd.grad(y.square().sum(), (ridge, k)))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8)


@EACH
@METHODS
def test_state_is_read_with_the_ridge_of_the_query(name: str, engine: str) -> None:
    recipe, x = recipe_of(name), inputs(name)
    _, state = generate.run_recall(recipe, x, engine=engine)
    assert recipe.read_gates == ("ridge",)
    # The queries and ridges of all tokens, and the memory after the last token.
    y = rc.read(recipe, x.q, gates={"ridge": x.gates["ridge"]}, state=state)
    for t in range(T):
        gates = {n: g.clone() for n, g in x.gates.items()}
        gates["ridge"][:, -1] = x.gates["ridge"][:, t]
        q = x.q.clone()
        q[:, -1] = x.q[:, t]
        want, _ = rc.recall(recipe, q, x.k, x.v, gates, initial_memory=x.init, engine=engine)
        torch.testing.assert_close(y[:, t], want[:, -1], **TOL)
    with pytest.raises(rc.RecipeError, match=r"needs the gate 'ridge'"):
        rc.read(recipe, x.q, state=state)


def test_recursion_has_one_ridge() -> None:
    for schedule in ("refreshed", "decaying"):
        with pytest.raises(rc.RecipeError, match=r"one for all tokens: use ridge_schedule="):
            rc.Recipe(
                context=rc.context.Prefix(),
                algorithm=LeastSquares(ridge="input", ridge_schedule=schedule),
            )


def test_layer_learns_the_ridge() -> None:
    torch.manual_seed(0)
    preset = rc.zoo.get("gated_kalmanet")
    algorithm = LeastSquares(ridge="input", ridge_schedule="relative")
    layer = rc.MemoryLayer(8, 2, preset.recipe.replace(algorithm=algorithm)).double()
    x = torch.randn(1, T, 8, dtype=torch.float64)
    y, _ = layer(x)
    parts, state = [], None
    for piece in x.split((1, 3, T - 4), dim=1):
        part, state = layer(piece, state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), y, **TOL)
    y.square().sum().backward()
    gradient = layer.gates["ridge"].weight.grad
    assert gradient is not None and gradient.abs().max() > 0
