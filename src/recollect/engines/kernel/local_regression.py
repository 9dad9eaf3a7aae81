"""Local polynomial regression around every query (TTR 48–54), in memory O(T·D).

With weights p_i that sum to one, the basis X_i of all D monomials of k_i − q but the constant, its
mean X̄ and c_i = X_i − X̄, the constant of the fit is

    y = Σ_i p_i (1 − c_i·x) v_i,    (Σ_i p_i c_i c_iᵀ + λ) x = X̄

which is TTR 54 for any degree: the constant, which no ridge meets, is eliminated, and what is left
is symmetric positive definite with eigenvalues ≥ λ.

Two solvers. *Dense* writes the basis down for every pair, for few coefficients or no ridge.
*Conjugate gradients*, for degrees 1 and 2: monomials of k − q are those of k times a triangular
matrix S(q) of q alone, so the product with a vector x is two products shaped like attention,

    s_ti = (S(q_t)ᵀ x_t)·(φ_i − φ̄_t),    S(q_t) Σ_i p_ti s_ti φ_i + λ x_t,

and no basis is written per pair. Queries come in pieces: the weights of one piece against all keys
are formed once and used by all of its iterations.

Its gradient is that of the implicit function: x solves A x = b, so x + A⁻¹(b − A x) with A⁻¹ held
constant has the value of x and its derivative. The backward pass recomputes one piece at a time,
keeps x from the forward pass, and solves once more with the same matrix.
"""

# More than 400 lines: two solvers of one system, and the gradient of both.

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recollect.choices.context.weights import ContextWeights, VisibleAssociations
from recollect.choices.features.base import Kernel
from recollect.choices.gradients import once
from recollect.engines.common.associations import gather_visible, values
from recollect.engines.common.linalg import least
from recollect.engines.common.problem import Problem
from recollect.engines.common.resolution import digits, ridged
from recollect.engines.kernel.attention import context_weights, piece_size, seen, slices

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["DENSE", "attend", "describes", "is_dense", "queries", "refuses"]

DENSE = 8  # coefficients per query up to which a dense solve is as fast
PIECE = 128
ENTRIES = 2**23  # numbers of one piece of a basis per pair

Solver = Callable[[Tensor], Tensor]


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
    problem: Problem, asked: Mapping[str, Tensor] | None = None, *, solver: str = "auto"
) -> Tensor:
    """Outputs ``[B, T, H, G, V]``.

    Args:
        asked: numbers of queries that only read.
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
    y = _Recomputed.apply(problem, asked, solver, *_tensors(problem, asked))
    assert isinstance(y, Tensor)
    y = y.permute(0, 3, 1, 2, 4)
    if problem.live is not None and asked is None:
        y = torch.where(problem.live[..., None, None, None], y, 0.0)
    return (problem.recipe.bias.optimum * y).to(problem.v.dtype)


def _tensors(problem: Problem, asked: Mapping[str, Tensor] | None) -> list[Tensor]:
    """Everything that a gradient may flow to, in a fixed order."""
    buffer = problem.state.buffer
    held = [] if buffer is None else [buffer.k, buffer.v, *buffer.rates.values()]
    return [
        problem.q,
        problem.k,
        problem.v,
        *problem.rates.values(),
        *(asked or {}).values(),
        *held,
    ]


def _with_tensors(
    problem: Problem, asked: Mapping[str, Tensor] | None, given: Sequence[Tensor]
) -> tuple[Problem, Mapping[str, Tensor] | None]:
    """The same call of other tensors, in the order of `_tensors`."""
    left, buffer = iter(given), problem.state.buffer
    q, k, v = next(left), next(left), next(left)
    rates = {name: next(left) for name in problem.rates}
    again = None if asked is None else {name: next(left) for name in asked}
    if buffer is not None:
        held = next(left), next(left)
        old = {name: next(left) for name in buffer.rates}
        buffer = dataclasses.replace(buffer, k=held[0], v=held[1], rates=old)
    state = dataclasses.replace(problem.state, buffer=buffer)
    return dataclasses.replace(problem, q=q, k=k, v=v, rates=rates, state=state), again


def _plan(
    problem: Problem, asked: Mapping[str, Tensor] | None, solver: str, kept: Tensor | None
) -> tuple[Iterator[tuple[slice, Tensor]], Tensor]:
    """Outputs of the queries, piece by piece, and x of every query, for `_Recomputed`.

    Args:
        kept: x of an earlier pass, which is not solved for again.
    """
    recipe, dtype = problem.recipe, digits(problem)
    kernel, degree = recipe.context.kernel, recipe.memory.degree
    assert kernel is not None
    assert degree is not None
    visible, stored = gather_visible(problem, dtype, asked), values(problem, dtype)
    B, T, H, G, K = visible.q.shape
    D, n = math.comb(K + degree, degree) - 1, stored.shape[1]
    q, v = visible.q.permute(0, 2, 3, 1, 4), stored.transpose(1, 2).unsqueeze(2)
    shares = _shares(visible, kernel, context_weights(visible, recipe), recipe.context.horizon)
    solved = kept is not None
    if kept is None:
        kept = q.new_zeros((B, H, G, T, D) if solver == "cg" else (0,))
    if solver == "dense":
        fit = _dense(visible, recipe.memory.basis, shares, recipe.ridge)
    else:
        fit = _iterative(visible, degree, shares, recipe.ridge, kept, solved=solved)
    size = queries(B * H * G, n, D, dense=solver == "dense")
    at = slices(visible, recipe.context.horizon, size)
    found = ((i, fit(i, keys, q[..., i, :]) @ v[..., keys, :]) for i, keys in at)
    return found, kept


class _Recomputed(torch.autograd.Function):
    """All pieces, of which the backward pass makes each again.

    No graph is kept, not even the small nodes of one: between the large blocks of the pieces they
    would split the holes that these leave in the heap.
    """

    @staticmethod
    def forward(
        ctx: Any,
        problem: Problem,
        asked: Mapping[str, Tensor] | None,
        solver: str,
        *given: Tensor,
    ) -> Tensor:
        B, T, H, G, _ = problem.q.shape
        dtype = digits(problem)
        y = problem.q.new_zeros(B, H, G, T, problem.v.shape[-1], dtype=dtype)
        problem, asked = _with_tensors(problem, asked, given)
        found, kept = _plan(problem, asked, solver, None)
        for at, piece in found:
            y[:, :, :, at] = piece
        # The tensors are saved; what goes along holds none of them.
        bare = [x.detach() for x in given]
        ctx.call = (*_with_tensors(problem, asked, bare), solver)
        ctx.save_for_backward(kept, *given)
        return y

    @staticmethod
    @once("local regression (engine kernel)")
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        problem, asked, solver = ctx.call
        kept, *given = saved
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
        leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(given)]
        sums = [torch.zeros_like(leaves[i]) for i in wanted]
        with torch.enable_grad():
            found, _ = _plan(*_with_tensors(problem, asked, leaves), solver, kept)
            for at, piece in found:
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
        return (None, None, None, *(by_index.get(i) for i in range(len(given))))


def is_dense(D: int, degree: int, ridge: float) -> bool:
    """Whether D slopes are solved for densely."""
    return D <= DENSE or ridge == 0 or degree > 2


def queries(rows: int, n: int, D: int, *, dense: bool) -> int:
    """Queries of a piece, of which ``rows`` run at once over n keys."""
    if dense:
        return max(1, min(PIECE, ENTRIES // max(1, rows * n * D)))
    return piece_size(rows, n, PIECE)


Shares = Callable[[slice, slice], Tensor]
"""p ``[B, H, G, C, m]`` of a piece of the queries over a piece of the keys; rows sum to 1 or 0."""

Fit = Callable[[slice, slice, Tensor], Tensor]
"""p_i (1 − c_i·x) of a piece."""


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


# -- conjugate gradients ---------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _pairs(K: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """(i, j) and the weight of each monomial of degree two, in the order of the basis."""
    pairs = list(combinations_with_replacement(range(K), 2))
    weights = tuple(1.0 if i == j else 2**0.5 for i, j in pairs)
    return tuple(i for i, _ in pairs), tuple(j for _, j in pairs), weights


@dataclass(frozen=True, kw_only=True)
class _Shift:
    """S(q) of degree 1 or 2: monomials of k − q without the constant are S(q) φ(k) + s(q)."""

    K: int
    i: Tensor
    j: Tensor
    w: Tensor

    @classmethod
    def of(cls, degree: int, like: Tensor) -> _Shift:
        i, j, w = _pairs(like.shape[-1]) if degree == 2 else ((), (), ())
        device = like.device
        return cls(
            K=like.shape[-1],
            i=torch.tensor(i, dtype=torch.long, device=device),
            j=torch.tensor(j, dtype=torch.long, device=device),
            w=torch.tensor(w, dtype=like.dtype, device=device),
        )

    def lift(self, x: Tensor) -> Tensor:
        """φ(x)."""
        if not len(self.i):
            return x
        return torch.cat([x, self.w * x[..., self.i] * x[..., self.j]], dim=-1)

    def up(self, q: Tensor, f: Tensor) -> Tensor:
        """S(q) f."""
        if not len(self.i):
            return f
        one, two = f[..., : self.K], f[..., self.K :]
        cross = self.w * (q[..., self.i] * one[..., self.j] + q[..., self.j] * one[..., self.i])
        return torch.cat([one, two - cross], dim=-1)

    def down(self, q: Tensor, x: Tensor) -> Tensor:
        """S(q)ᵀ x."""
        if not len(self.i):
            return x
        one, two = x[..., : self.K], self.w * x[..., self.K :]
        turned = torch.zeros_like(q).index_add(-1, self.j, two * q[..., self.i])
        turned = turned.index_add(-1, self.i, two * q[..., self.j])
        return torch.cat([one - turned, x[..., self.K :]], dim=-1)

    def mean(self, q: Tensor, f: Tensor) -> Tensor:
        """S(q) f + s(q): the basis's mean from that of φ."""
        own = self.lift(q)
        own = torch.cat([-own[..., : self.K], own[..., self.K :]], dim=-1)
        return self.up(q, f) + own


def _iterative(
    visible: VisibleAssociations,
    degree: int,
    shares: Shares,
    ridge: float,
    kept: Tensor,
    *,
    solved: bool,
) -> Fit:
    shift = _Shift.of(degree, visible.k)
    phi = shift.lift(visible.k).transpose(1, 2).unsqueeze(2)  # [B, H, 1, n, D]

    def fit(queries: slice, keys: slice, q: Tensor) -> Tensor:
        p, f = shares(queries, keys), phi[..., keys, :]
        mean = p @ f  # [B, H, G, C, D]
        system = _System(shift=shift, ridge=ridge, p=p, q=q, f=f, mean=mean)
        b = shift.mean(q, mean)
        if not solved:
            found = conjugate_gradients(system.product, b)
            system.check(found)
            kept[..., queries, :] = found
        x = kept[..., queries, :]
        if torch.is_grad_enabled():
            x = x + _Inverse.apply(b - system.product(x), shift, ridge, p, q, f, mean)
        return p * (1 - system.slopes(x))

    return fit


@dataclass(frozen=True, kw_only=True)
class _System:
    """A = Σ p_i c_i c_iᵀ + λ of every query of a piece, as a product."""

    shift: _Shift
    ridge: float
    p: Tensor
    q: Tensor
    f: Tensor
    mean: Tensor

    def slopes(self, x: Tensor) -> Tensor:
        """c_i·x ``[B, H, G, C, m]``."""
        u = self.shift.down(self.q, x)
        return u @ self.f.mT - (u * self.mean).sum(-1, keepdim=True)

    def check(self, x: Tensor) -> None:
        """That `slopes`, a difference of products as large as the query, keep half of their digits.

        The dense solve centres the basis itself and has no such limit.

        Raises:
            ValueError: they may lose more. The bound takes all roundings for the largest, of one
                sign; in high dimension what is seen is less by the factor that stands here.
        """
        size = self.shift.down(self.q, x).norm(dim=-1) * self.f.norm(dim=-1).amax(-1, keepdim=True)
        eps = torch.finfo(x.dtype).eps
        if not torch.compiler.is_compiling() and bool((eps * size > 256 * eps**0.5).any()):
            raise ValueError(
                f"local regression: with queries so long, conjugate gradients in {x.dtype} return "
                "rounding: normalise q and k, take a larger ridge in algorithm.Analytic, or use "
                "method='reference', which solves densely"
            )

    def product(self, x: Tensor) -> Tensor:
        """A x."""
        return self.shift.up(self.q, (self.p * self.slopes(x)) @ self.f) + self.ridge * x


class _Inverse(torch.autograd.Function):
    """A⁻¹ r of a residual that is 0 up to rounding: value 0, gradient A⁻¹ of the gradient."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, shift: _Shift, ridge: float, *system: Tensor) -> Tensor:
        ctx.shift, ctx.ridge = shift, ridge
        ctx.save_for_backward(*system)
        return torch.zeros_like(residual)

    @staticmethod
    @once("local regression (engine kernel)")
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        p, q, f, mean = saved
        system = _System(shift=ctx.shift, ridge=ctx.ridge, p=p, q=q, f=f, mean=mean)
        return conjugate_gradients(system.product, grad), *[None] * 6


def conjugate_gradients(product: Solver, right: Tensor) -> Tensor:
    """Solve A x = right for many symmetric positive definite systems at once, ``[..., D]``.

    Each stops where its residual is rounding. In exact arithmetic D steps suffice.

    Args:
        product: x to A x.
    """
    eps = torch.finfo(right.dtype).eps
    x, r = torch.zeros_like(right), right.clone()
    p, size = r.clone(), r.square().sum(-1, keepdim=True)
    goal = size * (8 * eps) ** 2
    limit = 2 * right.shape[-1] + 20
    least_size, best = size.clone(), x.clone()
    for step in range(limit):
        if step % 4 == 0 and not bool((least_size > goal).any()):
            break
        moving = least_size > goal
        Ap = product(p)
        curve = (p * Ap).sum(-1, keepdim=True)
        pace = torch.where(moving & (curve > 0), size / torch.where(curve > 0, curve, 1.0), 0.0)
        x, r = x + pace * p, r - pace * Ap
        new = r.square().sum(-1, keepdim=True)
        p = r + torch.where(moving, new / torch.where(size > 0, size, 1.0), 0.0) * p
        size = new
        better = new < least_size
        best, least_size = torch.where(better, x, best), torch.where(better, new, least_size)
    # What rounding cannot reach is no failure; a residual of a thousandth is.
    bad = least_size > right.square().sum(-1, keepdim=True) * 1e-6
    if not torch.compiler.is_compiling() and bool(bad.any()):
        warnings.warn(
            f"local regression: {int(bad.sum())} queries did not converge in {limit} steps of "
            "conjugate gradients: use a larger ridge in algorithm.Analytic",
            RuntimeWarning,
            stacklevel=2,
        )
    return best
