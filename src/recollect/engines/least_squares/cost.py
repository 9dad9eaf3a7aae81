"""FLOPs of the least-squares engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recollect.engines.common.sizes import FlopCount, Sizes
from recollect.engines.linear.cost import simple_chunk_flops

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

STEP_SECONDS = 1e-5
"""`Counted.step_seconds` of a chunk of the recursion, or of one product with the systems."""


def flops(recipe: Recipe, s: Sizes) -> FlopCount:
    """Count the operations of one call; a factorization counts as F³/3."""
    algorithm, F, V, H, T, G = recipe.algorithm, s.F, s.V, s.H, s.T, s.G
    read, write = 2 * G * F * V, 2 * F * V
    inverse = algorithm.inverse
    assert inverse is not None  # least_squares.refuses
    if inverse.is_recursive:
        C = min(64, T)
        N = -(-T // C) if T else 0
        J = C * G
        chunk = {
            "gram": 2 * C * F * F + 2 * C * C * F,
            "factor": C**3 // 3 + C * C * (F + V),
            "state": 2 * C * F * (F + V) + 2 * C * F * V,
            "read": 2 * J * F * V + 2 * J * C * (F + V),
        }
        if inverse.ridge == "refreshed" and recipe.context.has_decay:
            refresh_every = inverse.refresh_every
            border = 2 * F**3 + 2 * F * F * V
            chunk["borders"] = border * C // refresh_every + 2 * C * F * F + 2 * C * C * (F + V)
        step = (4 * F * F + 2 * F * F + 2 * write + read) * H
        return FlopCount(
            forward={name: n * N * H for name, n in chunk.items()},
            decode=step,
            steps=N,
            step_seconds=STEP_SECONDS,
            states=N,
        )
    kind = "" if inverse.kind == "exact" else inverse.kind
    attend = simple_chunk_flops(F, V, 64, 64 * G, has_error=False)
    product = sum(simple_chunk_flops(F, F, 64, 64 * G, has_error=False).values())
    N = -(-T // 64) if T else 0
    parts = {"read": sum(attend.values()) * N * H}
    notes: tuple[str, ...] = ()
    step, steps = 2 * write + read, N
    if kind == "spectral":
        parts["eigenvectors"] = 10 * F**3 * T * H
        step += 10 * F**3
        steps = T  # each Gram matrix depends on the previous one
    elif kind == "conjugate_gradient" or not kind:
        count = inverse.steps if kind else 30
        parts["products"] = product * N * H * count
        step += 2 * F * F * (1 + G * count)
        steps *= 1 + count
        if not kind:
            notes = ("counted as 30 iterations; they stop at the tolerance (rc.record_solver)",)
    return FlopCount(
        forward=parts,
        decode=step * H,
        steps=steps,
        step_seconds=STEP_SECONDS,
        states=N,
        notes=notes,
    )


def reading(recipe: Recipe, s: Sizes, queries: int) -> int:
    """Count FLOPs of reads without writes, including the solve if no map is stored.

    Args:
        recipe: recipe with least squares over all of the past.
        s: sizes.
        queries: number of queries per batch element and query head.
    """
    inverse, F, V = recipe.algorithm.inverse, s.F, s.V
    assert inverse is not None  # least_squares.refuses
    per_query, shared = 2 * s.G * F * V, 0
    if inverse.kind == "exact" and not inverse.is_recursive:
        shared = 2 * F**3 // 3 + 2 * F * F * V  # one factor for all queries
    elif inverse.kind == "spectral":
        per_query += 10 * F**3
    elif inverse.kind == "conjugate_gradient":
        per_query += 2 * F * F * s.G * inverse.steps
    return (per_query * queries + shared) * s.H
