"""Conjugate gradients over all prefixes at once: ridges without a recursion, and approximations.

A product with the Gram matrices D_t of all prefixes is one gated linear attention. Conjugate
gradients therefore solve the T systems (D_t + λ) z_t = q_t in parallel, in O(T·C·F) memory. One
more attention gives y_t = W_0 q_t + E_t z_t. The backward pass solves the systems once more, by the
implicit function theorem.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recollect.choices.algorithm.closed_form import relative_size
from recollect.choices.autograd import CustomFunction, once_differentiable
from recollect.choices.runtime import has_data
from recollect.engines.common.conjugate_gradient import conjugate_gradient, safe_divide
from recollect.engines.common.linalg import inverse_power
from recollect.engines.common.problem import Problem
from recollect.engines.common.ridge import ridges, weighted_associations
from recollect.engines.linear.chunked import chunked
from recollect.engines.linear.inputs import LinearProblem

if TYPE_CHECKING:
    from recollect.choices.algorithm.base import Inverse

__all__ = ["ConvergenceWarning", "SolverReport", "approximate", "describe_inverse", "record_solver"]


class ConvergenceWarning(UserWarning):
    """Warning that conjugate gradients reached the iteration limit before the tolerance.

    Examples:
        >>> import warnings
        >>> layer = rc.zoo.get("mesa_net").build(d_model=8, num_heads=1)
        >>> with warnings.catch_warnings(record=True) as caught, rc.record_solver(limit=1):
        ...     warnings.simplefilter("always", rc.ConvergenceWarning)
        ...     _ = layer(torch.randn(1, 4, 8))
        ...
        >>> caught[0].category.__name__
        'ConvergenceWarning'
    """


@dataclass(frozen=True, kw_only=True)
class SolverReport:
    """Iterations and residuals of one batch of systems.

    Attributes:
        systems: number of systems.
        iterations: number of iterations of the batch.
        residual: largest ‖(D + λ)z − q‖ / ‖q‖ at the end.
        tolerance: requested relative residual.
        unsolved: number of systems with a larger residual.

    Examples:
        >>> layer = rc.zoo.get("mesa_net").build(d_model=8, num_heads=1)
        >>> with rc.record_solver() as reports:
        ...     y, state = layer(torch.randn(1, 4, 8))
        ...
        >>> reports[0].systems, reports[0].unsolved
        (4, 0)
    """

    systems: int
    iterations: int
    residual: float
    tolerance: float
    unsolved: int

    def __str__(self) -> str:
        return (
            f"{self.systems} systems, {self.iterations} iterations, largest relative residual "
            f"{self.residual:.1e} (tolerance {self.tolerance:.1e}), {self.unsolved} unsolved"
        )


@dataclass(frozen=True, kw_only=True)
class _Recorder:
    """Limits of solvers, and their reports."""

    tolerance: float | None = None
    limit: int | None = None
    reports: list[SolverReport] = field(default_factory=list[SolverReport])


_RECORDER: ContextVar[_Recorder | None] = ContextVar("recollect_solves", default=None)


@contextlib.contextmanager
def record_solver(
    *, tolerance: float | None = None, limit: int | None = None
) -> Generator[list[SolverReport]]:
    """Set limits of iterative solvers inside the ``with`` block, and collect their reports.

    Args:
        tolerance: relative residual, in (0, 1), at which a system is solved. Defaults to 1e-5 in
            float32 and 1e-12 in float64.
        limit: largest number of iterations, at least 1. Defaults to twice the number of features.
            At the limit solvers stop with a `ConvergenceWarning`. A backward pass uses the
            settings of its forward pass.

    Raises:
        ValueError: If ``tolerance`` or ``limit`` is out of range.

    Examples:
        >>> layer = rc.zoo.get("mesa_net").build(d_model=8, num_heads=1)
        >>> with rc.record_solver(tolerance=1e-3, limit=30) as reports:
        ...     y, state = layer(torch.randn(1, 4, 8))
        ...
        >>> reports[0].residual <= reports[0].tolerance
        True
    """
    if tolerance is not None and not 0 < tolerance < 1:
        raise ValueError(f"record_solver(tolerance=...) must be in (0, 1), not {tolerance!r}")
    if limit is not None and limit < 1:
        raise ValueError(f"record_solver(limit=...) must be at least 1, not {limit!r}")
    recorder = _Recorder(tolerance=tolerance, limit=limit)
    token = _RECORDER.set(recorder)
    try:
        yield recorder.reports
    finally:
        _RECORDER.reset(token)


def describe_inverse(inverse: Inverse) -> str:
    """Return a short description of the method for an inverse."""
    if inverse.kind == "exact":
        return "conjugate gradients on gated linear attention"
    return {
        "identity": "masked attention",
        "diagonal": "masked attention with scaled queries",
        "spectral": "an eigendecomposition for every token",
    }.get(inverse.kind, f"{inverse.steps} conjugate-gradient steps on gated linear attention")


@dataclass(frozen=True, kw_only=True)
class _PrefixSystems:
    """Systems of all prefixes: features of keys, weights, decays, and the initial Gram matrix."""

    k: Tensor  # [B, T, H, F]
    weight: Tensor  # [B, T, H]
    log_decay: Tensor | None  # [B, T, H]
    gram: Tensor  # [B, H, F, F]
    ridge: Tensor  # [B, T or 1, H, F]
    token_mask: Tensor | None
    chunk_size: int | None

    def read(self, q: Tensor, v: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ_{i≤t} γ w v_i (k_i·q_t) and the memory after all tokens."""
        products = LinearProblem(
            q=q,
            k=self.k,
            v=v,
            lr=self.weight,
            affine=(0.0, 1.0),
            log_decay=self.log_decay,
            A0=start.to(v.dtype),
            token_mask=self.token_mask,
            chunk_size=self.chunk_size,
        )
        return chunked(products)[:2]

    def system(self, z: Tensor) -> Tensor:
        """Return (D_t + λ) z_t, ``[B, T, H, G, F]``."""
        return self.read(z, self.k, self.gram)[0] + self.ridge.unsqueeze(3) * z

    def squared_norms(self) -> Tensor:
        """Return n_t = ‖D_t‖_F² ``[B, T, H]``.

        D_t = γ D_(t−1) + w k kᵀ gives n_t = γ² n_(t−1) + 2 w kᵀ D_t k − w² ‖k‖⁴.
        """
        k, w = self.k, self.weight
        if self.token_mask is not None:
            k = torch.where(self.token_mask[..., None, None], k, 0.0)
        products = self.read(k.unsqueeze(3), k, self.gram)[0].squeeze(3)
        growth = w * (2 * (k * products).sum(-1) - w * k.square().sum(-1).square())
        ones = torch.ones_like(k[..., :1])
        log_decay = None if self.log_decay is None else 2 * self.log_decay
        sums = replace(self, k=ones, weight=ones[..., 0], log_decay=log_decay)
        start = self.gram.square().sum((-2, -1))[..., None, None]
        return sums.read(ones.unsqueeze(3), growth.unsqueeze(-1), start)[0].flatten(3).squeeze(3)

    def differentiable(self) -> tuple[Tensor, ...]:
        """Return the tensors that define the systems."""
        inputs = (self.k, self.weight, self.gram, self.ridge)
        return inputs if self.log_decay is None else (*inputs, self.log_decay)

    def with_tensors(self, inputs: tuple[Tensor, ...]) -> _PrefixSystems:
        """Replace the tensors of `differentiable`."""
        k, weight, gram, ridge, *log_decay = inputs
        return replace(
            self,
            k=k,
            weight=weight,
            gram=gram,
            ridge=ridge,
            log_decay=log_decay[0] if log_decay else None,
        )


def approximate(problem: Problem) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return outputs, the memory and the statistics after all tokens."""
    recipe, state = problem.recipe, problem.state
    inverse = recipe.algorithm.inverse
    assert inverse is not None
    kind = inverse.kind
    position = problem.positions()
    k, v, weight = weighted_associations(problem, position)
    q = problem.phi(problem.q, "query", position)
    A = state.weights[0]
    is_new = (state.position == 0)[:, None, None, None]
    origin = torch.where(is_new, A, state.algorithm_state["origin"][0])
    B, _, H, F = k.shape
    ridge = ridges(problem.rates, F)
    ridge = ridge if recipe.algorithm.query_gates else ridge[:, :1]
    gram = state.algorithm_state["gram"][0] if "gram" in state.algorithm_state else None
    systems = _PrefixSystems(
        k=k,
        weight=weight,
        log_decay=problem.rates["log_decay"] if recipe.context.has_decay else None,
        gram=k.new_zeros(B, H, F, F) if gram is None or gram.dim() < 4 else gram,
        ridge=ridge,
        token_mask=problem.token_mask,
        chunk_size=problem.chunk_size,
    )
    if inverse.ridge == "relative":
        size = relative_size(systems.squared_norms().clamp_min(0))
        systems = replace(systems, ridge=ridge * size.unsqueeze(-1))
    slots = {"origin": origin}
    if kind == "identity":
        z = q
    elif kind == "diagonal":
        assert gram is not None
        ones = torch.ones_like(q[..., :1])
        unit = replace(systems, k=torch.ones_like(k[..., :1]))
        diagonal, diagonal_end = unit.read(ones, k.square(), gram.unsqueeze(-1))
        z = q / (diagonal + ridge.unsqueeze(3)).pow(inverse.power)
        slots["gram"] = diagonal_end.squeeze(-1)
    else:
        slots["gram"] = systems.read(q[:, :, :, :1], k, systems.gram)[1]
        z = _apply_inverse(inverse, systems, q)
    # Learn the residual of the initial memory.
    residual = v - torch.einsum("bhvf,bthf->bthv", origin, k)
    y, E = systems.read(z, residual, A - origin)
    y = y + torch.einsum("bhvf,bthgf->bthgv", origin, q)
    if problem.token_mask is not None:
        y = torch.where(problem.token_mask[..., None, None, None], y, 0.0)
    return y, origin + E, slots


def _apply_inverse(inverse: Inverse, systems: _PrefixSystems, q: Tensor) -> Tensor:
    """Apply the inverse to queries, for kinds that need the full Gram matrix."""
    if inverse.kind == "spectral":
        return _spectral(systems, q, inverse.power)
    if inverse.kind == "conjugate_gradient":
        return conjugate_gradient(systems.system, q, steps=inverse.steps)[0]
    eps = torch.finfo(q.dtype).eps
    recorder = _RECORDER.get() or _Recorder()
    tolerance = recorder.tolerance or (1e-5 if eps > 1e-10 else 1e-12)
    limit = recorder.limit or 2 * q.shape[-1]
    inputs = systems.differentiable()
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, *inputs)):
        return _Solve.apply(systems, tolerance, limit, q, *inputs)
    return _solve(systems.system, q, tolerance, limit)


def _solve(system: Callable[[Tensor], Tensor], q: Tensor, tolerance: float, limit: int) -> Tensor:
    """Iterate until ‖system(z) − q‖ ≤ tolerance ‖q‖ for every token, or to the limit."""
    if not has_data(q):  # without data only the shape matters
        return system(q)
    z, size, count = conjugate_gradient(system, q, steps=limit, tolerance=tolerance, check_every=1)
    _report(size, tolerance**2 * q.square().sum(-1, keepdim=True), tolerance, count, limit)
    return z


def _report(size: Tensor, threshold: Tensor, tolerance: float, count: int, limit: int) -> None:
    # The loop ends before the limit only if every system is solved.
    unsolved = 0 if count < limit else int((size > threshold).sum())
    recorder = _RECORDER.get()
    if recorder is None and not unsolved:
        return
    ratio = (
        safe_divide(size, threshold).sqrt().max() * tolerance
        if size.numel()
        else size.new_zeros(())
    )
    report = SolverReport(
        systems=size.numel(),
        iterations=count,
        residual=float(ratio),
        tolerance=tolerance,
        unsolved=unsolved,
    )
    if recorder is not None:
        recorder.reports.append(report)
    if unsolved:
        warnings.warn(
            "conjugate gradients of algorithm.LeastSquares stopped "
            f"after {count} iterations (limit {limit}) with {unsolved} of {report.systems} systems "
            f"above the tolerance, relative residual {report.residual:.1e}: raise the ridge, or "
            "limit or tolerance in rc.record_solver(), or use ridge_schedule='refreshed', which "
            "needs no iterations",
            ConvergenceWarning,
            stacklevel=2,
        )


class _Solve(CustomFunction):
    """z = (D + λ)⁻¹ q for all prefixes; backward by the implicit function theorem.

    With u = (D + λ)⁻¹ z̄, q̄ = u. Inputs of the systems receive the gradient of −⟨u, (D + λ) z⟩.
    """

    @staticmethod
    def forward(
        ctx: Any, systems: _PrefixSystems, tolerance: float, limit: int, q: Tensor, *inputs: Tensor
    ) -> Tensor:
        z = _solve(systems.system, q, tolerance, limit)
        ctx.systems = systems.with_tensors(tuple(x.detach() for x in inputs))
        ctx.limits = (tolerance, limit)
        ctx.save_for_backward(z, *inputs)
        return z

    @staticmethod
    @once_differentiable("a ridge solved for by conjugate gradients (engine least_squares)")
    def backward(ctx: Any, saved: tuple[Tensor, ...], *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        z, *inputs = saved
        u = _solve(ctx.systems.system, grads[0].contiguous(), *ctx.limits)
        needs = ctx.needs_input_grad[4:]
        leaves = tuple(
            x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)
        )
        inputs_with_grad = [x for x in leaves if x.requires_grad]
        grads_iter: Iterator[Tensor | None] = iter(())
        if inputs_with_grad:
            with torch.enable_grad():
                product = ctx.systems.with_tensors(leaves).system(z.detach())
            grads_iter = iter(torch.autograd.grad(product, inputs_with_grad, -u, allow_unused=True))
        return None, None, None, u, *(next(grads_iter) if need else None for need in needs)


def _spectral(systems: _PrefixSystems, q: Tensor, power: float) -> Tensor:
    """Return (D_t + λ)^(−p) q_t, by blocks of tokens."""
    block, gram, T = 64, systems.gram, q.shape[1]
    outputs: list[Tensor] = []
    ridge = systems.ridge.expand(-1, T, -1, -1)
    for start in range(0, T, block):
        grams: list[Tensor] = []
        for t in range(start, min(start + block, T)):
            k, w = systems.k[:, t], systems.weight[:, t, :, None, None]
            if systems.token_mask is not None:
                w = torch.where(systems.token_mask[:, t, None, None, None], w, 0.0)
            decayed = gram
            if systems.log_decay is not None:
                log = systems.log_decay[:, t, :, None, None]
                if systems.token_mask is not None:
                    log = torch.where(systems.token_mask[:, t, None, None, None], log, 0.0)
                decayed = gram * log.exp()
            gram = decayed + w * k.unsqueeze(-1) * k.unsqueeze(-2)
            grams.append(gram)
        penalty = torch.diag_embed(ridge[:, start : start + block])
        root = inverse_power(torch.stack(grams, dim=1) + penalty, power)
        outputs.append(q[:, start : start + block] @ root)
    return torch.cat(outputs, dim=1)
