"""The contract of an engine: what the reference computes, and reasons for what it does not."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from recollect.engines import select
from recollect.engines.base import Engine
from recollect.messages import RecipeError
from recollect.recipe.recipe import Recipe
from recollect.testing.compare import (
    error,
    gradients,
    loss,
    parts,
    require,
    run,
    same,
    split,
    worst,
)
from recollect.testing.draws import Pool
from recollect.testing.inputs import Inputs, ill_posed, inputs, smaller

__all__ = [
    "EXACT",
    "MASKS",
    "agree",
    "check_chunks_and_splits",
    "check_engine",
    "check_gradients_across_splits",
    "check_lengths",
    "check_masks",
    "check_packing",
    "check_refusal",
    "check_single_gradients",
    "check_strides",
    "check_turns",
    "fitting",
    "tame",
]

EXACT = 1e-10
"""In float64 both sides compute the same sums in another order, a few hundred terms of order 1:
norm-wise rounding, with room for a triangular solve's condition."""


def check_engine(
    engine: Engine, *, recipes: Iterable[Recipe] | None = None, min_recipes: int = 5
) -> None:
    """Hold an engine to the reference on every recipe that it accepts.

    In float64: outputs, final state and every gradient, at odd lengths and chunk sizes, split
    anywhere, continuing the reference's states and continued by it, under masks, with documents
    packed, heads grouped and tensors strided. A recipe that it refuses is refused with a reason,
    also by `recall`.

    Args:
        engine: one of `recollect.engines.select.ENGINES`, through which `recall` finds it.
        recipes: what it is held to; drawn from the library's members when omitted.
        min_recipes: number of them that it must accept, so that something is checked.

    Raises:
        AssertionError: what is false, in one sentence that names the engine and the recipe.
        RecipeError: `recall` does not find the engine.

    Example:
        >>> import recollect as rc
        >>> from recollect.engines.select import ENGINES
        >>> rc.testing.check_engine(ENGINES[0], recipes=[rc.Recipe()], min_recipes=1)
    """
    if engine not in select.ENGINES:
        raise RecipeError(
            f"engine {engine.name!r} is not among recollect.engines.select.ENGINES, through which "
            "recall finds it: add it there"
        )
    accepted = 0
    drawn = (recipe for _, recipe in Pool().valid(80)) if recipes is None else recipes
    for recipe in drawn:
        try:
            if engine.unsupported_reasons(recipe):
                check_refusal(recipe, engine)
                continue
            accepted += 1
            if not ill_posed(recipe):
                _check_recipe(recipe, engine.name)
        except Exception as problem:
            said = " ".join(str(problem).split())
            if not isinstance(problem, AssertionError):
                said = f"{type(problem).__name__}: {said}"
            raise AssertionError(f"engine {engine.name} on {recipe}: {said}") from problem
    require(
        accepted >= min_recipes,
        f"engine {engine.name} accepts {accepted} of the recipes and needs {min_recipes}: "
        "hand recipes=[...] of its structure",
    )


def _check_recipe(recipe: Recipe, engine: str) -> None:
    x = tame(recipe, fitting(recipe, B=1, T=13, H=2))
    agree(recipe, x, engine, chunk_size=4)
    check_chunks_and_splits(recipe, tame(recipe, fitting(recipe, B=2, T=9, H=2)), engine)
    check_turns(recipe, x, engine)
    check_packing(recipe, tame(recipe, fitting(recipe, B=1, T=12, H=2)), engine)
    for where in MASKS:
        check_masks(recipe, tame(recipe, fitting(recipe, B=2, T=9, H=2)), engine, where)
    agree(recipe, tame(recipe, fitting(recipe, B=1, T=6, H=2, G=3)), engine, chunk_size=4)
    check_strides(recipe, x, engine)


def fitting(
    recipe: Recipe, *, B: int, T: int, H: int = 2, G: int = 1, K: int = 4, V: int | None = None
) -> Inputs:
    """Inputs with K = V where the recipe needs it, and K ≠ V elsewhere.

    Args:
        recipe: whose arguments.
        B: batch rows. T: tokens. H: memories. G: query heads per memory.
        K: size of keys. V: of values; K or 3 when omitted.
    """
    square = recipe.memory.is_elementwise or recipe.memory.residual
    width = (K if square else 3) if V is None else V
    return inputs(recipe, B=B, T=T, H=H, G=G, K=K, V=width)


def agree(
    recipe: Recipe, x: Inputs, engine: str, tolerance: float = EXACT, **options: object
) -> None:
    """Outputs, final state and every gradient equal the reference's.

    Args:
        recipe, x: what is run.
        engine: the engine's name.
        tolerance: of norm-wise errors.
        options: of `recall`, for the engine.

    Raises:
        AssertionError: what differs.
    """
    expected, expected_state, slopes = gradients(recipe, x, engine="reference")
    y, state, gradients_found = gradients(recipe, x, engine=engine, **options)
    same((y, state), (expected, expected_state), tolerance, f"of engine {engine}")
    wrong, name = worst(gradients_found, slopes)
    require(wrong < tolerance, f"the gradient of {name} by engine {engine} is off by {wrong:.1e}")


def check_lengths(recipe: Recipe, x: Inputs, engine: str) -> None:
    """Outputs and state equal the reference's, without gradients."""
    with torch.no_grad():
        outputs, expected = run(recipe, x, engine=engine), run(recipe, x, engine="reference")
    same(outputs, expected, EXACT, f"of engine {engine} at {x.T} tokens")


def check_chunks_and_splits(recipe: Recipe, x: Inputs, engine: str) -> None:
    """Pieces of 0, 1 and more tokens, one token at a time, and chunks of any size."""
    with torch.no_grad():
        complete = run(recipe, x, engine=engine)
        third = x.T // 3
        for cuts in ([1, 1, third, x.T - 2], list(range(1, x.T))):
            pieces = split(recipe, x, cuts, [engine])
            same(pieces, complete, EXACT, f"of engine {engine} split at {cuts}")
        for size in (1, 2, 5, 16, 64):
            chunked = run(recipe, x, engine=engine, chunk_size=size)
            same(chunked, complete, EXACT, f"of engine {engine} with chunk_size={size}")


def check_turns(recipe: Recipe, x: Inputs, engine: str) -> None:
    """The engine continues the reference's states, and the reference the engine's."""
    with torch.no_grad():
        complete = run(recipe, x, engine="reference")
        for order in (["reference", engine], [engine, "reference"]):
            pieces = split(recipe, x, [3, 4, 8], order)
            same(pieces, complete, EXACT, f"of {order[0]} and {order[1]} in turns")


def check_gradients_across_splits(recipe: Recipe, x: Inputs, engine: str) -> None:
    """Gradients flow through a state that is handed on."""
    slopes: list[dict[str, Tensor]] = []
    for cuts in ([], [4, 5]):
        leaves = x.leaves()
        y, _ = split(recipe, leaves, cuts, [engine])
        named = leaves.tensors()
        found = torch.autograd.grad(
            y.square().sum(), list(named.values()), allow_unused=True, materialize_grads=True
        )
        slopes.append(dict(zip(named, found, strict=True)))
    wrong, name = worst(slopes[1], slopes[0])
    require(
        wrong < EXACT,
        f"the gradient of {name} by engine {engine} across splits is off by {wrong:.1e}",
    )


MASKS = {
    "left": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1]]),
    "right": torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1]]),
    "gaps": torch.tensor([[0, 1, 0, 0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0]]),
}
"""Attention masks of two rows of 9 tokens."""


def check_masks(recipe: Recipe, x: Inputs, engine: str, side: str) -> None:
    """Each masked row equals its real tokens run alone, and masked tokens read 0.

    Args:
        recipe: what is run.
        x: two rows of 9 tokens.
        engine: the engine's name.
        side: which of `MASKS`.
    """
    mask, how = MASKS[side].bool(), f"of engine {engine} masked at the {side}"
    y, state = run(recipe, x, engine=engine, attention_mask=mask, chunk_size=4)
    require(not y[~mask].any(), f"masked outputs {how} are not 0")
    for row in range(2):
        alone = x.rows(row).tokens(lambda a, row=row: a[:, mask[row]])
        row_y, row_state = run(recipe, alone, engine=engine)
        wrong = error(y[row : row + 1, mask[row]], row_y)
        require(wrong < EXACT, f"outputs {how} are off by {wrong:.1e}")
        if recipe.buffer_size is not None:  # an unbounded cache keeps its padding
            kept = parts(state.select(torch.tensor([row])))
            wrong, name = worst(kept, parts(row_state))
            require(wrong < EXACT, f"{name} of the state {how} is off by {wrong:.1e}")


def check_packing(recipe: Recipe, x: Inputs, engine: str) -> None:
    """Documents of 1, 0, 7 and 4 tokens in a row of 12, twice: the second time they continue."""
    borders, how = [0, 1, 1, 8, 12], f"of documents packed by engine {engine}"
    packed = torch.tensor(borders)
    y, state = run(recipe, x, engine=engine, cu_seqlens=packed)
    y2, state2 = run(recipe, x, engine=engine, cu_seqlens=packed, state=state)
    for document, (start, stop) in enumerate(itertools.pairwise(borders)):
        piece = x.cut(start, stop)
        document_y, document_state = run(recipe, piece, engine=engine)
        wrong = error(y[:, start:stop], document_y)
        require(wrong < EXACT, f"outputs {how} are off by {wrong:.1e}")
        document_y, document_state = run(recipe, piece, engine=engine, state=document_state)
        wrong = error(y2[:, start:stop], document_y)
        require(wrong < EXACT, f"outputs {how} that continue are off by {wrong:.1e}")
        if recipe.buffer_size is not None:  # an unbounded cache keeps its padding
            kept = parts(state2.select(torch.tensor([document])))
            wrong, name = worst(kept, parts(document_state))
            require(wrong < EXACT, f"{name} of the state {how} is off by {wrong:.1e}")


def check_strides(recipe: Recipe, x: Inputs, engine: str) -> None:
    """Every second channel of a wider tensor, as a fused projection would hand over."""

    def strided(a: Tensor) -> Tensor:
        wide = torch.full((*a.shape, 2), torch.nan, dtype=a.dtype)
        wide[..., 0] = a
        return wide[..., 0]

    y, _, slopes = gradients(recipe, x, engine=engine)
    views = x.map(lambda a: strided(a).requires_grad_())
    y2, state2 = run(recipe, views, engine=engine)
    total = loss(y2, state2)
    if total.requires_grad:
        found = torch.autograd.grad(
            total,
            list(views.tensors().values()),
            allow_unused=True,
            materialize_grads=True,
        )
        wrong, name = worst(dict(zip(slopes, found, strict=True)), slopes)
        require(wrong < EXACT, f"the gradient of {name} of strided tensors is off by {wrong:.1e}")
    require(error(y2, y) < EXACT, f"outputs of engine {engine} depend on strides")


def check_single_gradients(
    recipe: Recipe,
    x: Inputs,
    names: Sequence[str] | None = None,
    tolerance: float = EXACT,
    **options: object,
) -> None:
    """A gradient does not depend on which other inputs ask for one.

    Args:
        recipe, x: what is run.
        names: of the inputs that ask alone; all when omitted.
        tolerance: of norm-wise errors.
        options: of `recall`.
    """
    _, _, slopes = gradients(recipe, x, **options)
    for name in slopes if names is None else names:
        leaf = x.tensors()[name].clone().requires_grad_()
        y, state = run(recipe, x.put({name: leaf}), **options)
        total = loss(y, state)
        if not total.requires_grad:
            require(not slopes[name].any(), f"the gradient of {name} alone is lost")
            continue
        (slope,) = torch.autograd.grad(total, leaf, allow_unused=True, materialize_grads=True)
        wrong = error(slope, slopes[name])
        require(wrong < tolerance, f"the gradient of {name} alone is off by {wrong:.1e}")


def check_refusal(recipe: Recipe, engine: Engine) -> None:
    """A method asked for by name that cannot run a recipe says why, and which can."""
    reasons = engine.unsupported_reasons(recipe)
    said = bool(reasons) and all(isinstance(one, str) and len(one) > 10 for one in reasons)
    require(said, f"engine {engine.name} refuses a recipe without a reason that is a sentence")
    try:
        run(recipe, fitting(recipe, B=1, T=1), engine=engine.name)
    except RecipeError as problem:
        told = str(problem)
        names = reasons[0] in told and "these can: " in told and "reference" in told
        require(
            names, f"the refusal by engine {engine.name} does not say why, or which can: {told}"
        )
        return
    raise AssertionError(f"engine {engine.name} refuses a recipe, and recall runs it there")


def tame(recipe: Recipe, x: Inputs) -> Inputs:
    """The inputs, smaller where the recipe would diverge from them."""
    with torch.no_grad():
        y, _ = run(recipe, x, engine="reference")
    return x if y.abs().amax() < 1e3 else smaller(recipe, x)
