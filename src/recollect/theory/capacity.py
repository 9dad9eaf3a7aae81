"""Number of pairs that a memory stores exactly: ATLAS section 3.1.

*Fitting.* The largest number of pairs (k_i, v_i) for which weights with M(k_i) = v_i exist. A
memory that is linear in its weights stores exactly as many pairs as it has independent features: K
for a matrix (proposition 1), C(K + p, p) for polynomials of degree p (proposition 2). Keys of equal
length lose C(K + p − 2, p − 2) of these features, because ‖k‖² = 1 is a relation between them. A
memory with P weights stores at most P/V pairs, because a smooth map from P numbers does not fill
the N·V numbers of N free values.

ATLAS's theorem 1 gives a deep memory "at least O(K V)" pairs. The count of weights contradicts it
while the hidden width h is of the order of K: h (K + V) weights store at most h (K + V)/V pairs of
V numbers each. The theorem's upper bound, a count of weights times K V, is `atlas_upper_bound`.

*Streaming.* The largest number of pairs that a recipe recalls after it wrote each of them once, in
sequence. A layer achieves this number.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.messages import RecipeError
from recollect.recipe.initial_params import initial_params
from recollect.recipe.resolve import RecipeLike, as_recipe
from recollect.theory.helpers import apply_features, write_and_read

__all__ = [
    "Capacity",
    "atlas_upper_bound",
    "capacity",
    "capacity_bound",
    "feature_rank",
    "fit_error",
    "stream_error",
]


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """A bound on pairs stored exactly.

    Attributes:
        pairs: Largest number of pairs; ``math.inf`` if the memory stores every pair.
        exact: Whether generic pairs are known to reach the bound. Otherwise it is an upper bound,
            which `feature_rank` sharpens for a memory that is linear in its weights.
        reason: Reason for the bound, as text.

    Examples:
        >>> bound = rc.theory.capacity_bound(rc.Recipe(), 8, 8)
        >>> bound.pairs, bound.exact
        (8, True)
    """

    pairs: float
    exact: bool
    reason: str


def capacity_bound(recipe: RecipeLike, K: int, V: int) -> Capacity:
    """Return the number of pairs that fitted weights can store, from a count of weights.

    Args:
        recipe: Recipe; its memory and its features count.
        K, V: Sizes of keys and values.

    Examples:
        >>> rc.theory.capacity_bound(rc.Recipe(), 8, 8).pairs
        8
        >>> lifted = rc.Recipe(features=rc.features.Polynomial(degree=2))
        >>> rc.theory.capacity_bound(lifted, 8, 8).pairs
        45
    """
    recipe = as_recipe(recipe, "capacity_bound")
    if recipe.nonparametric:
        return Capacity(
            pairs=math.inf, exact=False, reason="every pair is kept, and none is averaged"
        )
    if not recipe.features.finite:
        return Capacity(pairs=math.inf, exact=True, reason="infinitely many features")
    shapes = recipe.shapes(K, V)
    weights = sum(math.prod(shape) for shape in shapes)
    if recipe.memory.linear:
        F = weights // V
        plain = recipe.features.lift("k") == "k"
        return Capacity(pairs=F, exact=plain, reason=f"{F} features")
    return Capacity(
        pairs=weights // V, exact=False, reason=f"{weights} weights for {V} numbers each"
    )


def feature_rank(recipe: RecipeLike, K: int, *, unit: bool = False, seed: int = 0) -> int:
    """Return the number of independent features on random keys: the pairs that a recipe stores.

    Args:
        recipe: Recipe with finite features; their params have initial values.
        K: Size of keys.
        unit: Whether keys have length 1.
        seed: Seed of keys and params.

    Cost: O(F³).

    Examples:
        >>> rc.theory.feature_rank(rc.Recipe(features=rc.features.Polynomial(degree=2)), 4)
        15
    """
    recipe = as_recipe(recipe, "feature_rank")
    count = recipe.features.dim(K) + 8
    k, _ = _pairs(count, K, 1, seed, unit=unit)
    generator = torch.Generator().manual_seed(seed)
    params = initial_params(recipe, H=1, K=K, V=K, generator=generator, dtype=torch.float64)
    return int(torch.linalg.matrix_rank(apply_features(recipe, k, params, "key")))


def atlas_upper_bound(widths: list[int], K: int, V: int) -> float:
    """Return ATLAS theorem 1's bound up to a constant: K V Σ_i min_{j≥i}(d_h^(j)) d_h^(j+1).

    Args:
        widths: d_h^(1), …, d_h^(L+1): sizes between layers, then the size of the output.
        K, V: Sizes of keys and values.

    Examples:
        >>> rc.theory.atlas_upper_bound([8, 8], 8, 8)
        4096
    """
    total = sum(min(widths[i:-1]) * widths[i + 1] for i in range(len(widths) - 1))
    return K * V * total


def _pairs(count: int, K: int, V: int, seed: int, *, unit: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(count, K, generator=generator, dtype=torch.float64)
    v = torch.randn(count, V, generator=generator, dtype=torch.float64)
    return k / (k.norm(dim=-1, keepdim=True) if unit else K**0.5), v / V**0.5


def fit_error(
    recipe: RecipeLike, count: int, *, K: int, V: int, seed: int = 0, unit: bool = False
) -> float:
    """Return the largest ‖M(k_i) − v_i‖/‖v_i‖ after fitting ``count`` random pairs.

    Keys are normal with E‖k‖² = 1, or of length 1 with ``unit``. The fit is one least-squares solve
    for a memory that is linear in its weights, and an interpolation of the Gram matrix for a
    kernel. Other memories take Levenberg–Marquardt steps on all weights from three random starts;
    the best of the three results is an upper bound of the smallest error.

    Args:
        recipe: Recipe; its memory and its features are fitted.
        count: Number of pairs N.
        K: Number of key channels.
        V: Number of value channels.
        seed: Seed of the pairs, of random params and of random starts.
        unit: Whether keys have length 1.

    Cost: O(N² F), or 300 solves of the number of weights.

    Raises:
        RecipeError: The memory stores associations; use `stream_error`.

    Examples:
        >>> rc.theory.fit_error(rc.Recipe(), 4, K=4, V=4) < 1e-6
        True
        >>> rc.theory.fit_error(rc.Recipe(), 8, K=4, V=4) > 0.1
        True
    """
    recipe = as_recipe(recipe, "fit_error")
    if recipe.nonparametric:
        raise RecipeError(
            f"{recipe.memory.title} stores associations and has no weights to fit: use stream_error"
        )
    k, v = _pairs(count, K, V, seed, unit=unit)
    if not recipe.features.finite:
        if not recipe.memory.linear:
            raise RecipeError(f"fitting {recipe.memory.title} over infinite features is not known")
        gram = recipe.features.kappa(k, k)
        return _largest(gram @ torch.linalg.lstsq(gram, v, driver="gelsd").solution, v)
    params = initial_params(
        recipe, H=1, K=K, V=V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    x = apply_features(recipe, k, params, "key")
    if recipe.memory.linear and not recipe.memory.is_elementwise:
        return _largest(x @ torch.linalg.lstsq(x, v, driver="gelsd").solution, v)
    shapes = recipe.shapes(K, V)
    forward = recipe.memory.bind(x.shape[-1], V)
    sizes = [math.prod(shape) for shape in shapes]

    def predict(flat: Tensor) -> Tensor:
        weights = [
            part.view(1, 1, *shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)
        ]
        return forward(weights, x[None, None], k[None, None], params)[0, 0]

    generator = torch.Generator().manual_seed(seed)
    errors: list[float] = []
    for _ in range(3):
        start = torch.cat(
            [
                torch.randn(size, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
                for size, shape in zip(sizes, shapes, strict=True)
            ]
        )
        errors.append(_largest(predict(_marquardt(predict, start, v)), v))
        if errors[-1] < 1e-6:
            break
    return min(errors)


def _largest(prediction: Tensor, v: Tensor) -> float:
    return float(((prediction - v).norm(dim=-1) / v.norm(dim=-1)).max())


def _marquardt(predict: Callable[[Tensor], Tensor], flat: Tensor, v: Tensor) -> Tensor:
    """Minimise ½‖predict(w) − v‖² by up to 100 accepted or rejected Levenberg–Marquardt steps."""
    jacobian = torch.func.jacrev(lambda w: predict(w).flatten())  # type: ignore[no-untyped-call]
    damping = 1e-2
    residual = (predict(flat) - v).flatten()
    J = jacobian(flat)
    for _ in range(100):
        if float(residual.abs().max()) < 1e-10:
            break
        # The smaller of the two normal matrices, JJᵀ or JᵀJ.
        wide = J.shape[1] > J.shape[0]
        normal = J @ J.T if wide else J.T @ J
        eye = torch.eye(len(normal), dtype=flat.dtype)
        right = residual if wide else J.T @ residual
        solved = torch.linalg.solve(normal + damping * eye, right)
        step = J.T @ solved if wide else solved
        candidate = (predict(flat - step) - v).flatten()
        if candidate.square().sum() < residual.square().sum():
            flat, residual, damping = flat - step, candidate, damping / 4
            J = jacobian(flat)
        else:
            damping *= 4
            if damping > 1e12:
                break
    return flat


def stream_error(
    recipe: RecipeLike,
    count: int,
    *,
    K: int,
    V: int,
    seed: int = 0,
    orthogonal: bool = False,
    gates: Mapping[str, float] | None = None,
) -> float:
    """Return the largest ‖y_i − v_i‖/‖v_i‖ after a recipe wrote ``count`` pairs once, in sequence.

    Args:
        recipe: Any recipe.
        count: Number of pairs N.
        K, V: Sizes of keys and values.
        seed: Seed of the pairs.
        orthogonal: Whether keys are orthonormal (N ≤ K) instead of random unit vectors.
        gates: Values of gates by name; other gates have a layer's initial values.

    Raises:
        ValueError: There are more orthogonal keys than dimensions.

    Examples:
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr=1.0))
        >>> rc.theory.stream_error(recipe, 4, K=4, V=4, orthogonal=True) < 1e-6
        True
    """
    recipe = as_recipe(recipe, "stream_error")
    k, v = _pairs(count, K, V, seed, unit=True)
    if orthogonal:
        if count > K:
            raise ValueError(f"stream_error: {count} keys of size {K} cannot be orthogonal")
        k = torch.linalg.qr(k.T).Q.T
    with torch.no_grad():
        y = write_and_read(recipe, k[None], k[None], v[None], gates=gates)[0]
    return _largest(y, v)


def capacity(error: Callable[[int], float], *, max_pairs: int, tolerance: float = 1e-6) -> int:
    """Return the largest N with an error within the tolerance, by bisection up to ``max_pairs``.

    ``capacity(lambda n: fit_error(recipe, n, K=8, V=8), max_pairs=20)`` measures a recipe.

    Args:
        error: Error of N pairs, which grows with N.
        max_pairs: Upper bound of the search and of the result.
        tolerance: Largest error of a recalled pair.

    Raises:
        ValueError: ``max_pairs`` is below 1.

    Examples:
        >>> def error(count):
        ...     return rc.theory.fit_error(rc.Recipe(), count, K=4, V=4)
        >>> rc.theory.capacity(error, max_pairs=8)
        4
    """
    if max_pairs < 1:
        raise ValueError(f"capacity: max_pairs must be at least 1, got {max_pairs}")
    sizes = range(1, max_pairs + 1)
    return bisect.bisect_left(sizes, True, key=lambda count: not error(count) <= tolerance)
