"""When a memory follows exchanged states exactly: AM theorem 1.

Unit keys with inner products of at most ε in size and values v_a: the token k_a − k_b exchanges
what stands under a and b, if κ rounds to whole numbers. Every product that it rounds is a sum of at
most four inner products, so that 4ε and the error of the arithmetic must stay below ½ together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.functional.read import read
from recollect.functional.recall import recall
from recollect.recipe.resolve import RecipeLike, as_recipe
from recollect.tasks.exchange import Exchange

__all__ = ["Margin", "exchange_margin", "wrong_answers"]


@dataclass(frozen=True, kw_only=True)
class Margin:
    """What rounding has to cope with.

    Attributes:
        spread: ε, the largest |inner product| of two keys.
        arithmetic: a bound on the error of a product of two differences of keys in a dtype.
        total: 4ε + arithmetic, which must be below ½.

    Examples:
        >>> margin = rc.theory.Margin(spread=0.12, arithmetic=0.01)
        >>> round(margin.total, 2)  # below ½: rounding tracks every swap
        0.49
    """

    spread: float
    arithmetic: float

    @property
    def total(self) -> float:
        """4ε + arithmetic."""
        return 4 * self.spread + self.arithmetic

    @property
    def exact(self) -> bool:
        """Whether theorem 1 promises exact states for any number of exchanges."""
        return self.total < 0.5


def exchange_margin(keys: Tensor, dtype: torch.dtype) -> Margin:
    """The margin of keys ``[n, d]`` when products are computed in a dtype.

    A product of two vectors of length √2 in which each entry, product and sum is rounded by u is
    off by at most ((1 + u)^(d + 4) − 1) Σ |x_i y_i| ≤ 2 ((1 + u)^(d + 4) − 1): the worst case; sums
    in a wider format (matrix units) do much better.

    Args:
        keys: unit vectors.
        dtype: of keys and of their products.

    Examples:
        >>> keys = rc.tasks.low_coherence_keys(64, 36)
        >>> margin = rc.theory.exchange_margin(keys, torch.float32)
        >>> round(margin.spread, 4), margin.total < 0.5
        (0.1111, True)
    """
    n, d = keys.shape
    gram = (keys.double() @ keys.double().T) - torch.eye(n, dtype=torch.float64)
    u = torch.finfo(dtype).eps / 2
    return Margin(spread=float(gram.abs().max()), arithmetic=2 * ((1 + u) ** (d + 4) - 1))


def wrong_answers(recipe: RecipeLike, stream: Exchange, *, engine: str = "auto") -> tuple[int, int]:
    """How many answers of a recipe are wrong, along the way and about every key at the end.

    Args:
        recipe: one that asks for no gates, e.g. a kernel with constant rates.
        stream: of `recollect.tasks.swap_stream`.
        engine: as for `recall`.

    Examples:
        >>> stream = rc.tasks.swap_stream(4, 8, 3, torch.Generator().manual_seed(0))
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr=1.0))
        >>> rc.theory.wrong_answers(recipe, stream)
        (0, 0)
    """
    recipe = as_recipe(recipe, "wrong_answers")
    q, k, v = (x[None, :, None] for x in (stream.q, stream.k, stream.v))
    with torch.no_grad():
        y, state = recall(recipe, q, k, v, engine=engine)
        end = read(recipe, stream.keys[None, :, None], state=state)
    asked = y[0, :, 0].argmax(-1) != stream.answer_index
    final = end[0, :, 0].argmax(-1) != stream.final_assignment
    return int(asked.sum()), int(final.sum())
