"""Closed forms: the exact minimiser, and approximations of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.algorithm.base import Algorithm, Inverse
from recollect.choices.equation_terms import format_number
from recollect.choices.member import member
from recollect.fields import integer, number, option, quantity
from recollect.messages import RecipeError
from recollect.numerics import safe_sqrt

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["Analytic", "LeastSquares", "Preconditioned", "relative_size", "smallest_ridge"]

MIN_SIZE = 1e-6
"""Added to the norm of a Gram matrix for a relative ridge, which is then positive."""


@member
class Analytic(Algorithm):
    """The minimum in closed form, for memories that store associations.

    These are local regressors, and a matrix over a kernel's features with `context.Prefix`
    (TTR 43).

    Args:
        ridge: λ ≥ 0 on the non-constant terms of a local polynomial, in units of the total weight;
            λ > 0 of a kernel regression, ½λ‖W‖².

    Examples:
        >>> recipe = rc.Recipe(
        ...     features=rc.features.Gaussian(),
        ...     context=rc.context.Prefix(),
        ...     algorithm=rc.algorithm.Analytic(ridge=1e-6),
        ... )
        >>> k, v = torch.randn(2, 1, 6, 2, 4, dtype=torch.float64)
        >>> y, _ = rc.recall(recipe, k, k, v)
        >>> torch.allclose(y, v, atol=1e-3)  # a kernel regression stores all associations
        True
    """

    ridge: float = number(0.0, at_least=0)  # type: ignore[assignment]

    solves = True
    full_batch = True
    curvature = True

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        if recipe.memory.degree is not None:
            return
        if recipe.features.finite or not recipe.memory.linear:
            yield (
                f"algorithm.Analytic is the closed form of local regressors and of kernel "
                f"regression, and {recipe.memory.title} has weights: use memory.LocalConstant() "
                "with context.KernelWeighted(), or algorithm.GradientDescent()"
            )
        elif recipe.context.horizon is not None or recipe.context.kernel is not None:
            yield (
                f"algorithm.Analytic with {recipe.memory.title} needs all past associations, which "
                f"{recipe.context.title} does not provide: use context.Prefix()"
            )
        elif self.ridge == 0:
            yield (
                "algorithm.Analytic(ridge=0) would store two values under equal keys, which "
                f"{recipe.features.title} cannot tell apart: use algorithm.Analytic(ridge=1.0)"
            )


class _StatisticsSolver(Algorithm):
    """Algorithms that only need Σ γ w k kᵀ and Σ γ w (v − W₀k) kᵀ of the past."""

    full_batch = True

    @property
    def slots(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the statistics that the inverse needs."""
        assert self.inverse is not None
        return self.inverse.slots

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        if not recipe.bias.is_quadratic or recipe.bias.probe is not None:
            yield (
                f"{self.title} solves quadratic problems, and that of {recipe.bias.title} is not "
                "quadratic: use bias.L2()"
            )
        if not recipe.memory.linear or recipe.memory.is_elementwise:
            yield f"{self.title} needs memory.Matrix, not {recipe.memory.title}"
        if not recipe.features.finite:
            yield (
                f"{self.title} stores a Gram matrix of features, and {recipe.features.title} has "
                "infinitely many: use features.Taylor(), or algorithm.Analytic(ridge=...)"
            )
        if recipe.context.horizon is not None:
            yield (
                f"{self.title} needs all past associations, which {recipe.context.title} does not "
                "provide: use context.Prefix()"
            )

    def _statistics_equations(self, recipe: Recipe) -> tuple[str, ...]:
        key, W = recipe.features.lift("k_t"), recipe.memory.weight_symbol
        decay = "γ_t " if recipe.context.has_decay else ""
        weight = "w_t " if recipe.context.has_weights else ""
        return (
            f"E_t = {decay}E_(t−1) + {weight}(v_t − {W}_0 {key}) {key}ᵀ",
            f"G_t = {decay}G_(t−1) + {weight}{key} {key}ᵀ",
        )

    @property
    def _ridge_text(self) -> str:
        return format_number(self.symbol("ridge"))

    def _scaled_by_ridge(self, rest: str) -> str:
        """Return the text of λ times a factor."""
        return rest if self.ridge == 1.0 else f"{self._ridge_text} {rest}"


def _ridge(init: float = 1.0) -> float | str:
    """Return the field of a solver's ridge, λ > 0."""
    return quantity(
        init,
        name="ridge",
        role="ridge",
        above=0,
        init=init,
        axes=lambda a: ("in",) if a.ridge_per == "key" else (),
        letter="λ",
    )


@member
class LeastSquares(_StatisticsSolver):
    """The exact minimum at every token (TTR 11–15, the mesa layer).

    W_t = argmin ½ Σ_{i≤t} γ_i^(t) w_i ‖W k_i − v_i‖² + ½ ρ_t ‖W − W_0‖². Its solution is
    W_t = W_0 + E_t (G_t + ρ_t I)⁻¹ with G = Σ γ w k kᵀ and E = Σ γ w (v − W_0 k) kᵀ.

    Constant and relative ridges are solved for by conjugate gradients. `recollect.record_solver`
    sets their number and reports their accuracy.

    With the other schedules, decays below e^−87 (float32's smallest number) act as 0: the memory
    restarts from W_0 and ρ_t = λ. Statistics are float64, and ridges have at least the size that
    float64 resolves (`smallest_ridge`). The error of outputs is at most 1e-4. If F tokens of strong
    decay leave less of the oldest association than float64 resolves, `recollect.recall` raises.

    Args:
        ridge: λ > 0: a constant, a param (``"learned"``) per head, or the gate ``"ridge"``
            (``"input"``), whose value at token t is that of the solution which token t reads; with
            ``ridge_schedule="constant"`` or ``"relative"``.
        ridge_per: ``"key"`` for one λ per lifted key channel.
        ridge_schedule: ρ_t under decay. ``"decaying"``: ρ_t = λ Π γ_i over i ≤ t, the classical
            recursion, which winds up if keys leave directions unexcited. ``"refreshed"``: decaying
            inside spans of ``refresh_every`` tokens, and λ again at the end of each span.
            ``"constant"``: ρ_t = λ (MesaNet). The three are equal without decay. ``"relative"``:
            ρ_t = λ (‖G_t‖_F + 1e-6), which bounds the condition number by 1 + 1/λ.
        refresh_every: tokens of a span; part of the model if γ < 1. A span's last token reads
            before the ridge is refreshed, and `recollect.read` after that token reads after it.

    Raises (by `recollect.recall`):
        ValueError: decays that float64 does not resolve. They are not checked on a GPU, which would
            synchronise, or in compiled code (`torch.compile`, `recollect.StaticDecoder`).
            Undetermined outputs and memories are then NaN until the memory restarts.

    Examples:
        >>> recipe = rc.Recipe(
        ...     context=rc.context.Prefix(), algorithm=rc.algorithm.LeastSquares(ridge=1e-6)
        ... )
        >>> q, k = torch.randn(2, 1, 8, 1, 4)
        >>> M = torch.randn(4, 4)
        >>> y, _ = rc.recall(recipe, q, k, k @ M.mT)  # after four keys, a linear map is known
        >>> torch.allclose(y[:, -1], q[:, -1] @ M.mT, atol=1e-3)
        True
    """

    ridge: float | str = _ridge()
    ridge_per: str = option("head", "key")
    ridge_schedule: str = option("refreshed", "decaying", "constant", "relative")
    refresh_every: int = integer(64, at_least=1)  # type: ignore[assignment]

    solves = True
    curvature = True

    @property
    def inverse(self) -> Inverse:  # type: ignore[override]
        return Inverse(ridge=self.ridge_schedule, refresh_every=self.refresh_every)

    def float64_slots(self, recipe: Recipe) -> tuple[str, ...]:
        return ("gram", "inverse", "kept") if self._ridge_decays(recipe) else ()

    def penalty_text(self, recipe: Recipe) -> str:
        rest = "‖W − W_0‖²"
        changes = self._ridge_decays(recipe) or self.ridge_schedule == "relative"
        return f"½ ρ_t {rest}" if changes else f"½ {self._scaled_by_ridge(rest)}"

    def _ridge_decays(self, recipe: Recipe) -> bool:
        return self.inverse.is_recursive and recipe.context.has_decay

    def solution_equations(self, recipe: Recipe) -> tuple[str, ...]:
        W, is_relative = recipe.memory.weight_symbol, self.ridge_schedule == "relative"
        changes = is_relative or self._ridge_decays(recipe)
        weight = "ρ_t I" if changes else self._scaled_by_ridge("I")
        lines = (f"{W}_t = {W}_0 + E_t (G_t + {weight})⁻¹", *self._statistics_equations(recipe))
        if is_relative:
            return (*lines, f"ρ_t = {self._scaled_by_ridge('(‖G_t‖_F + 1e-6)')}")
        if not changes:
            return lines
        product = "Π_(i≤t) γ_i"
        if self.ridge_schedule == "refreshed":
            span = "one token" if self.refresh_every == 1 else f"{self.refresh_every} tokens"
            product = f"Π γ_i over the open span of {span}"
        return (*lines, f"ρ_t = {self._scaled_by_ridge(product)}")


@member
class Preconditioned(_StatisticsSolver):
    """Family from linear attention to least squares: W_t = W_0 + E_t B_t, B_t ≈ (G_t + λI)⁻¹.

    G = Σ γ w k kᵀ and E = Σ γ w (v − W_0 k) kᵀ (TTR section 3.3 leaves the family open).

    Args:
        kind: ``"identity"``: B = I, linear attention. ``"diagonal"``: B = (diag(G) + λ)^(−p).
            ``"spectral"``: B = (G + λI)^(−p), p = 0 linear attention and p = 1 least squares.
            ``"conjugate_gradient"``: B q is the result of ``steps`` conjugate-gradient steps from 0
            on (G + λI) z = q, so B depends on q.
        steps: j ≥ 1, number of conjugate-gradient steps.
        power: p in [0, 1] of the diagonal and spectral kinds.
        ridge: λ > 0: a constant, a param, or the gate ``"ridge"`` of the token that reads.
        ridge_per: ``"key"`` for one λ per lifted key channel.

    Examples:
        >>> recipe = rc.Recipe(
        ...     context=rc.context.Prefix(),
        ...     algorithm=rc.algorithm.Preconditioned(kind="spectral", power=1.0),
        ... )
        >>> q, k, v = torch.randn(3, 1, 6, 2, 4)
        >>> y, _ = rc.recall(recipe, q, k, v)
        >>> exact, _ = rc.recall(recipe.replace(algorithm=rc.algorithm.LeastSquares()), q, k, v)
        >>> torch.allclose(y, exact, atol=1e-4)  # p = 1 is least squares
        True
    """

    kind: str = option("conjugate_gradient", "identity", "diagonal", "spectral")
    steps: int = integer(1, at_least=1)
    power: float = number(1.0, at_least=0, at_most=1)
    ridge: float | str = _ridge()
    ridge_per: str = option("head", "key")

    @property
    def inverse(self) -> Inverse:  # type: ignore[override]
        return Inverse(kind=self.kind, power=self.power, steps=self.steps)

    @property
    def curvature(self) -> bool:  # type: ignore[override]
        return self.kind != "identity" and self.power > 0

    def validate(self) -> None:
        if self.steps > 1 and self.kind != "conjugate_gradient":
            raise RecipeError(
                f"algorithm.Preconditioned(kind={self.kind!r}, steps={self.steps}): only "
                "kind='conjugate_gradient' takes steps"
            )
        if self.power != 1.0 and self.kind not in ("diagonal", "spectral"):
            raise RecipeError(
                f"algorithm.Preconditioned(kind={self.kind!r}, power={self.power:g}): only "
                "'diagonal' and 'spectral' have powers"
            )

    def solution_equations(self, recipe: Recipe) -> tuple[str, ...]:
        ridge, p, W = self._ridge_text, format_number(self.power), recipe.memory.weight_symbol
        lines = (f"{W}_t = {W}_0 + E_t B_t", *self._statistics_equations(recipe))
        if self.kind == "identity":
            return (f"{W}_t = {W}_0 + E_t", lines[1])
        b = {
            "diagonal": f"B_t = (diag(G_t) + {ridge})^(−{p})",
            "spectral": f"B_t = (G_t + {self._scaled_by_ridge('I')})^(−{p})",
        }.get(
            self.kind,
            f"B_t q: {'one' if self.steps == 1 else self.steps} conjugate-gradient "
            f"step{'s' * (self.steps > 1)} on "
            f"(G_t + {self._scaled_by_ridge('I')}) z = q from 0",
        )
        return (*lines, b)


def relative_size(squared_norm: Tensor) -> Tensor:
    """Return ‖G‖_F + 1e-6, the unit of a relative ridge, from ‖G‖_F² ≥ 0."""
    return safe_sqrt(squared_norm) + MIN_SIZE


def smallest_ridge(gram: Tensor) -> Tensor:
    """Return the smallest ridge that the dtype of ``gram [..., F, F]`` resolves, ``[..., 1]``.

    It is 6 ε ‖G‖_F. With a much smaller ridge, rounding errors of G k act as excitation.

    Examples:
        >>> rc.algorithm.smallest_ridge(torch.eye(4))
        tensor([1.4305e-06])
    """
    norm = gram.detach().square().sum((-2, -1)).sqrt().unsqueeze(-1)
    return 6 * torch.finfo(gram.dtype).eps * norm
