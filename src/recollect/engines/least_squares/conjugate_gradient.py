"""Conjugate gradients over all prefixes at once: constant ridges, approximations of the inverse.

Every product with the Gram matrices D_t of all prefixes is one gated linear attention, so that
conjugate gradients solve the T systems (D_t + λ) z_t = q_t side by side in O(T·C·F) memory, and
y_t = W_0 q_t + E_t z_t is another. Backward is the implicit function's: one more solve.
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

from recollect.choices.autograd import CustomFunction, once_differentiable
from recollect.choices.runtime import has_data
from recollect.engines.common.linalg import inverse_power
from recollect.engines.common.problem import Problem
from recollect.engines.common.ridge import association, ridge_of
from recollect.engines.linear.chunked import chunked
from recollect.engines.linear.inputs import LinearProblem

if TYPE_CHECKING:
    from recollect.choices.algorithm.base import Inverse

__all__ = ["ConvergenceWarning", "SolverReport", "approximate", "how", "record_solver"]


class ConvergenceWarning(UserWarning):
    """Conjugate gradients stopped at their limit before they reached their tolerance.

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
    """What one batch of systems took.

    Attributes:
        systems: how many there were. iterations: of all of them together.
        residual: the largest ‖(D + λ)z − q‖ / ‖q‖ at the end. tolerance: the one it should reach.
        unsolved: how many systems were above it.

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
class _Watch:
    """Limits of solvers, and what they reported."""

    tolerance: float | None = None
    limit: int | None = None
    reports: list[SolverReport] = field(default_factory=list[SolverReport])


_WATCHED: ContextVar[_Watch | None] = ContextVar("recollect_solves", default=None)


@contextlib.contextmanager
def record_solver(
    *, tolerance: float | None = None, limit: int | None = None
) -> Generator[list[SolverReport]]:
    """Set how far iterative solvers go inside the ``with`` block, and collect what they report.

    Args:
        tolerance: relative residual, in (0, 1), at which a system is solved; 1e-5 in float32 and
            1e-12 in float64 if omitted.
        limit: most iterations, at least 1; twice the number of features if omitted. Beyond it they
            stop with a `ConvergenceWarning`. Backward passes go as far as their forward pass.

    Raises:
        ValueError: a number out of its range.

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
    watch = _Watch(tolerance=tolerance, limit=limit)
    token = _WATCHED.set(watch)
    try:
        yield watch.reports
    finally:
        _WATCHED.reset(token)


def how(inverse: Inverse) -> str:
    """How it is run, in a few words."""
    if inverse.kind == "exact":
        return "conjugate gradients on gated linear attention"
    return {
        "identity": "masked attention",
        "diagonal": "masked attention with scaled queries",
        "spectral": "an eigendecomposition for every token",
    }.get(inverse.kind, f"{inverse.steps} conjugate-gradient steps on gated linear attention")


@dataclass(frozen=True, kw_only=True)
class _Past:
    """All prefixes: lifted keys, weights, decays, and what was there before."""

    k: Tensor  # [B, T, H, F]
    weight: Tensor  # [B, T, H]
    logs: Tensor | None  # [B, T, H]
    gram: Tensor  # [B, H, F, F]
    ridge: Tensor  # [B, H, F]
    live: Tensor | None
    chunk: int | None

    def read(self, q: Tensor, v: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_{i≤t} γ w v_i (k_i·q_t) and the memory after all tokens."""
        products = LinearProblem(
            q=q,
            k=self.k,
            v=v,
            lr=self.weight,
            affine=(0.0, 1.0),
            log_decay=self.logs,
            A0=start.to(v.dtype),
            live=self.live,
            chunk_size=self.chunk,
        )
        return chunked(products)[:2]

    def system(self, z: Tensor) -> Tensor:
        """(D_t + λ) z_t, ``[B, T, H, G, F]``."""
        return self.read(z, self.k, self.gram)[0] + self.ridge[:, None, :, None] * z

    def differentiable(self) -> tuple[Tensor, ...]:
        """What the systems depend on."""
        inputs = (self.k, self.weight, self.gram, self.ridge)
        return inputs if self.logs is None else (*inputs, self.logs)

    def put(self, inputs: tuple[Tensor, ...]) -> _Past:
        """Others in the order of `differentiable`."""
        k, weight, gram, ridge, *logs = inputs
        return replace(
            self, k=k, weight=weight, gram=gram, ridge=ridge, logs=logs[0] if logs else None
        )


def approximate(problem: Problem) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Outputs, the memory and the statistics after all tokens."""
    recipe, state = problem.recipe, problem.state
    inverse = recipe.algorithm.inverse
    assert inverse is not None
    kind = inverse.kind
    position = problem.positions()
    k, v, weight = association(problem, position)
    q = problem.phi(problem.q, "query", position)
    A = state.weights[0]
    fresh = (state.position == 0)[:, None, None, None]
    origin = torch.where(fresh, A, state.algorithm_state["origin"][0])
    ridge = ridge_of(problem.rates, k.shape[-1])
    gram = state.algorithm_state["gram"][0] if "gram" in state.algorithm_state else None
    past = _Past(
        k=k,
        weight=weight,
        logs=problem.rates["log_decay"] if recipe.context.has_decay else None,
        gram=k.new_zeros(*ridge.shape, k.shape[-1]) if gram is None or gram.dim() < 4 else gram,
        ridge=ridge,
        live=problem.token_mask,
        chunk=problem.chunk_size,
    )
    slots = {"origin": origin}
    if kind == "identity":
        z = q
    elif kind == "diagonal":
        assert gram is not None
        ones = torch.ones_like(q[..., :1])
        unit = replace(past, k=torch.ones_like(k[..., :1]))
        diagonal, end = unit.read(ones, k.square(), gram.unsqueeze(-1))
        z = q / (diagonal + ridge[:, None, :, None]).pow(inverse.power)
        slots["gram"] = end.squeeze(-1)
    else:
        slots["gram"] = past.read(q[:, :, :, :1], k, past.gram)[1]
        z = _solved(inverse, past, q)
    # What the initial memory does not explain is what is learned.
    rest = v - torch.einsum("bhvf,bthf->bthv", origin, k)
    y, E = past.read(z, rest, A - origin)
    y = y + torch.einsum("bhvf,bthgf->bthgv", origin, q)
    if problem.token_mask is not None:
        y = torch.where(problem.token_mask[..., None, None, None], y, 0.0)
    return y, origin + E, slots


def _solved(inverse: Inverse, past: _Past, q: Tensor) -> Tensor:
    """B_t q_t for rules that need the whole Gram matrix."""
    if inverse.kind == "spectral":
        return _spectral(past, q, inverse.power)
    if inverse.kind == "conjugate_gradient":
        return _steps(past.system, q, inverse.steps)
    eps = torch.finfo(q.dtype).eps
    watch = _WATCHED.get() or _Watch()
    tolerance = watch.tolerance or (1e-5 if eps > 1e-10 else 1e-12)
    limit = watch.limit or 2 * q.shape[-1]
    inputs = past.differentiable()
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, *inputs)):
        return _Solve.apply(past, tolerance, limit, q, *inputs)
    return _solve(past.system, q, tolerance, limit)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


def _over(x: Tensor, y: Tensor) -> Tensor:
    """x/y, 0 where y is not positive."""
    positive = y > 0
    return torch.where(positive, x / torch.where(positive, y, 1.0), 0.0)


def _steps(system: Callable[[Tensor], Tensor], q: Tensor, steps: int) -> Tensor:
    """z after so many conjugate-gradient steps from 0; differentiable through each."""
    z, r, p = torch.zeros_like(q), q, q
    size = _dot(r, r)
    for left in reversed(range(steps)):
        product = system(p)
        alpha = _over(size, _dot(p, product))
        z = z + alpha * p
        if left:
            r = r - alpha * product
            after = _dot(r, r)
            p = r + _over(after, size) * p
            size = after
    return z


def _solve(system: Callable[[Tensor], Tensor], q: Tensor, tolerance: float, limit: int) -> Tensor:
    """z with ‖system(z) − q‖ ≤ tolerance ‖q‖ for every token, as far as the limit allows."""
    if not has_data(q):  # whether more steps are needed is in the numbers; the shape is not
        return system(q)
    z, r, p = torch.zeros_like(q), q.clone(), q.clone()
    size = _dot(r, r)
    enough = tolerance**2 * size
    count, open_ = 0, size > enough
    while count < limit and bool(open_.any()):
        product = system(p)
        alpha = torch.where(open_, _over(size, _dot(p, product)), 0.0)
        z.addcmul_(alpha, p)
        r.addcmul_(alpha, product, value=-1)
        after = _dot(r, r)
        p = torch.addcmul(r, torch.where(open_, _over(after, size), 0.0), p)
        size, count = after, count + 1
        open_ = size > enough
    _report(size, enough, tolerance, count, limit)
    return z


def _report(size: Tensor, enough: Tensor, tolerance: float, count: int, limit: int) -> None:
    # Before the limit the loop ends because every system is solved.
    unsolved = 0 if count < limit else int((size > enough).sum())
    watch = _WATCHED.get()
    if watch is None and not unsolved:
        return
    ratio = _over(size, enough).sqrt().max() * tolerance if size.numel() else size.new_zeros(())
    report = SolverReport(
        systems=size.numel(),
        iterations=count,
        residual=float(ratio),
        tolerance=tolerance,
        unsolved=unsolved,
    )
    if watch is not None:
        watch.reports.append(report)
    if unsolved:
        warnings.warn(
            "conjugate gradients of algorithm.LeastSquares(ridge_schedule='constant') stopped "
            f"after {count} iterations (limit {limit}) with {unsolved} of {report.systems} systems "
            "above the "
            f"tolerance, relative residual {report.residual:.1e}: raise the ridge, or limit or "
            "tolerance in rc.record_solver(), or use ridge_schedule='refreshed', which needs no "
            "iterations",
            ConvergenceWarning,
            stacklevel=2,
        )


class _Solve(CustomFunction):
    """z = (D + λ)⁻¹ q for all prefixes; backward by the implicit function theorem.

    With u = (D + λ)⁻¹ z̄: q̄ = u, and the systems' inputs get the gradient of −⟨u, (D + λ) z⟩.
    """

    @staticmethod
    def forward(
        ctx: Any, past: _Past, tolerance: float, limit: int, q: Tensor, *inputs: Tensor
    ) -> Tensor:
        z = _solve(past.system, q, tolerance, limit)
        ctx.past, ctx.limits = past.put(tuple(x.detach() for x in inputs)), (tolerance, limit)
        ctx.save_for_backward(z, *inputs)
        return z

    @staticmethod
    @once_differentiable("a constant ridge solved by conjugate gradients (engine least_squares)")
    def backward(ctx: Any, saved: tuple[Tensor, ...], *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        z, *inputs = saved
        u = _solve(ctx.past.system, grads[0].contiguous(), *ctx.limits)
        needs = ctx.needs_input_grad[4:]
        leaves = tuple(x.detach().requires_grad_(n) for x, n in zip(inputs, needs, strict=True))
        wanted = [x for x in leaves if x.requires_grad]
        slopes: Iterator[Tensor | None] = iter(())
        if wanted:
            with torch.enable_grad():
                product = ctx.past.put(leaves).system(z.detach())
            slopes = iter(torch.autograd.grad(product, wanted, -u, allow_unused=True))
        return None, None, None, u, *(next(slopes) if n else None for n in needs)


def _spectral(past: _Past, q: Tensor, power: float) -> Tensor:
    """(D_t + λ)^(−p) q_t, blocks of tokens at a time."""
    block, gram = 64, past.gram
    outputs: list[Tensor] = []
    ridge = torch.diag_embed(past.ridge).unsqueeze(1)
    for start in range(0, q.shape[1], block):
        grams: list[Tensor] = []
        for t in range(start, min(start + block, q.shape[1])):
            k, w = past.k[:, t], past.weight[:, t, :, None, None]
            if past.live is not None:
                w = torch.where(past.live[:, t, None, None, None], w, 0.0)
            decayed = gram
            if past.logs is not None:
                log = past.logs[:, t, :, None, None]
                if past.live is not None:
                    log = torch.where(past.live[:, t, None, None, None], log, 0.0)
                decayed = gram * log.exp()
            gram = decayed + w * k.unsqueeze(-1) * k.unsqueeze(-2)
            grams.append(gram)
        root = inverse_power(torch.stack(grams, dim=1) + ridge, power)
        outputs.append(q[:, start : start + block] @ root)
    return torch.cat(outputs, dim=1)
