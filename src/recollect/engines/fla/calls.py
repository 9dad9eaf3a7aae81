"""Calls of the operators of flash-linear-attention in place of an engine's products.

The engines compute the quantities without an argument: features, rates that depend on keys, a read
before the write, the bonus of the current token, and the initial memory of least squares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem
from recollect.engines.common.ridge import initial_ridge, weighted_associations
from recollect.engines.fla.choose import Choice, Offer, choose, refusal
from recollect.engines.fla.double_backward import with_double_backward
from recollect.engines.fla.operators import PACKAGE, function
from recollect.engines.fla.recurrences import (
    MIN_LOG_DECAY,
    arguments,
    scan_channels,
    solve,
    with_tensors,
)
from recollect.engines.kernel.attention import attend
from recollect.engines.least_squares.engine import LeastSquaresEngine
from recollect.engines.linear.engine import bonus, read_in_order, solve_vector
from recollect.engines.linear.inputs import LinearProblem, linear_problem
from recollect.messages import RecipeError
from recollect.state.state import State

if TYPE_CHECKING:
    from recollect.engines.linear.decode import LinearPlan
    from recollect.recipe.bound import BoundRecipe

__all__ = ["run", "supports_cu_seqlens", "token"]

Inputs = Mapping[str, Tensor]


def run(problem: Problem, offered: Offer) -> tuple[Tensor, State] | None:
    """Return outputs ``[B, T, H, G, V]`` and the final state, or ``None`` without an operator."""
    choice = choose(problem, offered)
    if isinstance(choice, str):
        if offered.is_required and problem.q.numel():
            raise RecipeError(f"engine='fla' cannot run this call: {choice}")
        return None
    return _RUNS[choice.operator.memory](problem, choice)


def supports_cu_seqlens(offered: Offer, x: Tensor) -> bool:
    """Return whether an operator accepts several documents in one sequence with the input x."""
    structure = offered.structure
    return (
        structure is not None
        and structure.supports_cu_seqlens
        and bool(offered.operators)
        and refusal(x) is None
    )


# -- a matrix memory -------------------------------------------------------------------------------


def _matrix(problem: Problem, choice: Choice) -> tuple[Tensor, State]:
    bound, operator, read = problem.bound, choice.operator, problem.recipe.memory.read
    cu_seqlens, dtype = problem.cu_seqlens, problem.v.dtype
    # Key-dependent rates, probes and a bonus need products of keys in the state's dtype.
    multiplies_keys = bound.rate_depends_on_key or "probe" in operator.erases
    multiplies_keys |= read.bonus != 0.0 and not operator.reads_before
    p = linear_problem(problem, keeps_dtype=not multiplies_keys)
    assert bound.fla_operator is not None and bound.fla_operator.structure is not None
    # A running scale of the memory changes the rate.
    unweighted = bound.fla_operator.structure.has_unit_rate and not bound.is_stabilized
    if p.lr.dim() == 4:
        # The write is η ⊙ v, so a rate per value channel is absorbed into the value.
        p = replace(p, v=p.v * p.lr, lr=torch.ones_like(p.lr[..., 0]))
    inputs = {**p.tokens(), "A0": p.A0}
    if read.bonus != 0.0:
        inputs["bonus"] = problem.rates["bonus"]

    def by_operator(inputs: Inputs) -> tuple[Tensor, ...]:
        u = inputs.get("bonus")
        bonus_gate = (
            _per_head(u, p.k.shape[-1]) if u is not None and operator.reads_before else None
        )

        def run_operator(q: LinearProblem) -> tuple[Tensor, Tensor, None]:
            x = arguments(
                operator,
                q,
                choice.dtype,
                bonus=bonus_gate,
                cu_seqlens=cu_seqlens,
                num_associations=problem.steps_per_token,
                output_final_state=problem.uses_final_state,
                unweighted=unweighted,
            )
            y, A = solve(operator, x, q, is_recurrent=choice.is_recurrent)
            return y, q.A0 if A is None else A, None

        current = with_tensors(p, inputs)
        y, A, _ = read_in_order(
            current, "after" if operator.reads_before else read.when, run_operator
        )
        y = y if u is None or operator.reads_before else y + bonus(current, u)
        return y.to(dtype), A

    def by_engine(inputs: Inputs) -> tuple[Tensor, ...]:
        inputs = {name: x.to(p.A0.dtype) for name, x in inputs.items()}
        current, u = with_tensors(p, inputs), inputs.get("bonus")
        y, A = _run_documents(current, read.when, cu_seqlens)
        return (y if u is None else y + bonus(current, u)).to(dtype), A

    y, A = with_double_backward(by_operator, by_engine, inputs)
    return y, problem.final_state(weights=(A,)) if problem.uses_final_state else problem.state


def _per_head(u: Tensor, features: int) -> Tensor:
    """Return the bonus ``[H, F]`` of token-independent values ``[B, T, H]`` or ``[B, T, H, F]``."""
    u = u[0, 0]
    return u if u.dim() == 2 else u.unsqueeze(-1).expand(-1, features)


def _run_documents(
    p: LinearProblem, read_when: str, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return outputs and memories from the engine's products, one document at a time."""
    if cu_seqlens is None:
        return read_in_order(p, read_when)[:2]
    boundaries = cu_seqlens.tolist()
    outputs: list[Tensor] = []
    memories: list[Tensor] = []
    for row, (start, end) in enumerate(pairwise(boundaries)):
        document = {name: x[:, start:end] for name, x in p.tokens().items()}
        y, A, _ = read_in_order(replace(p, **document, A0=p.A0[row : row + 1]), read_when)
        outputs.append(y)
        memories.append(A)
    return torch.cat(outputs, 1), torch.cat(memories)


def token(
    bound: BoundRecipe,
    q: Tensor,  # [B, 1, H·G, K]
    k: Tensor,  # [B, 1, H, K]
    v: Tensor,  # [B, 1, H, V]
    gates: Inputs,  # [B, 1, H, ...]
    state: State,
) -> tuple[Tensor, State] | None:
    """Run one token from a state, with validated inputs; ``None`` without an operator."""
    plan: LinearPlan = bound.plan
    offered = bound.fla_operator
    assert offered is not None
    structure = offered.structure
    if structure is None or structure.memory != "matrix" or not plan.bare or refusal(q) is not None:
        return None
    if bound.per_value or bound.learned_rates:  # a rate per channel, or a decay of two factors
        return None
    operator = next((one for one in offered.operators if one.token is not None), None)
    (A,), affine = state.weights, bound.affine
    if operator is None or affine is None or not q.dtype == k.dtype == v.dtype == A.dtype:
        return None
    if A.dtype != torch.float32:
        return None
    p = LinearProblem(
        q=q.unflatten(2, (bound.H, -1)),
        k=k,
        v=v,
        lr=gates["lr"].float(),
        A0=A,
        log_decay=gates["log_decay"].float() if "log_decay" in gates else None,
        affine=affine,
        decays_first=plan.decays_first,
    )
    y, final_memory = solve(operator, arguments(operator, p, q.dtype), p, is_recurrent=True)
    assert final_memory is not None
    return y.flatten(2, 3), state.replace(weights=(final_memory,), recipe_id=bound.recipe_id)


# -- a vector memory -------------------------------------------------------------------------------


def _vector(problem: Problem, choice: Choice) -> tuple[Tensor, State]:
    p, read_when = linear_problem(problem), problem.recipe.memory.read.when

    def by_operator(inputs: Inputs) -> tuple[Tensor, ...]:
        current = with_tensors(p, inputs)
        y, A = scan_channels(
            choice.operator, current, read_when, output_final_state=problem.uses_final_state
        )
        return y, current.A0 if A is None else A

    def by_engine(inputs: Inputs) -> tuple[Tensor, ...]:
        return solve_vector(problem, with_tensors(p, inputs))[:2]

    y, A = with_double_backward(by_operator, by_engine, {**p.tokens(), "A0": p.A0})
    return y.to(problem.v.dtype), problem.final_state(weights=(A,))


# -- the minimum under a constant ridge ----------------------------------------------------------


def _ridge(problem: Problem, choice: Choice) -> tuple[Tensor, State]:
    return LeastSquaresEngine().run(problem, lambda problem: _conjugate_gradients(problem, choice))


def _conjugate_gradients(
    problem: Problem, choice: Choice
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return outputs, final memory and final statistics after 2 F steps, as in the engine."""
    state, G = problem.state, problem.q.shape[3]
    position = problem.positions()
    k, v, weight = weighted_associations(problem, position)
    q = problem.phi(problem.q, "query", position)
    A, log = state.weights[0], problem.rates.get("log_decay")
    is_empty = (state.position == 0)[:, None, None, None]
    inputs = {
        "q": q,
        "k": k,
        "v": v,
        "weight": weight,
        "ridge": initial_ridge(problem.rates, k.shape[-1]),
        "start": A,
        "origin": torch.where(is_empty, A, state.algorithm_state["origin"][0]),
        "gram": state.algorithm_state["gram"][0],
    }
    if log is not None and problem.recipe.context.has_decay:
        inputs["log_decay"] = log
    token_mask = problem.token_mask

    def by_operator(inputs: Inputs) -> tuple[Tensor, ...]:
        q, k, weight, origin = (inputs[name] for name in ("q", "k", "weight", "origin"))
        log = inputs.get("log_decay")
        log = torch.zeros_like(weight) if log is None else log.clamp_min(MIN_LOG_DECAY)
        rest = inputs["v"] - torch.einsum("bhvf,bthf->bthv", origin, k)
        if token_mask is not None:
            is_token = token_mask[..., None]
            weight, log = torch.where(is_token, weight, 0.0), torch.where(is_token, log, 0.0)
            k, rest = (torch.where(is_token.unsqueeze(-1), x, 0.0) for x in (k, rest))
            q = torch.where(is_token[..., None, None], q, 0.0)

        def heads(x: Tensor, dim: int = 2) -> Tensor:
            return x if G == 1 else x.repeat_interleave(G, dim=dim)

        y, gram, rows = function(choice.operator.module, choice.operator.name)(
            q.flatten(2, 3).to(choice.dtype),
            heads(k).to(choice.dtype),
            heads(rest).to(choice.dtype),
            heads(log),
            heads(weight),
            heads(inputs["ridge"][0], 0).contiguous(),
            h_kk_init=heads(inputs["gram"], 1).contiguous(),
            h_kv_init=heads(inputs["start"] - origin, 1).mT.contiguous(),
            output_final_state=True,
            max_CG_iteration=2 * k.shape[-1],
        )
        H = weight.shape[2]
        y = y.unflatten(2, (H, G)).to(origin.dtype)
        y = y + torch.einsum("bhvf,bthgf->bthgv", origin, q)
        gram, rows = (x.unflatten(1, (H, G))[:, :, 0] for x in (gram, rows))
        return y, origin + rows.mT, gram

    def by_engine(inputs: Inputs) -> tuple[Tensor, ...]:
        raise RecipeError(
            f"a constant ridge solved by conjugate gradients ({PACKAGE}) can be differentiated "
            "only once: use engine='reference', which can be differentiated any number of times"
        )

    y, W, gram = with_double_backward(by_operator, by_engine, inputs)
    return y, W, {"origin": inputs["origin"], "gram": gram}


# -- softmax attention with a decay --------------------------------------------------------------


def _mean(problem: Problem, choice: Choice) -> tuple[Tensor, State]:
    recipe, G = problem.recipe, problem.q.shape[3]
    kernel = recipe.context.kernel
    exponent = None if kernel is None else kernel.exponent(problem.q.shape[-1])
    assert exponent is not None  # checked by `structure`
    inputs = {"q": problem.q, "k": problem.k, "v": problem.v}
    inputs["log_decay"] = problem.rates["log_decay"]

    def by_operator(inputs: Inputs) -> tuple[Tensor, ...]:
        q, k, v = (inputs[name].to(choice.dtype) for name in ("q", "k", "v"))
        log = inputs["log_decay"].clamp_min(MIN_LOG_DECAY)
        y = function(choice.operator.module, choice.operator.name)(
            q.flatten(2, 3), k, v, log.repeat_interleave(G, dim=2), scale=exponent[0]
        )
        y = y.unflatten(2, problem.q.shape[2:4]) * recipe.bias.optimum
        return (y.to(problem.v.dtype),)

    def by_engine(inputs: Inputs) -> tuple[Tensor, ...]:
        rates = {**problem.rates, "log_decay": inputs["log_decay"]}
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        return (attend(replace(problem, q=q, k=k, v=v, rates=rates)),)

    (y,) = with_double_backward(by_operator, by_engine, inputs)
    if problem.token_mask is not None:
        y = torch.where(problem.token_mask[..., None, None, None], y, 0.0)
    return y, problem.final_state()


_RUNS: Mapping[str, Callable[[Problem, Choice], tuple[Tensor, State]]] = {
    "matrix": _matrix,
    "vector": _vector,
    "ridge": _ridge,
    "mean": _mean,
}
