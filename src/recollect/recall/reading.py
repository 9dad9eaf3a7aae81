"""`read`: queries against a memory as it stands, without writing."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from recollect.choices.member import RecipeError
from recollect.engines import reference
from recollect.engines.common.problem import Problem, resolve, state_dtype
from recollect.engines.select import Engine
from recollect.recall.arguments import named
from recollect.recall.bound import Bound, bind
from recollect.recall.checks import (
    check_init,
    check_params,
    check_precision,
    check_state,
    tensors_of,
)
from recollect.recall.lowering import lower
from recollect.recall.modes import (
    leaves_inference,
    ordinary,
    ordinary_mode,
    ordinary_problem,
    refuse_transforms,
    solving,
)
from recollect.recipe.argument import Stated, recipe_of
from recollect.recipe.sized import sized
from recollect.state.state import State, initial_state
from recollect.typing import Gates, Init, Params

__all__ = ["read", "read_from"]


def read(
    recipe: Stated,
    q: Tensor,
    *,
    gates: Gates | None = None,
    state: State | None = None,
    init: Init | None = None,
    params: Params | None = None,
    precision: str | None = None,
) -> Tensor:
    """Read without writing: y_t = M(W; φ(q_t)) for every query, W the memory as it stands.

    Args:
        recipe: the regression problem; the name of an architecture, or what has a recipe, will do.
        q: queries ``[B, T, Hq, K]``.
        gates: only those of a link that has gates (a ball's radius, an elastic net's threshold).
        state: what was memorised; or
        init: a memory A₀ as for `recall`, when nothing was memorised yet.
        params: learned tensors, as for `recall`.
        precision: of products, as for `recall`.

    Returns:
        ``[B, T, Hq, V]`` in q's dtype.

    Raises:
        RecipeError: neither or both of ``state`` and ``init``; gates the read needs are missing.
        ValueError: queries that do not fit the state, or something else in its place; on the CPU,
            an initial memory with NaN or infinities.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr=0.5))
        >>> y, state = rc.recall(recipe, q, k, v)
        >>> last = rc.read(recipe, q[:, -1:], state=state)
        >>> torch.allclose(last, y[:, -1:], atol=1e-6)
        True
    """
    recipe = recipe_of(recipe, "rc.read")
    gates, params = named(gates, "gates"), named(params, "params")
    refuse_transforms(itertools.chain((q,), gates.values(), params.values()))
    if (state is None) == (init is None):
        both = "" if state is None else ", not both"
        raise RecipeError(f"rc.read needs one memory to read: give state=... or init=...{both}")
    if not isinstance(q, Tensor) or not q.is_floating_point():
        given = q.dtype if isinstance(q, Tensor) else type(q).__name__
        raise ValueError(f"q must be a floating-point tensor [B, T, H, K], not {given}")
    if q.dim() != 4:
        raise ValueError(f"q must have shape [B, T, H, K], not {list(q.shape)}")
    B, T, Hq, K = q.shape
    if state is None:
        assert init is not None
        check_init(init)
        given = list(tensors_of(init))
        if not given:
            raise RecipeError("rc.read needs something to read, and init is empty")
        # Initial associations end with gates; their values come second.
        last = given[1] if recipe.nonparametric and len(given) > 1 else given[-1]
        if recipe.nonparametric and (len(given) < 2 or last.dim() != 3):
            raise RecipeError(
                f"init of {recipe.memory.title} is a bundle of associations: keys [H, m, K], "
                "values [H, m, V], then the gates that travel with them"
            )
        if recipe.memory.channelled is False and not recipe.nonparametric:
            raise RecipeError(
                f"{recipe.memory.title} does not tell its value size from init: read from a state"
            )
        diagonal = recipe.memory.diagonal
        H, V = last.shape[-2 if diagonal else -3], last.shape[-1 if diagonal else -2]
        if recipe.nonparametric:
            V = last.shape[-1]
        if recipe.dual and not recipe.shapes(K, 1):
            V = last.shape[-1]  # rows of values, not a map
        at = sized(recipe, H=H, K=K, V=V)
        state = initial_state(at, B=B, dtype=state_dtype(q), device=q.device, init=init)
    if not isinstance(state, State):
        raise ValueError(f"state must be what recall returned, not {type(state).__name__}")
    if state.rows != B:
        raise ValueError(f"q has {B} rows and the state has {state.rows}")
    H, held_k, V = state.sizes
    bound = bind(recipe, H=H, K=held_k, V=V, precision=precision)
    check_state(bound.sized, state)
    check_precision(state, state_dtype(q), bound.engine)
    if state.dtype == torch.float32 and q.dtype == torch.float64:
        state = state.to(dtype=torch.float64)
    if held_k != K:
        raise ValueError(f"q has K = {K} and the state's keys have K = {held_k}")
    if Hq % H:
        raise ValueError(f"q has {Hq} heads, which is no multiple of the {H} memories")
    declared = bound.sized.gates
    for name in recipe.read_gates:
        if name not in gates:
            gate = declared[name].declared
            axes = ", ".join(("B", "T", "H", *gate.axes))
            raise RecipeError(f"rc.read needs the gate {name!r} of {gate.owner}, [{axes}]")
    for name in sorted(gates.keys() - declared.keys()):
        raise RecipeError(f"gate {name!r} is unknown to this recipe")
    gates = {name: x for name, x in gates.items() if name in recipe.read_gates}
    for name, x in gates.items():
        shape = [B, T, *declared[name].shape]
        if list(x.shape) != shape:
            raise RecipeError(
                f"gate {name!r} of {declared[name].declared.owner} must have shape {shape}, not "
                f"{list(x.shape)}"
            )
    check_params(bound.sized, params, like=q)
    shell = Problem(
        sized=bound.sized,
        plan=bound.plan,
        q=q.unflatten(2, (H, Hq // H)),
        k=q.new_zeros(B, 0, H, K),
        v=q.new_zeros(B, 0, H, V),
        rates=resolve(bound.sized, {}, params, B=B, T=0, dtype=state_dtype(q), device=q.device),
        params=params,
        state=state,
    )
    if torch.compiler.is_dynamo_compiling() and not bound.followed:
        from recollect.recall.uncompiled import uncompiled  # as in `recollect.recall.recall`

        return cast(Tensor, uncompiled(_answer, (bound, shell, gates)))
    return _answer((bound, shell, gates))


def _answer(asked: tuple[Bound, Problem, dict[str, Tensor]]) -> Tensor:
    """What the queries of a problem without tokens read from its state, ``[B, T, Hq, V]``."""
    bound, shell, gates = asked
    engine, products = bound.engine, bound.products
    # An inner batch that is open is learned once more before it is read.
    if leaves_inference(shell, *gates.values(), inner_gradients=True):
        gates = {name: ordinary(x) for name, x in gates.items()}
        with ordinary_mode():
            shell = ordinary_problem(shell)
            y = read_from(shell, shell.state, gates=gates, engine=engine, precision=products)
    else:
        y = read_from(shell, shell.state, gates=gates, engine=engine, precision=products)
    return y.flatten(2, 3)


def read_from(
    problem: Problem,
    state: State,
    *,
    engine: Engine,
    gates: Mapping[str, Tensor] | None = None,
    precision: str | None = None,
) -> Tensor:
    """What the problem's queries read from a state, ``[B, T, H, G, V]``.

    Args:
        problem: with the queries.
        state: what was memorised.
        engine: which may know how to read its own states.
        gates: those that a read asks for.
        precision: of products.
    """
    at, (B, T) = problem.sized, problem.q.shape[:2]
    dtype, device = state_dtype(problem.q, problem.k), problem.q.device
    known = {name: x for name, x in problem.rates.items() if x.shape[1] == T}
    query_rates = resolve(at, gates or {}, problem.params, B=B, T=T, dtype=dtype, device=device)
    rates = {**query_rates, **known}
    empty = dataclasses.replace(
        problem,
        k=problem.k.new_zeros(B, 0, at.H, at.K),
        v=problem.v.new_zeros(B, 0, at.H, at.V),
        rates=_empty_rates(problem, state),
        lengths=None,
        state=state,
    )
    lowered = lower(empty, reading=True)
    with solving(device, precision):
        y = None if engine.read is None else engine.read(lowered.problem, rates)
        if y is None:
            y = reference.read(lowered.problem, rates)
    return lowered.divide(y, after_all=True)


def _empty_rates(problem: Problem, state: State) -> dict[str, Tensor]:
    if state.buffer is not None:
        return {name: x[:, :0] for name, x in state.buffer.rates.items()}
    return {name: x[:, :0] for name, x in problem.rates.items()}
