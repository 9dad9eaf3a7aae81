"""Retentions with a mirror map or a projection: Lq, simplex, elastic net, Bregman, ball.

A retention is a decay α and, for most members, a mirror map ``link`` from the dual state A to the
weights W that are read. Members that rebuild A from W override ``advance``; see also `divergence`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.equation_terms import Term, Terms, format_number, power, render_sum
from recollect.choices.fields import flag, number, option, quantity, slot
from recollect.choices.member import member
from recollect.choices.retention.base import Decay, Retention, Values

if TYPE_CHECKING:
    from recollect.choices.questions import RecipeLike

__all__ = ["DIMS", "Ball", "Bregman", "ElasticNet", "Lq", "Simplex", "constant_along"]


def _power(x: Tensor, exponent: float) -> Tensor:
    """sign(x)|x|^exponent with a finite gradient at 0."""
    if exponent == 3:
        return x.pow(3)
    zero = x == 0
    return torch.where(zero, 0.0, x.sign() * torch.where(zero, 1.0, x.abs()).pow(exponent))


def constant_along(axis: str, decay: Decay | None, owner: str) -> Iterator[str]:
    """Why a decay does not go with sums that are kept along an axis."""
    alike = {"in": ("head", "value"), "out": ("head", "key"), "all": ("head",)}[axis]
    if decay is not None and decay.per not in alike:
        yield (
            f"{owner}(axis={axis!r}) normalises along that axis, so α must be constant along it, "
            f"and Decay(per={decay.per!r}) is not: use per='head'"
        )


DIMS = {"in": (-1,), "out": (-2,), "all": (-2, -1)}


@member
class Lq(Retention):
    """An L_q retention gate (MIRAS variant 4).

    ``form="mirror"``: W = sign(A)|A|^{q−1}/‖A‖_q^{q−2}, the mirror map of ½‖·‖²_{q'}, q' = q/(q−1).
    ``form="printed"``: W = A/‖A‖_q^{q−2}, MIRAS's and MONETA's print: of degree 3 − q, so it blows
    up as A → 0; the norm is floored. Norms act per map and head.

    Args:
        q: > 1; 2 is the identity.
        floor: smallest ‖A‖_q of the printed form.

    Examples:
        >>> A = torch.tensor([[1.0, 2.0]])
        >>> rc.retention.Lq(q=2).link(A, {}), rc.retention.Lq(q=4).link(A, {})
        (tensor([[1., 2.]]), tensor([[0.2425, 1.9403]]))
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

    def gain(self, A: Tensor, G: Tensor, gates: Values) -> Tensor:
        """(q − 1)‖G‖_q², by which ½‖·‖_q² is smooth; |G|²/‖A‖_q^{q−2} of the printed form.

        The printed form takes its norm as it stands: that of the mirror map is flat at zeros of A
        and this one's changes sign. For q < 2 it is a bound below, so ⟨G, J G⟩ where that is more.
        """
        if self.form == "printed":
            size = _matrix_norm(A, self.q).clamp_min(self.floor).pow(self.q - 2)
            return G.square().sum((-2, -1)) / size[..., 0, 0]
        bound = (self.q - 1) * _norm(G, self.q, (-2, -1)).square()[..., 0, 0]
        return bound if self.q >= 2 else torch.maximum(bound, super().gain(A, G, gates))

    def rank_one_gain(self, A: Tensor, h: Tensor, delta: Tensor, gates: Values) -> Tensor | None:
        if self.form == "printed":
            size = _matrix_norm(A, self.q).clamp_min(self.floor).pow(self.q - 2)
            return h.square().sum(-1) * delta.square().sum(-1) / size[..., 0]
        if self.q < 2:
            return None
        sizes = _norm(h, self.q, (-1,)) * _norm(delta, self.q, (-1,))
        return (self.q - 1) * sizes.square()[..., 0]

    def text(self) -> str:
        if self.form == "printed":
            return f"A_t / ‖A_t‖_{format_number(self.q)}" + (
                f"^{format_number(self.q - 2)}" if self.q != 3 else ""
            )
        size = f"‖A_t‖_{format_number(self.q)}{power(self.q - 2)}"
        return f"sign(A_t)|A_t|{power(self.q - 1)} / {size}"

    def notes(self) -> tuple[str, ...]:
        floor = (
            (f"‖A_t‖_{format_number(self.q)} is at least {format_number(self.floor)}",)
            if self.form == "printed"
            else ()
        )
        return (*floor, *super().notes())


def _matrix_norm(A: Tensor, q: float) -> Tensor:
    """Entrywise ‖A‖_q per matrix, kept, with gradient 0 at a zero matrix."""
    return _norm(A, q, (-2, -1))


def _norm(A: Tensor, q: float, dim: tuple[int, ...]) -> Tensor:
    """Entrywise ‖A‖_q over ``dim``, kept, with gradient 0 at zero.

    The norm is homogeneous: dividing by max|A| first keeps float32 powers in range.
    """
    scale = A.detach().abs().amax(dim=dim, keepdim=True)
    zero = scale == 0
    scale = torch.where(zero, 1.0, scale)
    u = A / scale
    # Squares of squares where they do: general powers cost ten times as much.
    powers = u.square().square() if q == 4 else u.square() if q == 2 else _power(u.abs(), q)
    total = powers.sum(dim=dim, keepdim=True)
    return torch.where(zero, 0.0, scale * torch.where(zero, 1.0, total).pow(1 / q))


_CENTRED = 0.999


@member
class Simplex(Retention):
    """W = c · softmax(A) on a scaled simplex: KL retention (MIRAS 21, MEMORA).

    ``softmax(α log W − η g)`` is exactly this recurrence when α is constant along ``axis``.

    Args:
        scale: c, the sum along ``axis``.
        axis: ``"in"``: every row sums to c; ``"out"``: every column; ``"all"``: the whole matrix
            of each map, Σ_jl W_jl = c (MIRAS 19–20).

    Examples:
        >>> A = torch.tensor([[0.0, 0.0], [0.0, 9.0]])
        >>> rc.retention.Simplex().link(A, {}).sum(-1)
        tensor([1., 1.])
    """

    scale: float = number(1.0, above=0)
    axis: str = option("in", "out", "all")
    decay: Decay | None = slot(None, "retention", optional=True)
    every: str = option("token", "batch")

    def link(self, A: Tensor, gates: Values) -> Tensor:
        if self.axis == "all":
            return self.scale * A.flatten(-2).softmax(-1).view_as(A)
        return self.scale * A.softmax(-1 if self.axis == "in" else -2)

    gain_products = 2

    def gain(self, A: Tensor, G: Tensor, gates: Values) -> Tensor:
        """Σ W G² − (Σ W G)²/c over each sum, the variance of G, and a thousandth of (Σ W G)²/c.

        The thousandth stands in where a sum has come to rest on one entry, which no step moves.
        """
        dim, W = DIMS[self.axis], self.link(A, gates)
        means = (W * G).sum(dim).square()
        total = (W * G.square()).sum((-2, -1))
        return total - _CENTRED / self.scale * (means if self.axis == "all" else means.sum(-1))

    def rank_one_gain(self, A: Tensor, h: Tensor, delta: Tensor, gates: Values) -> Tensor:
        W = self.link(A, gates)
        right, left = delta.square(), h.square()
        total = ((left @ W.mT) * right).sum(-1)
        if self.axis == "in":
            means = ((h @ W.mT).square() * right).sum(-1)
        elif self.axis == "out":
            means = ((delta @ W).square() * left).sum(-1)
        else:
            means = ((h @ W.mT) * delta).sum(-1).square()
        return total - _CENTRED / self.scale * means

    @property
    def settles_first(self) -> bool:
        return True

    def requires(self, recipe: RecipeLike) -> Iterator[str]:
        yield from super().requires(recipe)
        yield from constant_along(self.axis, self.decay, self.title)

    def text(self) -> str:
        return f"{'' if self.scale == 1 else f'{format_number(self.scale)}·'}softmax(A_t)"

    def notes(self) -> tuple[str, ...]:
        over = {"in": "rows", "out": "columns", "all": "all entries of each matrix"}[self.axis]
        return (f"softmax over {over}", *super().notes())


def _soft_threshold(A: Tensor, tau: Tensor, smooth: bool) -> Tensor:
    if smooth:
        return A.abs() * torch.atan(A / tau.clamp_min(torch.finfo(A.dtype).tiny)) * (2 / torch.pi)
    return A.sign() * functional.relu(A.abs() - tau)


@member
class ElasticNet(Retention):
    """Hard and soft forgetting: W = soft-threshold(A, τ).

    ``form="ftrl"``: A accumulates, the threshold acts on what is read (MIRAS 23).
    ``form="proximal"``: A_t = α W_{t−1} − η g_t, a proximal step rebuilt from W (MIRAS 22).

    Args:
        tau: τ ≥ 0: the gate ``"tau"``, a constant, or a param.
        smooth: MIRAS's differentiable form |z|·arctan(z/τ)/(π/2).

    Examples:
        >>> A = torch.tensor([[0.3, -2.0]])
        >>> rc.retention.ElasticNet().link(A, {"tau": torch.tensor([[0.5]])})
        tensor([[ 0.0000, -1.5000]])
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
    def steepest(self) -> float:
        return 1.0

    @property
    def linked(self) -> bool:
        return self.form == "ftrl"

    @property
    def additive(self) -> bool:
        return self.form == "ftrl"

    def text(self) -> str:
        t = format_number(self.symbol("tau"))
        return f"soft({'Z_t' if self.form == 'proximal' else 'A_t'}, {t})"

    def moves(
        self, old: str, new: str, step: Terms, *, at: str = "t", vector: bool = False
    ) -> tuple[str, ...]:
        if self.form == "ftrl":
            return super().moves(old, new, step, at=at, vector=vector)
        kept = Term((old,)) if self.decay is None else self.decay.on(old, at, vector=vector)
        return (f"Z_t = {render_sum((kept, *step))}", f"{new} = {self.text()}")

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
_STEEPEST = {"sigmoid": 0.25, "tanh": 1.0, "softplus": 1.0}


@member
class Bregman(Retention):
    """W = (f')⁻¹(A) entry by entry: mirror descent with a Bregman divergence (MIRAS variant 5).

    Args:
        map: (f')⁻¹. ``"sigmoid"`` (f' = logit) keeps entries in (0, 1), ``"tanh"`` in (−1, 1),
            ``"exp"`` and ``"softplus"`` positive.

    Examples:
        >>> rc.retention.Bregman(map="tanh").link(torch.tensor([[0.5, -99.0]]), {})
        tensor([[ 0.4621, -1.0000]])
    """

    map: str = option("sigmoid", *_BREGMAN)
    decay: Decay | None = slot(None, "retention", optional=True)
    every: str = option("token", "batch")

    def link(self, A: Tensor, gates: Values) -> Tensor:
        return _BREGMAN[self.map](A)

    @property
    def steepest(self) -> float | None:
        return _STEEPEST.get(self.map)

    @property
    def gain_products(self) -> int:  # type: ignore[override]
        return int(self.steepest is None)

    def gain(self, A: Tensor, G: Tensor, gates: Values) -> Tensor:
        """L |G|² for slopes of at most L; Σ (1 + W) G² of ``"exp"``, whose slope is W."""
        if self.steepest is not None:
            return super().gain(A, G, gates)
        return ((1 + self.link(A, gates)) * G.square()).sum((-2, -1))

    def rank_one_gain(self, A: Tensor, h: Tensor, delta: Tensor, gates: Values) -> Tensor | None:
        if self.steepest is not None:
            return super().rank_one_gain(A, h, delta, gates)
        return ((h.square() @ (1 + self.link(A, gates)).mT) * delta.square()).sum(-1)

    def text(self) -> str:
        return f"{self.map}(A_t)"


@member
class Ball(Retention):
    """W = A · min(1, r/‖A‖_F), the projection on an L2 ball (MIRAS 4.1).

    Args:
        radius: r > 0: a constant, the gate ``"radius"``, or a param.

    Examples:
        >>> A = torch.tensor([[3.0, 4.0]])  # ‖A‖_F = 5
        >>> rc.retention.Ball().link(A, {"radius": torch.tensor([[1.0]])})
        tensor([[0.6000, 0.8000]])
    """

    radius: float | str = quantity(1.0, above=0, init=1.0, letter="r")
    decay: Decay | None = slot(None, "retention", optional=True)
    every: str = option("token", "batch")

    def link(self, A: Tensor, gates: Values) -> Tensor:
        size, radius = _matrix_norm(A, 2.0), gates["radius"]
        outside = size > radius
        return torch.where(outside, A * radius / torch.where(outside, size, 1.0), A)

    @property
    def steepest(self) -> float:
        return 1.0

    def text(self) -> str:
        return f"A_t · min(1, {format_number(self.symbol('radius'))}/‖A_t‖)"
