"""Muon: steps orthogonalised by Newton–Schulz iterations."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.algorithm.base import Slots, Step
from recollect.choices.algorithm.descent import Descent, rate_quantity
from recollect.choices.autograd import gram
from recollect.choices.equation_terms import Gradient, Term, Terms, render_sum, sum_over_batch
from recollect.choices.matmul_precision import effective_eps, is_full_precision
from recollect.choices.member import member
from recollect.choices.runtime import without_autocast
from recollect.fields import flag, integer, option, quantity
from recollect.messages import RecipeError
from recollect.numerics import safe_sqrt

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["Muon", "newton_schulz", "newton_schulz_flops"]


NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)

MAX_FUSED = 3
"""Maximum number of iterations that are computed from one Gram matrix, without loss of accuracy in
float32. Five iterations lose two digits (`docs/design/deep-engine.md`)."""

NEGLIGIBLE = 5e-12
"""Largest results of rows that are 0 in float32 on a CPU. Each iteration multiplies small singular
values by the first of `NS_COEFFICIENTS`."""


def newton_schulz(S: Tensor, steps: int) -> Tensor:
    """Push the singular values of ``S [..., out, in]`` towards 1 (ATLAS 5.1).

    X ← aX + (b XXᵀ + c (XXᵀ)²) X from S/(‖S‖_F + 1e-7), on the smaller side, in S's own dtype. Zero
    steps are the identity, without normalisation.

    Every iteration is X ← P X with a polynomial P of G = XXᵀ. Up to three iterations are therefore
    one product Q X with Q = P_3 P_2 P_1: P ← aI + bG + cG², Q ← P Q and G ← P (P G), because P and
    G commute. On a GPU, and if products have fewer bits than float32, every iteration computes G
    from X. Otherwise its errors would grow fourfold.

    Args:
        S: matrices ``[..., out, in]``.
        steps: number of iterations, ≥ 0; usually five.

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
    max_fused = _fusable_iterations(S)
    with without_autocast(S.device.type):
        X, unit = _divided_by_largest(X, NEGLIGIBLE * NS_COEFFICIENTS[0] ** -steps)
        # ‖X‖² is the trace of the Gram matrix, which saves an intermediate of the size of X.
        G = gram(X)
        norm = safe_sqrt(G.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None])
        # Only zeros have a norm below 1. The minimum keeps their derivative finite in float16.
        min_norm = torch.finfo(S.dtype).max ** (-1 / 3)
        scale = 1 / (norm + 1e-7 / unit).clamp_min(min_norm)
        X = torch.bmm(_fused_iterations(G * scale * scale, min(steps, max_fused)) * scale, X)
        for done in range(max_fused, steps, max_fused):
            X = torch.bmm(_fused_iterations(gram(X), min(steps - done, max_fused)), X)
    X = X.view_as(wide)
    return X.mT if tall else X


def _divided_by_largest(X: Tensor, negligible: float) -> tuple[Tensor, Tensor]:
    """Return ``X [n, s, l]`` over its largest absolute value, and this value (1 if X is 0).

    Squares of entries of at most 1 do not overflow. Products of rows below ``negligible`` would be
    subnormal numbers, which a CPU multiplies many times slower. These rows become 0, and keep their
    gradient.
    """
    values, on_cpu = X.detach(), X.device.type == "cpu"
    if on_cpu:  # eight times faster than the norm
        rows = torch.maximum(values.amax(-1, True), values.amin(-1, True).neg())
        unit = rows.amax(-2, True)
    else:
        rows = unit = torch.linalg.vector_norm(values, inf, dim=(-2, -1), keepdim=True)
    unit = torch.where(unit == 0, 1.0, unit)
    X = X / unit
    if on_cpu and X.dtype == torch.float32:
        is_negligible = (rows < negligible * unit).to(X.dtype)
        X = torch.addcmul(X, X.detach(), is_negligible, value=-1)
    return X, unit


def _fusable_iterations(S: Tensor) -> int:
    """Return the number of iterations per Gram matrix for the precision of products of S."""
    if S.device.type != "cpu" or effective_eps(S.dtype) > 1e-6:
        return 1
    # Compilers cannot trace the query.
    is_full = torch.compiler.is_compiling() or is_full_precision("cpu")
    return MAX_FUSED if is_full else 1


def _fused_iterations(G: Tensor, steps: int) -> Tensor:
    """Return Q ``[n, s, s]``, so that Q X is the result of the iterations from X with XXᵀ = G."""
    Q = P = _polynomial(G)
    for _ in range(steps - 1):
        G = torch.bmm(P, torch.bmm(P, G))
        P = _polynomial(G)
        Q = torch.bmm(P, Q)
    return Q


def _polynomial(G: Tensor) -> Tensor:
    a, b, c = NS_COEFFICIENTS
    P = torch.baddbmm(G, G, G, beta=b, alpha=c)
    P.diagonal(dim1=-2, dim2=-1).add_(a)
    return P


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """Return the FLOPs of `newton_schulz` on one matrix, with fused iterations as on a CPU.

    n fused iterations take 4 s²l + (4n − 3) 2 s³ for sides s ≤ l.
    """
    small, large = sorted((rows, columns))
    fused = [min(steps - done, MAX_FUSED) for done in range(0, steps, MAX_FUSED)]
    return sum(4 * small * small * large + (4 * n - 3) * 2 * small**3 for n in fused)


@member
class Muon(Descent):
    """Orthogonalised momentum, per linear map and head (ATLAS 32–33).

    ``lr_position="outside"``: S_t = θ_t S_{t−1} − g_t, A_t = α_t A_{t−1} + η_t NS(S_t).
    ``lr_position="inside"``: S_t = θ_t S_{t−1} − η_t g_t, A_t = α_t A_{t−1} + NS(S_t) (D.4: η
    cancels).

    Orthogonalised steps have an absolute size: their effect depends on the scale of the weights and
    not on the error. With ``normalized_steps`` the step is η_t λ_t D_t with D_t = NS(S_t). One λ_t
    for all maps minimises the errors to first order,

        λ_t = −Σ_i w_i ⟨e_i, J_i D_t⟩ / Σ_i w_i (|J_i D_t|² + ε‖D_t‖²),   e_i = M(W°; k_i) − v_i,

    and is at least 0. J_i D is the change of prediction i along D at W°, and ε = 1e-6. The weights
    w_i = γ_i^(t) are those of the token's context. For one step per batch they are summed over the
    batch.

    Args:
        ns_steps: Newton–Schulz iterations; 0 is the identity.
        update_every: ``"batch"`` for one update at the end of an inner batch, whose tokens read
            W°. It uses the product of the batch's decays and the mean of its rates.
        momentum_every: ``"batch"`` for a momentum from batch to batch instead of token to token:
            S = θ̄ S° − Σ_s g_s over the inner batch (``"inside"``: −Σ_s η_s g_s), with θ̄ the mean
            of its θ_s. It needs ``update_every="batch"``.
        normalized_steps: whether to scale the step by λ, which needs ``lr_position="outside"`` and
            no link.

    Examples:
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.Muon(lr=1.0, momentum=0.0))
        >>> q, k, v = torch.randn(3, 1, 1, 1, 4)
        >>> y, state = rc.recall(recipe, q, k, 99 * v)  # the size of the gradient does not matter
        >>> bool(0.5 < torch.linalg.matrix_norm(state.weights[0], 2) < 1.5)
        True
    """

    batch_size: int = integer(1, at_least=1, size=True)
    lr: float | str = rate_quantity(init=0.05)
    momentum: float | str = quantity(
        "input", at_least=0, below=1, init=0.9, letter="θ", role="momentum"
    )
    ns_steps: int = integer(5)  # type: ignore[assignment]
    lr_position: str = option("outside", "inside")
    update_every: str = option("token", "batch")
    momentum_every: str = option("token", "batch")
    normalized_steps: bool = flag(False)

    slots = ("momentum",)

    def validate(self) -> None:
        if self.normalized_steps and self.lr_position == "inside":
            raise RecipeError(
                "algorithm.Muon(normalized_steps=True) scales NS(S_t), which has no factor with "
                "lr_position='inside': use lr_position='outside'"
            )

    uses_normalized_steps = False  # type: ignore[assignment]

    @property
    def uses_line_search(self) -> bool:  # type: ignore[override]
        return self.normalized_steps

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return self.ns_steps == 0 and not self.normalized_steps

    def update(self, slots: Slots, step: Step) -> tuple[dict[str, Tensor], Tensor]:
        inner = step.lr * step.gradient if self.lr_position == "inside" else step.gradient
        S = step.momentum * slots["momentum"] - inner
        direction = newton_schulz(S, self.ns_steps)
        return {"momentum": S}, step.lr * direction if self.lr_position == "outside" else direction

    @property
    def accumulator(self) -> str:
        return "gradients" if self.lr_position == "outside" else "steps"

    def batch_step(self, slots: Slots, lr: Tensor) -> Tensor:
        direction = self.batch_direction(slots)
        return lr * direction if self.lr_position == "outside" else direction

    def batch_direction(self, slots: Slots) -> Tensor:
        return newton_schulz(slots["momentum"], self.ns_steps)

    @property
    def curvature(self) -> bool:  # type: ignore[override]
        return self.ns_steps > 0

    def update_equations(self, gradient: Gradient, at: str = "t") -> tuple[tuple[str, ...], Terms]:
        inner: float | str = self.rate_factor_text() if self.lr_position == "inside" else 1.0
        added = gradient.scaled(inner, -1.0, compact=True)
        theta, old = self.symbol("momentum"), "S_(t−1)"
        if self.momentum_every == "batch":
            theta = "θ̄" if isinstance(theta, str) else theta
            added, old = sum_over_batch(added), "S°"
        line = render_sum((Term((old,)).times(theta), *added))
        direction = Term((f"NS{self.ns_steps}(S_t)" if self.ns_steps else "S_t",))
        if self.normalized_steps:
            direction = direction.times("λ_t")
        if self.lr_position == "outside":
            direction = direction.times(self.rate_factor_text(at))
        return (f"S_t = {line}",), (direction,)

    def notes(self) -> tuple[str, ...]:
        if self.ns_steps == 0:
            return ()
        steps = self.ns_steps
        return (f"NS{steps}: {steps} Newton–Schulz step{'s' * (steps > 1)}, per map and head",)

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        if recipe.memory.is_elementwise:
            yield (
                "algorithm.Muon orthogonalises matrices, and memory.Vector has none: use "
                "algorithm.Momentum()"
            )
