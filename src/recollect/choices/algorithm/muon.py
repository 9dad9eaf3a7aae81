"""Muon: steps orthogonalised by Newton–Schulz iterations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from recollect.choices.algorithm.base import Slots, Step
from recollect.choices.algorithm.descent import Descent, step_size
from recollect.choices.devices import without_autocast
from recollect.choices.equation_terms import Gradient, Term, Terms, render_sum
from recollect.choices.fields import flag, integer, option, quantity
from recollect.choices.gradients import HandWritten
from recollect.choices.member import RecipeError, member
from recollect.choices.multiplying import spacing

if TYPE_CHECKING:
    from recollect.choices.questions import RecipeLike

__all__ = ["Muon", "newton_schulz", "newton_schulz_flops"]


_NS = (3.4445, -4.7750, 2.0315)

_TOGETHER = 3
"""Iterations that are made of one Gram matrix: as exact in float32 as one by one. Five lose two
digits: small singular values are squared beside the largest (`docs/design/deep-engine.md`)."""


def newton_schulz(S: Tensor, steps: int) -> Tensor:
    """Push the singular values of ``S [..., out, in]`` towards 1 (ATLAS 5.1).

    X ← aX + (b XXᵀ + c (XXᵀ)²) X from S/(‖S‖_F + 1e-7), on the smaller side, in S's own dtype. Zero
    steps are the identity, without normalisation.

    Every iteration is X ← P X with a polynomial P of G = XXᵀ, so that up to three of them are one
    product Q X, Q = P_3 P_2 P_1, of matrices of the smaller side: P ← aI + bG + cG², Q ← P Q and
    G ← P (P G), because P and G commute. On a GPU, and where products take fewer bits than float32
    has, G is made anew for every iteration, whose errors would otherwise grow fourfold.

    Args:
        S: matrices ``[..., out, in]``.
        steps: iterations, ≥ 0; five are customary.

    Examples:
        >>> S = torch.diag(torch.tensor([1.0, 3.0, 9.0]))
        >>> singular = torch.linalg.svdvals(rc.algorithm.newton_schulz(S, steps=5))
        >>> bool(((singular > 0.6) & (singular < 1.3)).all())
        True
    """
    if steps == 0:
        return S
    tall = S.shape[-2] > S.shape[-1]
    wide = S.mT if tall else S
    X = wide.flatten(0, -3) if wide.dim() > 2 else wide.unsqueeze(0)
    most = _most(S)
    with without_autocast(S.device.type):
        # Of entries of at most 1 no square overflows, and none that counts is lost.
        unit = _largest(X.detach())
        unit = torch.where(unit == 0, 1.0, unit)
        X = X / unit
        # ‖X‖² is the trace of the Gram matrix, so that nothing as large as X is made to scale it.
        G = _gram(X)
        squared = G.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
        size = torch.where(squared == 0, 0.0, torch.where(squared == 0, 1.0, squared).sqrt())
        # Below 1 for zeros alone, whose slope stays within half precision too.
        least = torch.finfo(S.dtype).max ** (-1 / 3)
        scale = 1 / (size + 1e-7 / unit).clamp_min(least)
        X = torch.bmm(_together(G * scale * scale, min(steps, most)) * scale, X)
        for done in range(most, steps, most):
            X = torch.bmm(_together(_gram(X), min(steps - done, most)), X)
    X = X.view_as(wide)
    return X.mT if tall else X


def _largest(X: Tensor) -> Tensor:
    """The largest size of an entry of ``X [n, s, l]``, ``[n, 1, 1]``."""
    if X.device.type == "cpu":  # An eighth of the time that the norm takes there.
        return torch.maximum(X.amax((-2, -1), True), X.amin((-2, -1), True).neg())
    return torch.linalg.vector_norm(X, float("inf"), dim=(-2, -1), keepdim=True)


class _Gram(HandWritten):
    """XXᵀ of ``X [n, s, l]``: its gradient is one product, (Ḡ + Ḡᵀ) X, not one for each factor."""

    generate_vmap_rule = True

    @staticmethod
    def forward(X: Tensor) -> Tensor:
        return torch.bmm(X, X.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Tensor:
        (X,) = ctx.saved_tensors
        return torch.bmm(above[0] + above[0].mT, X)

    @staticmethod
    def jvp(ctx: Any, *moved: Tensor) -> Tensor:
        (X,) = ctx.saved_tensors
        half = torch.bmm(moved[0], X.mT)
        return half + half.mT


def _gram(X: Tensor) -> Tensor:
    """XXᵀ ``[n, s, s]``; in a compiled graph as autograd has it, since compilers take no jvp."""
    return torch.bmm(X, X.mT) if torch.compiler.is_compiling() else cast(Tensor, _Gram.apply(X))


def _most(S: Tensor) -> int:
    """How many iterations one Gram matrix is good for, by the bits of S's products."""
    if S.device.type != "cpu" or spacing(S.dtype) > 1e-6:
        return 1
    # No compiler follows the question.
    full = torch.compiler.is_compiling() or torch.get_float32_matmul_precision() == "highest"
    return _TOGETHER if full else 1


def _together(G: Tensor, steps: int) -> Tensor:
    """Q ``[n, s, s]``: that many iterations from X with XXᵀ = G are Q X."""
    Q = P = _polynomial(G)
    for _ in range(steps - 1):
        G = torch.bmm(P, torch.bmm(P, G))
        P = _polynomial(G)
        Q = torch.bmm(P, Q)
    return Q


def _polynomial(G: Tensor) -> Tensor:
    a, b, c = _NS
    P = torch.baddbmm(G, G, G, beta=b, alpha=c)
    P.diagonal(dim1=-2, dim2=-1).add_(a)
    return P


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """Of `newton_schulz` on one matrix: n iterations together take 4 s²l + (4n − 3) 2 s³, s ≤ l.

    As a CPU makes them, up to three together.

    Args:
        rows: of the matrix.
        columns: of the matrix.
        steps: iterations, ≥ 0.
    """
    small, large = sorted((rows, columns))
    together = [min(steps - done, _TOGETHER) for done in range(0, steps, _TOGETHER)]
    return sum(4 * small * small * large + (4 * n - 3) * 2 * small**3 for n in together)


@member
class Muon(Descent):
    """Orthogonalised momentum, per linear map and head (ATLAS 32–33).

    ``scale="outer"``: S_t = θ_t S_{t−1} − g_t, A_t = α_t A_{t−1} + η_t NS(S_t).
    ``scale="inner"``: S_t = θ_t S_{t−1} − η_t g_t, A_t = α_t A_{t−1} + NS(S_t) (D.4: η cancels).

    Orthogonalised steps have an absolute size: what they correct depends on the weights' scale and
    not on the error. With ``normalize`` the step is η_t λ_t D_t, D_t = NS(S_t), where
    λ_t D_t leaves least of the errors to first order, one λ for all maps,

        λ_t = −Σ_i w_i ⟨e_i, J_i D_t⟩ / Σ_i w_i (|J_i D_t|² + ε‖D_t‖²),   e_i = M(W°; k_i) − v_i,

    at least 0, with J_i D what D does to prediction i at W°, and w_i = γ_i^(t) over the token's
    context, or the sum of the batch's γ_i^(t) where there is one step per batch. ε = 1e-6.

    Args:
        newton_steps: Newton–Schulz iterations; 0 is the identity.
        every: ``"batch"``: tokens read W°, one update at the border of the inner batch, with the
            product of its decays and the mean of its rates.
        normalize: scale the step by λ; it needs ``scale="outer"`` and no link.

    Examples:
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.Muon(lr=1.0, momentum=0.0))
        >>> q, k, v = torch.randn(3, 1, 1, 1, 4)
        >>> y, state = rc.recall(recipe, q, k, 99 * v)  # the size of the gradient does not matter
        >>> bool(0.5 < torch.linalg.matrix_norm(state.weights[0], 2) < 1.5)
        True
    """

    batch: int = integer(1, at_least=1, size=True)
    lr: float | str = step_size(init=0.05)
    momentum: float | str = quantity("token", at_least=0, below=1, init=0.9, letter="θ")
    newton_steps: int = integer(5)  # type: ignore[assignment]
    scale: str = option("outer", "inner")
    every: str = option("token", "batch")
    normalize: bool = flag(False)

    slots = ("momentum",)

    def validate(self) -> None:
        if self.normalize and self.scale == "inner":
            raise RecipeError(
                "algorithm.Muon(normalize=True) scales what stands outside of NS(S_t), and with "
                "scale='inner' nothing does: use scale='outer'"
            )

    @property
    def normalizes(self) -> bool:  # type: ignore[override]
        return False

    @property
    def searches(self) -> bool:  # type: ignore[override]
        return self.normalize

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return self.newton_steps == 0 and not self.normalize

    def update(self, slots: Slots, step: Step) -> tuple[dict[str, Tensor], Tensor]:
        inner = step.lr * step.gradient if self.scale == "inner" else step.gradient
        S = step.momentum * slots["momentum"] - inner
        moved = newton_schulz(S, self.newton_steps)
        return {"momentum": S}, step.lr * moved if self.scale == "outer" else moved

    @property
    def accumulates(self) -> str:
        return "gradients" if self.scale == "outer" else "steps"

    def settle(self, slots: Slots, lr: Tensor) -> Tensor:
        moved = self.direction(slots)
        return lr * moved if self.scale == "outer" else moved

    def direction(self, slots: Slots) -> Tensor:
        return newton_schulz(slots["momentum"], self.newton_steps)

    @property
    def curvature(self) -> bool:  # type: ignore[override]
        return self.newton_steps > 0

    def moves(self, gradient: Gradient, at: str = "t") -> tuple[tuple[str, ...], Terms]:
        kept = Term(("S_(t−1)",)).times(self.symbol("momentum"))
        inner: float | str = self.pace() if self.scale == "inner" else 1.0
        line = render_sum((kept, *gradient.scaled(inner, -1.0, compact=True)))
        moved = Term((f"NS{self.newton_steps}(S_t)" if self.newton_steps else "S_t",))
        if self.normalize:
            moved = moved.times("λ_t")
        return (f"S_t = {line}",), (moved.times(self.pace(at)) if self.scale == "outer" else moved,)

    def notes(self) -> tuple[str, ...]:
        if self.newton_steps == 0:
            return ()
        steps = self.newton_steps
        return (f"NS{steps}: {steps} Newton–Schulz step{'s' * (steps > 1)}, per map and head",)

    def requires(self, recipe: RecipeLike) -> Iterator[str]:
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
