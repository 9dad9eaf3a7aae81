"""Local memories: they store associations, and fit a polynomial around every query."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.features.monomials import monomials
from recollect.choices.member import member
from recollect.choices.memory.base import Memory
from recollect.fields import Gate, integer, option
from recollect.messages import RecipeError

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["LocalConstant", "LocalPolynomial"]


class _Local(Memory):
    """Base of memories that store associations and are solved for every query."""

    weight_symbol = "w"

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        if not recipe.algorithm.solves:
            yield (
                f"{self.title} stores associations and no weights that {recipe.algorithm.title} "
                "could update: use algorithm.Analytic()"
            )


@member
class LocalConstant(_Local):
    """A weighted mean of the values near the query (TTR 50): softmax attention's memory.

    It stores the associations instead of weights. With L2 the weights of the mean are normalised
    (softmax); with DotProduct it is a sum.

    Examples:
        >>> recipe = rc.Recipe(
        ...     memory=rc.memory.LocalConstant(),
        ...     context=rc.context.KernelWeighted(),
        ...     algorithm=rc.algorithm.Analytic(),
        ... )
        >>> q, k, v = torch.randn(3, 1, 5, 2, 8)
        >>> y, _ = rc.recall(recipe, q, k, v)
        >>> attend = torch.nn.functional.scaled_dot_product_attention
        >>> heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        >>> torch.allclose(y.transpose(1, 2), attend(*heads_first, is_causal=True), atol=1e-5)
        True
    """

    degree = 0

    def prediction_text(self, x: str, *, raw: str = "", W: str = "") -> str:
        return W or self.weight_symbol


@member
class LocalPolynomial(_Local):
    """A polynomial of degree p in k − q, fitted around every query q and read there (TTR 48–49).

    min Σ_i γ_i ½‖m(k_i) − v_i‖² + ½λ Σ_i γ_i ‖slopes‖², m(k) = Σ_j M_j (k − q)^j;  y = M_0. The
    ridge λ of `algorithm.Analytic` is in units of the total weight, so a common factor of all
    weights has no effect (as in a softmax; TTR 51 drops one). It does not penalise the constant:
    the first output is the first value. The norm of slopes of degree j is Σ M_j², with every
    monomial as often as it occurs. It is invariant under rotations of the keys.

    There are D = C(K + p, p) coefficients. A query costs O(n D) per step of conjugate gradients, or
    O(n D²) with a dense solve. Only quadratic errors have this closed form.

    With the shares p_i = γ_i/Σ γ and means k̄ and v̄, the linear fit is y = v̄ − C x. Here C is the
    covariance Σ p_i v_i (k_i − k̄)ᵀ, and x = (Σ p_i (k_i − k̄)(k_i − k̄)ᵀ + λ)⁻¹ (k̄ − q). A gate of
    the query can replace x, which spares the solve (Parallax).

    Args:
        degree: p ≥ 1: 1 is local linear (TTR 52–54), 2 local quadratic.
        slope: ``"fitted"``: x is solved for. ``"input"``: x is the gate ``"slope" [B, T, H, K]`` of
            the query, for degree 1 and no ridge.

    Examples:
        >>> recipe = rc.Recipe(
        ...     memory=rc.memory.LocalPolynomial(degree=1),
        ...     context=rc.context.KernelWeighted(),
        ...     algorithm=rc.algorithm.Analytic(ridge=1e-6),
        ... )
        >>> q, k = torch.randn(2, 1, 12, 1, 2, dtype=torch.float64)
        >>> M = torch.tensor([[1.0, 2.0], [0.0, -1.0]], dtype=torch.float64)
        >>> y, _ = rc.recall(recipe, q, k, k @ M.mT + 3)  # values that are linear in their keys
        >>> torch.allclose(y[:, -1], q[:, -1] @ M.mT + 3, atol=1e-3)  # read exactly at any query
        True
    """

    shown = ("degree",)

    degree: int = integer(1, at_least=1)  # type: ignore[assignment]
    slope: str = option("fitted", "input")

    def validate(self) -> None:
        if self.slope == "input" and self.degree != 1:
            raise RecipeError(
                f"memory.LocalPolynomial(slope='input') has one slope and needs degree=1, not "
                f"{self.degree}"
            )

    @property
    def slope_gate(self) -> str | None:  # type: ignore[override]
        return "slope" if self.slope == "input" else None

    def gates(self) -> tuple[Gate, ...]:
        if self.slope == "fitted":
            return ()
        return (Gate(name="slope", owner=self.title, axes=("K",), role="key"),)

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        if self.slope == "input" and recipe.ridge != 0:
            yield (
                f"{recipe.algorithm.brief} penalises fitted slopes, and slope='input' fits none: "
                "use algorithm.Analytic(ridge=0)"
            )
        if not recipe.bias.is_quadratic:
            yield (
                f"{self.title} fits values, and {recipe.bias.title} has no error that vanishes at "
                "a fit: use bias.L2()"
            )

    def basis(self, difference: Tensor) -> Tensor:
        """Return the monomials of k − q of degree 0 to p, ``[..., D]``, the constant first."""
        one = torch.ones((), dtype=difference.dtype, device=difference.device)
        return monomials(difference, [one] * (self.degree + 1))

    def prediction_text(self, x: str, *, raw: str = "", W: str = "") -> str:
        d = f"({x} − q_t)"
        terms = [
            self.weight_symbol,
            f"M1 {d}",
            *(f"M{j} {d}^{j}" for j in range(2, self.degree + 1)),
        ]
        return " + ".join(terms)

    def notes(self) -> tuple[str, ...]:
        if self.slope == "input":
            return (
                "w = v̄ − Σ_i p_i v_i (k_i − k̄)·x_t, p_i the share of association i, k̄ and v̄ the "
                "means",
                "x_t: a gate of the query in place of the solution of the fit",
            )
        slopes = ", ".join(f"M{j}" for j in range(1, self.degree + 1))
        return (f"{slopes}: fitted for each query, which reads w",)
