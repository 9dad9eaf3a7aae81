"""Condition under which a memory follows exchanged states exactly: AM theorem 1.

Keys have length 1 and inner products of magnitude at most ε. The token k_a − k_b exchanges the
values of a and b if κ rounds to integers. Every rounded product is a sum of at most four inner
products, so the sum of 4ε and the rounding error must be below ½.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.functional.read import read
from recollect.functional.recall import recall
from recollect.recipe.resolve import RecipeLike, as_recipe
from recollect.tasks.exchange import Exchange

__all__ = ["Margin", "count_errors", "exchange_margin"]


@dataclass(frozen=True, kw_only=True)
class Margin:
    """Errors of inner products before rounding.

    Attributes:
        coherence: ε, the largest |inner product| of two keys.
        rounding_error: Bound on the error of a product of two differences of keys in a dtype.
        total: 4ε + rounding_error, which must be below ½.

    Examples:
        >>> margin = rc.theory.Margin(coherence=0.12, rounding_error=0.01)
        >>> round(margin.total, 2)  # below ½: rounding tracks every swap
        0.49
    """

    coherence: float
    rounding_error: float

    @property
    def total(self) -> float:
        """4ε + rounding_error."""
        return 4 * self.coherence + self.rounding_error

    @property
    def exact(self) -> bool:
        """Whether theorem 1 promises exact states for any number of exchanges."""
        return self.total < 0.5


def exchange_margin(keys: Tensor, dtype: torch.dtype) -> Margin:
    """Return the margin of keys ``[n, d]`` if products are computed in a dtype.

    The product of two vectors of length √2, with a relative rounding error u of each entry, product
    and sum, has an error of at most ((1 + u)^(d + 4) − 1) Σ |x_i y_i| ≤ 2 ((1 + u)^(d + 4) − 1).
    Sums in a wider format (matrix units) have much smaller errors.

    Args:
        keys: Unit vectors.
        dtype: Dtype of keys and of their products.

    Examples:
        >>> keys = rc.tasks.low_coherence_keys(64, 36)
        >>> margin = rc.theory.exchange_margin(keys, torch.float32)
        >>> round(margin.coherence, 4), margin.total < 0.5
        (0.1111, True)
    """
    n, d = keys.shape
    gram = (keys.double() @ keys.double().T) - torch.eye(n, dtype=torch.float64)
    u = torch.finfo(dtype).eps / 2
    return Margin(coherence=float(gram.abs().max()), rounding_error=2 * ((1 + u) ** (d + 4) - 1))


def count_errors(recipe: RecipeLike, stream: Exchange, *, engine: str = "auto") -> tuple[int, int]:
    """Count the wrong answers of a recipe, after each token and about every key at the end.

    Args:
        recipe: Recipe without gates, such as a kernel with a constant ``lr``.
        stream: Stream of `recollect.tasks.swap_stream`.
        engine: Engine of `recall`.

    Examples:
        >>> stream = rc.tasks.swap_stream(4, 8, 3, torch.Generator().manual_seed(0))
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr=1.0))
        >>> rc.theory.count_errors(recipe, stream)
        (0, 0)
    """
    recipe = as_recipe(recipe, "count_errors")
    q, k, v = (x[None, :, None] for x in (stream.q, stream.k, stream.v))
    with torch.no_grad():
        y, state = recall(recipe, q, k, v, engine=engine)
        end = read(recipe, stream.keys[None, :, None], state=state)
    wrong = y[0, :, 0].argmax(-1) != stream.answer_index
    final = end[0, :, 0].argmax(-1) != stream.final_assignment
    return int(wrong.sum()), int(final.sum())
