"""Retention: what keeps the memory near its past and bounded.

A retention is a decay α and, for most members, a mirror map ``link`` from the dual state A to the
weights W that are read. Members that rebuild A from W override ``advance``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.equation_terms import Term, Terms, figure, power, written
from recollect.choices.member import (
    Gate,
    Member,
    Param,
    Range,
    RecipeError,
    flag,
    member,
    number,
    option,
    quantity,
    slot,
)
from recollect.choices.retention.multiplier import multiplier, weighed

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = [
    "Ball",
    "Bregman",
    "Decay",
    "ElasticNet",
    "FDivergence",
    "Keep",
    "Lq",
    "Retention",
    "Simplex",
]

Values = Mapping[str, Tensor]


class Retention(Member):
    """How A_t follows from A_{t−1}, and W_t from A_t.

    Attributes:
        decay: the decay α, or ``None``.
        every: ``"token"``: W_t = link(A_t) at every token; ``"batch"``: the link acts at the
            borders of the inner batch and reading inside it is linear. The same when b = 1.
    """

    choice = "retention"

    decay: Decay | None = None
    every: str = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        # A slot admits any retention, whatever its annotation says.
        held: Retention | None = self.decay
        if held is not None and type(held) is not Decay:
            raise RecipeError(
                f"{self.title}(decay=...) must be retention.Decay(...), not {held.title}"
            )

    def link(self, A: Tensor, gates: Values) -> Tensor:
        """W = link(A) of one map, ``[..., out, in]``; gates come as ``[..., 1, 1]``."""
        return A

    def advance(self, A: Tensor, step: Tensor, log_decay: Tensor | None, gates: Values) -> Tensor:
        """A_t from A_{t−1} and the algorithm's step: α_t A_{t−1} + step."""
        return step + (A if log_decay is None else log_decay.exp() * A)

    @property
    def linked(self) -> bool:
        """Whether W differs from A (``link`` is overridden)."""
        return type(self).link is not Retention.link

    @property
    def additive(self) -> bool:
        """Whether A_t = α A_{t−1} + step (``advance`` is not overridden)."""
        return type(self).advance is Retention.advance

    @property
    def settles_first(self) -> bool:
        """With ``every="batch"``: W_1 = link(A_1) replaces W° for tokens 2..b (MIRAS 30)."""
        return False

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        own = dict(self.numbers)
        for name in self.decay.numbers if self.decay is not None else ():
            own.pop(name, None)
        acts = self.linked or not self.additive
        for name, axes in own.items():
            if name == "log_decay":
                yield (
                    f"{self.title} declares the number 'decay', which acts as a retention.Decay() "
                    "that it holds in a field decay"
                )
            elif axes or not acts:
                yield (
                    f"{self.title} declares the number {name!r} with axes {axes}, and a link is "
                    "handed numbers per head, where link or advance is overridden: drop the axes, "
                    "or override one of them"
                )
        if not self.additive and recipe.algorithm.batch != 1:
            yield (
                f"{self.title} rebuilds A from W at every token, so it is sequential: set "
                f"batch=1 in {recipe.algorithm.title}"
            )

    def text(self) -> str:
        """The link as it is written in an equation; empty for the identity."""
        return f"{type(self).__name__.lower()}(A_t)" if self.linked else ""

    def moves(
        self, old: str, new: str, step: Terms, *, at: str = "t", vector: bool = False
    ) -> tuple[str, ...]:
        """The equations that lead from the old state to the new.

        Args:
            old: name of the state before, e.g. ``"A_(t−1)"``; ``new``: after.
            step: what the algorithm adds.
            at: index of the decay's token. vector: as in `Decay.on`.
        """
        if self.additive:
            kept = Term((old,)) if self.decay is None else self.decay.on(old, at, vector=vector)
            return (f"{new} = {written((kept, *step))}",)
        decay = "" if self.decay is None else f", {written((self.decay.on('', at),)).strip()}"
        return (f"{new} = {type(self).__name__.lower()}({old}, {written(step)}{decay})",)


@member
class Keep(Retention):
    """Nothing is forgotten: α = 1."""


_AXES = {
    "head": (),
    "key": ("F",),
    "value": ("V",),
    "key_value": ("F",),
    "entry": ("V", "F"),
}


_SCALE = "decay_scale"
_SLOW = math.log(0.98)


@member
class Decay(Retention):
    """A_t = α_t A_{t−1} + …: exponential forgetting, the L2 retention gate.

    Args:
        per: one α per ``"head"``, per ``"key"`` channel (columns, feature channels), per
            ``"value"`` channel (rows), both (``"key_value"``: β αᵀ), or per ``"entry"``. In a deep
            memory, keys act on the first map's inputs, values on the last map's outputs, and the
            other maps use the mean log-decay.
        when: ``"after"``: gradients at W_{t−1} (Titans, leaky LMS); ``"before"``: at α_t W_{t−1}
            (Gated DeltaNet).
        rate: α in (0, 1]: a constant, the gate ``"log_decay"`` (with ``per="key_value"`` also
            ``"log_decay_value"``), or the param ``"decay"``. ``"factored"``, per channel or entry:
            α_t = exp(−δ_t ⊙ a). The gate ``"log_decay"`` holds −δ_t per channel (of values, when
            per entry), the param ``"decay_scale"`` a ≥ 0 (Mamba's Δ and A, RG-LRU's r and Λ), so
            that no tensor has tokens and entries.
    """

    per: str = option("head", "key", "value", "key_value", "entry")
    when: str = option("after", "before")
    rate: float | str = quantity(
        "token",
        name="decay",
        above=0,
        at_most=1,
        init=0.98,
        log=True,
        axes=lambda d: _AXES[d.per],
        kinds=("token", "static", "factored"),
        letter="α",
    )

    @property
    def decay(self) -> Decay:  # type: ignore[override]
        """A decay is its own decay."""
        return self

    def validate(self) -> None:
        if self.per == "key_value" and not isinstance(self.rate, str):
            raise RecipeError(
                "retention.Decay(per='key_value') with a constant rate is one number for every "
                "entry: use per='head', or rate='token' or 'static'"
            )
        if self.rate == "factored" and self.per not in ("key", "value", "entry"):
            raise RecipeError(
                f"retention.Decay(rate='factored') factors a decay per channel or entry, and "
                f"per={self.per!r} is neither: use per='entry', or rate='token'"
            )

    @property
    def factored(self) -> bool:
        """Whether log α_t is the gate times a param."""
        return self.rate == "factored"

    def on(self, state: str, at: str = "t", *, vector: bool = False) -> Term:
        """The decayed state: α_t A, A Diag(α_t), Diag(α_t) A.

        Args:
            vector: whether the state has one row, so that every channel is an entry.
        """
        alpha = self.symbol("rate", at)
        if not isinstance(alpha, str) or self.per == "head":
            return Term((state,)).times(alpha)
        if self.per == "entry" or vector:
            return Term((f"{alpha} ⊙ {state}",))
        key, value = f"Diag({alpha})", f"Diag({alpha.replace('α', 'β')})"
        if self.per == "key":
            return Term((state, key))
        return Term((key, state)) if self.per == "value" else Term((value, state, key))

    def notes(self) -> tuple[str, ...]:
        if not self.factored:
            return ()
        per = "δ_t per value channel, a per entry" if self.per == "entry" else "a per channel"
        return (f"α_t = exp(−δ_t ⊙ a): {per}",)

    def gates(self) -> tuple[Gate, ...]:
        own = super().gates()
        if self.factored:
            span = Range(high=0.0)
            axes = ("V",) if self.per == "entry" else _AXES[self.per]
            return (Gate(name="log_decay", owner=self.title, axes=axes, range=span, init=_SLOW),)
        if self.per != "key_value" or not own:
            return own
        (g,) = own
        value = Gate(name="log_decay_value", owner=g.owner, axes=("V",), range=g.range, init=g.init)
        return (g, value)

    def params(self) -> tuple[Param, ...]:
        own = super().params()
        if self.factored:
            span = Range(low=0.0)
            axes = _AXES[self.per]
            return (Param(name=_SCALE, owner=self.title, axes=axes, range=span, init=1.0),)
        if self.per != "key_value" or not own:
            return own
        (p,) = own
        value = Param(name="decay_value", owner=p.owner, axes=("V",), range=p.range, init=p.init)
        return (p, value)

    def logs(self) -> frozenset[str]:
        own = super().logs()
        return own | {"decay_value"} if own and self.per == "key_value" else own

    def static_quantities(self) -> frozenset[str]:
        scale = frozenset({_SCALE}) if self.factored else frozenset[str]()
        return super().static_quantities() | self.logs() | scale

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        yield from decay_conflicts(self, recipe)


def decay_conflicts(decay: Decay, recipe: Recipe) -> Iterator[str]:
    """Reasons why a decay of this shape cannot stand in the recipe."""
    if decay.when == "before":
        if recipe.algorithm.batch != 1:
            yield (
                "retention.Decay(when='before') measures the error at α_t W_{t−1}, which changes "
                f"inside an inner batch: set batch=1 in {recipe.algorithm.title}, or when='after'"
            )
        if recipe.context.horizon not in (1, None) and not recipe.memory.linear:
            yield (
                "retention.Decay(when='before') with a window needs a linear memory, and "
                f"{recipe.memory.title} is deep: use when='after' or context.Online()"
            )
    if decay.per != "head" and not recipe.memory.channelled:
        yield (
            f"retention.Decay(per={decay.per!r}) acts on channels of linear maps, which "
            f"{recipe.memory.title} does not have: use per='head'"
        )
    if decay.per in ("key_value", "entry") and recipe.memory.diagonal:
        yield (
            f"retention.Decay(per={decay.per!r}) needs a matrix, and {recipe.memory.title} has one "
            "weight per channel: use per='key'"
        )
    if decay.per == "entry" and not recipe.memory.linear:
        yield (
            f"retention.Decay(per='entry') needs memory.Matrix, and {recipe.memory.title} has "
            "several maps: use per='head', 'key', 'value' or 'key_value'"
        )
    if decay.per == "entry" and decay.factored:
        algorithm, retention = recipe.algorithm, recipe.retention
        linear = algorithm.momentum_of is not None and algorithm.batch == 1
        if not linear or recipe.bias.affine is None or retention is not decay:
            yield (
                "retention.Decay(per='entry', rate='factored') keeps its factors apart, which a "
                "linear recursion token by token can: use rate='token', or bias.DotProduct() or "
                "L2() with algorithm.GradientDescent(batch=1) and no link"
            )


def _power(x: Tensor, exponent: float) -> Tensor:
    """sign(x)|x|^exponent with a finite gradient at 0."""
    if exponent == 3:
        return x.pow(3)
    zero = x == 0
    return torch.where(zero, 0.0, x.sign() * torch.where(zero, 1.0, x.abs()).pow(exponent))


class _Linked(Retention):
    """What the members with a mirror map share: a decay and ``every``."""

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        if recipe.memory.read != type(recipe.memory.read)():
            yield (
                f"memory.Read(...) with a normaliser, bonus or earlier read needs weights that are "
                f"the state itself, and {self.title} puts a link between them: use "
                "retention.Keep() or Decay()"
            )


def _constant_along(axis: str, decay: Decay | None, owner: str) -> Iterator[str]:
    alike = {"in": ("head", "value"), "out": ("head", "key"), "all": ("head",)}[axis]
    if decay is not None and decay.per not in alike:
        yield (
            f"{owner}(axis={axis!r}) normalises along that axis, so α must be constant along it, "
            f"and Decay(per={decay.per!r}) is not: use per='head'"
        )


_DIMS = {"in": (-1,), "out": (-2,), "all": (-2, -1)}


@member
class Lq(_Linked):
    """An L_q retention gate (MIRAS variant 4).

    ``form="mirror"``: W = sign(A)|A|^{q−1}/‖A‖_q^{q−2}, the mirror map of ½‖·‖²_{q'}, q' = q/(q−1).
    ``form="printed"``: W = A/‖A‖_q^{q−2}, MIRAS's and MONETA's print: of degree 3 − q, so it blows
    up as A → 0; the norm is floored. Norms act per map and head.

    Args:
        q: > 1; 2 is the identity.
        floor: smallest ‖A‖_q of the printed form.
    """

    shown = ("q",)

    q: float = number(4.0, above=1)
    form: str = option("mirror", "printed")
    floor: float = number(1e-3, above=0)
    decay: Decay | None = slot(None, "retention", optional=True)
    every: str = option("token", "batch")

    def link(self, A: Tensor, gates: Values) -> Tensor:
        if self.q == 2:
            return A
        if self.form == "printed":
            size = _matrix_norm(A, self.q).clamp_min(self.floor)
            return A / size.pow(self.q - 2)
        # The map is homogeneous of degree 1: scaling by max|A| first keeps float32 powers in range.
        scale = A.detach().abs().amax(dim=(-2, -1), keepdim=True)
        scale = torch.where(scale == 0, 1.0, scale)
        u = A / scale
        size = _matrix_norm(u, self.q)
        size = torch.where(size == 0, 1.0, size)
        return scale * _power(u, self.q - 1) / size.pow(self.q - 2)

    def text(self) -> str:
        if self.form == "printed":
            return f"A_t / ‖A_t‖_{figure(self.q)}" + (
                f"^{figure(self.q - 2)}" if self.q != 3 else ""
            )
        size = f"‖A_t‖_{figure(self.q)}{power(self.q - 2)}"
        return f"sign(A_t)|A_t|{power(self.q - 1)} / {size}"

    def notes(self) -> tuple[str, ...]:
        floor = (
            (f"‖A_t‖_{figure(self.q)} is at least {figure(self.floor)}",)
            if self.form == "printed"
            else ()
        )
        return (*floor, *super().notes())


def _matrix_norm(A: Tensor, q: float) -> Tensor:
    """Entrywise ‖A‖_q per matrix, kept, with gradient 0 at a zero matrix.

    The norm is homogeneous: dividing by max|A| first keeps float32 powers in range.
    """
    scale = A.detach().abs().amax(dim=(-2, -1), keepdim=True)
    zero = scale == 0
    scale = torch.where(zero, 1.0, scale)
    u = A / scale
    # Squares of squares where they do: general powers cost ten times as much.
    powers = u.square().square() if q == 4 else u.square() if q == 2 else _power(u.abs(), q)
    total = powers.sum(dim=(-2, -1), keepdim=True)
    return torch.where(zero, 0.0, scale * torch.where(zero, 1.0, total).pow(1 / q))


@member
class Simplex(_Linked):
    """W = c · softmax(A) on a scaled simplex: KL retention (MIRAS 21, MEMORA).

    ``softmax(α log W − η g)`` is exactly this recurrence when α is constant along ``axis``.

    Args:
        scale: c, the sum along ``axis``.
        axis: ``"in"``: every row sums to c; ``"out"``: every column; ``"all"``: the whole matrix
            of each map, Σ_jl W_jl = c (MIRAS 19–20).
    """

    scale: float = number(1.0, above=0)
    axis: str = option("in", "out", "all")
    decay: Decay | None = slot(None, "retention", optional=True)
    every: str = option("token", "batch")

    def link(self, A: Tensor, gates: Values) -> Tensor:
        if self.axis == "all":
            return self.scale * A.flatten(-2).softmax(-1).view_as(A)
        return self.scale * A.softmax(-1 if self.axis == "in" else -2)

    @property
    def settles_first(self) -> bool:
        return True

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        yield from _constant_along(self.axis, self.decay, self.title)

    def text(self) -> str:
        return f"{'' if self.scale == 1 else f'{figure(self.scale)}·'}softmax(A_t)"

    def notes(self) -> tuple[str, ...]:
        over = {"in": "rows", "out": "columns", "all": "all entries of each matrix"}[self.axis]
        return (f"softmax over {over}", *super().notes())


def _soft_threshold(A: Tensor, tau: Tensor, smooth: bool) -> Tensor:
    if smooth:
        return A.abs() * torch.atan(A / tau.clamp_min(torch.finfo(A.dtype).tiny)) * (2 / torch.pi)
    return A.sign() * functional.relu(A.abs() - tau)


@member
class ElasticNet(_Linked):
    """Hard and soft forgetting: W = soft-threshold(A, τ).

    ``form="ftrl"``: A accumulates, the threshold acts on what is read (MIRAS 23).
    ``form="proximal"``: A_t = α W_{t−1} − η g_t, a proximal step rebuilt from W (MIRAS 22).

    Args:
        tau: τ ≥ 0: the gate ``"tau"``, a constant, or a param.
        smooth: MIRAS's differentiable form |z|·arctan(z/τ)/(π/2).
    """

    form: str = option("ftrl", "proximal")
    tau: float | str = quantity("token", at_least=0, init=0.01, letter="τ")
    smooth: bool = flag(False)
    decay: Decay | None = slot(None, "retention", optional=True)
    every: str = option("token", "batch")

    def link(self, A: Tensor, gates: Values) -> Tensor:
        return A if self.form == "proximal" else _soft_threshold(A, gates["tau"], self.smooth)

    def advance(self, A: Tensor, step: Tensor, log_decay: Tensor | None, gates: Values) -> Tensor:
        moved = Retention.advance(self, A, step, log_decay, gates)
        if self.form == "ftrl":
            return moved
        # A_{t-1} holds W_{t-1}: thresholding when it is made is thresholding when it is read.
        return _soft_threshold(moved, gates["tau"], self.smooth)

    @property
    def linked(self) -> bool:
        return self.form == "ftrl"

    @property
    def additive(self) -> bool:
        return self.form == "ftrl"

    def text(self) -> str:
        t = figure(self.symbol("tau"))
        return f"soft({'Z_t' if self.form == 'proximal' else 'A_t'}, {t})"

    def moves(
        self, old: str, new: str, step: Terms, *, at: str = "t", vector: bool = False
    ) -> tuple[str, ...]:
        if self.form == "ftrl":
            return super().moves(old, new, step, at=at, vector=vector)
        kept = Term((old,)) if self.decay is None else self.decay.on(old, at, vector=vector)
        return (f"Z_t = {written((kept, *step))}", f"{new} = {self.text()}")

    def notes(self) -> tuple[str, ...]:
        if self.smooth:
            soft = "soft(z, τ) = |z| arctan(z/τ) 2/π"
        else:
            soft = "soft(z, τ) = sign(z) max(|z| − τ, 0)"
        return (soft, *super().notes())


_BREGMAN: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "softplus": functional.softplus,
}


@member
class Bregman(_Linked):
    """W = (f')⁻¹(A) entry by entry: mirror descent with a Bregman divergence (MIRAS variant 5).

    Args:
        map: (f')⁻¹. ``"sigmoid"`` (f' = logit) keeps entries in (0, 1), ``"tanh"`` in (−1, 1),
            ``"exp"`` and ``"softplus"`` positive.
    """

    map: str = option("sigmoid", *_BREGMAN)
    decay: Decay | None = slot(None, "retention", optional=True)
    every: str = option("token", "batch")

    def link(self, A: Tensor, gates: Values) -> Tensor:
        return _BREGMAN[self.map](A)

    def text(self) -> str:
        return f"{self.map}(A_t)"


def _chi_square(y: Tensor) -> Tensor:
    return functional.relu(1 + 0.5 * y)


# Each: g = (f')⁻¹, and g(y*) = 1 at y* = f'(1). Beyond its domain g is +inf, as a limit.
_DIVERGENCES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "kl": (lambda y: (y - 1).exp(), 1.0),
    "reverse_kl": (lambda y: torch.where(y < 0, -1 / torch.where(y < 0, y, -1.0), torch.inf), -1.0),
    "hellinger": (
        lambda y: torch.where(y < 1, (1 - torch.where(y < 1, y, 0.0)).pow(-2), torch.inf),
        0.0,
    ),
    "chi_square": (_chi_square, 0.0),
}


@member
class FDivergence(_Linked):
    """W_t = W̄ ⊙ g(−ζ − η∇), ζ such that ‖W_t‖₁ = c (MIRAS 18), rebuilt from W.

    g = (f')⁻¹. With a decay, W̄ = c·W_{t−1}^α/‖W_{t−1}^α‖₁, so that f = KL is exactly `Simplex`'s
    recurrence. A holds W itself; A₀ is made a measure by c|A₀|/‖A₀‖₁ (uniform where A₀ = 0).

    Args:
        kind: ``"kl"`` f = τ ln τ, ``"reverse_kl"`` −ln τ, ``"hellinger"`` (√τ − 1)²,
            ``"chi_square"`` (τ − 1)² (reaches exact zeros).
        scale: c. axis: ``"in"``: each row is a measure; ``"out"``: each column; ``"all"``: the
            whole matrix of each map, as in MIRAS 18.
    """

    kind: str = option("kl", *_DIVERGENCES)
    scale: float = number(1.0, above=0)
    axis: str = option("in", "out", "all")
    decay: Decay | None = slot(None, "retention", optional=True)
    every: str = option("token", "batch")

    @property
    def _dim(self) -> tuple[int, ...]:
        return _DIMS[self.axis]

    def link(self, A: Tensor, gates: Values) -> Tensor:
        size = A.abs()
        total = size.sum(self._dim, keepdim=True)
        zero = total == 0
        # Zeros say nothing about where the measure sits: start uniform.
        uniform = self.scale / math.prod(A.shape[dim] for dim in self._dim)
        return torch.where(zero, uniform, self.scale * size / torch.where(zero, 1.0, total))

    def advance(self, A: Tensor, step: Tensor, log_decay: Tensor | None, gates: Values) -> Tensor:
        W = self.link(A, gates)
        if log_decay is not None:
            alpha = log_decay.exp().expand_as(W)
            zero = W == 0
            W = torch.where(zero, 0.0, torch.where(zero, 1.0, W).pow(alpha))
            W = self.scale * W / W.sum(self._dim, keepdim=True)
        g, one = _DIVERGENCES[self.kind]
        zeta = multiplier(W, step, g, one=one, scale=self.scale, dim=self._dim)
        return weighed(W, g, step - zeta)

    @property
    def linked(self) -> bool:
        return True

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        yield from _constant_along(self.axis, self.decay, self.title)

    def text(self) -> str:
        return "A_t"

    def moves(
        self, old: str, new: str, step: Terms, *, at: str = "t", vector: bool = False
    ) -> tuple[str, ...]:
        moved = written((*step, Term(("ζ_t",), -1.0)))
        if self.decay is None:
            return (f"{new} = {old} ⊙ g({moved})",)
        rate = figure(self.decay.symbol("rate", at))
        scale = Term((f"{old}^{rate} / ‖{old}^{rate}‖₁",)).times(self.scale)
        return (f"{new} = W̄_t ⊙ g({moved})", f"W̄_t = {scale}")

    def notes(self) -> tuple[str, ...]:
        g = {
            "kl": "exp(y − 1)",
            "reverse_kl": "−1/y",
            "hellinger": "(1 − y)⁻²",
            "chi_square": "max(1 + y/2, 0)",
        }[self.kind]
        over = {"in": "each row of the result", "out": "each column of the result"}
        what = over.get(self.axis, "each matrix of the result")
        return (f"g(y) = {g}, ζ_t such that {what} sums to {figure(self.scale)}",)


@member
class Ball(_Linked):
    """W = A · min(1, r/‖A‖_F), the projection on an L2 ball (MIRAS 4.1).

    Args:
        radius: r > 0: a constant, the gate ``"radius"``, or a param.
    """

    radius: float | str = quantity(1.0, above=0, init=1.0, letter="r")
    decay: Decay | None = slot(None, "retention", optional=True)
    every: str = option("token", "batch")

    def link(self, A: Tensor, gates: Values) -> Tensor:
        size, radius = _matrix_norm(A, 2.0), gates["radius"]
        outside = size > radius
        return torch.where(outside, A * radius / torch.where(outside, size, 1.0), A)

    def text(self) -> str:
        return f"A_t · min(1, {figure(self.symbol('radius'))}/‖A_t‖)"
