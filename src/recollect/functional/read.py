"""`read`: queries against the memory of a state, without writing."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from recollect.choices.runtime import without_autocast
from recollect.engines.common.problem import Problem, resolve_rates, state_dtype
from recollect.engines.reference.engine import ReferenceEngine
from recollect.functional.binding import bind
from recollect.functional.checks import (
    as_mapping,
    check_init,
    check_params,
    check_precision,
    check_state,
    refuse_transforms,
    tensors_of,
)
from recollect.functional.lowering import lower
from recollect.functional.modes import (
    engine_context,
    must_leave_inference_mode,
    outside_inference_mode,
    problem_without_inference_flag,
    without_inference_flag,
)
from recollect.messages import RecipeError
from recollect.recipe.bound import BoundRecipe
from recollect.recipe.recipe import Recipe
from recollect.recipe.resolve import RecipeLike, as_recipe
from recollect.state.state import State, initial_state
from recollect.typing import Gates, Init, Params

__all__ = ["read", "read_from"]


def read(
    recipe: RecipeLike,
    q: Tensor,
    *,
    gates: Gates | None = None,
    state: State | None = None,
    initial_memory: Init | None = None,
    params: Params | None = None,
    precision: str | None = None,
) -> Tensor:
    """Read without writing: y_t = M(W; φ(q_t)) for every query, W the memory of the state.

    Args:
        recipe: the regression problem, a name of the zoo, or an object with a recipe.
        q: queries ``[B, T, Hq, K]``.
        gates: gates of a link, if it has any (a ball's radius, an elastic net's threshold), and of
            the queries (a ridge per token).
        state: state of an earlier call; or
        initial_memory: a memory A₀ as for `recall`, if nothing was memorised yet.
        params: learned tensors, as for `recall`.
        precision: of products, as for `recall`.

    Returns:
        ``[B, T, Hq, V]`` in q's dtype.

    Raises:
        RecipeError: neither or both of ``state`` and ``initial_memory``; gates the read needs are
            missing.
        ValueError: queries that do not fit the state, or another type in its place; on the CPU,
            an initial memory with NaN or infinities.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr=0.5))
        >>> y, state = rc.recall(recipe, q, k, v)
        >>> last = rc.read(recipe, q[:, -1:], state=state)
        >>> torch.allclose(last, y[:, -1:], atol=1e-6)
        True
    """
    recipe = as_recipe(recipe, "rc.read")
    gates, params = as_mapping(gates, "gates"), as_mapping(params, "params")
    refuse_transforms(itertools.chain((q,), gates.values(), params.values()))
    if (state is None) == (initial_memory is None):
        both = "" if state is None else ", not both"
        raise RecipeError(
            f"rc.read needs one memory to read: pass state=... or initial_memory=...{both}"
        )
    if not isinstance(q, Tensor) or not q.is_floating_point():
        actual = q.dtype if isinstance(q, Tensor) else type(q).__name__
        raise ValueError(f"q must be a floating-point tensor [B, T, H, K], not {actual}")
    if q.dim() != 4:
        raise ValueError(f"q must have shape [B, T, H, K], not {list(q.shape)}")
    B, T, Hq, K = q.shape
    dtype, device = state_dtype(q), q.device
    if initial_memory is not None:
        check_init(initial_memory)
        H, V = _memory_sizes(recipe, tensors_of(initial_memory), K)
        bound = bind(recipe, H=H, K=K, V=V, precision=precision)
        state = initial_state(bound, B=B, dtype=dtype, device=device, init=initial_memory)
    if not isinstance(state, State):
        raise ValueError(f"state must be a state that recall returned, not {type(state).__name__}")
    if state.rows != B:
        raise ValueError(f"q has {B} rows and the state has {state.rows}")
    H, key_dim, V = state.sizes
    bound = bind(recipe, H=H, K=key_dim, V=V, precision=precision)
    check_state(bound, state)
    check_precision(state, dtype, bound.engine)
    if state.dtype == torch.float32 and dtype == torch.float64:
        state = state.to(dtype=dtype)
    if key_dim != K:
        raise ValueError(f"q has K = {K} and the state's keys have K = {key_dim}")
    if Hq % H:
        raise ValueError(f"q has {Hq} heads, which is not a multiple of the {H} memories")
    gates = _read_gates(bound, gates, [B, T])
    check_params(bound, params, like=q)
    problem = Problem(
        bound=bound,
        q=q.unflatten(2, (H, Hq // H)),
        k=q.new_zeros(B, 0, H, K),
        v=q.new_zeros(B, 0, H, V),
        gates=gates,
        params=params,
        rates=resolve_rates(bound, {}, params, B=B, T=0, dtype=dtype, device=device),
        state=state,
    )
    if torch.compiler.is_dynamo_compiling() and not bound.is_traceable:
        from recollect.functional.compile import uncompiled  # as in `memorise`

        return cast(Tensor, uncompiled(_read_outputs, problem))
    return _read_outputs(problem)


def _memory_sizes(recipe: Recipe, init_tensors: Sequence[Tensor], K: int) -> tuple[int, int]:
    """Return H and V of an initial memory."""
    if not init_tensors:
        raise RecipeError("rc.read needs a memory to read, and initial_memory is empty")
    # Initial associations are keys, values, then gates.
    several = len(init_tensors) > 1
    value = init_tensors[1] if recipe.nonparametric and several else init_tensors[-1]
    if recipe.nonparametric:
        if not several or value.dim() != 3:
            raise RecipeError(
                f"initial_memory of {recipe.memory.title} is a tuple of associations: keys "
                "[H, m, K], values [H, m, V], then the gates per association"
            )
    elif recipe.memory.has_channels is False:
        raise RecipeError(
            f"the value size of {recipe.memory.title} does not follow from initial_memory: read "
            "from a state"
        )
    diagonal = recipe.memory.is_elementwise
    V = value.shape[-1 if diagonal else -2]
    if recipe.nonparametric or (recipe.uses_kernel_rows and not recipe.shapes(K, 1)):
        V = value.shape[-1]  # values by row, not a map
    return value.shape[-2 if diagonal else -3], V


def _read_gates(
    bound: BoundRecipe, gates: Mapping[str, Tensor], lead: list[int]
) -> dict[str, Tensor]:
    """Return the gates that a read uses, checked in name and shape."""
    declared, names = bound.gates, bound.recipe.read_gates
    for name in names:
        if name not in gates:
            gate = declared[name].declared
            axes = ", ".join(("B", "T", "H", *gate.axes))
            raise RecipeError(f"rc.read needs the gate {name!r} of {gate.owner}, [{axes}]")
    for name in sorted(gates.keys() - declared.keys()):
        raise RecipeError(f"gate {name!r} is unknown to this recipe")
    for name in names:
        shape = [*lead, *declared[name].shape]
        if list(gates[name].shape) != shape:
            raise RecipeError(
                f"gate {name!r} of {declared[name].declared.owner} must have shape {shape}, not "
                f"{list(gates[name].shape)}"
            )
    return {name: x for name, x in gates.items() if name in names}


def _read_outputs(problem: Problem) -> Tensor:
    """Read the queries of a problem without tokens from its state, ``[B, T, Hq, V]``."""
    gates, device, precision = problem.gates, problem.q.device, problem.bound.matmul_precision
    with without_autocast(device.type) if precision is None else engine_context(device, precision):
        # An open inner batch is learned again before the read.
        if must_leave_inference_mode(problem, *gates.values(), uses_inner_autograd=True):
            gates = {name: without_inference_flag(x) for name, x in gates.items()}
            with outside_inference_mode():
                problem = problem_without_inference_flag(problem)
                y = read_from(problem, problem.state, gates=gates)
        else:
            y = read_from(problem, problem.state, gates=gates)
    return y.flatten(2, 3)


def read_from(
    problem: Problem, state: State, *, gates: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Read the problem's queries from a state, ``[B, T, H, G, V]``."""
    bound, (B, T) = problem.bound, problem.q.shape[:2]
    dtype, device = state_dtype(problem.q, problem.k), problem.q.device
    per_query = {name: x for name, x in problem.rates.items() if x.shape[1] == T}
    query_rates = resolve_rates(
        bound, gates or {}, problem.params, B=B, T=T, dtype=dtype, device=device
    )
    rates = {**query_rates, **per_query}
    no_tokens = problem.rates if state.buffer is None else state.buffer.rates
    query_problem = dataclasses.replace(
        problem,
        k=problem.k.new_zeros(B, 0, bound.H, bound.K),
        v=problem.v.new_zeros(B, 0, bound.H, bound.V),
        rates={name: x[:, :0] for name, x in no_tokens.items()},
        lengths=None,
        state=state,
    )
    lowered = lower(query_problem, reading=True)
    y = bound.engine.read_state(lowered.problem, rates)
    if y is None:
        y = ReferenceEngine().read_state(lowered.problem, rates)
    return lowered.apply_normalizer(y, final_scale=True)
