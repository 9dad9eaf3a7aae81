"""Exactly stored pairs: counts, and fits that reach them and no more."""

from __future__ import annotations

import math

import pytest
import torch

import recollect as rc
from recollect.theory import (
    atlas_upper_bound,
    capacity,
    capacity_bound,
    feature_rank,
    fit_error,
    stream_error,
)


@pytest.mark.parametrize("K", [1, 4, 7])
def test_a_matrix_stores_one_pair_per_channel(K: int) -> None:
    recipe = rc.Recipe()
    bound = capacity_bound(recipe, K, 3)
    assert (bound.pairs, bound.exact) == (K, True)
    assert capacity(lambda n: fit_error(recipe, n, K=K, V=3), max_pairs=2 * K + 2) == K


@pytest.mark.parametrize(("degree", "K"), [(1, 4), (2, 3), (2, 5), (3, 3)])
def test_polynomials_store_all_their_monomials(degree: int, K: int) -> None:
    """C(K + p, p), exactly; unit keys lose C(K + p − 2, p − 2) of them."""
    recipe = rc.Recipe(features=rc.features.Polynomial(degree=degree))
    count = math.comb(K + degree, degree)
    assert capacity_bound(recipe, K, 2).pairs == count
    assert feature_rank(recipe, K) == count
    assert capacity(lambda n: fit_error(recipe, n, K=K, V=2), max_pairs=count + 9) == count
    missing = math.comb(K + degree - 2, degree - 2) if degree > 1 else 0
    unit = capacity(lambda n: fit_error(recipe, n, K=K, V=2, unit=True), max_pairs=count + 9)
    assert unit == feature_rank(recipe, K, unit=True) == count - missing


def test_repeated_monomials_do_not_count() -> None:
    """A map that has x_i x_j and x_j x_i stores no more for it."""
    recipe = rc.zoo.get("based").recipe
    rank = feature_rank(recipe, 4)
    assert rank == math.comb(6, 2) <= capacity_bound(recipe, 4, 4).pairs


def test_kernels_store_every_pair() -> None:
    recipe = rc.Recipe(features=rc.features.Exponential(temperature=0.5))
    assert capacity_bound(recipe, 4, 4).pairs == math.inf
    assert fit_error(recipe, 30, K=6, V=3) < 1e-6


def test_a_deep_memory_stores_more_than_a_matrix_of_its_keys() -> None:
    """And no more than its number of weights, far below ATLAS's K V pairs at this width."""
    recipe = rc.Recipe(memory=rc.memory.MLP(depth=2, expansion=2, residual=False))
    K = V = 3
    bound = capacity_bound(recipe, K, V)
    assert (bound.pairs, bound.exact) == (2 * 3 * 6 // 3, False)  # 36 weights
    assert fit_error(recipe, K + 3, K=K, V=V) < 1e-4
    assert fit_error(recipe, int(bound.pairs) + 1, K=K, V=V) > 1e-3
    # Counting against theorem 1's lower bound K V: for the width 2K of this memory the bound is
    # larger for every K > 4, with any constant below 1.
    wide = capacity_bound(recipe, 64, 64)
    assert wide.pairs == 256 < 64 * 64
    assert atlas_upper_bound([6, 3], 3, 3) == 9 * 6 * 3


def test_single_writes() -> None:
    """With orthonormal keys and steps of 1 the delta rule recalls K pairs, with others fewer."""
    recipe = rc.Recipe()
    step = {"lr": 1.0}

    def error(n: int, *, orthogonal: bool = True) -> float:
        return stream_error(recipe, n, K=6, V=4, orthogonal=orthogonal, gates=step)

    assert capacity(error, max_pairs=6) == 6
    assert error(2, orthogonal=False) > 1e-3
    solved = rc.Recipe(context=rc.context.Prefix(), algorithm=rc.algorithm.LeastSquares(ridge=1e-9))
    assert capacity(lambda n: stream_error(solved, n, K=6, V=4), max_pairs=9, tolerance=1e-4) == 6
    with pytest.raises(ValueError, match="cannot be orthogonal"):
        error(7)


def test_softmax_recalls_sharp_keys_without_a_fit() -> None:
    kernel = rc.features.Exponential(temperature=0.02)
    recipe = rc.zoo.get("softmax_attention").recipe.replace(
        context=rc.context.KernelWeighted(kernel=kernel)
    )
    assert stream_error(recipe, 20, K=16, V=4) < 0.1
    assert capacity_bound(recipe, 4, 4).pairs == math.inf
    with pytest.raises(rc.RecipeError, match="use stream_error"):
        fit_error(recipe, 4, K=4, V=4)


def test_bisection() -> None:
    looked: list[int] = []

    def error(n: int) -> float:
        looked.append(n)
        return 0.0 if n <= 13 else 1.0

    assert capacity(error, max_pairs=100) == 13
    assert len(looked) <= 7
    assert capacity(lambda n: 0.0, max_pairs=5) == 5
    assert capacity(lambda n: 1.0, max_pairs=5) == 0
    with pytest.raises(ValueError, match="at least 1"):
        capacity(error, max_pairs=0)


def test_fitting_is_the_least_squares_solution() -> None:
    """Beyond its capacity the error is that of the normal equations, solved here by hand."""
    g = torch.Generator().manual_seed(0)
    k = torch.randn(9, 4, generator=g, dtype=torch.float64) / 2.0
    v = torch.randn(9, 3, generator=g, dtype=torch.float64) / 3**0.5
    W = torch.linalg.solve(k.T @ k, k.T @ v)
    by_hand = ((k @ W - v).norm(dim=-1) / v.norm(dim=-1)).max()
    assert fit_error(rc.Recipe(), 9, K=4, V=3) == pytest.approx(float(by_hand), rel=1e-9)


def test_errors_that_are_not_numbers_are_not_recalled() -> None:
    assert rc.theory.capacity(lambda n: 0.0 if n <= 3 else math.nan, max_pairs=8) == 3
