"""The contract of an engine: results of the reference, and reasons for refusals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from recollect.engines import select
from recollect.engines.base import Engine
from recollect.messages import RecipeError
from recollect.recipe.recipe import Recipe
from recollect.testing.compare import (
    assert_states_equal,
    describe_failure,
    gradients,
    gradients_of,
    random_projection,
    require,
    require_close,
    run_in_pieces,
    run_recall,
)
from recollect.testing.draws import Pool
from recollect.testing.inputs import Inputs, inputs, is_ill_posed, scaled_down
from recollect.testing.sequences import EXACT, check_masks, check_packing

__all__ = [
    "MASKS",
    "PACKED",
    "check_agrees",
    "check_chunks_and_splits",
    "check_engine",
    "check_handover",
    "check_lengths",
    "check_refusal",
    "check_single_gradients",
    "check_strides",
    "inputs_for",
    "scale_if_divergent",
    "supported_engines",
]

MASKS = {
    "left": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1]]).bool(),
    "right": torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1]]).bool(),
    "gaps": torch.tensor([[0, 1, 0, 0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0]]).bool(),
}
"""Attention masks of two sequences of 9 tokens."""

PACKED = [0, 1, 1, 8, 12]
"""Boundaries of documents in a sequence of 12 tokens."""


def check_engine(
    engine: Engine, *, recipes: Iterable[Recipe] | None = None, min_recipes: int = 5
) -> None:
    """Compare an engine with the reference on every recipe that it accepts.

    Outputs, final states and all gradients are compared in float64: at odd lengths and chunk sizes,
    split anywhere, in turns with the reference, under masks, with packed documents, grouped heads
    and strided tensors. If the engine refuses a recipe, it must give a reason, and `recall` must
    refuse the recipe, too.

    Args:
        engine: one of `recollect.engines.select.ENGINES`, in which `recall` finds it.
        recipes: recipes to compare; by default random ones of the library's members.
        min_recipes: number of them that the engine must accept.

    Raises:
        AssertionError: a check fails; one sentence that names the engine and the recipe.
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
    for recipe in (recipe for _, recipe in Pool().valid(80)) if recipes is None else recipes:
        with describe_failure(f"engine {engine.name} on {recipe}"):
            if engine.unsupported_reasons(recipe):
                check_refusal(recipe, engine)
                continue
            accepted += 1
            if not is_ill_posed(recipe):
                _check_recipe(recipe, engine.name)
    require(
        accepted >= min_recipes,
        f"engine {engine.name} accepts {accepted} of the recipes and needs {min_recipes}: "
        "hand recipes=[...] of its structure",
    )


def _check_recipe(recipe: Recipe, engine: str) -> None:
    def arguments(B: int, T: int, G: int = 1) -> Inputs:
        return scale_if_divergent(recipe, inputs_for(recipe, B=B, T=T, G=G))

    x, pair = arguments(1, 13), arguments(2, 9)
    check_agrees(recipe, x, engine, chunk_size=4)
    check_chunks_and_splits(recipe, pair, engine)
    check_handover(recipe, x, engine)
    check_packing(recipe, arguments(1, 12), PACKED, engine)
    for mask in MASKS.values():
        check_masks(recipe, pair, engine, mask, chunk_size=4)
    check_agrees(recipe, arguments(1, 6, G=3), engine, chunk_size=4)
    check_strides(recipe, x, engine)


def supported_engines(recipe: Recipe) -> Iterator[tuple[str, str | None]]:
    """Iterate over all engines but the reference, with the reasons why one refuses a recipe."""
    for engine in select.ENGINES:
        if engine.name != "reference":
            yield engine.name, "; ".join(engine.unsupported_reasons(recipe)) or None


def inputs_for(
    recipe: Recipe, *, B: int, T: int, H: int = 2, G: int = 1, K: int = 4, V: int | None = None
) -> Inputs:
    """Return arguments with K = V if the recipe needs it, and K ≠ V otherwise.

    Args:
        recipe: the recipe.
        B, T, H, G, K: sizes, as for `inputs`.
        V: size of values; K or 3 by default.
    """
    memory = recipe.memory
    is_square = memory.is_elementwise or memory.residual or memory.read.transposed
    return inputs(recipe, B=B, T=T, H=H, G=G, K=K, V=(K if is_square else 3) if V is None else V)


def check_agrees(
    recipe: Recipe, x: Inputs, engine: str, tolerance: float = EXACT, **options: object
) -> None:
    """Outputs, final state and every gradient equal the reference's.

    Args:
        recipe, x: recipe and arguments.
        engine: name of the engine.
        tolerance: bound of relative errors.
        options: arguments of `recall` for the engine.

    Raises:
        AssertionError: a result differs.
    """
    expected, expected_state, slopes = gradients(recipe, x, engine="reference")
    y, state, engine_slopes = gradients(recipe, x, engine=engine, **options)
    run = f"of engine {engine}"
    assert_states_equal((y, state), (expected, expected_state), tolerance, run)
    subject = f"the gradient of {{name}} by engine {engine} is"
    require_close(engine_slopes, slopes, tolerance, subject)


def check_lengths(recipe: Recipe, x: Inputs, engine: str) -> None:
    """Outputs and state equal the reference's, without gradients."""
    with torch.no_grad():
        result, expected = (run_recall(recipe, x, engine=name) for name in (engine, "reference"))
    assert_states_equal(result, expected, EXACT, f"of engine {engine} at {x.T} tokens")


def check_chunks_and_splits(recipe: Recipe, x: Inputs, engine: str) -> None:
    """Pieces of 0, 1 and more tokens, one token at a time, and chunks of any size agree."""
    with torch.no_grad():
        expected = run_recall(recipe, x, engine=engine)
        third = x.T // 3
        for cuts in ([1, 1, third, x.T - 2], list(range(1, x.T))):
            pieces = run_in_pieces(recipe, x, cuts, [engine])
            assert_states_equal(pieces, expected, EXACT, f"of engine {engine} split at {cuts}")
        for size in (1, 2, 5, 16, 64):
            chunks = run_recall(recipe, x, engine=engine, chunk_size=size)
            run = f"of engine {engine} with chunk_size={size}"
            assert_states_equal(chunks, expected, EXACT, run)


def check_handover(recipe: Recipe, x: Inputs, engine: str) -> None:
    """The engine continues the reference's states, and the reference the engine's."""
    with torch.no_grad():
        expected = run_recall(recipe, x, engine="reference")
        for order in (["reference", engine], [engine, "reference"]):
            pieces = run_in_pieces(recipe, x, [3, 4, 8], order)
            run = f"of {order[0]} and {order[1]} in turns"
            assert_states_equal(pieces, expected, EXACT, run)


def check_strides(recipe: Recipe, x: Inputs, engine: str) -> None:
    """Every second channel of a wider tensor, as of a fused projection, gives equal results."""

    def make_strided(a: Tensor) -> Tensor:
        wide = torch.full((*a.shape, 2), torch.nan, dtype=a.dtype)
        wide[..., 0] = a
        return wide[..., 0].requires_grad_()

    y, _, slopes = gradients(recipe, x, engine=engine)
    views = x.map_tensors(make_strided)
    y2, state2 = run_recall(recipe, views, engine=engine)
    strided_slopes = gradients_of(random_projection(y2, state2), views)
    require_close(strided_slopes, slopes, EXACT, "the gradient of {name} of strided tensors is")
    require_close(y2, y, EXACT, f"outputs of engine {engine} for strided tensors are")


def check_single_gradients(
    recipe: Recipe,
    x: Inputs,
    names: Sequence[str] | None = None,
    tolerance: float = EXACT,
    **options: object,
) -> None:
    """A gradient does not depend on which other inputs require one.

    Args:
        recipe, x: recipe and arguments.
        names: names of the inputs; all by default.
        tolerance: bound of relative errors.
        options: arguments of `recall`.
    """
    _, _, slopes = gradients(recipe, x, **options)
    for name in slopes if names is None else names:
        leaf = x.tensors()[name].clone().requires_grad_()
        total = random_projection(*run_recall(recipe, x.replace_tensors({name: leaf}), **options))
        if not total.requires_grad:
            require(not slopes[name].any(), f"the gradient of {name} alone is lost")
            continue
        (slope,) = torch.autograd.grad(total, leaf, allow_unused=True, materialize_grads=True)
        require_close(slope, slopes[name], tolerance, f"the gradient of {name} alone is")


def check_refusal(recipe: Recipe, engine: Engine) -> None:
    """An engine that is requested by name but cannot run a recipe gives the reason."""
    reasons = engine.unsupported_reasons(recipe)
    are_sentences = all(isinstance(reason, str) and len(reason) > 10 for reason in reasons)
    require(
        reasons and are_sentences,
        f"engine {engine.name} refuses a recipe without a reason that is a sentence",
    )
    try:
        run_recall(recipe, inputs_for(recipe, B=1, T=1), engine=engine.name)
    except RecipeError as error:
        text = str(error)
        require(
            reasons[0] in text and "these can: " in text and "reference" in text,
            f"the refusal by engine {engine.name} does not say why, or which can: {text}",
        )
        return
    raise AssertionError(f"engine {engine.name} refuses a recipe, and recall runs it there")


def scale_if_divergent(recipe: Recipe, x: Inputs) -> Inputs:
    """Return the arguments, scaled down if the recipe diverges from them."""
    with torch.no_grad():
        y, _ = run_recall(recipe, x, engine="reference")
    return x if y.abs().amax() < 1e3 else scaled_down(recipe, x)
