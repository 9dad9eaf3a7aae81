"""Runs of recipes, in one call and in pieces, and comparisons of their results."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from recollect.functional.recall import recall
from recollect.recipe.recipe import Recipe
from recollect.state.state import State
from recollect.testing.inputs import Inputs

__all__ = [
    "assert_states_equal",
    "describe_check",
    "describe_failure",
    "finite_difference_error",
    "flatten_state",
    "gradients",
    "gradients_of",
    "largest_error",
    "random_cuts",
    "random_projection",
    "relative_error",
    "require",
    "require_close",
    "run_in_pieces",
    "run_recall",
]

STATE_METADATA = ("sizes", "recipe_id")
"""Parts of a saved state that do not belong to the memory."""


def require(condition: object, sentence: str) -> None:
    """Raise AssertionError with the sentence unless the condition holds, also in ``python -O``."""
    if not condition:
        raise AssertionError(sentence)


def require_close(
    result: Tensor | Mapping[str, Tensor],
    expected: Tensor | Mapping[str, Tensor],
    tolerance: float,
    subject: str,
) -> None:
    """Raise AssertionError if a relative error is not below the tolerance.

    The message begins with ``subject``, a subject and verb such as ``"outputs are"``. ``{name}`` in
    it is replaced by the name of the tensor with the largest error.
    """
    if isinstance(result, Tensor) and isinstance(expected, Tensor):
        result, expected = {"": result}, {"": expected}
    assert not isinstance(result, Tensor) and not isinstance(expected, Tensor)
    error, name = largest_error(result, expected)
    require(error < tolerance, f"{subject.replace('{name}', name)} off by {error:.1e}")


def describe_check(check: Callable[..., object]) -> str:
    """Return the first line of a check's docstring as plain text."""
    line = (check.__doc__ or check.__name__).partition("\n")[0]
    return line.replace("`", "").removesuffix(".")


@contextmanager
def describe_failure(subject: str, name: str = "") -> Iterator[None]:
    """Turn an exception into an AssertionError of one line that names the subject.

    An AssertionError with ``name`` is raised unchanged.
    """
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split()) or "an assertion fails"
        if not isinstance(error, AssertionError):
            text = f"{type(error).__name__}: {text}"
        elif name and name in text:
            raise
        raise AssertionError(f"{subject}: {text}") from error


def run_recall(recipe: Recipe, x: Inputs, **options: Any) -> tuple[Tensor, State]:
    """Call `recall` with ``options``, and with the initial memory if they contain no state."""
    if options.get("state") is None:
        options.setdefault("initial_memory", x.init)
    y, state = recall(recipe, x.q, x.k, x.v, x.gates, params=x.params, **options)
    assert state is not None
    return y, state


def run_in_pieces(
    recipe: Recipe,
    x: Inputs,
    cuts: Sequence[int],
    engines: Sequence[str] = ("reference",),
    **options: Any,
) -> tuple[Tensor, State]:
    """Run a sequence in pieces that end at the cuts; pieces may be empty.

    The engines run the pieces in turn, with the options of `recall`.
    """
    state, outputs = None, []
    for i, (start, stop) in enumerate(itertools.pairwise([0, *cuts, x.T])):
        engine = engines[i % len(engines)]
        piece = x.slice_tokens(start, stop)
        y, state = run_recall(recipe, piece, state=state, engine=engine, **options)
        outputs.append(y)
    assert state is not None
    return torch.cat(outputs, dim=1), state


def random_cuts(T: int, index: int) -> list[int]:
    """Return one to three ends of pieces, which may be empty."""
    rng = random.Random(index)
    return sorted(rng.randint(0, T) for _ in range(rng.randint(1, 3)))


def flatten_state(state: State) -> dict[str, Tensor]:
    """Return the tensors of a state by name, booleans and counts as floats."""
    tensors = {name: x for name, x in state.to_dict().items() if name not in STATE_METADATA}
    return {name: x if x.is_floating_point() else x.double() for name, x in tensors.items()}


def random_projection(y: Tensor, state: State) -> Tensor:
    """Return a fixed random projection of the outputs and of all real tensors of the state."""
    g = torch.Generator().manual_seed(99)
    slots = state.algorithm_state
    tensors = [y, *state.weights, *(w for name in sorted(slots) for w in slots[name])]
    if state.normalizer is not None:
        tensors.append(state.normalizer)
    if state.kernel_rows is not None:
        slots = state.kernel_rows.slots
        tensors += [*state.kernel_rows.rows, *(u for name in sorted(slots) for u in slots[name])]
    weights = [torch.randn(x.shape, generator=g, dtype=torch.float64).to(x) for x in tensors]
    first, *terms = [(x * w).sum() for x, w in zip(tensors, weights, strict=True)]
    return sum(terms, first)


def gradients_of(total: Tensor, inputs: Inputs, *, create_graph: bool = False) -> dict[str, Tensor]:
    """Return the gradient of a scalar by the name of each input; zeros if it has none."""
    tensors = inputs.tensors()
    if not total.requires_grad:
        return {name: torch.zeros_like(x) for name, x in tensors.items()}
    result = torch.autograd.grad(
        total,
        list(tensors.values()),
        create_graph=create_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(tensors, result, strict=True))


def gradients(recipe: Recipe, x: Inputs, **options: Any) -> tuple[Tensor, State, dict[str, Tensor]]:
    """Return outputs, final state, and the gradient of `random_projection` by input."""
    leaves = x.with_grad()
    y, state = run_recall(recipe, leaves, **options)
    return y, state, gradients_of(random_projection(y, state), leaves)


def finite_difference_error(
    function: Callable[[float], float], derivative: float, size: float, steps: Sequence[float]
) -> float | None:
    """Compare a derivative at 0 with central differences of fourth order.

    The error h⁴ f⁽⁵⁾ + rounding/h is below 1e-6 if the function is smooth. A smaller step avoids a
    kink (relu, a threshold, a sign) inside a larger one, so the steps descend. ``size`` is the
    magnitude of the terms of the derivative. The result is ``None`` if a step agrees with the
    derivative, else the difference quotient of the last one.
    """
    quotient = math.nan
    for h in steps:
        near = function(-2 * h) - 8 * function(-h)
        quotient = (near + 8 * function(h) - function(2 * h)) / (12 * h)
        if abs(derivative - quotient) < 1e-5 * max(1.0, abs(quotient), size):
            return None
    return quotient


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return ‖result − expected‖ / max(1, ‖expected‖); infinity for NaN."""
    if result.shape != expected.shape:
        raise AssertionError(
            f"a tensor has shape {tuple(result.shape)} and should have {tuple(expected.shape)}"
        )
    if not expected.numel():
        return 0.0
    a, b = result.detach().double(), expected.detach().double()
    error = float((a - b).norm() / b.norm().clamp_min(1.0))
    return math.inf if math.isnan(error) else error


def largest_error(
    results: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> tuple[float, str]:
    """Return the largest relative error among tensors of equal names, and its name."""
    if results.keys() != expected.keys():
        raise AssertionError(
            f"there are {', '.join(sorted(results)) or 'none'} and should be "
            f"{', '.join(sorted(expected)) or 'none'}"
        )
    errors = ((relative_error(results[name], expected[name]), name) for name in expected)
    return max(errors, default=(0.0, ""))


def assert_states_equal(
    result: tuple[Tensor, State],
    expected: tuple[Tensor, State],
    tolerance: float = 1e-9,
    run: str = "of the first run",
) -> None:
    """Raise AssertionError unless outputs and states are equal."""
    require_close(result[0], expected[0], tolerance, f"outputs {run} are")
    states = flatten_state(result[1]), flatten_state(expected[1])
    require_close(*states, tolerance, f"{{name}} of the state {run} is")
