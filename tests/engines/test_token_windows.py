"""Windows of tokens with several associations each, against loops over tokens in float64.

Sub-step j of token t takes the gradient of association j of the last c tokens, at the memory after
the preceding sub-steps.
"""

from __future__ import annotations

import pytest
import torch
from tests.contracts import generate
from torch import Tensor, nn

import recollect as rc
from recollect.testing.sequences import check_gradients_across_splits, check_masks, check_packing

B, T, H, N, C, K, V = 2, 11, 2, 3, 2, 4, 5
TOL = {"atol": 1e-10, "rtol": 1e-10}
GD, Window, Decay = rc.algorithm.GradientDescent, rc.context.Window, rc.retention.Decay


def inputs(recipe: rc.Recipe, *, seed: int = 0) -> generate.Inputs:
    return generate.inputs(recipe, B=B, T=T, H=H, K=K, V=V, seed=seed)


def recipe_of(**choices: object) -> rc.Recipe:
    return rc.Recipe(**{"context": Window(size=C), "algorithm": GD(updates_per_token=N), **choices})  # type: ignore[arg-type]


def error(bias: rc.bias.Bias, prediction: Tensor, v: Tensor) -> Tensor:
    if bias == rc.bias.DotProduct():
        return -v
    difference = prediction - v
    if bias == rc.bias.L2():
        return difference
    # A Huber loss of the norm of the error, with threshold 0.5.
    norm = difference.norm(dim=-1, keepdim=True)
    return torch.where(norm <= 0.5, difference, 0.5 * difference / norm)


def loop(recipe: rc.Recipe, x: generate.Inputs, *, normalized: bool = False) -> Tensor:
    """Return outputs of W ← α W, then W ← W − η_j Σ_(m<c) γ_m ρ ∂ℓ_j(t − m), j = 1..n."""
    W, outputs, g = torch.zeros(B, H, V, K, dtype=torch.float64), [], x.gates
    if x.init is not None and not recipe.uses_kernel_rows:
        W = W + x.init[0]
    decays_first = recipe.retention.decay is not None and recipe.retention.decay.when == "before"
    for t in range(T):
        initial = W
        if "log_decay" in g:
            W = W * g["log_decay"][:, t].exp()[..., None, None]
        for j in range(N):
            at = W if j or decays_first else initial
            step = torch.zeros_like(W)
            for m in range(min(C, t + 1)):
                k, v = x.k[:, t - m, :, j], x.v[:, t - m, :, j]
                e = error(recipe.bias, torch.einsum("bhvk,bhk->bhv", at, k), v)
                if normalized:
                    e = e / (k.square().sum(-1, keepdim=True) + 1e-6)
                weight = g["window"][:, t, :, m] if "window" in g else torch.ones(B, H).double()
                step = step + torch.einsum("bh,bhv,bhk->bhvk", weight, e, k)
            W = W - g["lr"][:, t, :, j, None, None] * step
        outputs.append(torch.einsum("bhvk,bhk->bhv", W, x.q[:, t]))
    return torch.stack(outputs, 1)


RECIPES = {
    "l2": recipe_of(),
    "l2, decay before": recipe_of(retention=Decay(when="before")),
    "dot product, decay": recipe_of(bias=rc.bias.DotProduct(), retention=Decay()),
    "huber, decay": recipe_of(bias=rc.bias.Huber(form="norm", threshold=0.5), retention=Decay()),
    "equal weights": recipe_of(context=Window(size=C, gated=False)),
    "rows of a kernel": recipe_of(features=rc.features.LinearKernel(), retention=Decay()),
}
PAIRS = [
    (name, engine)
    for name, recipe in RECIPES.items()
    for engine in ("reference", "linear")
    if engine == "reference" or rc.explain(recipe).engine.startswith("linear")
]
EACH = pytest.mark.parametrize(("name", "engine"), PAIRS)


@EACH
def test_equals_the_loop(name: str, engine: str) -> None:
    recipe = RECIPES[name]
    x = inputs(recipe)
    if recipe.uses_kernel_rows:  # an initial memory without keys
        x = generate.inputs(recipe, B=B, T=T, H=H, K=K, V=V, zero=True)
    y, state = generate.run_recall(recipe, x, engine=engine)
    torch.testing.assert_close(y, loop(recipe, x), **TOL)
    assert state.buffer is not None and state.buffer.k.shape[1] == (C - 1) * N


@EACH
def test_splits_masks_and_documents(name: str, engine: str) -> None:
    recipe = RECIPES[name]
    x = inputs(recipe)
    y, final = generate.run_recall(recipe, x, engine=engine)
    for cuts in ((1, 4, T), tuple(range(1, T + 1))):
        parts, state, start = [], None, 0
        for end in cuts:
            part = x.slice_tokens(start, end)
            y_part, state = generate.run_recall(recipe, part, engine=engine, state=state)
            parts, start = [*parts, y_part], end
        torch.testing.assert_close(torch.cat(parts, 1), y, **TOL)
        pairs = zip(state.tensors(), final.tensors(), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, **TOL)
    check_gradients_across_splits(recipe, x, engine, (1, 4, T))
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0, :3], mask[1, 6:] = False, False
    check_masks(recipe, x, engine, mask)
    row = generate.inputs(recipe, B=1, T=T, H=H, K=K, V=V, seed=2)
    check_packing(recipe, row, (0, 1, 7, T), engine)


def test_normalised_steps() -> None:
    recipe = recipe_of(algorithm=GD(updates_per_token=N, normalized_steps=True))
    x = inputs(recipe)
    y, _ = generate.run_recall(recipe, x)
    torch.testing.assert_close(y, loop(recipe, x, normalized=True), **TOL)


def test_a_deep_memory() -> None:
    """The reference runs memories that are not linear, and the deep engine refuses them."""
    recipe = recipe_of(memory=rc.memory.MLP(depth=2, residual=False))
    x = inputs(recipe)
    assert x.init is not None
    y, _ = generate.run_recall(recipe, x)
    W, outputs = [w.expand(B, *w.shape) for w in x.init], []
    forward = recipe.memory.bind(K, V)
    for t in range(T):
        for j in range(N):
            leaves = [w.detach().requires_grad_() for w in W]
            loss = torch.zeros((), dtype=torch.float64)
            for m in range(min(C, t + 1)):
                k, v = (a[:, t - m, :, j].unsqueeze(2) for a in (x.k, x.v))
                squares = (forward(leaves, k, k, x.params) - v).square().sum(-1) / 2
                loss = loss + (x.gates["window"][:, t, :, m, None] * squares).sum()
            gradients = torch.autograd.grad(loss, leaves)
            lr = x.gates["lr"][:, t, :, j, None, None]
            W = [w - lr * g for w, g in zip(W, gradients, strict=True)]
        q = x.q[:, t].unsqueeze(2)
        outputs.append(forward(W, q, q, x.params).squeeze(2))
    torch.testing.assert_close(y, torch.stack(outputs, 1), **TOL)
    assert rc.explain(recipe).engine.startswith("reference")
    with pytest.raises(ValueError, match=r"Window skips the other associations of a token"):
        generate.run_recall(recipe, x, engine="deep")


def test_one_association_is_the_window_of_associations() -> None:
    one, several = (recipe_of(algorithm=GD(updates_per_token=n)) for n in (1, 2))
    x = inputs(one)
    y, _ = generate.run_recall(one, x)
    # The second association of every token has rate 0.
    gates = {
        "window": x.gates["window"],
        "lr": nn.functional.pad(x.gates["lr"].unsqueeze(-1), (0, 1)),
    }
    k, v = (torch.stack([a, torch.randn_like(a)], 3) for a in (x.k, x.v))
    init = x.init
    result, _ = rc.recall(several, x.q, k, v, gates, initial_memory=init)
    torch.testing.assert_close(result, y, **TOL)


def test_explain() -> None:
    explained = rc.explain(RECIPES["dot product, decay"])
    assert explained.problem == "−Σ_(j≤3) Σ_(i>t−2) γ_i^(t) ⟨W k_ij, v_ij⟩"
    assert "Σ_(i>t−2) γ_i^(t) v_ij k_ijᵀ" in explained.write_equations[0]
    assert "3 open associations" in explained.state[0]
