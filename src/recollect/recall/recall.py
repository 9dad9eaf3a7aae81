"""The functional interface: `recall` memorises and reads; `recollect.recall.reading` only reads.

Everything that is the same for all engines happens here, once: checks, packing, padding, grouped
query heads, several associations per token, and the normaliser. Engines see dense right-padded
rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from recollect.choices.devices import holds
from recollect.engines import fla
from recollect.engines.common.overlap import rates_by_keys
from recollect.engines.common.problem import Problem, resolve, state_dtype
from recollect.recall.arguments import check_flags, check_tensors, named
from recollect.recall.bound import Bound, bind
from recollect.recall.call import Call
from recollect.recall.checks import (
    check_call,
    check_init,
    check_values,
    refuse_long,
    refuse_nan,
    suspicious,
    tensors_of,
)
from recollect.recall.lowering import lower
from recollect.recall.modes import (
    leaves_inference,
    ordinary_mode,
    ordinary_problem,
    refuse_transforms,
    solving,
)
from recollect.recall.packing import run_compacted, run_documents
from recollect.recall.reading import read_from
from recollect.recipe.argument import Stated, recipe_of
from recollect.state.state import State, initial_state
from recollect.typing import Gates, Init, Params

__all__ = ["memorise", "recall"]


def recall(
    recipe: Stated,
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
    precision: str | None = None,
    output_state: bool = True,
) -> tuple[Tensor, State | None]:
    """Memorise each association, then read: y_t = M(W_t; φ(q_t)).

    Args:
        recipe: the regression problem; the name of an architecture, or what has a recipe, will do.
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
        method: ``"auto"``, ``"reference"``, or an engine's name; ``"torch"`` never takes
            flash-linear-attention, which ``"auto"`` may take on CUDA, nor other Triton kernels, and
            ``"fla"`` nothing else.
        causal: False memorises everything first and then reads.
        attention_mask: ``[B, T]``, nonzero at real tokens; masked ones leave the state untouched
            and read 0.
        cu_seqlens: ``[N + 1]`` borders of N documents packed in one row (B = 1); the memory starts
            anew at each, and states have one row per document.
        chunk_size: an execution detail; it does not change results.
        precision: what products of float32 numbers multiply: ``"float32"``, ``"tf32"`` (where the
            device has it), ``"bf16"``, or ``None``: what PyTorch is set to. They add in float32,
            and nothing else is rounded. Recipes that need their digits stay float32
            (`recollect.explain` says which), and so does the reference.
        output_state: False returns ``None`` in place of the final state.

    Returns:
        ``y [B, T, Hq, V]`` in v's dtype, not finite where steps diverge (η ‖k‖² beyond 2 in the
        delta rule: long keys), and the state after the last token. States are float32
        (float64 when an input is, and what `Algorithm.wide` names), attached to autograd.

    Raises:
        RecipeError: gates or params missing, unknown or of the wrong shape; a method that cannot
            run.
        ValueError: tensors whose shapes, devices or dtypes do not fit, or, on the CPU, with NaN or
            infinities (a log decay may be −inf); an unknown method or precision.
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
    recipe = recipe_of(recipe, "rc.recall")
    check_flags(causal=causal, output_state=output_state)
    gates, params = named(gates, "gates"), named(params, "params")
    refuse_transforms(itertools.chain((q, k, v), gates.values(), params.values()))
    check_tensors(recipe, q, k, v)
    call = Call(
        bound=bind(
            recipe,
            H=k.shape[2],
            K=k.shape[-1],
            V=v.shape[-1],
            method=method,
            precision=precision,
        ),
        q=q,
        k=k,
        v=v,
        gates=gates,
        params=params,
        init=init,
        state=state,
        attention_mask=attention_mask,
        cu_seqlens=cu_seqlens,
        causal=causal,
        chunk_size=chunk_size,
        output_state=output_state,
    )
    return memorise(call)


def memorise(call: Call) -> tuple[Tensor, State | None]:
    """`recall` of a call that is already bound.

    Raises:
        RecipeError: as `recall`.
        ValueError: as `recall`.
    """
    if torch.compiler.is_dynamo_compiling() and not call.bound.followed:
        # To load a compiler takes longer than all else that is imported, so this is only done where
        # it is at work.
        from recollect.recall.uncompiled import uncompiled

        return uncompiled(memorise, call)
    check_call(call)
    if call.init is not None:
        check_init(call.init)
    if call.cu_seqlens is not None:
        if call.init is not None:
            # Documents may be grouped by length below, so each takes its own start along.
            call = _started(call, rows=call.cu_seqlens.numel() - 1)
        found = _run_packed(call)
        y, after = run_documents(_run, call) if found is None else found
    elif call.attention_mask is not None:
        y, after = run_compacted(_run, call)
    else:
        y, after = _run(call)
    return y, after if call.output_state else None


def _started(call: Call, *, rows: int) -> Call:
    """The call with a state: the one before the first token where the caller gave none."""
    state = initial_state(
        call.bound.sized,
        B=rows,
        dtype=state_dtype(call.q, call.k, call.v),
        device=call.k.device,
        init=call.init,
    )
    return dataclasses.replace(call, state=state, init=None)


def _run(call: Call) -> tuple[Tensor, State]:
    """One dense, right-padded call of an engine."""
    engine, at, state = call.bound.engine, call.bound.sized, call.state
    q, k, v = call.q, call.k, call.v
    if call.sure and engine.token is not None and state is not None and _one_by_one(call):
        plan, decoded = call.bound.plan, None
        with solving(k.device, call.bound.products):
            if call.bound.offer is not None and q.device.type in fla.DEVICES:
                decoded = fla.token(at, plan, call.bound.offer, q, k, v, call.gates, state)
            if decoded is None:
                decoded = _token(call, state)
        if decoded is not None:
            if suspicious(decoded[:1]):
                refuse_nan(call)
            return decoded
    if not call.sure:
        check_values(at, call.gates, call.params)
    by_outputs = call.sure and engine.shows_nan
    if not by_outputs:
        refuse_nan(call)
    refuse_long(call)
    problem = _problem(call, rows=k.shape[0])
    if leaves_inference(problem, inner_gradients=call.bound.inner_gradients):
        with ordinary_mode():
            y, after = _solve(ordinary_problem(problem), call)
    else:
        y, after = _solve(problem, call)
    if (
        call.init is not None
        and not torch.compiler.is_compiling()
        and (type(y) is Tensor or holds(y))
    ):
        after = _own(after, tensors_of(call.init))
    # Without padding the last token has read all of the memory, and what is wrong there shows.
    read = call.lengths is None and at.recipe.memory.read.when == "after"
    if by_outputs and suspicious((y,) if read else (y, *after.weights)):
        refuse_nan(call)
    return y, after


def _problem(call: Call, *, rows: int) -> Problem:
    """What an engine is asked, with states of so many rows."""
    at, state, (q, k, v) = call.bound.sized, call.state, (call.q, call.k, call.v)
    (B, T), dtype = k.shape[:2], state_dtype(q, k, v)
    if state is None:
        state = initial_state(at, B=rows, dtype=dtype, device=k.device, init=call.init)
    elif dtype == torch.float64 and state.dtype not in (None, dtype):
        state = state.to(dtype=dtype)  # float64 inputs widen what float32 ones have left
    rates = resolve(at, call.gates, call.params, B=B, T=T, dtype=dtype, device=k.device)
    if call.bound.by_keys:
        with solving(k.device, call.bound.products):
            rates = rates_by_keys(at.recipe.algorithm, k, state, rates)
    return Problem(
        sized=at,
        plan=call.bound.plan,
        q=q.unflatten(2, (at.H, q.shape[2] // at.H)),
        k=k,
        v=v,
        rates=rates,
        params=call.params,
        lengths=call.lengths,
        places=call.places,
        packed=call.documents,
        state=state,
        chunk_size=call.chunk_size,
        sources=tuple(call.params.values()) if call.sources is None else call.sources,
        continues=call.output_state or not call.causal,
    )


def _token(call: Call, state: State) -> tuple[Tensor, State] | None:
    """One decoded token straight from the gates, where the engine takes it so."""
    bound, gates = call.bound, call.gates
    algorithm = bound.sized.recipe.algorithm
    assert bound.engine.token is not None
    if bound.by_keys:
        if "lr" not in gates or state.seen is None:
            return None  # a constant, or a logarithm: it is made a rate first
        gates = rates_by_keys(algorithm, call.k, state, gates)
    return bound.engine.token(bound.sized, bound.plan, call.q, call.k, call.v, gates, state)


def _run_packed(call: Call) -> tuple[Tensor, State] | None:
    """Documents in one row as they are, where an operator takes their borders; else ``None``."""
    offer, borders = call.bound.offer, call.cu_seqlens
    if offer is None or borders is None or not (call.causal and fla.packs(offer, call.k)):
        return None
    if not call.sure:
        check_values(call.bound.sized, call.gates, call.params)
    refuse_nan(call)
    refuse_long(call)
    problem = _problem(call, rows=borders.numel() - 1)
    problem = dataclasses.replace(problem, borders=borders, lengths=borders.diff(), packed=True)
    lowered = lower(problem)
    with solving(call.k.device, call.bound.products):
        found = fla.run(lowered.problem, offer)
    if found is None:
        return None
    y, after = found
    return lowered.finish(y).flatten(2, 3), lowered.finish_state(after)


def _one_by_one(call: Call) -> bool:
    """Whether a call is one real token of each row, and nobody asks for a gradient: decoding."""
    whole = call.lengths is None and call.k.shape[1] == 1 and call.causal
    return whole and not (torch.is_grad_enabled() or torch.compiler.is_compiling())


def _own(state: State, starts: Sequence[Tensor]) -> State:
    """The state with copies where nothing was written yet: the caller's ``init`` stays theirs."""
    theirs = {x.data_ptr() for x in starts}
    for x in state.tensors():
        if x.data_ptr() in theirs:
            return state.map(lambda x: x.clone() if x.data_ptr() in theirs else x)
    return state


def _solve(problem: Problem, call: Call) -> tuple[Tensor, State]:
    """Lower the problem, run it, and undo the lowering."""
    recipe, causal = problem.recipe, call.causal
    precision = call.bound.products
    if causal and problem.sized.plain:
        with solving(problem.k.device, precision):
            y, after = _by_engine(problem, call.bound)
        return y.flatten(2, 3), after
    lowered = lower(problem)
    # Engines keep their sums in float32 themselves; autocast would undo that.
    with solving(problem.k.device, precision):
        if not causal and (recipe.nonparametric or recipe.solves_from_gram):
            # What is kept depends on no query: nothing has to be read on the way.
            y, after = problem.v.new_zeros(0), problem.after()
        else:
            y, after = _by_engine(lowered.problem, call.bound)
    after = lowered.finish_state(after)
    if not causal:
        y = read_from(problem, after, engine=call.bound.engine, precision=precision)
    else:
        y = lowered.finish(y)
    return y.flatten(2, 3), after


def _by_engine(problem: Problem, bound: Bound) -> tuple[Tensor, State]:
    """Outputs and state by the engine, or by an operator that takes the place of its products."""
    if bound.offer is not None and (bound.offer.must or problem.q.device.type in fla.DEVICES):
        found = fla.run(problem, bound.offer)
        if found is not None:
            return found
    return bound.engine.run(problem)
