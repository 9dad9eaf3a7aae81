"""FLOPs of the kernel engine, form by form."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from recollect.engines.common.sizes import FlopCount, Sizes
from recollect.engines.kernel import attention, local_regression
from recollect.engines.kernel.moved_keys import BLOCK
from recollect.engines.kernel.pieces import piece_size

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe


STEP_SECONDS = 4e-4
"""`FlopCount.step_seconds` of a block of tokens, or of an iteration of a solver."""


PAIR_SECONDS = 4e-8
"""Time on a CPU of the elementwise operations of a pair whose logits are not one softmax."""


STEPS = 8  # assumed number of conjugate gradient steps


def local_flops(recipe: Recipe, s: Sizes) -> FlopCount:
    """Count the operations of one call of attention to associations."""
    horizon, rows, heads = recipe.context.horizon, s.B * s.H * s.G, s.H * s.G
    names = [part.title for part in recipe.context.restrictions]
    context, band, first = recipe.context, horizon, 0
    if horizon is None and context.num_kept is not None:
        band, first = context.num_kept - context.num_sinks, context.num_sinks
    banded = len(names) == 1 and band is not None
    window = band is not None and (band < s.T or first > 0)
    num_kept = recipe.context.num_kept
    last = s.T + 1 if num_kept is None else min(num_kept, s.T) + 1  # the cache and the token itself
    if recipe.memory.degree:
        return _polynomial(recipe, s, last)
    mean = recipe.bias.is_affine and recipe.bias.sees_prediction
    kernel = recipe.context.kernel
    exponent = kernel.exponent(s.K) if kernel is not None and mean else None
    if not context.keeps_similarity:
        exponent = None
    if exponent is None:
        each, size = 2 * (s.K + s.V), piece_size(rows, s.T)
        num_pairs = attention.pairs(s.T, horizon, banded=False, size=size)
    else:
        each = 4 * max(s.K + (exponent[1] != 0), s.V)
        size = piece_size(rows, s.T)
        weighed = bool(names) and not banded
        num_pairs = s.T * (s.T + 1) // 2
        if weighed or window:
            num_pairs = attention.pairs(s.T, band, banded=banded, size=size, front=first)
    forward, decode = {"attention": each * num_pairs * heads}, each * last * heads
    more = sum(2 * s.K for part in recipe.context.restrictions for _ in part.query_gates)
    if more:
        forward["gates"], decode = more * num_pairs * s.H, decode + more * last * s.H
    notes: list[str] = []
    if context.key_transition == "reflection":
        # Queries cross each earlier block, and the system of a block is solved once.
        block = 8 * BLOCK * s.K
        forward["moved keys"] = 2 * s.K * s.K * num_pairs // BLOCK * heads + block * s.T * s.H
        decode += 2 * s.K * s.K * last // BLOCK * heads + block * last * s.H
        notes.append("a decoded token solves the systems of all earlier blocks again")
    if horizon is None and not (banded and exponent is not None):
        notes.append("the cost is quadratic: every token is compared with all earlier tokens")
    elementwise = 0.0 if context.keeps_similarity else PAIR_SECONDS * num_pairs * rows
    return FlopCount(
        forward=forward,
        decode=decode,
        steps=min(1, s.T),
        step_seconds=STEP_SECONDS + elementwise,
        notes=tuple(notes),
    )


def _polynomial(recipe: Recipe, s: Sizes, last: int) -> FlopCount:
    horizon, degree = recipe.context.horizon, recipe.memory.degree or 0
    ridge = recipe.ridge
    rows, heads = s.B * s.H * s.G, s.H * s.G
    D = math.comb(s.K + degree, degree) - 1
    if recipe.memory.slope_gate is not None:
        num_pairs = attention.pairs(s.T, horizon, banded=False, size=piece_size(rows, s.T, 128))
        each = 4 * s.K + 2 * s.V
        return FlopCount(
            forward={"weights, slope and read": each * num_pairs * heads},
            decode=each * last * heads,
            steps=min(s.T, 1),
            step_seconds=STEP_SECONDS,
            notes=("the cost is quadratic: every token is compared with all earlier tokens",)
            * (horizon is None),
        )
    dense = local_regression.is_dense(D, degree, ridge)
    size = local_regression.queries(rows, s.T, D, dense=dense)
    num_pairs = attention.pairs(s.T, horizon, banded=False, size=size)
    steps = min(STEPS, D)
    solve = 2 * D * D if dense else 4 * D * (steps + 1)
    factorization = D**3 // 3 if dense else 0
    each = 2 * s.K + 4 * D + 2 * s.V
    forward = {
        "weights and read": each * num_pairs * heads,
        "solve": (solve * num_pairs + factorization * s.T) * heads,
    }
    how = (
        "a dense solve per query"
        if dense
        else f"conjugate gradients, counted with {steps} steps; {D} at most in exact arithmetic"
    )
    notes = (f"{D} slopes per value channel: {how}",)
    return FlopCount(
        forward=forward,
        decode=((each + solve) * last + factorization) * heads,
        steps=min(s.T, 1 if dense else steps),
        step_seconds=STEP_SECONDS,
        notes=notes,
    )


def gram_flops(recipe: Recipe, s: Sizes) -> FlopCount:
    """Count the operations of kernel regression over every prefix."""
    T, rows = s.T, s.B * s.H * s.G
    size = piece_size(rows, T)
    starts = range(0, T, size)
    solved = sum(min(start + size, T) ** 2 * (min(start + size, T) - start) for start in starts)
    num_pairs = attention.pairs(T, None, banded=False, size=size)
    forward = {
        "likenesses": 2 * s.K * (T * T + num_pairs * s.G) * s.H,
        "factor": T**3 // 3 * s.H,
        "solve": (T * T * s.V + solved * s.G) * s.H,
        "read": 2 * s.V * num_pairs * s.G * s.H,
    }
    token = (T + 1) ** 2 * (1 + s.G) + 2 * (T + 1) * (2 * s.K + 2 * s.V) * s.G
    notes = (
        "the cost is cubic in the tokens, and the factor takes T² numbers per head",
        "a decoded token appends a row to a copy of the factor",
    )
    return FlopCount(
        forward=forward,
        decode=token * s.H,
        steps=min(1, s.T),
        step_seconds=STEP_SECONDS,
        notes=notes,
    )
