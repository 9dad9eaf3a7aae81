"""Closed forms: the exact minimiser, and approximations of it, in place of steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.algorithm.base import Algorithm, Inverse
from recollect.choices.equation_terms import format_number
from recollect.choices.fields import integer, number, option, quantity
from recollect.choices.member import RecipeError, member

if TYPE_CHECKING:
    from recollect.choices.questions import RecipeLike

__all__ = ["Analytic", "LeastSquares", "Preconditioned", "smallest_ridge"]


@member
class Analytic(Algorithm):
    """The minimum in closed form, for memories that keep associations.

    Local regressors, and a matrix over a kernel's features with `context.Prefix` (TTR 43).

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
        >>> torch.allclose(y, v, atol=1e-3)  # a kernel regression stores what it has seen
        True
    """

    ridge: float = number(0.0, at_least=0)  # type: ignore[assignment]

    solves = True
    full_batch = True
    curvature = True

    def requires(self, recipe: RecipeLike) -> Iterator[str]:
        yield from super().requires(recipe)
        if recipe.memory.degree is not None:
            return
        if recipe.features.finite or not recipe.memory.linear:
            yield (
                f"algorithm.Analytic is the closed form of local regressors and of kernel "
                f"regression, and {recipe.memory.title} has weights: use memory.LocalConstant() "
                "with context.Similar(), or algorithm.GradientDescent()"
            )
        elif recipe.context.horizon is not None or recipe.context.kernel is not None:
            yield (
                f"algorithm.Analytic with {recipe.memory.title} solves for all of the past, and "
                f"{recipe.context.title} does not show it: use context.Prefix()"
            )
        elif self.ridge == 0:
            yield (
                "algorithm.Analytic(ridge=0) would store two values under equal keys, which "
                f"{recipe.features.title} cannot tell apart: use algorithm.Analytic(ridge=1.0)"
            )


class _Condensed(Algorithm):
    """Rules that need of the past only Σ γ w k kᵀ and Σ γ w (v − W₀k) kᵀ."""

    full_batch = True

    @property
    def slots(self) -> tuple[str, ...]:  # type: ignore[override]
        """The statistics that its inverse needs."""
        assert self.inverse is not None
        return self.inverse.slots

    def requires(self, recipe: RecipeLike) -> Iterator[str]:
        yield from super().requires(recipe)
        affine = recipe.bias.affine
        if affine is None or affine[0] <= 0 or recipe.bias.probe is not None:
            yield (
                f"{self.title} solves a quadratic problem, and {recipe.bias.title} does not pose "
                "one: use bias.L2()"
            )
        if not recipe.memory.linear or recipe.memory.diagonal:
            yield f"{self.title} needs memory.Matrix, not {recipe.memory.title}"
        if not recipe.features.finite:
            yield (
                f"{self.title} keeps a Gram matrix of features, and {recipe.features.title} has "
                "infinitely many: use features.Taylor(), or algorithm.Analytic(ridge=...)"
            )
        if recipe.context.horizon is not None:
            yield (
                f"{self.title} solves for all of the past, and {recipe.context.title} does not "
                "hold it: use context.Prefix()"
            )

    def _statistics(self, recipe: RecipeLike) -> tuple[str, ...]:
        key, W = recipe.features.lift("k_t"), recipe.memory.letter
        kept = "γ_t " if recipe.context.forgets else ""
        weight = "w_t " if recipe.context.weighs else ""
        return (
            f"E_t = {kept}E_(t−1) + {weight}(v_t − {W}_0 {key}) {key}ᵀ",
            f"G_t = {kept}G_(t−1) + {weight}{key} {key}ᵀ",
        )

    @property
    def _lambda(self) -> str:
        return format_number(self.symbol("ridge"))

    def _times(self, rest: str) -> str:
        """λ as a factor of what follows."""
        return rest if self.ridge == 1.0 else f"{self._lambda} {rest}"


def _ridge(init: float = 1.0) -> float | str:
    """The field every regularised solver shares: λ > 0."""
    return quantity(
        init,
        name="ridge",
        above=0,
        init=init,
        axes=lambda a: ("in",) if a.per == "key" else (),
        kinds=("static",),
        letter="λ",
    )


@member
class LeastSquares(_Condensed):
    """The exact minimum at every token (TTR 11–15, the mesa layer).

    W_t = argmin ½ Σ_{i≤t} γ_i^(t) w_i ‖W k_i − v_i‖² + ½ ρ_t ‖W − W_0‖², that is
    W_t = W_0 + E_t (G_t + ρ_t I)⁻¹ with G = Σ γ w k kᵀ and E = Σ γ w (v − W_0 k) kᵀ.

    Args:
        ridge: λ > 0: a constant, or a param (``"static"``) per head.
        per: ``"key"`` for one λ per lifted key channel.
        form: what the ridge ρ_t does while the past is forgotten. ``"decaying"``: ρ_t = λ Π γ_i
            over i ≤ t, the classical recursion, which winds up where keys leave directions
            unexcited. ``"refreshed"``: the same inside spans of ``every`` tokens, and λ again at
            the end of each. ``"constant"``: ρ_t = λ (MesaNet). Without decay the three are one.
        every: tokens of a span; part of the model where γ < 1. A span's last token reads before the
            ridge is refreshed, and `recollect.read` after it reads behind.

    A constant ridge is solved for by conjugate gradients; `recollect.watch_solves` sets and reports
    how far.

    Where the ridge fades, a decay below e^−87 (float32's smallest number) is one of 0: the memory
    starts anew, from W_0 and ρ_t = λ. Statistics are float64; a ridge smaller than that resolves
    (`smallest_ridge`) is kept there. Outputs are the minimum to 1e-4 or better, or the call is
    refused, because F tokens of strong decay leave less of the oldest than float64 resolves.

    Raises (by `recollect.recall`):
        ValueError: such decays. Nobody looks on a GPU, which would have to wait, nor in what is
            compiled (`torch.compile`, `recollect.StaticDecoder`): there outputs and memories that
            are not determined are NaN, until the memory starts anew.

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
    per: str = option("head", "key")
    form: str = option("refreshed", "decaying", "constant")
    every: int = integer(64, at_least=1)  # type: ignore[assignment]

    solves = True
    curvature = True

    @property
    def inverse(self) -> Inverse:  # type: ignore[override]
        return Inverse(ridge=self.form, every=self.every)

    def wide(self, recipe: RecipeLike) -> tuple[str, ...]:
        return ("gram", "inverse", "kept") if self._fades(recipe) else ()

    def penalty(self, recipe: RecipeLike) -> str:
        rest = "‖W − W_0‖²"
        return f"½ ρ_t {rest}" if self._fades(recipe) else f"½ {self._times(rest)}"

    def _fades(self, recipe: RecipeLike) -> bool:
        return self.form != "constant" and recipe.context.forgets

    def solution(self, recipe: RecipeLike) -> tuple[str, ...]:
        W = recipe.memory.letter
        weight = "ρ_t I" if self._fades(recipe) else self._times("I")
        lines = (f"{W}_t = {W}_0 + E_t (G_t + {weight})⁻¹", *self._statistics(recipe))
        if not self._fades(recipe):
            return lines
        product = "Π_(i≤t) γ_i"
        if self.form == "refreshed":
            span = "one token" if self.every == 1 else f"{self.every} tokens"
            product = f"Π γ_i over the open span of {span}"
        return (*lines, f"ρ_t = {self._times(product)}")


@member
class Preconditioned(_Condensed):
    """Between linear attention and least squares: W_t = W_0 + E_t B_t, B_t ≈ (G_t + λI)⁻¹.

    With G = Σ γ w k kᵀ and E = Σ γ w (v − W_0 k) kᵀ (TTR section 3.3 leaves the family open).

    Args:
        kind: ``"identity"``: B = I, linear attention. ``"diagonal"``: B = (diag(G) + λ)^(−p).
            ``"spectral"``: B = (G + λI)^(−p), p = 0 linear attention and p = 1 least squares.
            ``"conjugate_gradient"``: B q is what ``steps`` conjugate-gradient steps from 0 make of
            (G + λI) z = q, so B depends on q.
        steps: j ≥ 1, of conjugate gradients.
        power: p in [0, 1], of diagonal and spectral.
        ridge: λ > 0: a constant or a param. per: ``"key"`` for one per lifted key channel.

    Examples:
        >>> recipe = rc.Recipe(
        ...     context=rc.context.Prefix(),
        ...     algorithm=rc.algorithm.Preconditioned(kind="spectral", power=1.0),
        ... )
        >>> q, k, v = torch.randn(3, 1, 6, 2, 4)
        >>> y, _ = rc.recall(recipe, q, k, v)
        >>> least, _ = rc.recall(recipe.but(algorithm=rc.algorithm.LeastSquares()), q, k, v)
        >>> torch.allclose(y, least, atol=1e-4)  # p = 1 is least squares
        True
    """

    kind: str = option("conjugate_gradient", "identity", "diagonal", "spectral")
    steps: int = integer(1, at_least=1)
    power: float = number(1.0, at_least=0, at_most=1)
    ridge: float | str = _ridge()
    per: str = option("head", "key")

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

    def solution(self, recipe: RecipeLike) -> tuple[str, ...]:
        ridge, p, W = self._lambda, format_number(self.power), recipe.memory.letter
        lines = (f"{W}_t = {W}_0 + E_t B_t", *self._statistics(recipe))
        if self.kind == "identity":
            return (f"{W}_t = {W}_0 + E_t", lines[1])
        b = {
            "diagonal": f"B_t = (diag(G_t) + {ridge})^(−{p})",
            "spectral": f"B_t = (G_t + {self._times('I')})^(−{p})",
        }.get(
            self.kind,
            f"B_t q: {'one' if self.steps == 1 else self.steps} conjugate-gradient "
            f"step{'s' * (self.steps > 1)} on "
            f"(G_t + {self._times('I')}) z = q from 0",
        )
        return (*lines, b)


def smallest_ridge(gram: Tensor) -> Tensor:
    """The ridge that the dtype of ``gram [..., F, F]`` still resolves, ``[..., 1]``.

    6 ε ‖G‖_F: beside a much smaller one, rounding in G k passes for excitation.

    Examples:
        >>> rc.algorithm.smallest_ridge(torch.eye(4))
        tensor([1.4305e-06])
    """
    size = gram.detach().square().sum((-2, -1)).sqrt().unsqueeze(-1)
    return 6 * torch.finfo(gram.dtype).eps * size
