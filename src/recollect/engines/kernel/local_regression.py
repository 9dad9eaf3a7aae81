"""Local polynomial regression around every query (TTR 48–54), in memory O(T·D).

The weights p_i sum to one. The basis X_i contains the D monomials of k_i − q without the constant,
with mean X̄ and c_i = X_i − X̄. The constant of the fit is

    y = Σ_i p_i (1 − c_i·x) v_i,    (Σ_i p_i c_i c_iᵀ + λ) x = X̄

which is TTR 54 for any degree. The constant has no ridge and is eliminated. The remaining system is
symmetric positive definite with eigenvalues ≥ λ.

There are three solvers:

* *Dense* builds the basis of every pair, for few coefficients or no ridge.
* *Conjugate gradients*, for degrees 1 and 2, build no basis per pair (`local_conjugate_gradient`).
* *Given* takes x from a gate of the query and solves no system.

Queries are processed in pieces, and the weights of a piece over all keys are computed once. The
backward pass recomputes one piece at a time, with x from the forward pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recollect.choices.autograd import CustomFunction, once_differentiable
from recollect.choices.context.weights import ContextWeights, VisibleAssociations
from recollect.choices.features.base import Kernel
from recollect.engines.base import Engine
from recollect.engines.common.associations import gather_visible, visible_values
from recollect.engines.common.linalg import symmetric_pinv
from recollect.engines.common.precision_checks import solve_dtype, solve_with_ridge
from recollect.engines.common.problem import Problem
from recollect.engines.kernel.local_conjugate_gradient import Fit, Shares, iterative
from recollect.engines.kernel.pieces import context_weights, cut, piece_size, visibility_mask
from recollect.state.state import State

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["DENSE", "LocalRegression", "attend", "is_dense", "queries"]

DENSE = 8  # coefficients per query up to which a dense solve is as fast
PIECE = 128
ENTRIES = 2**23  # entries of one piece of a basis per pair


class LocalRegression(Engine):
    """Local polynomial regression around every query."""

    name = "local_regression"

    def unsupported_reasons(self, recipe: Recipe) -> list[str]:
        if not recipe.memory.degree:
            return [f"{recipe.memory.title} is not a local polynomial"]
        context = recipe.context
        if not context.keeps_similarity:
            return [
                f"the weights of {context.brief} are no products of factors, and a fit in pieces "
                "needs such weights"
            ]
        return []

    def describe(self, recipe: Recipe) -> str:
        if recipe.memory.slope_gate is not None:
            return "two products per piece with a slope of the query, KV cache"
        if recipe.ridge == 0 or (recipe.memory.degree or 0) > 2:
            return "a dense solve per query, KV cache"
        return (
            f"a solve per query, dense up to {DENSE} coefficients and by conjugate gradients "
            "above, KV cache"
        )

    def run(self, problem: Problem) -> tuple[Tensor, State]:
        return attend(problem), problem.final_state()

    def read_state(self, problem: Problem, query_rates: Mapping[str, Tensor]) -> Tensor:
        return attend(problem, query_rates)

    def float32_reason(self, recipe: Recipe) -> str:
        return "the system of a fit is made of differences, which lose digits"


def attend(
    problem: Problem, query_rates: Mapping[str, Tensor] | None = None, *, solver: str = "auto"
) -> Tensor:
    """Return outputs ``[B, T, H, G, V]`` by solver ``"dense"``, ``"cg"``, or the faster one.

    A memory with a slope of the query has the solver ``"given"``.
    """
    degree, buffer = problem.recipe.memory.degree, problem.state.buffer
    assert degree is not None
    B, T, H, G, K = problem.q.shape
    n, V = problem.k.shape[1] + (0 if buffer is None else buffer.k.shape[1]), problem.v.shape[-1]
    if T == 0 or B == 0 or n == 0:
        return problem.v.new_zeros(B, T, H, G, V)
    if problem.recipe.memory.slope_gate is not None:
        solver = "given"
    elif solver == "auto":
        D = math.comb(K + degree, degree) - 1
        solver = "dense" if is_dense(D, degree, problem.recipe.ridge) else "cg"
    y = _Recomputed.apply(problem, query_rates, solver, *_tensors(problem, query_rates))
    assert isinstance(y, Tensor)
    y = y.permute(0, 3, 1, 2, 4)
    if problem.token_mask is not None and query_rates is None:
        y = torch.where(problem.token_mask[..., None, None, None], y, 0.0)
    return (problem.recipe.bias.optimum * y).to(problem.v.dtype)


def _tensors(problem: Problem, query_rates: Mapping[str, Tensor] | None) -> list[Tensor]:
    """Return all tensors that may receive a gradient, in a fixed order."""
    buffer = problem.state.buffer
    buffered = [] if buffer is None else [buffer.k, buffer.v, *buffer.rates.values()]
    return [
        problem.q,
        problem.k,
        problem.v,
        *problem.rates.values(),
        *(query_rates or {}).values(),
        *buffered,
    ]


def _with_tensors(
    problem: Problem, query_rates: Mapping[str, Tensor] | None, tensors: Sequence[Tensor]
) -> tuple[Problem, Mapping[str, Tensor] | None]:
    """Return the problem and query rates with other tensors, in the order of `_tensors`."""
    remaining, buffer = iter(tensors), problem.state.buffer
    q, k, v = next(remaining), next(remaining), next(remaining)
    rates = {name: next(remaining) for name in problem.rates}
    new_rates = None if query_rates is None else {name: next(remaining) for name in query_rates}
    if buffer is not None:
        buffered = next(remaining), next(remaining)
        old = {name: next(remaining) for name in buffer.rates}
        buffer = dataclasses.replace(buffer, k=buffered[0], v=buffered[1], rates=old)
    state = dataclasses.replace(problem.state, buffer=buffer)
    return dataclasses.replace(problem, q=q, k=k, v=v, rates=rates, state=state), new_rates


def _plan(
    problem: Problem,
    query_rates: Mapping[str, Tensor] | None,
    solver: str,
    solutions: Tensor | None,
) -> tuple[Iterator[tuple[slice, Tensor]], Tensor]:
    """Return the outputs of the queries, piece by piece, and x of every query.

    ``solutions`` are x of an earlier pass, or ``None`` to solve for x.
    """
    recipe, dtype = problem.recipe, solve_dtype(problem)
    kernel, degree = recipe.context.kernel, recipe.memory.degree
    assert kernel is not None
    assert degree is not None
    visible, stored = gather_visible(problem, dtype, query_rates), visible_values(problem, dtype)
    B, T, H, G, K = visible.q.shape
    D, n = math.comb(K + degree, degree) - 1, stored.shape[1]
    q, v = visible.q.permute(0, 2, 3, 1, 4), stored.transpose(1, 2).unsqueeze(2)
    shares = _shares(visible, kernel, context_weights(visible, recipe), recipe.context.horizon)
    solved = solutions is not None
    if solutions is None:
        solutions = q.new_zeros((B, H, G, T, D) if solver == "cg" else (0,))
    slope_gate = recipe.memory.slope_gate
    if slope_gate is not None:
        fit = _with_slope(visible, visible.query_rates[slope_gate].to(dtype), shares)
    elif solver == "dense":
        fit = _dense(visible, recipe.memory.basis, shares, recipe.ridge)
    else:
        fit = iterative(visible, degree, shares, recipe.ridge, solutions, solved=solved)
    size = queries(B * H * G, n, D, dense=solver == "dense")
    at = cut(visible, recipe.context.horizon, size)
    pieces = ((i, fit(i, keys, q[..., i, :]) @ v[..., keys, :]) for i, keys in at)
    return pieces, solutions


class _Recomputed(CustomFunction):
    """All pieces, each recomputed by the backward pass.

    No graph is saved. Even its small nodes would fragment the heap between the blocks of pieces.
    """

    @staticmethod
    def forward(
        ctx: Any,
        problem: Problem,
        query_rates: Mapping[str, Tensor] | None,
        solver: str,
        *tensors: Tensor,
    ) -> Tensor:
        B, T, H, G, _ = problem.q.shape
        dtype = solve_dtype(problem)
        y = problem.q.new_zeros(B, H, G, T, problem.v.shape[-1], dtype=dtype)
        problem, query_rates = _with_tensors(problem, query_rates, tensors)
        pieces, solutions = _plan(problem, query_rates, solver, None)
        for at, piece in pieces:
            y[:, :, :, at] = piece
        # `ctx` must not hold the saved tensors in any other way.
        bare = [x.detach() for x in tensors]
        ctx.call = (*_with_tensors(problem, query_rates, bare), solver)
        ctx.save_for_backward(solutions, *tensors)
        return y

    @staticmethod
    @once_differentiable("local regression (engine kernel)")
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        problem, query_rates, solver = ctx.call
        solutions, *tensors = saved
        needed_indices = [i for i, needs_grad in enumerate(ctx.needs_input_grad[3:]) if needs_grad]
        leaves = [x.detach().requires_grad_(i in needed_indices) for i, x in enumerate(tensors)]
        sums = [torch.zeros_like(leaves[i]) for i in needed_indices]
        with torch.enable_grad():
            pieces, _ = _plan(*_with_tensors(problem, query_rates, leaves), solver, solutions)
            for at, piece in pieces:
                slopes = torch.autograd.grad(
                    piece,
                    [leaves[i] for i in needed_indices],
                    grad[:, :, :, at],
                    retain_graph=True,  # all pieces share a part of the graph
                    allow_unused=True,
                    materialize_grads=True,
                )
                for total, slope in zip(sums, slopes, strict=True):
                    total += slope
                del piece, slopes
        by_index = dict(zip(needed_indices, sums, strict=True))
        return (None, None, None, *(by_index.get(i) for i in range(len(tensors))))


def is_dense(D: int, degree: int, ridge: float) -> bool:
    """Return whether the system of D slopes is solved densely."""
    return D <= DENSE or ridge == 0 or degree > 2


def queries(rows: int, n: int, D: int, *, dense: bool) -> int:
    """Return the number of queries per piece, for ``rows`` sequences and heads over n keys."""
    if dense:
        return max(1, min(PIECE, ENTRIES // max(1, rows * n * D)))
    return piece_size(rows, n, PIECE)


def _shares(
    visible: VisibleAssociations, kernel: Kernel, weights: list[ContextWeights], horizon: int | None
) -> Shares:
    q, k = visible.q.permute(0, 2, 3, 1, 4), visible.k.transpose(1, 2).unsqueeze(2)

    def shares(queries: slice, keys: slice) -> Tensor:
        mask = visibility_mask(visible, queries, keys, horizon)
        assert mask is not None
        hidden = ~(mask & visible.valid[:, None, keys])[:, None, None]
        at, by = q[..., queries, :], k[..., keys, :]
        if kernel.positive:
            log = kernel.log_kappa(at, by)
        else:
            size = kernel.kappa(at, by)
            none = size == 0
            log = torch.where(none, -torch.inf, torch.where(none, 1.0, size).log())
        for x in weights:
            if x.log is not None:
                log = log + x.log(queries, keys)
        log = log.masked_fill(hidden, -torch.inf)
        empty = (log == -torch.inf).all(-1, keepdim=True)
        return log.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)

    return shares


def _with_slope(visible: VisibleAssociations, slope: Tensor, shares: Shares) -> Fit:
    """Return the fit with x ``[B, T, H, K]`` of each query."""
    x, k = slope.transpose(1, 2).unsqueeze(2), visible.k.transpose(1, 2).unsqueeze(2)

    def fit(queries: slice, keys: slice, q: Tensor) -> Tensor:
        p = shares(queries, keys)
        product = x[..., queries, :] @ k[..., keys, :].mT  # [B, H, 1, C, m]
        return p * (1 + (p * product).sum(-1, keepdim=True) - product)

    return fit


# -- dense -----------------------------------------------------------------------------------------


def _dense(
    visible: VisibleAssociations, basis: Callable[[Tensor], Tensor], shares: Shares, ridge: float
) -> Fit:
    k = visible.k.transpose(1, 2)[:, :, None, None]  # [B, H, 1, 1, n, K]

    def fit(queries: slice, keys: slice, q: Tensor) -> Tensor:
        p = shares(queries, keys)
        X = basis(k[..., keys, :] - q.unsqueeze(-2))[..., 1:]  # [B, H, G, C, m, D]
        mean = p.unsqueeze(-2) @ X  # [B, H, G, C, 1, D]
        centred = X - mean
        A = centred.mT @ (p.unsqueeze(-1) * centred)
        x = solve_with_ridge(A, ridge, mean.mT) if ridge > 0 else symmetric_pinv(A) @ mean.mT
        return p * (1 - (centred @ x).squeeze(-1))

    return fit
