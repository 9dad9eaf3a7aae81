"""Local polynomial regression around every query (TTR 48–54), in memory O(T·D).

With weights p_i that sum to one, the basis X_i of all D monomials of k_i − q but the constant, its
mean X̄ and c_i = X_i − X̄, the constant of the fit is

    y = Σ_i p_i (1 − c_i·x) v_i,    (Σ_i p_i c_i c_iᵀ + λ) x = X̄

which is TTR 54 for any degree: the constant, which no ridge meets, is eliminated, and what is left
is symmetric positive definite with eigenvalues ≥ λ.

Two solvers. *Dense* writes the basis down for every pair, for few coefficients or no ridge.
*Conjugate gradients*, for degrees 1 and 2, write no basis per pair (`local_conjugate_gradient`).
Queries come in pieces: the weights of one piece against all keys are formed once. The backward pass
recomputes one piece at a time, and keeps x from the forward pass.
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
from recollect.engines.common.associations import gather_visible, values
from recollect.engines.common.linalg import least
from recollect.engines.common.problem import Problem
from recollect.engines.common.resolution import digits, ridged
from recollect.engines.kernel.local_conjugate_gradient import Fit, Shares, iterative
from recollect.engines.kernel.pieces import context_weights, piece_size, seen, slices

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["DENSE", "attend", "describes", "is_dense", "queries", "refuses"]

DENSE = 8  # coefficients per query up to which a dense solve is as fast
PIECE = 128
ENTRIES = 2**23  # numbers of one piece of a basis per pair


def refuses(recipe: Recipe) -> list[str]:
    """Why this is no local polynomial."""
    if not recipe.memory.degree:
        return [f"{recipe.memory.title} is no local polynomial"]
    return []


def describes(recipe: Recipe) -> str:
    """How a local polynomial runs."""
    if recipe.ridge == 0 or (recipe.memory.degree or 0) > 2:
        return "a dense solve per query, KV cache"
    return (
        f"a solve per query, dense up to {DENSE} coefficients and by conjugate gradients above, KV "
        "cache"
    )


def attend(
    problem: Problem, query_rates: Mapping[str, Tensor] | None = None, *, solver: str = "auto"
) -> Tensor:
    """Outputs ``[B, T, H, G, V]``.

    Args:
        query_rates: numbers of queries that only read.
        solver: ``"dense"``, ``"cg"``, or ``"auto"`` by the number of coefficients.
    """
    degree, buffer = problem.recipe.memory.degree, problem.state.buffer
    assert degree is not None
    B, T, H, G, K = problem.q.shape
    n, V = problem.k.shape[1] + (0 if buffer is None else buffer.k.shape[1]), problem.v.shape[-1]
    if T == 0 or B == 0 or n == 0:
        return problem.v.new_zeros(B, T, H, G, V)
    if solver == "auto":
        D = math.comb(K + degree, degree) - 1
        solver = "dense" if is_dense(D, degree, problem.recipe.ridge) else "cg"
    y = _Recomputed.apply(problem, query_rates, solver, *_tensors(problem, query_rates))
    assert isinstance(y, Tensor)
    y = y.permute(0, 3, 1, 2, 4)
    if problem.token_mask is not None and query_rates is None:
        y = torch.where(problem.token_mask[..., None, None, None], y, 0.0)
    return (problem.recipe.bias.optimum * y).to(problem.v.dtype)


def _tensors(problem: Problem, query_rates: Mapping[str, Tensor] | None) -> list[Tensor]:
    """Everything that a gradient may flow to, in a fixed order."""
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
    """The same call of other tensors, in the order of `_tensors`."""
    left, buffer = iter(tensors), problem.state.buffer
    q, k, v = next(left), next(left), next(left)
    rates = {name: next(left) for name in problem.rates}
    rates_again = None if query_rates is None else {name: next(left) for name in query_rates}
    if buffer is not None:
        buffered = next(left), next(left)
        old = {name: next(left) for name in buffer.rates}
        buffer = dataclasses.replace(buffer, k=buffered[0], v=buffered[1], rates=old)
    state = dataclasses.replace(problem.state, buffer=buffer)
    return dataclasses.replace(problem, q=q, k=k, v=v, rates=rates, state=state), rates_again


def _plan(
    problem: Problem,
    query_rates: Mapping[str, Tensor] | None,
    solver: str,
    solutions: Tensor | None,
) -> tuple[Iterator[tuple[slice, Tensor]], Tensor]:
    """Outputs of the queries, piece by piece, and x of every query, for `_Recomputed`.

    Args:
        solutions: x of an earlier pass, which is not solved for again.
    """
    recipe, dtype = problem.recipe, digits(problem)
    kernel, degree = recipe.context.kernel, recipe.memory.degree
    assert kernel is not None
    assert degree is not None
    visible, stored = gather_visible(problem, dtype, query_rates), values(problem, dtype)
    B, T, H, G, K = visible.q.shape
    D, n = math.comb(K + degree, degree) - 1, stored.shape[1]
    q, v = visible.q.permute(0, 2, 3, 1, 4), stored.transpose(1, 2).unsqueeze(2)
    shares = _shares(visible, kernel, context_weights(visible, recipe), recipe.context.horizon)
    solved = solutions is not None
    if solutions is None:
        solutions = q.new_zeros((B, H, G, T, D) if solver == "cg" else (0,))
    if solver == "dense":
        fit = _dense(visible, recipe.memory.basis, shares, recipe.ridge)
    else:
        fit = iterative(visible, degree, shares, recipe.ridge, solutions, solved=solved)
    size = queries(B * H * G, n, D, dense=solver == "dense")
    at = slices(visible, recipe.context.horizon, size)
    pieces = ((i, fit(i, keys, q[..., i, :]) @ v[..., keys, :]) for i, keys in at)
    return pieces, solutions


class _Recomputed(CustomFunction):
    """All pieces, of which the backward pass makes each again.

    No graph is kept, not even the small nodes of one: between the large blocks of the pieces they
    would split the holes that these leave in the heap.
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
        dtype = digits(problem)
        y = problem.q.new_zeros(B, H, G, T, problem.v.shape[-1], dtype=dtype)
        problem, query_rates = _with_tensors(problem, query_rates, tensors)
        pieces, solutions = _plan(problem, query_rates, solver, None)
        for at, piece in pieces:
            y[:, :, :, at] = piece
        # The tensors are saved; what goes along holds none of them.
        bare = [x.detach() for x in tensors]
        ctx.call = (*_with_tensors(problem, query_rates, bare), solver)
        ctx.save_for_backward(solutions, *tensors)
        return y

    @staticmethod
    @once_differentiable("local regression (engine kernel)")
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        problem, query_rates, solver = ctx.call
        solutions, *tensors = saved
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
        leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(tensors)]
        sums = [torch.zeros_like(leaves[i]) for i in wanted]
        with torch.enable_grad():
            pieces, _ = _plan(*_with_tensors(problem, query_rates, leaves), solver, solutions)
            for at, piece in pieces:
                slopes = torch.autograd.grad(
                    piece,
                    [leaves[i] for i in wanted],
                    grad[:, :, :, at],
                    retain_graph=True,  # what all pieces share
                    allow_unused=True,
                    materialize_grads=True,
                )
                for total, slope in zip(sums, slopes, strict=True):
                    total += slope
                del piece, slopes
        by_index = dict(zip(wanted, sums, strict=True))
        return (None, None, None, *(by_index.get(i) for i in range(len(tensors))))


def is_dense(D: int, degree: int, ridge: float) -> bool:
    """Whether D slopes are solved for densely."""
    return D <= DENSE or ridge == 0 or degree > 2


def queries(rows: int, n: int, D: int, *, dense: bool) -> int:
    """Queries of a piece, of which ``rows`` run at once over n keys."""
    if dense:
        return max(1, min(PIECE, ENTRIES // max(1, rows * n * D)))
    return piece_size(rows, n, PIECE)


def _shares(
    visible: VisibleAssociations, kernel: Kernel, weights: list[ContextWeights], horizon: int | None
) -> Shares:
    q, k = visible.q.permute(0, 2, 3, 1, 4), visible.k.transpose(1, 2).unsqueeze(2)

    def shares(queries: slice, keys: slice) -> Tensor:
        mask = seen(visible, queries, keys, horizon)
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
        x = ridged(A, ridge, mean.mT) if ridge > 0 else least(A) @ mean.mT
        return p * (1 - (centred @ x).squeeze(-1))

    return fit
