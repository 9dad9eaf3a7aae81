"""Running recipes, whole and in pieces, and comparing what comes out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recollect.functional.recall import recall
from recollect.recipe.recipe import Recipe
from recollect.state.state import State
from recollect.testing.inputs import Inputs

__all__ = [
    "error",
    "gradients",
    "label",
    "loss",
    "parts",
    "random_cuts",
    "require",
    "run",
    "split",
    "worst",
]


LABELS = ("sizes", "recipe_id")
"""Parts of a saved state that say what it is, and are no numbers that it remembers."""


def require(holds: object, sentence: str) -> None:
    """Raise AssertionError with the sentence unless it holds, also under ``python -O``."""
    if not holds:
        raise AssertionError(sentence)


def label(check: Callable[..., object]) -> str:
    """Return the first line of a check's docstring as plain text."""
    line = (check.__doc__ or check.__name__).partition("\n")[0]
    return line.replace("`", "").removesuffix(".")


def run(recipe: Recipe, x: Inputs, **options: Any) -> tuple[Tensor, State]:
    """One call of `recall` with ``options``; ``init`` is left out when a state is given."""
    if options.get("state") is None:
        options.setdefault("initial_memory", x.init)
    y, state = recall(recipe, x.q, x.k, x.v, x.gates, params=x.params, **options)
    assert state is not None
    return y, state


def split(
    recipe: Recipe, x: Inputs, cuts: Sequence[int], methods: Sequence[str] = ("reference",),
    **options: Any,
) -> tuple[Tensor, State]:  # fmt: skip
    """The same sequence in pieces that end at ``cuts``, taking turns between ``methods``.

    Args:
        recipe, x: what is run.
        cuts: where pieces end, in order; they may be empty.
        methods: of the pieces, in turn.
        options: of `recall`, for every piece.
    """
    borders = [0, *cuts, x.T]
    state, outputs = None, []
    for piece, (start, stop) in enumerate(itertools.pairwise(borders)):
        y, state = run(
            recipe,
            x.cut(start, stop),
            state=state,
            engine=methods[piece % len(methods)],
            **options,
        )
        outputs.append(y)
    assert state is not None
    return torch.cat(outputs, dim=1), state


def random_cuts(T: int, index: int) -> list[int]:
    """One to three borders; pieces may be empty."""
    rng = random.Random(index)
    return sorted(rng.randint(0, T) for _ in range(rng.randint(1, 3)))


def parts(state: State) -> dict[str, Tensor]:
    """A state's tensors by name, booleans and counts as floats."""
    tensors = {name: x for name, x in state.to_dict().items() if name not in LABELS}
    return {n: x if x.is_floating_point() else x.double() for n, x in tensors.items()}


def loss(y: Tensor, state: State) -> Tensor:
    """A fixed random projection of the outputs and of everything learned in the state."""
    g = torch.Generator().manual_seed(99)
    total = (y * torch.randn(y.shape, generator=g, dtype=torch.float64).to(y)).sum()
    learned = [
        *state.weights,
        *(w for name in sorted(state.algorithm_state) for w in state.algorithm_state[name]),
    ]
    if state.normalizer is not None:
        learned.append(state.normalizer)
    if state.kernel_rows is not None:
        slots = state.kernel_rows.slots
        learned += [*state.kernel_rows.rows, *(u for name in sorted(slots) for u in slots[name])]
    for x in learned:
        total = total + (x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x)).sum()
    return total


def gradients(recipe: Recipe, x: Inputs, **options: Any) -> tuple[Tensor, State, dict[str, Tensor]]:
    """Outputs, final state, and the gradient of `loss` by the name of each input."""
    leaves = x.leaves()
    y, state = run(recipe, leaves, **options)
    named = leaves.tensors()
    total = loss(y, state)
    if not total.requires_grad:
        return y, state, {name: torch.zeros_like(a) for name, a in named.items()}
    found = torch.autograd.grad(
        total, list(named.values()), allow_unused=True, materialize_grads=True
    )
    return y, state, dict(zip(named, found, strict=True))


def error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / max(1, ‖expected‖); NaN counts as infinitely wrong."""
    if found.shape != expected.shape:
        raise AssertionError(
            f"a tensor has shape {tuple(found.shape)} and should have {tuple(expected.shape)}"
        )
    if not expected.numel():
        return 0.0
    a, b = found.detach().double(), expected.detach().double()
    wrong = float((a - b).norm() / b.norm().clamp_min(1.0))
    return wrong if wrong == wrong else float("inf")


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest error among tensors of the same names, and whose it is."""
    if found.keys() != expected.keys():
        raise AssertionError(
            f"there are {', '.join(sorted(found)) or 'none'} and should be "
            f"{', '.join(sorted(expected)) or 'none'}"
        )
    return max(((error(found[n], expected[n]), n) for n in expected), default=(0.0, ""))


def same(
    found: tuple[Tensor, State],
    expected: tuple[Tensor, State],
    tolerance: float = 1e-9,
    what: str = "of the first run",
) -> None:
    """Raise AssertionError unless outputs and states are equal, and say where they are not.

    Args:
        found, expected: outputs and final state of two runs.
        tolerance: of `error`.
        what: what was done to the first, for the sentence.
    """
    wrong = error(found[0], expected[0])
    require(wrong < tolerance, f"outputs {what} are off by {wrong:.1e}")
    wrong, name = worst(parts(found[1]), parts(expected[1]))
    require(wrong < tolerance, f"{name} of the state {what} is off by {wrong:.1e}")
