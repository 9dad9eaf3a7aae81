"""Retentions with a mirror map or a projection: Lq, simplex, elastic net, Bregman, ball."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.equation_terms import Term, Terms, format_number, power, render_sum
from recollect.choices.member import member
from recollect.choices.retention.base import Decay, Retention, Values
from recollect.fields import flag, number, option, quantity, slot
from recollect.numerics import safe_pow

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["DIMS", "Ball", "Bregman", "ElasticNet", "Lq", "Simplex", "decay_axis_conflicts"]


def _power(x: Tensor, exponent: float) -> Tensor:
    """Return sign(x)|x|^exponent, with a finite gradient at 0."""
    if exponent == 3:
        return x.pow(3)
    return x.sign() * safe_pow(x.abs(), exponent)


def decay_axis_conflicts(axis: str, decay: Decay | None, owner: str) -> Iterator[str]:
    """Yield the reason why a decay does not preserve sums along an axis."""
    allowed = {"in": ("head", "value"), "out": ("head", "key"), "all": ("head",)}[axis]
    if decay is not None and decay.per not in allowed:
        yield (
            f"{owner}(axis={axis!r}) normalises along that axis, so α must be constant along it, "
            f"and Decay(per={decay.per!r}) is not: use per='head'"
        )


DIMS = {"in": (-1,), "out": (-2,), "all": (-2, -1)}


@member
class Lq(Retention):
    """An L_q retention gate (MIRAS variant 4).

    ``form="mirror"``: W = sign(A)|A|^{q−1}/‖A‖_q^{q−2}, the mirror map of ½‖·‖²_{q'}, q' = q/(q−1).
    ``form="as_published"``: W = A/‖A‖_q^{q−2}, as MIRAS and MONETA print it. Its degree is 3 − q,
    so it diverges as A → 0, and the norm has a lower bound. Norms are per map and head.

    Args:
        q: exponent > 1; 2 is the identity.
        form: ``"mirror"`` or ``"as_published"``.
        floor: lower bound of ‖A‖_q in the published form.

    Examples:
        >>> A = torch.tensor([[1.0, 2.0]])
        >>> rc.retention.Lq(q=2).link(A, {}), rc.retention.Lq(q=4).link(A, {})
        (tensor([[1., 2.]]), tensor([[0.2425, 1.9403]]))
    """

    shown = ("q",)

    q: float = number(4.0, above=1)
    form: str = option("mirror", "as_published")
    floor: float = number(1e-3, above=0)
    decay: Decay | None = slot(None, "retention", optional=True)
    link_every: str = option("token", "batch")

    def link(self, A: Tensor, gates: Values) -> Tensor:
        if self.q == 2:
            return A
        if self.form == "as_published":
            size = _matrix_norm(A, self.q).clamp_min(self.floor)
            return A / size.pow(self.q - 2)
        # The map is homogeneous of degree 1. Scaling by max|A| avoids overflow of float32 powers.
        scale = A.detach().abs().amax(dim=(-2, -1), keepdim=True)
        scale = torch.where(scale == 0, 1.0, scale)
        u = A / scale
        size = _matrix_norm(u, self.q)
        size = torch.where(size == 0, 1.0, size)
        return scale * _power(u, self.q - 1) / size.pow(self.q - 2)

    def step_gain(self, A: Tensor, G: Tensor, gates: Values) -> Tensor:
        """Return (q − 1)‖G‖_q², the smoothness of ½‖·‖_q², or |G|²/‖A‖_q^{q−2} as published.

        The published form treats its norm as a constant, because ⟨G, J G⟩ changes sign. For q < 2
        the first formula is a lower bound, and the result is the larger of it and ⟨G, J G⟩.
        """
        if self.form == "as_published":
            size = _matrix_norm(A, self.q).clamp_min(self.floor).pow(self.q - 2)
            return G.square().sum((-2, -1)) / size[..., 0, 0]
        bound = (self.q - 1) * _norm(G, self.q, (-2, -1)).square()[..., 0, 0]
        return bound if self.q >= 2 else torch.maximum(bound, super().step_gain(A, G, gates))

    def rank_one_step_gain(
        self, A: Tensor, h: Tensor, delta: Tensor, gates: Values
    ) -> Tensor | None:
        if self.form == "as_published":
            size = _matrix_norm(A, self.q).clamp_min(self.floor).pow(self.q - 2)
            return h.square().sum(-1) * delta.square().sum(-1) / size[..., 0]
        if self.q < 2:
            return None
        sizes = _norm(h, self.q, (-1,)) * _norm(delta, self.q, (-1,))
        return (self.q - 1) * sizes.square()[..., 0]

    def link_text(self) -> str:
        if self.form == "as_published":
            return f"A_t / ‖A_t‖_{format_number(self.q)}" + (
                f"^{format_number(self.q - 2)}" if self.q != 3 else ""
            )
        size = f"‖A_t‖_{format_number(self.q)}{power(self.q - 2)}"
        return f"sign(A_t)|A_t|{power(self.q - 1)} / {size}"

    def notes(self) -> tuple[str, ...]:
        floor = (
            (f"‖A_t‖_{format_number(self.q)} is at least {format_number(self.floor)}",)
            if self.form == "as_published"
            else ()
        )
        return (*floor, *super().notes())


def _matrix_norm(A: Tensor, q: float) -> Tensor:
    """Return the entrywise ‖A‖_q per matrix ``[..., 1, 1]``, with gradient 0 at a zero matrix."""
    return _norm(A, q, (-2, -1))


def _norm(A: Tensor, q: float, dim: tuple[int, ...]) -> Tensor:
    """Return the entrywise ‖A‖_q over ``dim`` (kept with size 1), with gradient 0 at zero.

    The norm is homogeneous. Dividing by max|A| avoids overflow of float32 powers.
    """
    scale = A.detach().abs().amax(dim=dim, keepdim=True)
    scale = torch.where(scale == 0, 1.0, scale)
    u = A / scale
    # Squares for q = 2 and 4: general powers cost ten times as much.
    powers = u.square().square() if q == 4 else u.square() if q == 2 else _power(u.abs(), q)
    total = powers.sum(dim=dim, keepdim=True)
    return scale * safe_pow(total, 1 / q)


VARIANCE_SHRINKAGE = 0.999


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
    link_every: str = option("token", "batch")

    def link(self, A: Tensor, gates: Values) -> Tensor:
        if self.axis == "all":
            return self.scale * A.flatten(-2).softmax(-1).view_as(A)
        return self.scale * A.softmax(-1 if self.axis == "in" else -2)

    step_gain_matmuls = 2

    def step_gain(self, A: Tensor, G: Tensor, gates: Values) -> Tensor:
        """Return Σ W G² − 0.999 (Σ W G)²/c over each sum: the variance of G and a small term.

        The small term keeps the gain positive if one entry has all of a sum.
        """
        dim, W = DIMS[self.axis], self.link(A, gates)
        means = (W * G).sum(dim).square()
        total = (W * G.square()).sum((-2, -1))
        return total - VARIANCE_SHRINKAGE / self.scale * (
            means if self.axis == "all" else means.sum(-1)
        )

    def rank_one_step_gain(self, A: Tensor, h: Tensor, delta: Tensor, gates: Values) -> Tensor:
        W = self.link(A, gates)
        delta_squared, h_squared = delta.square(), h.square()
        total = ((h_squared @ W.mT) * delta_squared).sum(-1)
        if self.axis == "in":
            means = ((h @ W.mT).square() * delta_squared).sum(-1)
        elif self.axis == "out":
            means = ((delta @ W).square() * h_squared).sum(-1)
        else:
            means = ((h @ W.mT) * delta).sum(-1).square()
        return total - VARIANCE_SHRINKAGE / self.scale * means

    links_after_first_token = True

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        yield from decay_axis_conflicts(self.axis, self.decay, self.title)

    def link_text(self) -> str:
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

    ``form="ftrl"``: A accumulates, and the threshold applies to reads (MIRAS 23).
    ``form="proximal"``: A_t = α W_{t−1} − η g_t, a proximal step rebuilt from W (MIRAS 22).

    Args:
        form: ``"ftrl"`` or ``"proximal"``.
        tau: τ ≥ 0: the gate ``"tau"``, a constant, or a param.
        smooth: whether to use MIRAS's differentiable form |z|·arctan(z/τ)/(π/2).

    Examples:
        >>> A = torch.tensor([[0.3, -2.0]])
        >>> rc.retention.ElasticNet().link(A, {"tau": torch.tensor([[0.5]])})
        tensor([[ 0.0000, -1.5000]])
    """

    form: str = option("ftrl", "proximal")
    tau: float | str = quantity("input", at_least=0, init=0.01, letter="τ")
    smooth: bool = flag(False)
    decay: Decay | None = slot(None, "retention", optional=True)
    link_every: str = option("token", "batch")

    def link(self, A: Tensor, gates: Values) -> Tensor:
        return A if self.form == "proximal" else _soft_threshold(A, gates["tau"], self.smooth)

    def advance(self, A: Tensor, step: Tensor, log_decay: Tensor | None, gates: Values) -> Tensor:
        updated = Retention.advance(self, A, step, log_decay, gates)
        if self.form == "ftrl":
            return updated
        # The state of the proximal form is W itself, with the threshold applied.
        return _soft_threshold(updated, gates["tau"], self.smooth)

    link_lipschitz = 1.0  # type: ignore[assignment]

    @property
    def has_link(self) -> bool:
        return self.form == "ftrl"

    @property
    def is_additive(self) -> bool:
        return self.form == "ftrl"

    def link_text(self) -> str:
        t = format_number(self.symbol("tau"))
        return f"soft({'Z_t' if self.form == 'proximal' else 'A_t'}, {t})"

    def state_equations(
        self, old: str, new: str, step: Terms, *, at: str = "t", vector: bool = False
    ) -> tuple[str, ...]:
        if self.form == "ftrl":
            return super().state_equations(old, new, step, at=at, vector=vector)
        decayed = (
            Term((old,)) if self.decay is None else self.decay.decayed_text(old, at, vector=vector)
        )
        return (f"Z_t = {render_sum((decayed, *step))}", f"{new} = {self.link_text()}")

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
_LIPSCHITZ = {"sigmoid": 0.25, "tanh": 1.0, "softplus": 1.0}


@member
class Bregman(Retention):
    """W = (f')⁻¹(A) entry by entry: mirror descent with a Bregman divergence (MIRAS variant 5).

    Args:
        link_function: (f')⁻¹. Entries of W are in (0, 1) for ``"sigmoid"`` (f' = logit), in
            (−1, 1) for ``"tanh"``, and positive for ``"exp"`` and ``"softplus"``.

    Examples:
        >>> rc.retention.Bregman(link_function="tanh").link(torch.tensor([[0.5, -99.0]]), {})
        tensor([[ 0.4621, -1.0000]])
    """

    link_function: str = option("sigmoid", *_BREGMAN)
    decay: Decay | None = slot(None, "retention", optional=True)
    link_every: str = option("token", "batch")

    def link(self, A: Tensor, gates: Values) -> Tensor:
        return _BREGMAN[self.link_function](A)

    @property
    def link_lipschitz(self) -> float | None:
        return _LIPSCHITZ.get(self.link_function)

    @property
    def step_gain_matmuls(self) -> int:  # type: ignore[override]
        return int(self.link_lipschitz is None)

    def step_gain(self, A: Tensor, G: Tensor, gates: Values) -> Tensor:
        """Return L |G|² for slopes of at most L, or Σ (1 + W) G² for ``"exp"``, with slope W."""
        if self.link_lipschitz is not None:
            return super().step_gain(A, G, gates)
        return ((1 + self.link(A, gates)) * G.square()).sum((-2, -1))

    def rank_one_step_gain(
        self, A: Tensor, h: Tensor, delta: Tensor, gates: Values
    ) -> Tensor | None:
        if self.link_lipschitz is not None:
            return super().rank_one_step_gain(A, h, delta, gates)
        return ((h.square() @ (1 + self.link(A, gates)).mT) * delta.square()).sum(-1)

    def link_text(self) -> str:
        return f"{self.link_function}(A_t)"


@member
class Ball(Retention):
    """W = A · min(1, r/‖A‖_F), the projection onto an L2 ball (MIRAS 4.1).

    Args:
        radius: r > 0: a constant, the gate ``"radius"``, or a param.

    Examples:
        >>> A = torch.tensor([[3.0, 4.0]])  # ‖A‖_F = 5
        >>> rc.retention.Ball().link(A, {"radius": torch.tensor([[1.0]])})
        tensor([[0.6000, 0.8000]])
    """

    radius: float | str = quantity(1.0, above=0, init=1.0, letter="r")
    decay: Decay | None = slot(None, "retention", optional=True)
    link_every: str = option("token", "batch")

    def link(self, A: Tensor, gates: Values) -> Tensor:
        size, radius = _matrix_norm(A, 2.0), gates["radius"]
        outside = size > radius
        return torch.where(outside, A * radius / torch.where(outside, size, 1.0), A)

    link_lipschitz = 1.0  # type: ignore[assignment]

    def link_text(self) -> str:
        return f"A_t · min(1, {format_number(self.symbol('radius'))}/‖A_t‖)"
