"""Retention that keeps the length of every row of the weights.

The member rescales A at every update, so it overrides ``advance``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from recollect.choices.equation_terms import Term, Terms, render_sum
from recollect.choices.member import member
from recollect.choices.retention.base import Decay, Retention, Values
from recollect.fields import slot
from recollect.numerics import safe_divide, safe_sqrt

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["RowNorm"]


@member
class RowNorm(Retention):
    """Rows of constant length: Z = α A_{t−1} + step, row j of A_t is Z_j ‖A_{t−1,j}‖/‖Z_j‖ (LaCT).

    The rows of each map stay on the spheres of their initial lengths, so that no write makes the
    weights larger. A row is the weights of one output. Rows of zeros stay zero, therefore the
    memory needs an initial value: a deep memory, whose initial weights are learned. A row with
    Z_j = 0 becomes zero. With inner batches, use ``update_every="batch"``, which rescales once per
    batch.

    Source: Zhang et al. 2025 (Test-time training done right), the normalisation of the fast weights
    after each update.

    Args:
        decay: the decay α. One α per head changes only the weight of the step relative to A.

    Raises:
        RecipeError: a memory that starts at zero.

    Examples:
        >>> A, step = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, -4.0]])
        >>> rc.retention.RowNorm().advance(A, step, None, {})
        tensor([[5., 0.]])
    """

    decay: Decay | None = slot(None, "retention", optional=True)

    def advance(self, A: Tensor, step: Tensor, log_decay: Tensor | None, gates: Values) -> Tensor:
        Z = Retention.advance(self, A, step, log_decay, gates)
        return Z * safe_divide(_row_norm(A), _row_norm(Z))

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        if not recipe.memory.needs_init:
            yield (
                f"{self.title} keeps the length of rows, and those of {recipe.memory.title} start "
                "at zero: use memory.MLP() or memory.GatedMLP() without static_weights"
            )

    def state_equations(
        self, old: str, new: str, step: Terms, *, at: str = "t", vector: bool = False
    ) -> tuple[str, ...]:
        decayed = (
            Term((old,)) if self.decay is None else self.decay.decayed_text(old, at, vector=vector)
        )
        return (
            f"Z_t = {render_sum((decayed, *step))}",
            f"{new} = Z_t ‖{old}‖/‖Z_t‖ row by row",
        )


def _row_norm(A: Tensor) -> Tensor:
    """Return the length of every row ``[..., out, 1]``, with gradient 0 at a row of zeros."""
    # Entries of at most 1 avoid overflow and underflow of their squares.
    scale = A.detach().abs().amax(-1, keepdim=True)
    scale = scale.masked_fill(scale == 0, 1.0)
    return scale * safe_sqrt((A / scale).square().sum(-1, keepdim=True))
