"""The attention family against loops of the papers' equations, in float64 to 1e-10."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import recollect as rc

B, T, H, K, V = 2, 23, 2, 5, 4
TOL = {"atol": 1e-10, "rtol": 1e-10}
# Engines are compared with the reference by `tests/contracts`.
METHODS = pytest.mark.parametrize(
    "method", ["auto", pytest.param("reference", marks=pytest.mark.slow)]
)


def normal(*shape: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


Q, KEY, X = normal(B, T, H, K, seed=1), normal(B, T, H, K, seed=2), normal(B, T, H, V, seed=3)
DECAY = -normal(B, T, H, seed=4).abs()
A, C = normal(B, T, H, K, seed=5), normal(B, T, H, K, seed=6)


def softmax_over(logit: object) -> Tensor:
    """y_t = Σ softmax_i(logit(b, h, t, i)) v_i over i ≤ t, entry by entry."""
    y = torch.zeros(B, T, H, V, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                logits = torch.stack([logit(b, h, t, i) for i in range(t + 1)])  # type: ignore[operator]
                y[b, t, h] = logits.softmax(0) @ X[b, : t + 1, h]
    return y


def product(b: int, h: int, t: int, i: int) -> Tensor:
    return Q[b, t, h] @ KEY[b, i, h] / math.sqrt(K)


@METHODS
def test_fox_adds_the_sum_of_log_gates(method: str) -> None:
    """AM 31: g_i = Π_(i<j≤t) α_j."""

    def logit(b: int, h: int, t: int, i: int) -> Tensor:
        return product(b, h, t, i) + DECAY[b, i + 1 : t + 1, h].sum()

    gates = {"log_decay": DECAY}
    y, _ = rc.recall(rc.zoo.get("fox").recipe, Q, KEY, X, gates, engine=method)
    torch.testing.assert_close(y, softmax_over(logit), **TOL)


def test_fox_without_decay_is_softmax_attention() -> None:
    gates = {"log_decay": torch.zeros_like(DECAY)}
    y, _ = rc.recall(rc.zoo.get("fox").recipe, Q, KEY, X, gates)
    plain, _ = rc.recall(rc.zoo.get("softmax_attention").recipe, Q, KEY, X)
    torch.testing.assert_close(y, plain, **TOL)


@METHODS
def test_bilinear_gate_multiplies_the_weights(method: str) -> None:
    def logit(b: int, h: int, t: int, i: int) -> Tensor:
        g = A[b, i, h] @ C[b, t, h] / math.sqrt(K)
        return product(b, h, t, i) + torch.sigmoid(g).log()

    recipe = rc.zoo.get("bilinear_gated_attention").recipe
    gates = {"gate_key": A, "gate_query": C}
    y, _ = rc.recall(recipe, Q, KEY, X, gates, engine=method)
    torch.testing.assert_close(y, softmax_over(logit), **TOL)


@METHODS
def test_the_papers_bilinear_gate_is_a_plain_sum(method: str) -> None:
    """AM 30 with g_i = a_i·b_t: no denominator, and weights of either sign."""
    recipe = rc.Recipe(
        memory=rc.memory.LocalConstant(),
        bias=rc.bias.DotProduct(),
        context=rc.context.KernelWeighted(restrictions=(rc.context.Bilinear(),)),
        algorithm=rc.algorithm.Analytic(),
    )
    score = (torch.einsum("bthk,bshk->bhts", Q, KEY) / math.sqrt(K)).exp()
    score = score * torch.einsum("bthk,bshk->bhts", C, A)
    want = torch.einsum("bhts,bshv->bthv", score.tril(), X)
    y, _ = rc.recall(recipe, Q, KEY, X, {"gate_key": A, "gate_query": C}, engine=method)
    torch.testing.assert_close(y, want, **TOL)


def blocks(size: int, top: int, **options: object) -> rc.Recipe:
    part = rc.context.TopBlocks(size=size, top_k=top, **options)  # type: ignore[arg-type]
    return rc.zoo.get("moba").recipe.replace(
        context=rc.context.KernelWeighted(restrictions=(part,))
    )


@METHODS
@pytest.mark.parametrize(("size", "top"), [(4, 2), (3, 3), (5, 1), (1, 4)])
def test_moba_sees_the_top_blocks_and_the_current_one(size: int, top: int, method: str) -> None:
    """AM 25–27: blocks by q·mean(k), always with the current block."""

    def chosen(b: int, h: int, t: int) -> set[int]:
        current = t // size
        scores = {
            e: float(Q[b, t, h] @ KEY[b, e * size : (e + 1) * size, h].mean(0))
            for e in range(current)
        }
        best = sorted(scores, key=lambda e: -scores[e])[: top - 1]
        return {current, *best}

    def logit(b: int, h: int, t: int, i: int) -> Tensor:
        recorded = i // size in chosen(b, h, t)
        return product(b, h, t, i) if recorded else torch.tensor(-math.inf).double()

    y, _ = rc.recall(blocks(size, top), Q, KEY, X, engine=method)
    torch.testing.assert_close(y, softmax_over(logit), **TOL)


@METHODS
def test_moba_with_all_blocks_is_softmax_attention(method: str) -> None:
    plain, _ = rc.recall(rc.zoo.get("softmax_attention").recipe, Q, KEY, X)
    for size in (4, 7, 64):
        y, _ = rc.recall(blocks(size, -(-T // size)), Q, KEY, X, engine=method)
        torch.testing.assert_close(y, plain, **TOL)


def test_current_block_is_visible_with_any_score() -> None:
    """Keys of the current block point away from the query: its score is the worst."""
    q = torch.ones(1, 8, 1, K).double()
    k = torch.cat([q[:, :4], -9 * q[:, 4:]], dim=1)
    v = torch.arange(8.0).double().view(1, 8, 1, 1)
    y, _ = rc.recall(blocks(4, 1), q, k, v)
    torch.testing.assert_close(y[0, 4:, 0, 0], torch.tensor([4.0, 4.5, 5.0, 5.5]).double(), **TOL)
    y, _ = rc.recall(blocks(4, 1, include_current=False), q, k, v)
    torch.testing.assert_close(y[0, 4:, 0, 0], torch.full((4,), 1.5).double(), **TOL)


def test_routers_learn_through_the_softmax_of_the_chosen_blocks() -> None:
    router = A.clone().requires_grad_()
    for share, has_gradient in (("one", False), ("softmax", True)):
        recipe = blocks(4, 2, score="router", weighting=share)
        y, _ = rc.recall(recipe, Q, KEY, X, {"router": router})
        assert y.requires_grad == has_gradient
        if has_gradient:
            (slope,) = torch.autograd.grad(y.square().sum(), router)
            assert slope.any()


@METHODS
def test_unnormalized_attention_is_a_plain_sum(method: str) -> None:
    score = (torch.einsum("bthk,bshk->bhts", Q, KEY) / math.sqrt(K)).exp()
    want = torch.einsum("bhts,bshv->bthv", score.tril(), X)
    y, _ = rc.recall(rc.zoo.get("unnormalized_attention").recipe, Q, KEY, X, engine=method)
    torch.testing.assert_close(y, want, **TOL)


def test_unnormalized_attention_is_linear_attention_with_enough_taylor_features() -> None:
    """exp(x) to order 12 omits x^13/13!, below 1e-9 for |x| ≤ 1."""
    unit = functional.normalize
    q, k = unit(normal(1, 9, 1, 2, seed=7), dim=-1), unit(normal(1, 9, 1, 2, seed=8), dim=-1)
    v = normal(1, 9, 1, 3, seed=9)
    recipe = rc.zoo.get("unnormalized_attention").recipe
    y, _ = rc.recall(recipe, q, k, v)
    finite, _ = rc.recall(recipe.replace(features=rc.features.Taylor(order=12)), q, k, v)
    torch.testing.assert_close(y, finite, atol=1e-8, rtol=0)


def test_gaussian_equals_exponential_for_equal_norms() -> None:
    """The weights of TTR 51 differ by one factor per query."""
    q, k = (2.0 * functional.normalize(x, dim=-1) for x in (Q, KEY))
    for name in ("softmax_attention", "local_linear_attention", "local_quadratic_attention"):
        recipe = rc.zoo.get(name).recipe
        gaussian = recipe.replace(context=rc.context.KernelWeighted(kernel=rc.features.Gaussian()))
        y, y2 = (rc.recall(r, q, k, X)[0] for r in (recipe, gaussian))
        torch.testing.assert_close(y, y2, **TOL)


def test_negative_weights_in_a_mean_are_refused() -> None:
    softmax = rc.zoo.get("softmax_attention").recipe
    Similar = rc.context.KernelWeighted
    with pytest.raises(rc.RecipeError, match=r"LinearKernel .* may be negative"):
        softmax.replace(context=Similar(kernel=rc.features.LinearKernel()))
    with pytest.raises(rc.RecipeError, match=r"Bilinear\(link='sigmoid'\)"):
        softmax.replace(context=Similar(restrictions=(rc.context.Bilinear(),)))
    with pytest.raises(rc.RecipeError, match=r"context\.KernelWeighted\(restrictions="):
        rc.Recipe(context=rc.context.TopBlocks(size=2, top_k=1))
    with pytest.raises(rc.RecipeError, match=r"not by Window\(size=3\)"):
        softmax.replace(context=Similar(restrictions=(rc.context.Window(size=3),)))
