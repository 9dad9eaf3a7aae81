"""Algorithm: how the objective is minimised, one step per token.

The gradient g_t comes from the bias and the context; the algorithm turns it into the step that is
added to the decayed memory, and keeps what it needs (momentum, moments) in named slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recollect.choices.equation_terms import Gradient, Term, Terms, figure, grouped, written
from recollect.choices.member import (
    Member,
    RecipeError,
    integer,
    member,
    number,
    option,
    quantity,
)

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = [
    "Adam",
    "Algorithm",
    "Analytic",
    "GradientDescent",
    "Implicit",
    "Inverse",
    "LeastSquares",
    "Momentum",
    "Muon",
    "Normalized",
    "Preconditioned",
    "RMSProp",
    "Step",
    "newton_schulz",
    "smallest_ridge",
]

Slots = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What an algorithm sees at one token, for one map; numbers broadcast to ``[B, H, out, in]``.

    Attributes:
        gradient: g_t.
        write: the part of g_t that does not depend on the prediction (−b·v kᵀ summed over the
            context), when the bias is affine.
        lr, momentum: η_t and θ_t; 1 and 0 where the algorithm has none.
        count: number of this token in its document, from 1, ``[B, 1, 1, 1]``.
    """

    gradient: Tensor
    write: Tensor | None
    lr: Tensor
    momentum: Tensor
    count: Tensor


@dataclass(frozen=True, kw_only=True)
class Inverse:
    """What stands for (G_t + ρ_t I)⁻¹ in W_t = W_0 + E_t (G_t + ρ_t I)⁻¹, with λ the ridge.

    Attributes:
        kind: ``"exact"``; ``"identity"`` I; ``"diagonal"`` (diag(G) + λ)^(−p); ``"spectral"``
            (G + λI)^(−p); ``"conjugate_gradient"``: so many steps from 0 on each query.
        ridge: what ρ_t of an exact inverse does: ``"constant"``, ``"decaying"``, ``"refreshed"``.
        every: tokens of a span of a refreshed ridge. power: p. steps: of conjugate gradients.
    """

    kind: str = "exact"
    ridge: str = "constant"
    every: int = 1
    power: float = 1.0
    steps: int = 1

    @property
    def recurs(self) -> bool:
        """Whether the inverse itself has a recursion over tokens."""
        return self.kind == "exact" and self.ridge != "constant"

    @property
    def slots(self) -> tuple[str, ...]:
        """The statistics: the initial memory, what is needed of G, the inverse and ρ/λ."""
        gram = () if self.kind == "identity" else ("gram",)
        return (*gram, "origin", *(("inverse", "kept") if self.recurs else ()))

    def slot_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of one of `slots` beside weights ``[out, in]``."""
        out, inp = shape
        if name in ("origin", "kept"):
            return (out, inp) if name == "origin" else ()
        return (inp,) if self.kind == "diagonal" else (inp, inp)


class Algorithm(Member):
    """How the memory moves.

    Its numbers have fixed names, whatever their fields are called: the rate η is ``"lr"`` (per
    head, or ``axes=("V",)`` per value channel; 1 where none is declared), θ of `Step.momentum` is
    ``"momentum"``, λ of a solver ``"ridge"``. What no engine would read is refused.

    Attributes:
        batch: b, tokens whose gradients are taken at the same W°.
        steps: associations per token (or full-batch steps under `context.Prefix`).
        slots: names of the state it keeps beside A, each shaped like the weights.
        linear: whether the step is linear in the gradients.
        solves: whether it reaches the minimum in closed form.
        full_batch: whether it can use all of the past at once.
        inverse: how statistics of fixed size (its slots) stand for all of the past, if they do.
        splits: whether it needs the error's affine parts apart.
        every: ``"batch"`` when the memory moves only at the inner batch's border.
        reduce: ``"mean"``: steps are averaged over the open inner batch.
        ridge: λ of ½λ‖W‖² where it is a constant of the problem, else 0.
        newton_steps: Newton–Schulz iterations of one step.
    """

    choice = "algorithm"

    batch: int = 1
    steps: int = 1
    slots: tuple[str, ...] = ()
    solves: bool = False
    full_batch: bool = False
    inverse: Inverse | None = None
    splits: bool = False
    every: str = "token"
    reduce: str = "sum"
    curvature: bool = False
    """Whether it uses, or approximates, more than the first order of several associations."""
    ridge: float | str = 0.0
    newton_steps: int = 0

    @property
    def linear(self) -> bool:
        """Whether the step is linear in the gradients; unless said, where `momentum_of` is."""
        return self.momentum_of is not None

    @property
    def condenses(self) -> bool:
        """Whether statistics of fixed size (its slots) stand for all of the past."""
        return self.inverse is not None

    @property
    def per_value(self) -> bool:
        """Whether η differs between value channels."""
        return self._rate_axes == ("V",)

    @property
    def _rate_axes(self) -> tuple[str, ...]:
        numbers = self.numbers
        return numbers.get("lr", numbers.get("log_lr", ()))

    def rate(self, lr: Tensor, kappa: Tensor, slope: float) -> Tensor:
        """η_t given κ(k, k) and the error's slope a; only key-dependent rates override this."""
        return lr

    @property
    def keyed(self) -> bool:
        """Whether the rate depends on the key."""
        return type(self).rate is not Algorithm.rate

    @property
    def momentum_of(self) -> str | None:
        """Which linear recursion `update` is.

        ``"none"``: −η g; ``"gradient"``: S = θS − ηg; ``"value"``: θ on the write only. ``None`` is
        any other, so a new rule fails safe.
        """
        return "none" if type(self).update is Algorithm.update else None

    @property
    def accumulates(self) -> str | None:
        """What its slot ``"momentum"`` gathers, when `settle` turns that into the step.

        ``"steps"``: S = θS − ηg; ``"gradients"``: S = θS − g. ``None`` is any other rule.
        """
        return None

    def update(self, slots: Slots, step: Step) -> tuple[dict[str, Tensor], Tensor]:
        """New slots and what is added to the decayed memory."""
        return {}, -step.lr * step.gradient

    def settle(self, slots: Slots, lr: Tensor) -> Tensor:
        """The one step of a whole inner batch when ``every == "batch"``, from its last slots."""
        raise RecipeError(f"{self.title} moves at every token")

    def slot_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of one slot beside weights of that shape."""
        return shape if self.inverse is None else self.inverse.slot_shape(name, shape)

    def rate_text(self, x: str, slope: float) -> str:
        """η_t as text, a function of the lifted key ``x`` and the error's slope, where `keyed`."""
        return f"{type(self).__name__.lower()}({x})"

    def wide(self, recipe: Recipe) -> tuple[str, ...]:
        """Slots that are float64 whatever the inputs are, because what follows needs the digits."""
        return ()

    def penalty(self, recipe: Recipe) -> str:
        """What it adds to the objective, as text; nothing for most."""
        return ""

    def solution(self, recipe: Recipe) -> tuple[str, ...]:
        """How W_t follows from the past, one equation a line, where it is not reached by steps."""
        return ()

    @property
    def eta(self) -> str | None:
        """Field of the rate η, when it has one."""
        return self.field_of("lr")

    def pace(self, at: str = "t") -> float | str:
        """η as a factor of an equation: a number, a letter, or a diagonal for rates per channel."""
        if self.eta is None:
            return 1.0
        eta = self.symbol(self.eta, at)
        if isinstance(eta, str) and self.per_value:
            return f"Diag({eta})"
        return eta

    def moves(self, gradient: Gradient, at: str = "t") -> tuple[tuple[str, ...], Terms]:
        """The equations of its own state, and the terms it adds to the decayed memory.

        An algorithm whose `update` is its own is written as a function of g_t unless it says more.
        """
        if self.momentum_of == "none":
            return (), gradient.scaled(self.pace(at), -1.0)
        own = f"{type(self).__name__.lower()}(g_{at})"
        return (f"g_{at} = {written(gradient.compact)}",), (Term((own,)),)

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        yield from self._undeclared(recipe)
        yield from self._unread()
        if self._rate_axes and not recipe.memory.channelled:
            yield (
                f"{self.title} has a rate per value channel, which are those of a linear map, and "
                f"{recipe.memory.title} does not have them: use one rate per head"
            )
        if self.reduce == "mean" and (recipe.retention.decay or recipe.retention.linked):
            yield (
                f"{self.title}(reduce='mean') averages steps from W°, which "
                f"{recipe.retention.title} would forget: use retention.Keep() or reduce='sum'"
            )
        if self.steps > 1 and recipe.context.horizon not in (1, None):
            yield (
                f"{self.title}(steps={self.steps}) takes several associations per token, which "
                f"{recipe.context.title} cannot count: use context.Online()"
            )
        if self.steps > 1 and self.batch > 1:
            yield (
                f"{self.title}(batch={self.batch}, steps={self.steps}): the sub-steps of a token "
                "are sequential, so they need batch=1"
            )
        if self.keyed:
            yield from self._key_rules(recipe)

    def _undeclared(self, recipe: Recipe) -> Iterator[str]:
        """What engines would have to assume of an algorithm that does not say it."""
        me, of, slots = self.title, self.momentum_of, self.slots
        own = type(self).update is not Algorithm.update
        if self.solves and not (self.condenses or recipe.nonparametric or recipe.from_gram):
            yield (
                f"{me} says that it solves, and not from which statistics: state its inverse, as "
                "algorithm.LeastSquares does, or descend"
            )
        if self.inverse is not None and (
            slots != self.inverse.slots or self.numbers.get("ridge") not in ((), ("in",))
        ):
            yield (
                f"{me} states an inverse, which needs slots={self.inverse.slots} and the number "
                "'ridge', per head or with axes=('in',)"
            )
        if of in ("gradient", "value") and (
            slots != ("momentum",) or "momentum" not in self.numbers
        ):
            yield (
                f"{me} says momentum_of={of!r}, whose state is slots=('momentum',) and whose rate "
                "is the number 'momentum': declare both, or leave momentum_of out"
            )
        if self.accumulates is not None and slots != ("momentum",):
            yield f"{me} says accumulates={self.accumulates!r}, which needs slots=('momentum',)"
        if slots and not own and not self.condenses:
            yield f"{me} keeps {', '.join(slots)} and never moves it: override update"
        if self.every == "batch" and self.accumulates is None:
            yield (
                f"{me} moves once per inner batch, and not by what it accumulates: state "
                "accumulates and settle"
            )
        if self.reduce == "mean" and (own or "offset" not in self.numbers):
            yield (
                f"{me}(reduce='mean') averages plain steps −η g, with the number 'offset': leave "
                "update as it is and declare offset, or use reduce='sum'"
            )
        plain = of == "none" or self.condenses or self.solves
        if recipe.context.horizon is None and self.full_batch and not plain:
            yield (
                f"{me} says full_batch, and a full pass takes plain steps −η g, not those of its "
                "own update: leave update as it is, or use context.Online()"
            )

    def _unread(self) -> Iterator[str]:
        """Numbers that nobody would read, or not in that shape."""
        me, numbers = self.title, self.numbers
        read = {"lr", "log_lr", "offset", "ridge"}
        if type(self).update is not Algorithm.update:
            read |= {"momentum"}
        for name in sorted(numbers.keys() - read):
            yield (
                f"{me} declares the number {name!r}, which no step is handed: declare a constant "
                "as a plain field, or name the quantity 'lr' or 'momentum'"
            )
        per_value = () if self.keyed else ("V",)
        if self._rate_axes not in ((), per_value):
            yield (
                f"{me} has a rate with axes {self._rate_axes}: a rate is one per head, or, where "
                "it does not depend on the key, per value channel with axes=('V',)"
            )
        if numbers.get("momentum"):
            yield f"{me} has a momentum with axes {numbers['momentum']}: it is one per head"

    def _key_rules(self, recipe: Recipe) -> Iterator[str]:
        """A rate that depends on κ(k, k) solves for one association."""
        affine = recipe.bias.affine
        if affine is None or affine[0] <= 0:
            yield (
                f"{self.title} takes the size of its step from an error that grows with the "
                f"prediction, and {recipe.bias.title} has no such slope: use bias.L2()"
            )
        if not recipe.memory.linear or recipe.memory.diagonal:
            yield f"{self.title} needs memory.Matrix, not {recipe.memory.title}"
        if recipe.context.horizon != 1 or recipe.context.gates():
            yield f"{self.title} solves for one association: use context.Online()"


def _per(algorithm: GradientDescent | Momentum) -> tuple[str, ...]:
    return ("V",) if algorithm.per == "value" else ()


def _rate(
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


class _Descent(Algorithm):
    """Joint checks of the algorithms that follow a gradient."""

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        if self.splits and (recipe.bias.affine is None or not recipe.memory.linear):
            yield (
                f"{self.title}(of='value') keeps momentum on the write only, which needs an error "
                f"affine in the prediction and a linear memory; {recipe.bias.title} with "
                f"{recipe.memory.title} has no such parts: use of='gradient'"
            )


@member
class GradientDescent(_Descent):
    """A_t = α_t A_{t−1} − η_t g_t.

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
    """

    batch: int = integer(1, at_least=1, size=True)
    steps: int = integer(1, at_least=1)
    lr: float | str = _rate(axes=_per)
    per: str = option("head", "value")
    reduce: str = option("sum", "mean")
    offset: float | str = quantity(0.0, axes=("b",), kinds=("static",), init=0.0, letter="o")

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

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        if recipe.context.horizon is None and (self.batch > 1 or self.reduce == "mean"):
            yield (
                "algorithm.GradientDescent under context.Prefix is a full pass from the origin at "
                "every token: use batch=1 and reduce='sum'"
            )


@member
class Momentum(_Descent):
    """S_t = θ_t S_{t−1} − η_t g_t, A_t = α_t A_{t−1} + S_t (Titans).

    Args:
        momentum: θ in [0, 1): the gate ``"momentum"``, a constant or a param.
        of: ``"gradient"``, or ``"value"``: on the write only, C_t = θ C_{t−1} + η v kᵀ, while the
            erasure acts at once (DeltaNet + momentum, AM T2).
    """

    batch: int = integer(1, at_least=1, size=True)
    lr: float | str = _rate(axes=_per)
    momentum: float | str = quantity("token", at_least=0, below=1, init=0.9, letter="θ")
    of: str = option("gradient", "value")
    per: str = option("head", "value")

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
            line = written((kept, *gradient.scaled(eta, -1.0, compact=True)))
            return (f"S_t = {line}",), (Term(("S_t",)),)
        line = written((kept, *(term.times(eta, -1.0) for term in gradient.write)))
        erased = tuple(term.times(eta, -1.0) for term in gradient.erase)
        return (f"S_t = {line}",), (*erased, Term(("S_t",)))


_NS = (3.4445, -4.7750, 2.0315)


def newton_schulz(S: Tensor, steps: int) -> Tensor:
    """Push the singular values of ``S [..., out, in]`` towards 1 (ATLAS 5.1).

    X ← aX + (b XXᵀ + c (XXᵀ)²) X from S/(‖S‖_F + 1e-7), on the smaller side, in S's own dtype. Zero
    steps are the identity, without normalisation.
    """
    if steps == 0:
        return S
    a, b, c = _NS
    tall = S.shape[-2] > S.shape[-1]
    X = S.transpose(-1, -2) if tall else S
    squared = X.square().sum(dim=(-2, -1), keepdim=True)
    size = torch.where(squared == 0, 0.0, torch.where(squared == 0, 1.0, squared).sqrt())
    X = X / (size + 1e-7)
    for _ in range(steps):
        gram = X @ X.transpose(-1, -2)
        X = a * X + (b * gram + c * gram @ gram) @ X
    return X.transpose(-1, -2) if tall else X


@member
class Muon(_Descent):
    """Orthogonalised momentum, per linear map and head (ATLAS 32–33).

    ``scale="outer"``: S_t = θ_t S_{t−1} − g_t, A_t = α_t A_{t−1} + η_t NS(S_t).
    ``scale="inner"``: S_t = θ_t S_{t−1} − η_t g_t, A_t = α_t A_{t−1} + NS(S_t) (D.4: η cancels).

    Args:
        newton_steps: Newton–Schulz iterations; 0 is the identity.
        every: ``"batch"``: tokens read W°, one update at the border of the inner batch, with the
            product of its decays and the mean of its rates.
    """

    batch: int = integer(1, at_least=1, size=True)
    lr: float | str = _rate(init=0.05)
    momentum: float | str = quantity("token", at_least=0, below=1, init=0.9, letter="θ")
    newton_steps: int = integer(5)  # type: ignore[assignment]
    scale: str = option("outer", "inner")
    every: str = option("token", "batch")

    slots = ("momentum",)

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return self.newton_steps == 0

    def update(self, slots: Slots, step: Step) -> tuple[dict[str, Tensor], Tensor]:
        inner = step.lr * step.gradient if self.scale == "inner" else step.gradient
        S = step.momentum * slots["momentum"] - inner
        moved = newton_schulz(S, self.newton_steps)
        return {"momentum": S}, step.lr * moved if self.scale == "outer" else moved

    @property
    def accumulates(self) -> str:
        return "gradients" if self.scale == "outer" else "steps"

    def settle(self, slots: Slots, lr: Tensor) -> Tensor:
        moved = newton_schulz(slots["momentum"], self.newton_steps)
        return lr * moved if self.scale == "outer" else moved

    @property
    def curvature(self) -> bool:  # type: ignore[override]
        return self.newton_steps > 0

    def moves(self, gradient: Gradient, at: str = "t") -> tuple[tuple[str, ...], Terms]:
        kept = Term(("S_(t−1)",)).times(self.symbol("momentum"))
        inner: float | str = self.pace() if self.scale == "inner" else 1.0
        line = written((kept, *gradient.scaled(inner, -1.0, compact=True)))
        moved = Term((f"NS{self.newton_steps}(S_t)" if self.newton_steps else "S_t",))
        return (f"S_t = {line}",), (moved.times(self.pace(at)) if self.scale == "outer" else moved,)

    def notes(self) -> tuple[str, ...]:
        if self.newton_steps == 0:
            return ()
        steps = self.newton_steps
        return (f"NS{steps}: {steps} Newton–Schulz step{'s' * (steps > 1)}, per map and head",)

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        if recipe.memory.diagonal:
            yield (
                "algorithm.Muon orthogonalises matrices, and memory.Vector has none: use "
                "algorithm.Momentum()"
            )
        if self.every == "batch" and self.batch == 1:
            yield (
                "algorithm.Muon(every='batch') updates at the border of an inner batch: set "
                "batch > 1, or every='token'"
            )


class _Keyed(_Descent):
    """Rules whose rate depends on κ(k, k): they solve for one association in closed form."""

    def pace(self, at: str = "t") -> float | str:
        return f"η_{at}"


@member
class Implicit(_Keyed):
    """An implicit (proximal) step, η = δ/(1 + δ a κ(k, k)) (Longhorn, TTR 30–31).

    W_t = argmin ½‖W − W_{t−1}‖² + δ ℓ(W k_t, v_t) for ℓ = L2; a is the error's slope.

    Args:
        lr: δ ≥ 0: the gate ``"lr"``, a constant or a param.
    """

    lr: float | str = _rate(letter="δ")

    def rate(self, lr: Tensor, kappa: Tensor, slope: float) -> Tensor:
        return lr / (1 + lr * slope * kappa)

    def rate_text(self, x: str, slope: float) -> str:
        delta = self.symbol("lr")
        return f"{figure(delta)}/({written((Term(()), Term((f'‖{x}‖²',)).times(delta, slope)))})"


@member
class Normalized(_Keyed):
    """NLMS / Kaczmarz: η = μ/(a κ(k, k)), 0 where k = 0 (TTR 33).

    With μ = 1 the newest association is stored exactly: a·W_t k_t = b·v_t.

    Args:
        lr: μ ≥ 0; 1 by default.
    """

    lr: float | str = _rate(1.0, init=1.0, letter="μ")

    def rate(self, lr: Tensor, kappa: Tensor, slope: float) -> Tensor:
        zero = kappa == 0
        return torch.where(zero, 0.0, lr / torch.where(zero, 1.0, slope * kappa))

    def rate_text(self, x: str, slope: float) -> str:
        mu = self.symbol("lr")
        below = Term((f"‖{x}‖²",)).times(slope)
        return f"{figure(mu)}/{below if slope == 1 else grouped(str(below))}"


@member
class Analytic(Algorithm):
    """The minimum in closed form, for memories that keep associations.

    Local regressors, and a matrix over a kernel's features with `context.Prefix` (TTR 43).

    Args:
        ridge: λ ≥ 0 on the non-constant terms of a local polynomial, in units of the total weight;
            λ > 0 of a kernel regression, ½λ‖W‖².
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


class _Elementwise(_Descent):
    """Optimizers of `torch.optim` that act entry by entry."""


@member
class RMSProp(_Elementwise):
    """u_t = ρ u_{t−1} + (1 − ρ) g_t², A_t = α_t A_{t−1} − η_t g_t/(√u_t + ε) (torch's RMSprop).

    Args:
        decay_rate: ρ.
    """

    batch: int = integer(1, at_least=1, size=True)
    lr: float | str = _rate(init=0.01)
    decay_rate: float = number(0.99, at_least=0, below=1)
    eps: float = number(1e-8, above=0)

    slots = ("square",)

    def update(self, slots: Slots, step: Step) -> tuple[dict[str, Tensor], Tensor]:
        u = self.decay_rate * slots["square"] + (1 - self.decay_rate) * step.gradient.square()
        return {"square": u}, -step.lr * step.gradient / (_root(u) + self.eps)

    def moves(self, gradient: Gradient, at: str = "t") -> tuple[tuple[str, ...], Terms]:
        moment = f"u_t = {_moment(self.decay_rate, 'u', 'g_t²')}"
        step = Term((f"g_t/(√u_t + {figure(self.eps)})",), -1.0).times(self.pace())
        return (f"g_t = {written(gradient.compact)}", moment), (step,)


@member
class Adam(_Elementwise):
    """Adam entry by entry with bias correction by the token's number, as torch.optim.Adam.

    Args:
        beta1, beta2: decay rates of the moments.
    """

    batch: int = integer(1, at_least=1, size=True)
    lr: float | str = _rate(init=0.01)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    eps: float = number(1e-8, above=0)

    slots = ("mean", "square")

    def update(self, slots: Slots, step: Step) -> tuple[dict[str, Tensor], Tensor]:
        mean = self.beta1 * slots["mean"] + (1 - self.beta1) * step.gradient
        square = self.beta2 * slots["square"] + (1 - self.beta2) * step.gradient.square()
        first = mean / (1 - self.beta1**step.count)
        second = _root(square / (1 - self.beta2**step.count))
        return {"mean": mean, "square": square}, -step.lr * first / (second + self.eps)

    def moves(self, gradient: Gradient, at: str = "t") -> tuple[tuple[str, ...], Terms]:
        lines = (
            f"g_t = {written(gradient.compact)}",
            f"m_t = {_moment(self.beta1, 'm', 'g_t')}",
            f"u_t = {_moment(self.beta2, 'u', 'g_t²')}",
        )
        return lines, (Term((f"m̂_t/(√û_t + {figure(self.eps)})",), -1.0).times(self.pace()),)

    def notes(self) -> tuple[str, ...]:
        return (f"m̂_t = m_t/(1 − {figure(self.beta1)}^t), û_t = u_t/(1 − {figure(self.beta2)}^t)",)


def _moment(rate: float, letter: str, new: str) -> str:
    return written((Term((f"{letter}_(t−1)",), rate), Term((new,), round(1 - rate, 12))))


def _root(x: Tensor) -> Tensor:
    """√x with gradient 0 at 0."""
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())


# They extend `Algorithm`, which stands above.
from recollect.choices.solvers import (  # noqa: E402
    LeastSquares,
    Preconditioned,
    smallest_ridge,
)
