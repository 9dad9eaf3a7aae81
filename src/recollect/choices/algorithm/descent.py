"""Gradient descent, momentum, and steps whose rate depends on the key.

The gradient g_t comes from the bias and the context; the algorithm turns it into the step that is
added to the decayed memory, and keeps what it needs (momentum, moments) in named slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recollect.choices.algorithm.base import Algorithm, Slots, Step
from recollect.choices.algorithm.share import by_keys
from recollect.choices.equation_terms import (
    Gradient,
    Term,
    Terms,
    format_number,
    parenthesise,
    render_sum,
)
from recollect.choices.fields import flag, integer, option, quantity
from recollect.choices.member import RecipeError, member

if TYPE_CHECKING:
    from recollect.choices.questions import RecipeLike

__all__ = ["GradientDescent", "Implicit", "Momentum", "Normalized"]


def _per(algorithm: GradientDescent | Momentum) -> tuple[str, ...]:
    return ("V",) if algorithm.per == "value" else ()


def step_size(
    default: float | str = "token",
    init: float = 0.5,
    letter: str = "η",
    axes: Callable[[Any], tuple[str, ...]] = lambda _: (),
) -> float | str:
    """The field every descending algorithm shares: η ≥ 0."""
    return quantity(
        default,
        name="lr",
        at_least=0,
        init=init,
        axes=axes,
        kinds=("token", "static", "log_token"),
        letter=letter,
    )


class Descent(Algorithm):
    """Joint checks of the algorithms that follow a gradient."""

    normalize: bool = False

    @property
    def normalizes(self) -> bool:  # type: ignore[override]
        return self.normalize

    def pace(self, at: str = "t") -> float | str:
        eta = super().pace(at)
        if not by_keys(self):
            return eta
        if eta == 1.0:
            return f"r_{at}"
        return f"{eta if isinstance(eta, str) else format_number(eta)} r_{at}"

    def requires(self, recipe: RecipeLike) -> Iterator[str]:
        yield from super().requires(recipe)
        if self.splits and (recipe.bias.affine is None or not recipe.memory.linear):
            yield (
                f"{self.title}(of='value') keeps momentum on the write only, which needs an error "
                f"affine in the prediction and a linear memory; {recipe.bias.title} with "
                f"{recipe.memory.title} has no such parts: use of='gradient'"
            )


@member
class GradientDescent(Descent):
    """A_t = α_t A_{t−1} − η_t g_t.

    With ``normalize``, g_t = Σ_i γ_i ρ_i ∇ℓ_i in place of Σ_i γ_i ∇ℓ_i: each association's gradient
    is scaled by what it would correct of its own error,

        ρ_i = ⟨e_i, ∂ℓ_i/∂M⟩ / (Σ_l ‖∂ℓ_i/∂W_l‖² + ε|∂ℓ_i/∂M|²),    e_i = M(W°; k_i) − v_i,

    0 where that is 0/0, ε = 1e-6. For L2 that is normalised least mean squares through any stack of
    maps, for other losses Polyak's step. Under a link the step acts in A, and ‖∂ℓ/∂W‖² becomes what
    a step of A does to W, `Retention.gain`.

    Steps of an inner batch add up as far as their keys are alike. With ``limit="keys"`` the rate of
    a token is η_t r_t, what earlier tokens of the batch have left of its direction,

        r_t = max(0, u_t),    u_t = 1 − Σ_(j<t) |cos(k_t, k_j)| u_j / n,    n = min(b, 8),

    so that a layer's rates are shares of 2/n and not of 2/b (`recollect.recipe.limit`): a large
    batch writes as much of every token as a small one, and a repeated token stays below the limit.

    Args:
        batch: b; gradients inside an inner batch are all taken at its start W°.
        steps: n associations per token, one sequential sub-step each (DeltaProduct); k, v, lr and
            travelling gates get an axis n after H. Under `context.Prefix`: n full-batch steps from
            the origin at every t (TTR 20–23).
        lr: η ≥ 0: the gate ``"lr"`` (``"log_token"``: the gate ``"log_lr"``), a constant, or a
            param.
        per: ``"value"`` for one rate per value channel.
        reduce: ``"mean"``: averaged over the open inner batch, W̃_t = W° − τ_t Σ_{s≤t} η_s g_s with
            τ_t = 1/(tokens so far in the batch) + offset, at least 0 (TTT).
        offset: a learned correction to τ, one per place in the batch (``"static"``), or a constant.
        normalize: scale every association's gradient by ρ: η is then a share of its error. It needs
            a loss that says what it is least at (`Bias.target`).
        limit: what rates of a normalised step add up to in an inner batch: ``"batch"``, as if all
            of its keys were equal, or ``"keys"``, as far as they are.

    Examples:
        >>> print(*rc.explain(rc.Recipe(algorithm=rc.algorithm.GradientDescent())).write)
        W_t = W_(t−1) − η_t (W_(t−1) k_t) k_tᵀ + η_t v_t k_tᵀ
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr=1.0))
        >>> k, v = torch.eye(4).view(1, 4, 1, 4), torch.randn(1, 4, 1, 3)
        >>> torch.allclose(rc.recall(recipe, k, k, v)[0], v)  # orthonormal keys are stored exactly
        True
    """

    batch: int = integer(1, at_least=1, size=True)
    steps: int = integer(1, at_least=1)
    lr: float | str = step_size(axes=_per)
    per: str = option("head", "value")
    reduce: str = option("sum", "mean")
    offset: float | str = quantity(0.0, axes=("b",), kinds=("static",), init=0.0, letter="o")
    normalize: bool = flag(False)
    limit: str = option("batch", "keys")

    full_batch = True

    def validate(self) -> None:
        if self.steps > 1 and self.batch > 1:
            raise RecipeError(
                f"algorithm.GradientDescent(batch={self.batch}, steps={self.steps}): the sub-steps "
                "of a token are sequential, so they need batch=1"
            )
        if self.reduce == "sum" and self.offset != 0.0:
            raise RecipeError(
                "algorithm.GradientDescent(offset=...) corrects the mean: set reduce='mean'"
            )

    def requires(self, recipe: RecipeLike) -> Iterator[str]:
        yield from super().requires(recipe)
        if recipe.context.horizon is None and (self.batch > 1 or self.reduce == "mean"):
            yield (
                "algorithm.GradientDescent under context.Prefix is a full pass from the origin at "
                "every token: use batch=1 and reduce='sum'"
            )


@member
class Momentum(Descent):
    """S_t = θ_t S_{t−1} − η_t g_t, A_t = α_t A_{t−1} + S_t (Titans).

    With ``normalize``, the gradients of associations are scaled as those of `GradientDescent` are.

    Args:
        momentum: θ in [0, 1): the gate ``"momentum"``, a constant or a param.
        of: ``"gradient"``, or ``"value"``: on the write only, C_t = θ C_{t−1} + η v kᵀ, while the
            erasure acts at once (DeltaNet + momentum, AM T2).
        normalize: scale every association's gradient by ρ, write and erasure alike.
        limit: as in `GradientDescent`.

    Examples:
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.Momentum())
        >>> [gate.name for gate in recipe.gates()]
        ['lr', 'momentum']
        >>> print(*rc.explain(recipe).write)
        S_t = θ_t S_(t−1) − η_t (W_(t−1) k_t − v_t) k_tᵀ;   W_t = W_(t−1) + S_t
    """

    batch: int = integer(1, at_least=1, size=True)
    lr: float | str = step_size(axes=_per)
    momentum: float | str = quantity("token", at_least=0, below=1, init=0.9, letter="θ")
    of: str = option("gradient", "value")
    per: str = option("head", "value")
    normalize: bool = flag(False)
    limit: str = option("batch", "keys")

    slots = ("momentum",)

    @property
    def splits(self) -> bool:  # type: ignore[override]
        return self.of == "value"

    @property
    def momentum_of(self) -> str:
        return self.of

    def update(self, slots: Slots, step: Step) -> tuple[dict[str, Tensor], Tensor]:
        if self.of == "gradient":
            S = step.momentum * slots["momentum"] - step.lr * step.gradient
            return {"momentum": S}, S
        assert step.write is not None  # requires() admits affine errors only
        S = step.momentum * slots["momentum"] - step.lr * step.write
        return {"momentum": S}, S - step.lr * (step.gradient - step.write)

    def moves(self, gradient: Gradient, at: str = "t") -> tuple[tuple[str, ...], Terms]:
        eta, kept = self.pace(at), Term(("S_(t−1)",)).times(self.symbol("momentum", at))
        if self.of == "gradient":
            line = render_sum((kept, *gradient.scaled(eta, -1.0, compact=True)))
            return (f"S_t = {line}",), (Term(("S_t",)),)
        line = render_sum((kept, *(term.times(eta, -1.0) for term in gradient.write)))
        erased = tuple(term.times(eta, -1.0) for term in gradient.erase)
        return (f"S_t = {line}",), (*erased, Term(("S_t",)))


class _Keyed(Descent):
    """Rules whose rate depends on κ(k, k): they solve for one association in closed form."""

    def pace(self, at: str = "t") -> float | str:
        return f"η_{at}"


@member
class Implicit(_Keyed):
    """An implicit (proximal) step, η = δ/(1 + δ a κ(k, k)) (Longhorn, TTR 30–31).

    W_t = argmin ½‖W − W_{t−1}‖² + δ ℓ(W k_t, v_t) for ℓ = L2; a is the error's slope.

    Args:
        lr: δ ≥ 0: the gate ``"lr"``, a constant or a param.

    Examples:
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.Implicit(lr=4.0))
        >>> one = torch.ones(1, 1, 1, 1)
        >>> rc.recall(recipe, one, one, one)[0].flatten()  # η = 4/(1 + 4·1)
        tensor([0.8000])
    """

    lr: float | str = step_size(letter="δ")

    def rate(self, lr: Tensor, kappa: Tensor, slope: float) -> Tensor:
        return lr / (1 + lr * slope * kappa)

    def rate_text(self, x: str, slope: float) -> str:
        delta = self.symbol("lr")
        below = render_sum((Term(()), Term((f"‖{x}‖²",)).times(delta, slope)))
        return f"{format_number(delta)}/({below})"


@member
class Normalized(_Keyed):
    """NLMS / Kaczmarz: η = μ/(a κ(k, k)), 0 where k = 0 (TTR 33).

    With μ = 1 the newest association is stored exactly: a·W_t k_t = b·v_t.

    Args:
        lr: μ ≥ 0; 1 by default.

    Examples:
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.Normalized())
        >>> k, v = torch.randn(2, 1, 6, 2, 4)
        >>> torch.allclose(rc.recall(recipe, k, k, v)[0], v, atol=1e-4)  # the newest, exactly
        True
    """

    lr: float | str = step_size(1.0, init=1.0, letter="μ")

    def rate(self, lr: Tensor, kappa: Tensor, slope: float) -> Tensor:
        zero = kappa == 0
        return torch.where(zero, 0.0, lr / torch.where(zero, 1.0, slope * kappa))

    def rate_text(self, x: str, slope: float) -> str:
        mu = self.symbol("lr")
        below = Term((f"‖{x}‖²",)).times(slope)
        return f"{format_number(mu)}/{below if slope == 1 else parenthesise(str(below))}"
