"""The functional interface: `recall` memorises and reads; `recollect.functional.read` only reads.

All work that engines share is done here, once: checks, packing, padding, grouped query heads,
several associations per token, and the normalizer. Engines get dense sequences, padded on the
right.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recollect.choices.runtime import has_data, without_autocast
from recollect.engines import fla
from recollect.engines.common.key_limited_rates import limit_rates_by_keys
from recollect.engines.common.problem import Problem, resolve_rates, state_dtype
from recollect.functional.binding import bind
from recollect.functional.checks import (
    as_mapping,
    check_call,
    check_finite,
    check_flags,
    check_init,
    check_key_norms,
    check_tensors,
    check_values,
    may_contain_nan,
    refuse_transforms,
    tensors_of,
)
from recollect.functional.lowering import lower
from recollect.functional.modes import (
    engine_context,
    must_leave_inference_mode,
    outside_inference_mode,
    problem_without_inference_flag,
)
from recollect.functional.packing import run_compacted, run_documents
from recollect.functional.read import read_from
from recollect.messages import suggest_arguments
from recollect.recipe.recipe import Recipe
from recollect.recipe.resolve import RecipeLike, as_recipe
from recollect.state import state as states
from recollect.state.state import State
from recollect.typing import Gates, Init, Params

__all__ = ["initial_state", "memorise", "new_call", "recall", "with_initial_state"]


@suggest_arguments
def recall(
    recipe: RecipeLike,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | None = None,
    *,
    params: Params | None = None,
    initial_memory: Init | None = None,
    state: State | None = None,
    engine: str = "auto",
    causal: bool = True,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    precision: str | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, State | None]:
    """Memorise each association, then read: y_t = M(W_t; φ(q_t)).

    Args:
        recipe: the regression problem, a name of the zoo, or an object with a recipe.
        q: queries ``[B, T, Hq, K]``. Hq is a multiple of H, and query head h reads memory
            h // (Hq / H).
        k: keys ``[B, T, H, K]``, or ``[B, T, H, n, K]`` with n associations per token.
        v: values ``[B, T, H, V]``, or ``[B, T, H, n, V]``.
        gates: tensors by name, as declared by ``recipe.gates()``: ``[B, T, H]`` or with one more
            axis.
        params: learned tensors by name, as declared by ``recipe.params()``, each ``[H, ...]``.
        initial_memory: A₀: one ``[H, out, in]`` tensor per map in order of application, or a
            single tensor; ``[B, H, out, in]`` for one memory per sequence. Zeros when omitted, if
            a zero memory can learn. For a memory that
            stores associations, a tuple of keys ``[H, m, K]``, values ``[H, m, V]``, and the
            gates per association in the recipe's order; they count as m tokens before the first.
        state: state of an earlier call, from which this call continues; not together with
            ``initial_memory``.
        engine: ``"auto"``, ``"reference"``, or an engine's name. ``"torch"`` excludes
            flash-linear-attention, which ``"auto"`` may take on CUDA, and other Triton kernels.
            ``"fla"`` takes flash-linear-attention only.
        causal: False memorises everything first and then reads.
        attention_mask: ``[B, T]``, nonzero at real tokens. Masked tokens leave the state untouched,
            and their output is 0.
        cu_seqlens: ``[N + 1]`` boundaries of N documents packed in one sequence (B = 1). The memory
            starts again at each, and the state has one row per document.
        chunk_size: tokens per chunk of engines that work in chunks; it does not change results.
        precision: precision of the factors of float32 products: ``"float32"``, ``"tf32"`` (if the
            device has it), or ``None`` for PyTorch's setting. The other two change that setting,
            which all threads share, while the engine runs. Gradients that autograd derives by
            itself follow PyTorch's setting during ``backward()``, so set
            ``torch.backends.cuda.matmul.fp32_precision`` to ``"ieee"`` or ``"tf32"`` there for the
            same precision. Sums are in float32. The reference engine, and recipes that need all
            digits (`recollect.explain` lists them), keep float32.
        output_final_state: False returns ``None`` in place of the final state.

    Returns:
        ``y [B, T, Hq, V]`` in v's dtype, not finite if steps diverge (η ‖k‖² beyond 2 in the
        delta rule: long keys), and the state after the last token. States are float32
        (float64 if an input is, and for names in `Algorithm.float64_slots`), attached to autograd.

    Raises:
        RecipeError: gates or params missing, unknown or of the wrong shape; an engine that
            cannot run the recipe.
        ValueError: tensors whose shapes, devices or dtypes do not fit, or, on the CPU, with NaN or
            infinities (a log decay may be −inf); an unknown engine or precision.
        RuntimeError: inside a transform of `torch.func`, or for forward-mode derivatives.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr=0.5))
        >>> y, state = rc.recall(recipe, q, k, v)
        >>> y.shape, state.position
        (torch.Size([1, 4, 2, 8]), tensor([4]))
        >>> exact, _ = rc.recall(recipe, q, k, v, engine="reference")
        >>> torch.allclose(y, exact, atol=1e-5)
        True
    """
    recipe = as_recipe(recipe, "rc.recall")
    check_flags(causal=causal, output_final_state=output_final_state)
    call = new_call(
        *(recipe, q, k, v, gates, params, engine, precision),
        initial_memory=initial_memory,
        state=state,
        attention_mask=attention_mask,
        cu_seqlens=cu_seqlens,
        causal=causal,
        chunk_size=chunk_size,
        output_final_state=output_final_state,
    )
    return memorise(call)


@suggest_arguments
def initial_state(
    recipe: RecipeLike,
    *,
    batch_size: int,
    num_heads: int,
    key_dim: int,
    value_dim: int | None = None,
    initial_memory: Init | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> State:
    """Return the state before the first token, for example with weights from elsewhere.

    Args:
        recipe: the regression problem, a name of the zoo, or an object with a recipe.
        batch_size: B, number of sequences.
        num_heads: H, number of memories.
        key_dim: K, size of keys.
        value_dim: V, size of values. Default: K.
        initial_memory: A₀, as for `recall`: ``[H, out, in]`` per map, or ``[B, H, out, in]`` for
            one memory per sequence. Default: zeros.
        dtype: type of the state: float32, or float64.
        device: device of the state.

    Raises:
        RecipeError: sizes that do not fit the recipe, an initial memory of the wrong shape, or none
            for a deep memory.

    Examples:
        >>> weights = torch.randn(2, 3, 4, 8)  # two sequences, three heads, V = 4, K = 8
        >>> state = rc.initial_state(
        ...     rc.Recipe(), batch_size=2, num_heads=3, key_dim=8, value_dim=4,
        ...     initial_memory=weights,
        ... )
        >>> q = torch.randn(2, 1, 3, 8)
        >>> y = rc.read(rc.Recipe(), q, state=state)
        >>> torch.allclose(y, torch.einsum("bhvk,bthk->bthv", weights, q), atol=1e-5)
        True
    """
    bound = bind(
        as_recipe(recipe, "rc.initial_state"),
        H=num_heads,
        K=key_dim,
        V=key_dim if value_dim is None else value_dim,
    )
    if initial_memory is not None:
        check_init(initial_memory)
    device = torch.device(device)
    return states.initial_state(
        bound, B=batch_size, dtype=dtype, device=device, init=initial_memory
    )


def new_call(
    recipe: Recipe,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | None,
    params: Params | None,
    engine: str,
    precision: str | None,
    **options: Any,
) -> Problem:
    """Return the call of these arguments, with q, k and v checked; options are other fields."""
    gates, params = as_mapping(gates, "gates"), as_mapping(params, "params")
    refuse_transforms(itertools.chain((q, k, v), gates.values(), params.values()))
    check_tensors(recipe, q, k, v)
    sizes = {"H": k.shape[2], "K": k.shape[-1], "V": v.shape[-1]}
    bound = bind(recipe, **sizes, engine=engine, precision=precision)
    return Problem(bound=bound, q=q, k=k, v=v, gates=gates, params=params, **options)


def memorise(call: Problem) -> tuple[Tensor, State | None]:
    """Run `recall` for a call that is already bound, and raise its errors."""
    if torch.compiler.is_dynamo_compiling() and not call.bound.is_traceable:
        # Loading the compiler takes longer than all other imports, so this is done only under it.
        from recollect.functional.compile import uncompiled

        return uncompiled(memorise, call)
    check_call(call)
    if call.initial_memory is not None:
        check_init(call.initial_memory)
    if call.cu_seqlens is not None:
        if call.initial_memory is not None:
            # Documents are grouped by length, so each needs its own initial state.
            call = with_initial_state(call, rows=call.cu_seqlens.numel() - 1)
        result = _run_packed(call)
        y, state = run_documents(_run, call) if result is None else result
    elif call.attention_mask is not None:
        y, state = run_compacted(_run, call)
    else:
        y, state = _run(call)
    return y, state if call.output_final_state else None


def with_initial_state(call: Problem, *, rows: int) -> Problem:
    """Return the call with the state before the first token, made of the initial memory."""
    state = states.initial_state(
        call.bound,
        B=rows,
        dtype=state_dtype(call.q, call.k, call.v),
        device=call.k.device,
        init=call.initial_memory,
    )
    return dataclasses.replace(call, state=state, initial_memory=None)


def _run(call: Problem) -> tuple[Tensor, State]:
    """Run one dense, right-padded call."""
    device, precision = call.k.device, call.bound.matmul_precision
    # Engines accumulate in float32 themselves, which autocast would undo.
    with without_autocast(device.type) if precision is None else engine_context(device, precision):
        if call.trusted and call.state is not None and call.bound.decode_token is not None:
            result = _decode(call)
            if result is not None:
                if may_contain_nan(result[:1]):
                    check_finite(call)
                return result
        return _run_prepared(call)


def _run_prepared(call: Problem) -> tuple[Tensor, State]:
    """Check values, prepare the call, run its engine, and keep the caller's tensors apart."""
    bound = call.bound
    if not call.trusted:
        check_values(bound, call.gates, call.params)
    checks_outputs = call.trusted and bound.engine.propagates_nan
    if not checks_outputs:
        check_finite(call)
    check_key_norms(call)
    problem = _prepare(call, rows=call.k.shape[0])
    inner = bound.uses_inner_autograd
    if (inner or torch.is_grad_enabled()) and must_leave_inference_mode(
        problem, uses_inner_autograd=inner
    ):
        with outside_inference_mode():
            y, state = _solve(problem_without_inference_flag(problem))
    else:
        y, state = _solve(problem)
    if (
        call.initial_memory is not None
        and not torch.compiler.is_compiling()
        and (type(y) is Tensor or has_data(y))
    ):
        state = _copy_aliases(state, tensors_of(call.initial_memory))
    # Without padding the last token has read all of the memory, so its output shows a NaN there.
    reads_all = call.lengths is None and bound.recipe.memory.read.when == "after"
    if checks_outputs and may_contain_nan((y,) if reads_all else (y, *state.weights)):
        check_finite(call)
    return y, state


def _prepare(call: Problem, *, rows: int) -> Problem:
    """Return the problem that an engine runs: rates, grouped queries, and a state of each row."""
    bound, state, (q, k, v) = call.bound, call.state, (call.q, call.k, call.v)
    (B, T), dtype = k.shape[:2], state_dtype(q, k, v)
    if state is None:
        state = states.initial_state(
            bound, B=rows, dtype=dtype, device=k.device, init=call.initial_memory
        )
    elif dtype == torch.float64 and state.dtype not in (None, dtype):
        state = state.to(dtype=dtype)
    rates = resolve_rates(bound, call.gates, call.params, B=B, T=T, dtype=dtype, device=k.device)
    cache = {}
    if bound.measures_overlap:
        rates, cache = limit_rates_by_keys(bound.recipe.algorithm, k, state, rates)
    return dataclasses.replace(
        call,
        q=q.unflatten(2, (bound.H, q.shape[2] // bound.H)),
        rates=rates,
        cache=cache,
        param_sources=call.param_sources or tuple(call.params.values()),
        state=state,
    )


def _decode(call: Problem) -> tuple[Tensor, State] | None:
    """Run one real token of each row without gradients, if the engine takes it without rates."""
    if call.lengths is not None or call.k.shape[1] != 1 or not call.causal:
        return None
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    bound, gates, state = call.bound, call.gates, call.state
    inputs = (call.q, call.k, call.v)
    if call.params:
        gates = {**gates, **call.params}
    if bound.fla_operator is not None and call.q.device.type in fla.DEVICES:
        result = fla.token(bound, *inputs, gates, state)
        if result is not None:
            return result
    if bound.measures_overlap:
        if "lr" not in gates or state.host_position is None:
            return None  # the rate is a constant or a logarithm
        gates, _ = limit_rates_by_keys(bound.recipe.algorithm, call.k, state, gates)
    assert bound.decode_token is not None
    return bound.decode_token(bound, *inputs, gates, state)


def _run_packed(call: Problem) -> tuple[Tensor, State] | None:
    """Run documents in one sequence by an operator that takes boundaries; else ``None``."""
    bound, boundaries = call.bound, call.cu_seqlens
    operator, precision, device = bound.fla_operator, bound.matmul_precision, call.k.device
    if operator is None or boundaries is None:
        return None
    if not (call.causal and fla.supports_cu_seqlens(operator, call.k)):
        return None
    with without_autocast(device.type) if precision is None else engine_context(device, precision):
        if not call.trusted:
            check_values(bound, call.gates, call.params)
        check_finite(call)
        check_key_norms(call)
        problem = _prepare(call, rows=boundaries.numel() - 1)
        problem.lengths, problem.rows_are_documents = boundaries.diff(), True
        lowered = lower(problem)
        result = fla.run(lowered.problem, operator)
    if result is None:
        return None
    return lowered.restore_output(result[0]).flatten(2, 3), lowered.restore_state(result[1])


def _copy_aliases(state: State, init_tensors: Sequence[Tensor]) -> State:
    """Copy tensors of the state that are the caller's: nothing was written to them yet."""
    caller_ptrs = {x.data_ptr() for x in init_tensors}
    for x in state.tensors():
        if x.data_ptr() in caller_ptrs:
            return state.map(lambda x: x.clone() if x.data_ptr() in caller_ptrs else x)
    return state


def _solve(problem: Problem) -> tuple[Tensor, State]:
    """Lower the problem, run its engine, and undo the lowering."""
    recipe, causal = problem.bound.recipe, problem.causal
    if causal and not problem.bound.needs_lowering:
        y, state = _run_engine(problem)
        return y.flatten(2, 3), state
    lowered = lower(problem)
    if not causal and (recipe.nonparametric or recipe.solves_from_gram):
        # The state depends on no query, so nothing is read on the way.
        y, state = problem.v.new_zeros(0), problem.final_state()
    else:
        y, state = _run_engine(lowered.problem)
    state = lowered.restore_state(state)
    y = lowered.restore_output(y) if causal else read_from(problem, state)
    return y.flatten(2, 3), state


def _run_engine(problem: Problem) -> tuple[Tensor, State]:
    """Run the engine, or an operator of flash-linear-attention in its place."""
    operator = problem.bound.fla_operator
    if operator is not None and (operator.is_required or problem.q.device.type in fla.DEVICES):
        result = fla.run(problem, operator)
        if result is not None:
            return result
    return problem.bound.run(problem)
