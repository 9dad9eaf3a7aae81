"""Entry points of the linear engine: a scan, single tokens, or chunks.

Value channels with different error equations are independent: gates or decays per value channel,
and an error that depends on the prediction. Each channel then becomes a memory with one row, at V
times the cost of the key products (see `LinearEngine.describe`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.engines.base import Engine
from recollect.engines.common.problem import Problem, factored_log_decay, state_dtype
from recollect.engines.common.sizes import FlopCount, Sizes
from recollect.engines.linear.chunked import chunk_length, chunked
from recollect.engines.linear.cost import (
    SOLVE_SECONDS,
    STEP_SECONDS,
    TOKEN_SECONDS,
    chunk_flops,
    read_extras,
    scan_flops,
    token_flops,
    transposed_flops,
)
from recollect.engines.linear.decode import (
    LinearPlan,
    decodes_in_one_step,
    erases_along_key,
    one_token,
    per_value_systems,
    scans,
    step,
    transposition_misfits,
)
from recollect.engines.linear.inputs import LinearProblem, linear_problem
from recollect.engines.linear.scan import ScanInputs, scan
from recollect.state.state import State

if TYPE_CHECKING:
    from recollect.recipe.bound import BoundRecipe
    from recollect.recipe.recipe import Recipe

__all__ = ["LinearEngine", "bonus", "read_in_order", "solve_vector"]

Solved = tuple[Tensor, Tensor, Tensor | None]
"""Outputs ``[B, T, H, G, V]``, A and S (``None`` without momentum) after all tokens."""


class LinearEngine(Engine):
    """Matrix and vector memories, exact at every token and parallel in chunks."""

    name = "linear"
    propagates_nan = True
    accepts_half_precision_state = True

    def unsupported_reasons(self, recipe: Recipe) -> list[str]:
        memory, retention, algorithm = recipe.memory, recipe.retention, recipe.algorithm
        if not memory.linear:
            return [f"{memory.title} is not linear in its parameters"]
        reasons: list[str] = []
        if not recipe.features.finite:
            reasons.append(f"{recipe.features.title} has infinitely many features")
        if recipe.bias.affine is None:
            reasons.append(f"the error of {recipe.bias.title} is not affine in the prediction")
        if recipe.context.horizon is None:
            reasons.append(f"{recipe.context.title} sees all of the past at once")
        if not retention.is_plain:
            reasons.append(f"{retention.title} puts a link between the state and the weights")
        if algorithm.recursion is None:
            reasons.append(f"the step of {algorithm.title} is not linear in the gradients")
        if algorithm.uses_normalized_steps:
            reasons.append(f"{algorithm.title} scales gradients by what they do to the prediction")
        if algorithm.batch_size > 1:
            reasons.append(
                f"inner batches of {algorithm.batch_size} tokens, and this engine solves for one"
            )
        if algorithm.reduction != "sum":
            reasons.append("the step is averaged over the open inner batch")
        if memory.read.transposed and not reasons:
            reasons += transposition_misfits(recipe)
        return reasons

    def describe(self, recipe: Recipe) -> str:
        decay = recipe.retention.decay
        if scans(recipe):
            return "scan over time, entry by entry"
        channels = decay is not None and decay.per in ("key", "value", "key_value", "entry")
        split = recipe.memory.is_elementwise or per_value_systems(recipe)
        # A memory per value channel has a scalar decay, unless the decay is over keys.
        if split and decay is not None:
            channels = decay.per in ("key_value", "entry") or (
                decay.per == "key" and not recipe.memory.is_elementwise
            )
        if channels and recipe.algorithm.recursion != "none":
            return "analytic scan: decay per channel with momentum does not separate"
        if not recipe.step_sees_prediction:
            return "masked attention"
        if split:
            return "one triangular solve per value channel"
        return "triangular solve"

    def make_plan(self, bound: BoundRecipe) -> LinearPlan:
        recipe, gates = bound.recipe, set(bound.gates)
        decay, simple = recipe.retention.decay, decodes_in_one_step(bound.recipe)
        factors = ["decay_scale"] if decay is not None and decay.is_input_scaled else []
        return LinearPlan(
            plain=simple,
            bare=simple
            and not bound.needs_lowering
            and not bound.has_features
            and not recipe.algorithm.rate_depends_on_key
            and [name for name, _, _ in bound.learned_rates] == factors
            and gates == ({"lr"} if decay is None else {"lr", "log_decay"}),
            decays_first=decay is not None and decay.when == "before",
            transposed=recipe.memory.read.transposed,
            split_values=per_value_systems(recipe),
            erases_along_key=erases_along_key(recipe),
        )

    def run(self, problem: Problem) -> tuple[Tensor, State]:
        if problem.bound.plan.plain and problem.k.shape[1] == 1 and problem.lengths is None:
            y, final_state = one_token(problem)
            return y.to(problem.v.dtype), final_state
        solve = solve_vector if problem.recipe.memory.is_elementwise else _matrix
        y, A, S = solve(problem, linear_problem(problem))
        slots = {} if S is None else {"momentum": (S,)}
        return y.to(problem.v.dtype), problem.final_state(weights=(A,), algorithm_state=slots)

    def has_token_path(self, bound: BoundRecipe) -> bool:
        plan: LinearPlan = bound.plan
        return plan.bare

    def decode_token(
        self,
        bound: BoundRecipe,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Mapping[str, Tensor],
        state: State,
    ) -> tuple[Tensor, State] | None:
        # The general call path costs as much as the arithmetic of one token. The dtypes of inputs,
        # gates and the memory must agree; the general path converts them.
        (A,) = state.weights
        if not q.dtype == k.dtype == v.dtype == A.dtype == state_dtype(q):
            return None
        for gate in gates.values():
            if gate.dtype != A.dtype:
                return None
        lr, log_decay, scale = gates["lr"], gates.get("log_decay"), gates.get("decay_scale")
        if log_decay is not None and scale is not None:
            has_all_axes = log_decay.dim() == scale.dim() + 2
            log_decay = factored_log_decay(
                log_decay if has_all_axes else log_decay.unsqueeze(-1), scale
            )
        B, H, V, F = A.shape
        P = B * H
        y, updated = step(
            bound,
            bound.plan,
            q.reshape(P, q.shape[2] // H, F),
            k.reshape(P, 1, F),
            v.reshape(P, 1, V),
            A.reshape(P, V, F),
            lr,
            log_decay,
        )
        return y.view(B, 1, q.shape[2], V), state.replace(
            weights=(updated.view(B, H, V, F),), recipe_id=bound.recipe_id
        )

    def is_traceable(self, bound: BoundRecipe, tokens: int) -> bool:
        return tokens == 1 and not bound.has_normalizer and not bound.is_stabilized

    def uses_inner_autograd(self, recipe: Recipe) -> bool:
        return False

    def count_flops(self, recipe: Recipe, sizes: Sizes) -> FlopCount:
        decay, algorithm = recipe.retention.decay, recipe.algorithm
        if scans(recipe):
            return scan_flops(recipe, sizes)
        per = decay.per if decay is not None else "head"
        V = sizes.V + (recipe.memory.read.normalize != "none")
        heads, F = sizes.H, sizes.F
        notes: list[str] = []
        has_momentum = algorithm.recursion != "none"
        has_error = recipe.step_sees_prediction
        # Value channels with separate equations become heads of one row.
        if recipe.memory.is_elementwise:
            heads, F, V, per = sizes.H * V, 1, 1, "head"
        elif per_value_systems(recipe):
            notes.append(f"one triangular system per value channel: {V} of them in place of one")
            heads, V, per = sizes.H * V, 1, "key" if per in ("key_value", "entry") else "head"
        # Without an error, a token writes all of its associations at once.
        n = sizes.n if has_error else 1
        T, c = sizes.T * n, sizes.c * sizes.n // n
        probe = recipe.bias.probe is not None and not erases_along_key(recipe)
        has_value_momentum = has_error and algorithm.recursion == "value"
        token = (
            token_flops(
                F,
                V,
                c,
                sizes.G,
                has_error=has_error,
                probe=probe,
                separate_erase=has_value_momentum,
            )
            * heads
        )
        if has_momentum and per != "head":
            notes.append("decay per channel with momentum runs token by token")
            return FlopCount(
                forward={"tokens": token * sizes.T},
                decode=token,
                steps=T,
                step_seconds=TOKEN_SECONDS,
                states=T,
                notes=tuple(notes),
            )

        def chunk(C: int) -> dict[str, int]:
            counted = chunk_flops(
                F,
                V,
                C * c,
                C * sizes.G,
                has_error=has_error,
                separate=probe or has_value_momentum,
                momentum=has_momentum,
            )
            return {**counted, "coefficients": 2 * C**3 if has_momentum else 0}

        C = min(chunk_length(solves=has_error, associations=sizes.n // n), T)
        N = -(-T // C) if T else 0
        forward = {name: count * N * heads for name, count in chunk(C).items()}
        if sizes.n > 1:  # the associations of a decoded token form a chunk
            token = sum(chunk(n).values()) * heads
        if recipe.memory.read.transposed:
            forward = transposed_flops(recipe, sizes)
            N += -(-T // chunk_length(solves=False)) if has_error else 0
            if sizes.n > 1:
                token = sum(transposed_flops(recipe, replace(sizes, T=1)).values())
            elif has_error and not decodes_in_one_step(recipe):
                token += 6 * F * V * heads  # both passes: a second write, and two more reads
        bonus, first = read_extras(recipe, sizes)
        forward["read"] += bonus * sizes.T + first
        return FlopCount(
            forward=forward,
            decode=token + bonus + first,
            steps=N,
            step_seconds=SOLVE_SECONDS if has_error else STEP_SECONDS,
            states=N,
            notes=tuple(notes),
        )


# -- a matrix memory -----------------------------------------------------------------------------


def _matrix(problem: Problem, p: LinearProblem) -> Solved:
    """Solve a matrix memory, with a head per value channel if their equations differ."""
    read, shape, bonus_output = problem.recipe.memory.read, p.A0.shape, None
    if read.bonus != 0.0:
        bonus_output = bonus(p, problem.rates["bonus"])
    plan: LinearPlan = problem.bound.plan
    if plan.erases_along_key:
        p = _one_direction(p, problem.rates["erase"])
    split = plan.split_values
    if split:
        p = _split_values(p)
    elif p.lr.dim() == 4:
        # η acts on the write alone: fold a gate per value channel into the value.
        p = _fold_rate(p)
    if read.transposed:
        return read_transposed(p, read.when)
    by_entry = p.log_decay is not None and (p.log_decay.dim() == 5 or p.decay_scale is not None)
    y, A, S = read_in_order(p, read.when, _scan_entries if by_entry else chunked)
    if split:
        y = y.squeeze(-1).unflatten(2, shape[1:3]).transpose(-1, -2)
        A, S = A.reshape(shape), None if S is None else S.reshape(shape)
    return y if bonus_output is None else y + bonus_output, A, S


def bonus(p: LinearProblem, u: Tensor) -> Tensor:
    """Return ⟨φ(q), u ⊙ φ(k)⟩ v of the current token, with u ``[B, T, H]`` or ``[B, T, H, F]``."""
    match = torch.einsum("bthgk,bthk->bthg", p.q, (u if u.dim() == 4 else u.unsqueeze(-1)) * p.k)
    return match.unsqueeze(-1) * p.v.unsqueeze(3)


def read_in_order(
    p: LinearProblem, order: str, solve: Callable[[LinearProblem], Solved] = chunked
) -> Solved:
    """Read after the write, or before it by shifting queries one token earlier.

    ``solve`` reads after the write.
    """
    if order == "after" or p.q.shape[1] == 0:
        return solve(p)
    y, A, S = solve(replace(p, q=torch.cat([p.q[:, 1:], torch.zeros_like(p.q[:, :1])], dim=1)))
    first = torch.einsum("bhvk,bhgk->bhgv", p.A0, p.q[:, 0].to(p.A0.dtype)).unsqueeze(1)
    return torch.cat([first, y[:, :-1]], dim=1), A, S


def read_transposed(p: LinearProblem, order: str) -> Solved:
    """Read y = Aᵀ q. Aᵀ is a memory of the keys k_t at the errors u_t = η_t (b v_t − a P_t k_t).

    A first pass predicts P_t k_t, by reads before the writes, and a second one reads Aᵀ.
    """
    p, (a, b) = p.masked(), p.affine
    lr, A, rows, columns = p.lr.unsqueeze(-1), None, p.log_decay_value, p.log_decay
    if rows is None and columns is not None and columns.dim() == 3:
        rows, columns = columns, None  # one decay of all entries
    u = b * lr * p.v
    if a != 0:
        keys = p.k
        if p.decays_first and p.log_decay is not None:
            decay = p.log_decay.exp()
            keys = keys * (decay if decay.dim() == 4 else decay.unsqueeze(-1))
        prediction, A, _ = read_in_order(replace(p, q=keys.unsqueeze(3)), "before")
        u = u - a * lr * prediction.squeeze(3)
    transposed = replace(
        p,
        k=u,
        v=p.k,
        lr=torch.ones_like(p.lr),
        A0=p.A0.mT,
        log_decay=rows,
        log_decay_value=columns,
        affine=(0.0, 1.0),
    )
    y, M, _ = read_in_order(transposed, order)
    return y, M.mT if A is None else A, None


def _scan_entries(p: LinearProblem) -> Solved:
    """Scan entries with separate decays under a dot product."""
    p = p.masked()
    assert p.log_decay is not None
    u = p.affine[1] * (p.v * p.lr.unsqueeze(-1))
    x = ScanInputs(p.A0, p.q, p.k, u, p.log_decay, p.decay_scale)
    return *scan(x, chunk_size=p.chunk_size), None


def _fold_rate(p: LinearProblem) -> LinearProblem:
    """Fold the rate of a write into the value."""
    rate = p.lr if p.lr.dim() == 4 else p.lr.unsqueeze(-1)
    return replace(p, v=p.v * rate, lr=torch.ones_like(p.k[..., 0]))


def _one_direction(p: LinearProblem, erase: Tensor) -> LinearProblem:
    """Fold the rate of an erasure along the key into the probe, and that of the write into v.

    Erasure and write then have one direction, and a chunk has the system of the delta rule.
    """
    assert p.probe is not None
    return replace(_fold_rate(p), probe=erase.unsqueeze(-1) * p.probe, erase=None)


def _repeat_per_value(x: Tensor | None, V: int) -> Tensor | None:
    """Repeat per-head values for every value channel: ``[B, T, H, ...] -> [B, T, H V, ...]``."""
    return None if x is None else x.repeat_interleave(V, dim=2)


def _split_values(p: LinearProblem) -> LinearProblem:
    """Make every value channel a separate memory ``[1, F]``: H·V heads."""
    V, past = p.v.shape[-1], p.past
    if past is not None:
        v = past.v.flatten(2).unsqueeze(-1)
        past = replace(past, k=past.k.repeat_interleave(V, dim=2), v=v)

    def rows(x: Tensor) -> Tensor:  # [B, H, V, F] -> [B, H V, 1, F]
        return x.flatten(1, 2).unsqueeze(2)

    if p.log_decay is not None and p.decay_scale is not None:
        decay = factored_log_decay(p.log_decay.unsqueeze(-1), p.decay_scale).flatten(2, 3)
    elif p.log_decay is not None and p.log_decay.dim() == 5:
        decay = p.log_decay.flatten(2, 3)
    else:
        decay = _repeat_per_value(p.log_decay, V)
    if p.log_decay_value is not None:
        per_value = p.log_decay_value.flatten(2)
        per_value = per_value if decay is None or decay.dim() == 3 else per_value.unsqueeze(-1)
        decay = per_value if decay is None else decay + per_value
    return replace(
        p,
        q=p.q.repeat_interleave(V, dim=2),
        k=p.k.repeat_interleave(V, dim=2),
        v=p.v.flatten(2).unsqueeze(-1),
        lr=p.lr.flatten(2) if p.lr.dim() == 4 else p.lr.repeat_interleave(V, dim=2),
        A0=rows(p.A0),
        S0=None if p.S0 is None else rows(p.S0),
        log_decay=decay,
        log_decay_value=None,
        decay_scale=None,
        momentum=_repeat_per_value(p.momentum, V),
        outer_lr=_repeat_per_value(p.outer_lr, V),
        window=_repeat_per_value(p.window, V),
        past=past,
        probe=_repeat_per_value(p.probe, V),
        erase=_repeat_per_value(p.erase, V),
    )


# -- a vector memory -----------------------------------------------------------------------------


def solve_vector(problem: Problem, p: LinearProblem) -> Solved:
    """Solve a vector memory by a scan over channels, or with K = V = 1 and a head per channel."""
    if scans(problem.recipe):
        return _scan_channels(p, problem.recipe.memory.read.when)
    B, H, V = p.A0.shape

    def channels(x: Tensor) -> Tensor:
        """Flatten ``[B, T, H]`` or ``[B, T, H, V]`` to ``[B, T, H V]``."""
        return x.flatten(2) if x.dim() == 4 else x.repeat_interleave(V, dim=2)

    def single(x: Tensor) -> Tensor:
        return x.flatten(2).unsqueeze(-1)

    past = None if p.past is None else replace(p.past, k=single(p.past.k), v=single(p.past.v))
    decay = p.log_decay if p.log_decay is not None else p.log_decay_value
    one = replace(
        p,
        q=p.q.transpose(3, 4).flatten(2, 3).unsqueeze(-1),  # [B, T, H V, G, 1]
        k=single(p.k),
        v=single(p.v),
        lr=channels(p.lr),
        A0=p.A0.reshape(B, H * V, 1, 1),
        S0=None if p.S0 is None else p.S0.reshape(B, H * V, 1, 1),
        log_decay=None if decay is None else channels(decay),
        log_decay_value=None,
        momentum=_repeat_per_value(p.momentum, V),
        outer_lr=_repeat_per_value(p.outer_lr, V),
        window=_repeat_per_value(p.window, V),
        past=past,
    )
    y, A, S = read_in_order(one, problem.recipe.memory.read.when)
    y = y.squeeze(-1).unflatten(2, (H, V)).transpose(-1, -2)
    return y, A.reshape(B, H, V), None if S is None else S.reshape(B, H, V)


def _scan_channels(p: LinearProblem, order: str) -> Solved:
    """Scan w_t = (α_t − a η_t k_t²) w_{t−1} + b η_t k_t v_t, y_t = w ⊙ q_t.

    If the decay precedes the error, the factor of w_{t−1} is α_t (1 − a η_t k_t²).
    """
    p = p.masked()
    a, b = p.affine
    lr = p.lr if p.lr.dim() == 4 else p.lr.unsqueeze(-1)
    log = p.log_decay if p.log_decay is not None else p.log_decay_value
    log = torch.zeros_like(p.v) if log is None else log if log.dim() == 4 else log.unsqueeze(-1)
    factor = log.expand_as(p.v)
    if a != 0:
        alpha, erase = factor.exp(), a * lr * p.k.square()
        factor = alpha * (1 - erase) if p.decays_first else alpha - erase
    writes = b * lr * p.k * p.v
    ones = torch.ones_like(writes[..., :1])  # F = 1: the only entry of a channel
    x = ScanInputs(p.A0.unsqueeze(-1), ones.unsqueeze(3), ones, writes, factor.unsqueeze(-1))
    w, A = scan(x, log=a == 0, chunk_size=p.chunk_size)
    if order == "before":
        w = torch.cat([p.A0[:, None, :, None], w[:, :-1]], dim=1)
    return p.q * w, A.squeeze(-1), None
