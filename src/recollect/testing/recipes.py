"""Checks that hold for every valid recipe, for any combination of members."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from recollect.choices.features.base import Kernel
from recollect.engines.select import select_engine
from recollect.functional.read import read
from recollect.recipe.recipe import Recipe
from recollect.state.state import State
from recollect.testing.compare import (
    assert_states_equal,
    describe_check,
    finite_difference_error,
    flatten_state,
    gradients,
    gradients_of,
    random_cuts,
    require,
    require_close,
    run_in_pieces,
    run_recall,
)
from recollect.testing.draws import parts_of
from recollect.testing.inputs import Inputs, is_ill_posed, scaled_down, small_inputs
from recollect.testing.sequences import (
    EXACT,
    check_gradients_across_splits,
    check_masks,
    check_packing,
)

__all__ = ["ENGINE_TOLERANCE", "check_recipe", "has_straight_through"]

ENGINE_TOLERANCE = 1e-9
"""Bound of relative errors in float64 for another order of summation and triangular solves."""

Result = tuple[str, str | None]
"""Name of a check, and the reason if it was skipped."""


def check_recipe(recipe: Recipe, index: int = 0) -> list[Result]:
    """Check one recipe in float64.

    Outputs and gradients are finite. Split, masked and packed sequences, and saved states, give
    equal outputs. Gradients are slopes of the outputs. The canonical form computes the same. The
    engine that `recall` selects equals the reference in outputs, state and all gradients.

    Args:
        recipe: the recipe.
        index: index of the random inputs, sizes and cuts.

    Returns:
        The name of each check, and the reason if it was skipped.

    Raises:
        AssertionError: a check fails; one sentence.
    """
    return list(_checks(recipe, index))


def _checks(recipe: Recipe, index: int) -> Iterator[Result]:
    x = small_inputs(recipe, index)
    y, state, slopes = gradients(recipe, x, engine="reference")
    if not y.abs().amax() < 1e6:
        # Some dynamics diverge from large values (a cubic error, a link of degree above 1), but
        # must not diverge from small ones.
        x = scaled_down(recipe, x)
        y, state, slopes = gradients(recipe, x, engine="reference")
    for name, tensor in {"y": y, **flatten_state(state)}.items():
        require(torch.isfinite(tensor).all(), f"{name} is not finite")
    for name, tensor in slopes.items():
        require(torch.isfinite(tensor).all(), f"the gradient of {name} is not finite")
    yield "outputs and gradients are finite", None
    if is_ill_posed(recipe):  # the errors of other checks depend on the condition number
        yield (
            "splits, masks, packing, reading, states and engines agree",
            "slopes are fitted without a ridge",
        )
        return

    cuts = random_cuts(x.T, index)
    pieces = run_in_pieces(recipe, x, cuts)
    assert_states_equal(pieces, (y, state), EXACT, f"split at {cuts}")
    yield "outputs and state are equal for any split", None

    g = torch.Generator().manual_seed(index)
    mask = torch.rand(x.q.shape[:2], generator=g) < 0.7
    yield describe_check(_check_slopes), _check_slopes(recipe, x, index)
    check_masks(recipe, x, "reference", mask)
    yield describe_check(check_masks), None
    check_packing(recipe, x.select_row(0), [0, *cuts, x.T, x.T], "auto")
    yield describe_check(check_packing), None
    yield describe_check(_check_read), _check_read(recipe, x, y, state)
    yield describe_check(_check_states), _check_states(recipe, x, y, state, cuts[0])
    _check_dtypes(recipe, x)
    yield describe_check(_check_dtypes), None

    loaded = Recipe.from_json(recipe.to_json())
    is_equal = loaded == recipe and hash(loaded) == hash(recipe)
    require(is_equal and loaded.to_json() == recipe.to_json(), "JSON gives back another recipe")
    simple = recipe.canonical()
    require(simple.canonical() == simple, "the canonical form has another canonical form")
    if simple != recipe:
        gates = {gate.name: x.gates[gate.name] for gate in simple.gates()}
        params = {param.name: x.params[param.name] for param in simple.params()}
        inputs = dataclasses.replace(x, gates=gates, params=params)
        simple_y = run_recall(simple, inputs, engine="reference")[0]
        require_close(simple_y, y, EXACT, "outputs of the canonical form are")
    yield "JSON gives the recipe back, and its canonical form computes as much", None

    engine, reason = select_engine(recipe).engine.name, None
    if engine == "reference":
        reason = "the reference is the only engine"
    else:
        y2, state2, slopes2 = gradients(recipe, x, engine="auto", chunk_size=1 + index % 6)
        run = f"of engine {engine}"
        assert_states_equal((y2, state2), (y, state), ENGINE_TOLERANCE, run)
        subject = f"the gradient of {{name}} by engine {engine} is"
        require_close(slopes2, slopes, ENGINE_TOLERANCE, subject)
        check_masks(recipe, x, "auto", mask)
    yield "the engine that recall chooses agrees with the reference", reason


def has_straight_through(recipe: Recipe) -> bool:
    """Whether finite differences do not apply, since a gradient replaces the slope."""
    return any(isinstance(part, Kernel) and not part.smooth for part in parts_of(recipe))


def _check_slopes(recipe: Recipe, x: Inputs, index: int) -> str | None:
    """The outer gradient of the outputs is their slope in a random direction."""
    if has_straight_through(recipe):
        return "a gradient in it replaces a slope"
    g = torch.Generator().manual_seed(index)
    leaves = x.with_grad()
    y, _ = run_recall(recipe, leaves, engine="reference")
    weights = torch.randn(y.shape, generator=g, dtype=y.dtype)
    if not y.requires_grad:
        return "outputs have no gradient"
    slopes = gradients_of((y * weights).sum(), leaves)
    tensors = {name: a.detach() for name, a in leaves.tensors().items() if a.numel()}
    # Links may have kinks at a memory of zeros, which the direction does not change.
    directions = {
        name: torch.randn(a.shape, generator=g, dtype=a.dtype) * a for name, a in tensors.items()
    }

    def project(step: float) -> float:
        moved = {name: a + step * directions[name] for name, a in tensors.items()}
        with torch.no_grad():
            z, _ = run_recall(recipe, x.replace_tensors(moved), engine="reference")
        return float((z * weights).sum())

    slope = sum(float((slopes[name] * a).sum()) for name, a in directions.items())
    size = sum(float(slopes[name].norm() * a.norm()) for name, a in directions.items())
    quotient = finite_difference_error(project, slope, size, (1e-4, 1e-6, 1e-8, 1e-9))
    require(
        quotient is None,
        f"the outer gradient is {slope:.8g} in a direction in which the outputs' slope is "
        f"{quotient or 0.0:.8g}",
    )
    return None


def _check_read(recipe: Recipe, x: Inputs, y: torch.Tensor, state: State) -> str | None:
    """Reading without writing is the last output; causal=False is reading after everything."""
    rule, inverse = recipe.memory.read, recipe.algorithm.inverse
    is_delayed = recipe.links_at_batch_end or recipe.algorithm.update_every == "batch"
    # A ridge is refreshed after the last token of its span has read.
    if inverse is not None and inverse.ridge == "refreshed":
        is_delayed |= x.T % inverse.refresh_every == 0
    is_delayed |= recipe.context.hides_current
    if rule.when == "before" or rule.bonus != 0.0 or is_delayed:
        return "the last token reads another memory than the final one"
    gates = {name: x.gates[name] for name in recipe.read_gates}
    outputs = read(recipe, x.q, gates=gates, state=state, params=x.params)
    require_close(outputs[:, -1:], y[:, -1:], EXACT, "outputs of rc.read after the last token are")
    if not recipe.context.restrictions:
        final_y, _ = run_recall(recipe, x, causal=False)
        require_close(final_y, outputs, EXACT, "outputs of causal=False are")
    return None


def _check_states(recipe: Recipe, x: Inputs, y: torch.Tensor, state: State, cut: int) -> str | None:
    """States carry the outer gradient, and survive being written, repeated, and reset."""
    cuts, tolerance = [cut], ENGINE_TOLERANCE
    if not check_gradients_across_splits(recipe, x, "reference", cuts, tolerance):
        return "outputs have no gradient"
    _, early = run_recall(recipe, x.slice_tokens(0, cut))
    early = State.from_dict({name: a.clone() for name, a in early.detach().to_dict().items()})
    tail = x.slice_tokens(cut, x.T)
    rest, _ = run_recall(recipe, tail, state=early)
    require_close(rest, y[:, cut:], tolerance, "outputs after a round trip of the state are")
    doubled = tail.map_token_tensors(lambda a: a.repeat_interleave(2, dim=0))
    doubled_y, _ = run_recall(recipe, doubled, state=early.repeat(2))
    require_close(doubled_y[::2], rest, tolerance, "outputs of a repeated state are")
    initial = state.reset(torch.ones(state.rows, dtype=torch.bool), x.init)
    second_y, _ = run_recall(recipe, x, state=initial)
    require_close(second_y, y, tolerance, "outputs after a reset are")
    size = sum(a.numel() * a.element_size() for a in state.tensors())
    require(state.nbytes == size, "a state's nbytes are not those of its tensors")
    return None


def _check_dtypes(recipe: Recipe, x: Inputs) -> None:
    """Outputs in the values' dtype; states in float32 under float32 and bf16."""
    for dtype in (torch.float32, torch.bfloat16):
        y, state = run_recall(recipe, x.map_tensors(lambda a, dtype=dtype: a.to(dtype)))
        require(y.dtype == dtype, f"outputs of {dtype} inputs are {y.dtype}")
        is_single = all(w.dtype == torch.float32 for w in state.weights)
        require(is_single, f"weights of {dtype} inputs are not kept in float32")
        require(torch.isfinite(y).all(), f"outputs in {dtype} are not finite")
