"""The functional face: `recall` memorises and reads, `read` only reads.

Everything that is the same for all engines happens here, once: checks, packing, padding, grouped
query heads, several associations per token, and the normaliser. Engines see dense right-padded
rows.
"""

# More than 400 lines: most of it is the contract of `recall` and `read`, which take the same
# steps in the same order.

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from recollect.choices.member import RecipeError
from recollect.engines import reference
from recollect.engines.common.inference import (
    leaves_inference,
    ordinary,
    ordinary_mode,
    ordinary_problem,
)
from recollect.engines.common.problem import Problem, resolve, state_dtype
from recollect.engines.select import Engine, select
from recollect.recall.checks import (
    check_call,
    check_gates,
    check_params,
    check_recipe,
    check_state,
    check_values,
)
from recollect.recall.lowering import lower
from recollect.recall.packing import Rows, compact, pack_rows, scatter
from recollect.recall.transforms import refuse_transforms
from recollect.recipe.recipe import Recipe
from recollect.state.initial import initial_state
from recollect.state.state import State
from recollect.typing import Gates, Init, Params

__all__ = ["read", "recall"]


def recall(
    recipe: Recipe,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | None = None,
    *,
    params: Params | None = None,
    init: Init | None = None,
    state: State | None = None,
    method: str = "auto",
    causal: bool = True,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    output_state: bool = True,
) -> tuple[Tensor, State | None]:
    """Memorise each association, then read: y_t = M(W_t; φ(q_t)).

    Args:
        recipe: the regression problem.
        q: queries ``[B, T, Hq, K]``; Hq is a multiple of H, and query head h reads memory
            h // (Hq / H).
        k: keys ``[B, T, H, K]`` (``[B, T, H, n, K]`` with n associations per token).
        v: values ``[B, T, H, V]`` (or with n).
        gates: per-token numbers by name, as ``recipe.gates()`` asks: ``[B, T, H]`` or with one more
            axis.
        params: learned tensors by name, as ``recipe.params()`` asks, each ``[H, ...]``.
        init: initial memory A₀: one ``[H, out, in]`` tensor per map in order of application, or a
            single tensor. Zeros when omitted, where a zero memory can learn. For a memory that
            keeps associations, a bundle of them: keys ``[H, m, K]``, values ``[H, m, V]``, and the
            gates that travel with them in the recipe's order; they count as m tokens before the
            first.
        state: continue from here; not together with ``init``.
        method: ``"auto"``, ``"reference"``, or an engine's name.
        causal: False memorises everything first and then reads.
        attention_mask: ``[B, T]``, nonzero at real tokens; masked ones leave the state untouched
            and read 0.
        cu_seqlens: ``[N + 1]`` borders of N documents packed in one row (B = 1); the memory starts
            anew at each, and states have one row per document.
        chunk_size: an execution detail; it does not change results.
        output_state: False returns ``None`` in place of the final state.

    Returns:
        ``y [B, T, Hq, V]`` in v's dtype, and the state after the last token. States are float32
        (float64 when an input is, and what `Algorithm.wide` names), attached to autograd.

    Raises:
        RecipeError: gates or params missing, unknown or of the wrong shape; a method that cannot
        run.
        ValueError: tensors whose shapes, devices or dtypes do not fit, or with NaN.
        RuntimeError: inside a transform of `torch.func`, or forward-mode derivatives.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr=0.5))
        >>> y, state = rc.recall(recipe, q, k, v)
        >>> y.shape, state.position
        (torch.Size([1, 4, 2, 8]), tensor([4]))
        >>> exact, _ = rc.recall(recipe, q, k, v, method="reference")
        >>> torch.allclose(y, exact, atol=1e-5)
        True
    """
    refuse_transforms((q, k, v, *_tensors(gates), *_tensors(params)))
    check_recipe(recipe)
    for name, given in (("gates", gates), ("params", params)):
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(f"{name} must map names to tensors, not {type(given).__name__}")
    gates, params = dict(gates or {}), dict(params or {})
    check_call(recipe, q, k, v, state=state, init=init, mask=attention_mask, borders=cu_seqlens)
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size must be a whole number >= 1, not {chunk_size!r}")
    check_gates(recipe, gates, q=q, k=k, v=v)
    check_params(recipe, params, H=k.shape[2], K=q.shape[-1], V=v.shape[-1], like=q)
    if not causal and any(part.horizon is not None for part in recipe.context.within):
        raise RecipeError(
            "causal=False reads after everything is memorised, and a window of the context would "
            "only see the end: use context.Similar(kernel=...) without within"
        )
    engine = select(recipe, method).engine
    starts = () if init is None else (init,) if isinstance(init, Tensor) else init
    if any(_suspicious(x) and bool(x.isnan().any()) for x in starts):
        raise ValueError("init has a NaN: every output would be one; mend its source")
    if cu_seqlens is not None and init is not None:
        # Documents are grouped by length below, so each takes its own start along.
        state = initial_state(
            recipe,
            B=cu_seqlens.numel() - 1,
            H=k.shape[2],
            K=k.shape[-1],
            V=v.shape[-1],
            dtype=state_dtype(q, k, v),
            device=k.device,
            init=init,
        )

    def call(
        q: Tensor, k: Tensor, v: Tensor, gates: Gates, rows: Rows | None, start: State | None
    ) -> tuple[Tensor, State]:
        return _run(
            recipe,
            engine,
            *(q, k, v),
            gates=gates,
            params=params,
            init=init,
            state=start,
            rows=rows,
            packed=cu_seqlens is not None,
            causal=causal,
            chunk_size=chunk_size,
            output_state=output_state,
        )

    # Padding holds valid numbers, so that what is discarded cannot poison a gradient.
    fills = {gate.name: gate.init for gate in recipe.gates()}
    if cu_seqlens is not None:
        y, after = pack_rows(call, q, k, v, gates, cu_seqlens, state, fills)
    elif attention_mask is not None:
        rows = compact(attention_mask)
        squeezed = {name: rows.gather(x, fills[name]) for name, x in gates.items()}
        y, after = call(rows.gather(q), rows.gather(k), rows.gather(v), squeezed, rows, state)
        y = scatter(y, rows)
    else:
        y, after = call(q, k, v, gates, None, state)
    return y, after if output_state else None


def _run(
    recipe: Recipe,
    engine: Engine,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gates: Gates,
    params: Params,
    init: Init | None,
    state: State | None,
    rows: Rows | None,
    packed: bool,
    causal: bool,
    chunk_size: int | None,
    output_state: bool,
) -> tuple[Tensor, State]:
    """One dense, right-padded call of an engine."""
    check_values(recipe, gates, params)
    if not engine.shows_nan:
        _refuse_nan(q, k, v, gates, params)
    B, T, H = k.shape[:3]
    dtype = state_dtype(q, k, v)
    if state is None:
        state = initial_state(
            recipe,
            B=B,
            H=H,
            K=k.shape[-1],
            V=v.shape[-1],
            dtype=dtype,
            device=k.device,
            init=init,
        )
    rates = resolve(recipe, gates, params, B=B, T=T, H=H, dtype=dtype, device=k.device)
    problem = Problem(
        recipe=recipe,
        q=q.unflatten(2, (H, q.shape[2] // H)) if H else q.unsqueeze(3),
        k=k,
        v=v,
        rates=rates,
        params=params,
        lengths=None if rows is None else rows.lengths,
        places=None if rows is None else rows.index,
        packed=packed,
        state=state,
        chunk_size=chunk_size,
        continues=output_state or not causal,
    )
    if leaves_inference(problem, inner_gradients=engine.inner_gradients):
        with ordinary_mode():
            y, after = _solve(ordinary_problem(problem), engine, causal=causal)
    else:
        y, after = _solve(problem, engine, causal=causal)
    if engine.shows_nan and _suspicious(y, *after.weights):
        _refuse_nan(q, k, v, gates, params)
    return y, after


def _solve(problem: Problem, engine: Engine, *, causal: bool) -> tuple[Tensor, State]:
    """Lower the problem, run it, and undo the lowering."""
    recipe, lowered = problem.recipe, lower(problem)
    # Engines keep their sums in float32 themselves; autocast would undo that.
    with full_precision(problem.k.device):
        if not causal and (recipe.nonparametric or recipe.from_gram):
            # What is kept depends on no query: nothing has to be read on the way.
            y, after = problem.v.new_zeros(0), problem.after()
        else:
            y, after = engine.run(lowered.problem)
    after = lowered.finish_state(after)
    if not causal:
        y = _read_from(problem, after, engine=engine)
    else:
        y = lowered.finish(y)
    return y.flatten(2, 3), after


def _tensors(named: Mapping[str, Tensor] | None) -> list[Tensor]:
    return list(named.values()) if isinstance(named, Mapping) else []


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Without autocast, where the device has any."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _suspicious(*tensors: Tensor) -> bool:
    """Whether a NaN may be among CPU tensors; a GPU would have to wait for the answer.

    A finite sum proves that there is none.
    """
    seen = [x.detach() for x in tensors if x.device.type == "cpu" and x.is_floating_point()]
    if torch.compiler.is_compiling():
        return False
    return any(not math.isfinite(x.sum().item()) for x in seen)


def _refuse_nan(q: Tensor, k: Tensor, v: Tensor, gates: Gates, params: Params) -> None:
    """Refuse NaN and infinities in what was given, naming the first place.

    A log decay of −inf is a value like others: it forgets everything.
    """
    named = {"q": q, "k": k, "v": v, **{f"gate {name!r}": x for name, x in gates.items()}}
    named |= {f"param {name!r}": x for name, x in params.items()}
    for name, x in named.items():
        if not _suspicious(x):
            continue
        x = x.detach()
        bad = ~(x < torch.inf) if name.startswith("gate 'log_") else ~x.isfinite()
        if not bool(bad.any()):
            continue
        what = "NaN" if bool(x.isnan().any()) else "infinity"
        if name.startswith("param"):
            raise ValueError(f"{name} has a {what}: every output would be one; mend its source")
        row, token = (bad.nonzero()[0, :2]).tolist()
        raise ValueError(
            f"{name} has a {what} at row {row}, token {token}: the memory would carry it to every "
            "later token; mask that token or mend its source"
        )


def read(
    recipe: Recipe,
    q: Tensor,
    *,
    gates: Gates | None = None,
    state: State | None = None,
    init: Init | None = None,
    params: Params | None = None,
) -> Tensor:
    """Read without writing: y_t = M(W; φ(q_t)) for every query, W the memory as it stands.

    Args:
        recipe: the regression problem.
        q: queries ``[B, T, Hq, K]``.
        gates: only those of a link that has gates (a ball's radius, an elastic net's threshold).
        state: what was memorised; or
        init: a memory A₀ as for `recall`, when nothing was memorised yet.
        params: learned tensors, as for `recall`.

    Returns:
        ``[B, T, Hq, V]`` in q's dtype.

    Raises:
        RecipeError: neither or both of ``state`` and ``init``; gates the read needs are missing.
        ValueError: queries that do not fit the state, or something else in its place.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr=0.5))
        >>> y, state = rc.recall(recipe, q, k, v)
        >>> last = rc.read(recipe, q[:, -1:], state=state)
        >>> torch.allclose(last, y[:, -1:], atol=1e-6)
        True
    """
    refuse_transforms((q, *_tensors(gates), *_tensors(params)))
    check_recipe(recipe)
    if (state is None) == (init is None):
        raise RecipeError("rc.read needs something to read: give state=... or init=..., not both")
    if q.dim() != 4:
        raise ValueError(f"q must have shape [B, T, H, K], not {list(q.shape)}")
    params, gates = dict(params or {}), dict(gates or {})
    B, T, Hq, K = q.shape
    if state is None:
        assert init is not None
        given = [init] if isinstance(init, Tensor) else list(init)
        if not given:
            raise RecipeError("rc.read needs something to read, and init is empty")
        # A bundle of associations ends with gates; its values come second.
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
        dtype = state_dtype(q)
        state = initial_state(recipe, B=B, H=H, K=K, V=V, dtype=dtype, device=q.device, init=init)
    if not isinstance(state, State):
        raise ValueError(f"state must be what recall returned, not {type(state).__name__}")
    if state.rows != B:
        raise ValueError(f"q has {B} rows and the state has {state.rows}")
    H, held_k, V = state.sizes
    check_state(recipe, state, held_k, V)
    if held_k != K:
        raise ValueError(f"q has K = {K} and the state's keys have K = {held_k}")
    if Hq % H:
        raise ValueError(f"q has {Hq} heads, which is no multiple of the {H} memories")
    wanted = {gate.name: gate for gate in recipe.retention.gates() if "decay" not in gate.name}
    asked = {name for part in recipe.context.within for name in part.reads}
    wanted |= {gate.name: gate for gate in recipe.context.gates() if gate.name in asked}
    sizes = recipe.axes(K, V)
    for name in wanted.keys() - gates.keys():
        axes = ", ".join(("B", "T", "H", *wanted[name].axes))
        raise RecipeError(f"rc.read needs the gate {name!r} of {wanted[name].owner}, [{axes}]")
    for name in sorted(gates.keys() - {gate.name for gate in recipe.gates()}):
        raise RecipeError(f"gate {name!r} is unknown to this recipe")
    gates = {name: x for name, x in gates.items() if name in wanted}
    for name, x in gates.items():
        shape = [B, T, H, *(sizes[axis] for axis in wanted[name].axes)]
        if list(x.shape) != shape:
            raise RecipeError(
                f"gate {name!r} of {wanted[name].owner} must have shape {shape}, not "
                f"{list(x.shape)}"
            )
    check_params(recipe, params, H=H, K=K, V=V, like=q)
    shell = Problem(
        recipe=recipe,
        q=q.unflatten(2, (H, Hq // H)),
        k=q.new_zeros(B, 0, H, K),
        v=q.new_zeros(B, 0, H, V),
        rates=resolve(recipe, {}, params, B=B, T=0, H=H, dtype=state_dtype(q), device=q.device),
        params=params,
        state=state,
    )
    engine = select(recipe).engine
    if leaves_inference(shell, *gates.values(), inner_gradients=True):
        gates = {name: ordinary(x) for name, x in gates.items()}
        with ordinary_mode():
            shell = ordinary_problem(shell)
            y = _read_from(shell, shell.state, gates=gates, engine=engine)
    else:
        y = _read_from(shell, state, gates=gates, engine=engine)
    return y.flatten(2, 3)


def _read_from(
    problem: Problem, state: State, *, engine: Engine, gates: Mapping[str, Tensor] | None = None
) -> Tensor:
    """What the problem's queries read from a state, ``[B, T, H, G, V]``."""
    recipe, (B, T, H) = problem.recipe, problem.q.shape[:3]
    dtype, device = state_dtype(problem.q, problem.k), problem.q.device
    known = {name: x for name, x in problem.rates.items() if x.shape[1] == T}
    rates = {
        **resolve(recipe, gates or {}, problem.params, B=B, T=T, H=H, dtype=dtype, device=device),
        **known,
    }
    empty = dataclasses.replace(
        problem,
        k=problem.k[:, :0],
        v=problem.v[:, :0],
        rates=_empty_rates(problem, state),
        lengths=None,
        state=state,
    )
    lowered = lower(empty, reading=True)
    with full_precision(device):
        y = None if engine.read is None else engine.read(lowered.problem, rates)
        if y is None:
            y = reference.read(lowered.problem, rates)
    return lowered.divide(y, after_all=True)


def _empty_rates(problem: Problem, state: State) -> dict[str, Tensor]:
    if state.buffer is not None:
        return {name: x[:, :0] for name, x in state.buffer.rates.items()}
    return {name: x[:, :0] for name, x in problem.rates.items()}
