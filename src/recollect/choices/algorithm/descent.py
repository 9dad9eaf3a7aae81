"""Gradient descent, momentum, and steps with rates that depend on the key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from recollect.choices.algorithm.base import Algorithm, Slots, Step
from recollect.choices.algorithm.normalized_steps import measures_overlap
from recollect.choices.equation_terms import (
    Gradient,
    Term,
    Terms,
    format_number,
    parenthesise,
    render_sum,
    sum_over_batch,
)
from recollect.choices.member import member
from recollect.fields import flag, integer, number, option, quantity
from recollect.messages import RecipeError
from recollect.numerics import exprel, safe_divide

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["NLMS", "Flow", "GradientDescent", "Implicit", "Momentum"]


def _rate_axes(algorithm: GradientDescent | Momentum) -> tuple[str, ...]:
    return ("V",) if algorithm.per == "value" else ()


def rate_quantity(
    default: float | str = "input",
    init: float = 0.5,
    letter: str = "η",
    axes: Callable[[Any], tuple[str, ...]] = lambda _: (),
) -> float | str:
    """Return the field of a rate, η ≥ 0."""
    return quantity(
        default,
        name="lr",
        role="rate",
        at_least=0,
        init=init,
        axes=axes,
        sources=("input", "learned", "log_input"),
        letter=letter,
    )


class Descent(Algorithm):
    """Base of algorithms that follow a gradient."""

    normalized_steps: bool = False

    @property
    def uses_normalized_steps(self) -> bool:  # type: ignore[override]
        return self.normalized_steps

    def rate_factor_text(self, at: str = "t") -> float | str:
        eta = super().rate_factor_text(at)
        if not measures_overlap(self):
            return eta
        if eta == 1.0:
            return f"r_{at}"
        return f"{eta if isinstance(eta, str) else format_number(eta)} r_{at}"

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        if self.update_every == "batch" and self.batch_size == 1:
            yield (
                f"{self.title}(update_every='batch') updates at the end of an inner batch: set "
                "batch_size > 1, or update_every='token'"
            )
        if self.needs_split_error and not (recipe.bias.is_affine and recipe.memory.linear):
            yield (
                f"{self.title}(momentum_on='value') needs an error affine in the prediction and a "
                f"linear memory, not {recipe.bias.title} with {recipe.memory.title}: use "
                "momentum_on='gradient'"
            )


@member
class GradientDescent(Descent):
    """A_t = α_t A_{t−1} − η_t g_t.

    With ``normalized_steps``, g_t = Σ_i γ_i ρ_i ∇ℓ_i instead of Σ_i γ_i ∇ℓ_i. The scale ρ_i makes
    a step of rate 1 correct the error of association i to first order:

        ρ_i = ⟨e_i, ∂ℓ_i/∂M⟩ / (Σ_l ‖∂ℓ_i/∂W_l‖² + ε|∂ℓ_i/∂M|²),    e_i = M(W°; k_i) − v_i.

    0/0 is 0, and ε = 1e-6. For L2 this is normalised least mean squares through any stack of maps,
    for other losses it is Polyak's step. Under a link the step acts in A, and ‖∂ℓ/∂W‖² becomes
    `Retention.step_gain`.

    With ``erasure=c``, the gradient of every linear map W_l of the memory, with input h_l and
    gradient δ_l of its output, is (δ_l + c W_l h_l) h_lᵀ instead of δ_l h_lᵀ. It is delta gradient
    descent, with c = 1 in the paper (Behrouz et al. 2025, arXiv 2512.24695):

        W_l ← W_l (α I − η c h_l h_lᵀ) − η ∇_(W_l) ℓ.

    On a matrix, `recollect.bias.DotProduct` with c = 1 is `recollect.bias.L2` with c = 0.

    The steps of an inner batch add up if their keys are similar. With ``batch_overlap="measured"``
    the rate of a token is η_t r_t, which discounts the overlap with earlier keys of the batch:

        r_t = max(0, u_t),    u_t = 1 − Σ_(j<t) |cos(k_t, k_j)| u_j / n,    n = min(b, 8).

    A layer's rates are then multiples of 2/n instead of 2/b (`recollect.recipe.stability`). A large
    batch writes as much of every token as a small one, and a repeated token stays below the limit.

    Args:
        batch_size: b; gradients inside an inner batch are all taken at its start W°.
        updates_per_token: n associations per token, one sequential sub-step each (DeltaProduct); k,
            v, lr and gates per association get an axis n after H. Under `context.Prefix`: n
            full-batch steps from the origin at every t (TTR 20–23).
        lr: η ≥ 0: the gate ``"lr"`` (``"log_input"``: the gate ``"log_lr"``), a constant, or a
            param.
        per: ``"value"`` for one rate per value channel.
        reduction: ``"mean"`` for the mean over the open inner batch, W̃_t = W° − τ_t Σ_{s≤t} η_s g_s
            (TTT). τ_t = 1/(tokens so far in the batch) + offset, at least 0.
        offset: a learned correction to τ, one per position in the batch (``"learned"``), or a
            constant.
        update_every: ``"batch"`` for one update at the end of an inner batch, whose tokens read
            W°: A = α_b A° − Σ_s η_s g_s, with α_b the product of the batch's decays.
        normalized_steps: whether to scale every association's gradient by ρ, so that η is the
            corrected fraction of its error. The loss must have a `Bias.target`.
        batch_overlap: ``"worst_case"`` assumes that all keys of an inner batch are equal.
            ``"measured"`` uses their cosines. It applies to normalised steps.
        erasure: c ≥ 0, which steps that are not normalised may have.

    Examples:
        >>> print(*rc.explain(rc.Recipe(algorithm=rc.algorithm.GradientDescent())).write_equations)
        W_t = W_(t−1) − η_t (W_(t−1) k_t) k_tᵀ + η_t v_t k_tᵀ
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr=1.0))
        >>> k, v = torch.eye(4).view(1, 4, 1, 4), torch.randn(1, 4, 1, 3)
        >>> torch.allclose(rc.recall(recipe, k, k, v)[0], v)  # orthonormal keys are stored exactly
        True
        >>> erases = rc.algorithm.GradientDescent(erasure=1.0)
        >>> recipe = rc.Recipe(bias=rc.bias.DotProduct(), algorithm=erases)
        >>> print(*rc.explain(recipe).write_equations)
        W_t = W_(t−1) − η_t (W_(t−1) k_t) k_tᵀ + η_t v_t k_tᵀ
    """

    batch_size: int = integer(1, at_least=1, size=True)
    updates_per_token: int = integer(1, at_least=1)
    lr: float | str = rate_quantity(axes=_rate_axes)
    per: str = option("head", "value")
    reduction: str = option("sum", "mean")
    offset: float | str = quantity(0.0, axes=("b",), sources=("learned",), init=0.0, letter="o")
    update_every: str = option("token", "batch")
    normalized_steps: bool = flag(False)
    batch_overlap: str = option("worst_case", "measured")
    erasure: float = number(0.0, at_least=0)

    full_batch = True

    def validate(self) -> None:
        if self.updates_per_token > 1 and self.batch_size > 1:
            raise RecipeError(
                f"algorithm.GradientDescent(batch_size={self.batch_size}, "
                f"updates_per_token={self.updates_per_token}): the sub-steps of a token are "
                "sequential, so they need batch_size=1"
            )
        if self.reduction == "sum" and self.offset != 0.0:
            raise RecipeError(
                "algorithm.GradientDescent(offset=...) corrects the mean: set reduction='mean'"
            )
        if self.reduction == "mean" and self.update_every == "batch":
            raise RecipeError(
                "algorithm.GradientDescent(reduction='mean', update_every='batch'): tokens read "
                "the mean over their open batch, which an update at its end does not have: use "
                "reduction='sum' or update_every='token'"
            )

    @property
    def accumulator(self) -> str | None:
        return "steps" if self.update_every == "batch" else None

    def batch_step(self, slots: Slots, lr: Tensor) -> Tensor:
        return slots["momentum"]

    def update_equations(self, gradient: Gradient, at: str = "t") -> tuple[tuple[str, ...], Terms]:
        lines, step = super().update_equations(gradient, at)
        return lines, sum_over_batch(step) if self.update_every == "batch" else step

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        if recipe.context.horizon is None and (self.batch_size > 1 or self.reduction == "mean"):
            yield (
                "algorithm.GradientDescent under context.Prefix is a full pass from the origin at "
                "every token: use batch_size=1 and reduction='sum'"
            )


@member
class Momentum(Descent):
    """S_t = θ_t S_{t−1} − η_t g_t, A_t = α_t A_{t−1} + β_t S_t (Titans; β = 1 by default).

    ``normalized_steps`` scales the gradients of associations as in `GradientDescent`.

    Args:
        momentum: θ in [0, 1): the gate ``"momentum"``, a constant or a param.
        momentum_on: ``"gradient"``, or ``"value"`` for momentum on the write only (DeltaNet +
            momentum, AM T2): C_t = θ C_{t−1} + η v kᵀ, with immediate erasure.
        outer_lr: β ≥ 0, rate at which S enters the memory: the gate ``"outer_lr"``, a constant or a
            param. With another value than 1, memories that are not linear run on the reference
            engine, and steps cannot be normalised.
        normalized_steps: whether to scale every association's gradient by ρ, write and erasure
            alike.
        batch_overlap, erasure: as in `GradientDescent`.

    Examples:
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.Momentum())
        >>> [gate.name for gate in recipe.gates()]
        ['lr', 'momentum']
        >>> print(*rc.explain(recipe).write_equations)
        S_t = θ_t S_(t−1) − η_t (W_(t−1) k_t − v_t) k_tᵀ;   W_t = W_(t−1) + S_t
    """

    batch_size: int = integer(1, at_least=1, size=True)
    lr: float | str = rate_quantity(axes=_rate_axes)
    momentum: float | str = quantity(
        "input", at_least=0, below=1, init=0.9, letter="θ", role="momentum"
    )
    momentum_on: str = option("gradient", "value")
    outer_lr: float | str = quantity(1.0, at_least=0, init=0.5, letter="β", role="rate")
    per: str = option("head", "value")
    normalized_steps: bool = flag(False)
    batch_overlap: str = option("worst_case", "measured")
    erasure: float = number(0.0, at_least=0)

    slots = ("momentum",)

    @property
    def needs_split_error(self) -> bool:  # type: ignore[override]
        return self.momentum_on == "value"

    @property
    def recursion(self) -> str:
        return self.momentum_on

    def update(self, slots: Slots, step: Step) -> tuple[dict[str, Tensor], Tensor]:
        if self.momentum_on == "gradient":
            S = step.momentum * slots["momentum"] - step.lr * step.gradient
            return {"momentum": S}, step.outer_lr * S
        assert step.write is not None  # requires() admits affine errors only
        S = step.momentum * slots["momentum"] - step.lr * step.write
        return {"momentum": S}, step.outer_lr * S - step.lr * (step.gradient - step.write)

    def update_equations(self, gradient: Gradient, at: str = "t") -> tuple[tuple[str, ...], Terms]:
        eta = self.rate_factor_text(at)
        decayed = Term(("S_(t−1)",)).times(self.symbol("momentum", at))
        moved = Term(("S_t",)).times(self.symbol("outer_lr", at))
        if self.momentum_on == "gradient":
            line = render_sum((decayed, *gradient.scaled(eta, -1.0, compact=True)))
            return (f"S_t = {line}",), (moved,)
        line = render_sum((decayed, *(term.times(eta, -1.0) for term in gradient.write)))
        erased = tuple(term.times(eta, -1.0) for term in gradient.erase)
        return (f"S_t = {line}",), (*erased, moved)


class _KeyDependentRate(Descent):
    """Base of rates that depend on κ(k, k): closed-form solutions for one association."""

    def rate_factor_text(self, at: str = "t") -> float | str:
        return f"η_{at}"


@member
class Implicit(_KeyDependentRate):
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

    lr: float | str = rate_quantity(letter="δ")

    def rate(self, lr: Tensor, kappa: Tensor, slope: float) -> Tensor:
        return lr / (1 + lr * slope * kappa)

    def key_rate_text(self, x: str, slope: float) -> str:
        delta = self.symbol("lr")
        denominator = render_sum((Term(()), Term((f"‖{x}‖²",)).times(delta, slope)))
        return f"{format_number(delta)}/({denominator})"


@member
class Flow(_KeyDependentRate):
    """The gradient flow of the newest loss over a time δ, η = (1 − exp(−δ a κ(k, k)))/(a κ(k, k)).

    W_t = W(δ) of dW/ds = −∇ℓ(W k_t, v_t), W(0) = W_{t−1}, for ℓ = L2; a is the error's slope. The
    key is an eigenvector of the flow, so its solution is a step along the key. The error at the key
    shrinks by exp(−δ a κ(k, k)) and never changes its sign: every δ is stable.

    Args:
        lr: δ ≥ 0: the gate ``"lr"``, a constant or a param.

    Examples:
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.Flow(lr=1.0))
        >>> one = torch.ones(1, 1, 1, 1)
        >>> rc.recall(recipe, one, one, one)[0].flatten()  # η = 1 − 1/e
        tensor([0.6321])
    """

    lr: float | str = rate_quantity(letter="δ")

    def rate(self, lr: Tensor, kappa: Tensor, slope: float) -> Tensor:
        return lr * exprel(-lr * slope * kappa)

    def key_rate_text(self, x: str, slope: float) -> str:
        exponent = Term((f"‖{x}‖²",)).times(self.symbol("lr"), -slope)
        denominator = str(Term((f"‖{x}‖²",)).times(slope))
        return (
            f"(1 − exp({render_sum((exponent,))}))/"
            f"{denominator if slope == 1 else parenthesise(denominator)}"
        )


@member
class NLMS(_KeyDependentRate):
    """NLMS / Kaczmarz: η = μ/(a κ(k, k)), and 0 if k = 0 (TTR 33).

    With μ = 1 the newest association is stored exactly: a·W_t k_t = b·v_t.

    Args:
        lr: μ ≥ 0; 1 by default.

    Examples:
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.NLMS())
        >>> k, v = torch.randn(2, 1, 6, 2, 4)
        >>> torch.allclose(rc.recall(recipe, k, k, v)[0], v, atol=1e-4)  # the newest, exactly
        True
    """

    lr: float | str = rate_quantity(1.0, init=1.0, letter="μ")

    def rate(self, lr: Tensor, kappa: Tensor, slope: float) -> Tensor:
        return safe_divide(lr, slope * kappa)

    def key_rate_text(self, x: str, slope: float) -> str:
        mu = self.symbol("lr")
        denominator = str(Term((f"‖{x}‖²",)).times(slope))
        return f"{format_number(mu)}/{denominator if slope == 1 else parenthesise(denominator)}"
