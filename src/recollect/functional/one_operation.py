"""A call as one custom operation of `torch.compile`, for every engine.

Engines have hand-written backward passes, loops over inner batches, and branches on sizes: a
compiler that traces them makes a dozen graphs of a layer. A compiled layer therefore passes its
call to one operation, which the compiler does not trace. The layers around it (projections, norms,
gates, MLPs) are one graph. The shapes of the results are those of the same engine, run on fake
tensors.

The operation saves its inputs only: its backward pass runs the memory again. It takes a list of
tensors and a text, which lists the parts of the call and the names of its state's tensors
(`State.flatten`). The names of the final state are recorded when shapes are derived.

No training step was timed with this operation on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from recollect.choices.runtime import fake_shapes_mode
from recollect.engines.common.problem import Problem
from recollect.functional.binding import bound_of
from recollect.functional.compile import uncompiled
from recollect.functional.modes import autograd_inside_op
from recollect.functional.recall import memorise
from recollect.recipe.bound import BoundRecipe
from recollect.state.buffer import Buffer
from recollect.state.kernel_rows import KernelRows
from recollect.state.state import State

__all__ = ["memorise_op", "use_custom_op"]

_state_layouts: WeakKeyDictionary[BoundRecipe, dict[str, str]] = WeakKeyDictionary()
"""Layout of the final state, by bound recipe and form of the call."""


def use_custom_op(call: Problem) -> bool:
    """Return whether a layer's compiled call becomes one operation; else the compiler traces it."""
    bound, recipe = call.bound, call.bound.recipe
    has_lengths = call.lengths is not None or call.cu_seqlens is not None
    grows = recipe.buffer_size is None or recipe.uses_kernel_rows
    if bound.name is None or (has_lengths and grows and call.output_final_state):
        return False  # the longest sequence decides the length of such a state
    if bound.matmul_precision is not None or bound.requested_engine == "fla":
        return True  # a graph keeps neither kernels nor PyTorch's setting for products
    return not bound.engine.is_traceable(bound, call.k.shape[1])


def memorise_op(call: Problem) -> tuple[Tensor, State | None]:
    """Run `recollect.functional.recall.memorise` of a compiled call as one operation.

    Errors are raised when the graph runs.
    """
    state = call.state
    if state is not None and state.recipe_id not in (None, call.bound.recipe_id):
        return uncompiled(memorise, call)  # which raises an error
    form, tensors = _flatten_call(call)
    y, *state_tensors = _memorise(form, tensors)
    if not call.output_final_state:
        return y, None
    return y, _state(call.bound, _final_layout(form), iter(state_tensors))


def _bound_of(form: str) -> BoundRecipe:
    return bound_of(form.split("|", 1)[0])


@torch.compiler.assume_constant_result
def _final_layout(form: str) -> str:
    """Return the layout of the state after a call of this form, whose shapes are known by now."""
    return _state_layouts[_bound_of(form)][form]


def _record_layout(form: str, state: State) -> None:
    _state_layouts.setdefault(_bound_of(form), {})[form] = ",".join(state.flatten()[0])


# -- a call as text and tensors -------------------------------------------------------------------


def _flatten_call(call: Problem) -> tuple[str, list[Tensor]]:
    """Return the parts of a call, separated by ``|``, and its tensors in the order of `_call`."""
    init, state = call.initial_memory, call.state
    init_tensors = [] if init is None else [init] if isinstance(init, Tensor) else list(init)
    optional = {name: getattr(call, name) for name in ("cu_seqlens", "lengths", "source_index")}
    indices = {name: x for name, x in optional.items() if x is not None}
    if state is not None and state.cache:
        state = replace(state, cache={})
    documents = call.rows_are_documents
    flags = (call.causal, call.output_final_state, call.trusted, documents, init is not None)
    form = "|".join(
        [
            str(call.bound.name),
            ",".join(call.gates),
            ",".join(call.params),
            str(len(init_tensors)),
            ",".join(indices),
            "".join(["1" if flag else "0" for flag in flags]),
            "" if call.chunk_size is None else str(call.chunk_size),
            "" if state is None else ",".join(state.flatten()[0]),
        ]
    )
    tensors = [call.q, call.k, call.v, *call.gates.values(), *call.params.values()]
    state_tensors = [] if state is None else state.tensors()
    return form, [*tensors, *init_tensors, *indices.values(), *state_tensors]


def _call(form: str, tensors: Sequence[Tensor]) -> Problem:
    """Rebuild the call."""
    name, gates, params, num_init, indices, flags, chunk_size, layout = form.split("|")
    bound, rest = bound_of(name), iter(tensors)
    q, k, v = next(rest), next(rest), next(rest)
    causal, output_final_state, trusted, documents, has_init = (flag == "1" for flag in flags)

    def by_name(names: str) -> dict[str, Tensor]:
        return {name: next(rest) for name in _words(names)}

    gate_tensors, param_tensors = by_name(gates), by_name(params)
    init = [next(rest) for _ in range(int(num_init))]
    index_tensors = by_name(indices)
    return Problem(
        bound=bound,
        q=q,
        k=k,
        v=v,
        gates=gate_tensors,
        params=param_tensors,
        initial_memory=init if has_init else None,
        cu_seqlens=index_tensors.get("cu_seqlens"),
        lengths=index_tensors.get("lengths"),
        source_index=index_tensors.get("source_index"),
        state=_state(bound, layout, rest) if layout else cast(State, None),
        causal=causal,
        chunk_size=int(chunk_size) if chunk_size else None,
        output_final_state=output_final_state,
        trusted=trusted,
        rows_are_documents=documents,
    )


def _words(text: str) -> list[str]:
    return text.split(",") if text else []


def _state(bound: BoundRecipe, names: str, tensors: Iterator[Tensor]) -> State:
    """Return the state of the next tensors by their dotted names, with commas between these."""
    fields: dict[str, Any] = {}
    for name in _words(names):
        *parents, last = name.split(".")
        node = fields
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = next(tensors)

    def tuples(node: dict[str, dict[str, Tensor]]) -> dict[str, tuple[Tensor, ...]]:
        return {name: tuple(slot.values()) for name, slot in node.items()}

    buffer, rows = fields.pop("buffer", None), fields.pop("kernel_rows", None)
    if rows is not None:
        rows["rows"] = tuple(rows["rows"].values())
        rows = KernelRows(**{**rows, "slots": tuples(rows.get("slots", {}))})
    return State(
        sizes=(bound.H, bound.K, bound.V),
        recipe_id=bound.recipe_id,
        weights=tuple(fields.pop("weights", {}).values()),
        algorithm_state=tuples(fields.pop("algorithm_state", {})),
        buffer=None if buffer is None else Buffer(**buffer),
        kernel_rows=rows,
        **fields,
    )


# -- the operation --------------------------------------------------------------------------------


@torch.library.custom_op("recollect::memorise", mutates_args=())
def _memorise(form: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    with autograd_inside_op():
        y, state = memorise(_call(form, tensors))
    if state is None:
        return _without_aliases([y], tensors)
    state = replace(state, cache={})
    _record_layout(form, state)  # read if the graph breaks at the operation
    return _without_aliases([y, *state.tensors()], tensors)


def _without_aliases(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return dense outputs that share no memory with inputs or with each other."""
    used = {x.untyped_storage().data_ptr() for x in inputs if x.numel()}
    unaliased: list[Tensor] = []
    for x in outputs:
        x = x.contiguous()
        pointer = x.untyped_storage().data_ptr()
        unaliased.append(x.clone() if x.numel() and pointer in used else x)
        used.add(pointer)
    return unaliased


@_memorise.register_fake
def _(form: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    call, packed_y = _call(form, tensors), None
    if call.cu_seqlens is not None:
        # Boundaries are numbers. The states of documents have the shapes of as many sequences.
        packed_y = call.v.new_empty(*call.q.shape[:3], call.v.shape[-1])
        rows = call.cu_seqlens.shape[0] - 1
        call = replace(
            call,
            q=call.q.expand(rows, *call.q.shape[1:]),
            k=call.k.expand(rows, *call.k.shape[1:]),
            v=call.v.expand(rows, *call.v.shape[1:]),
            gates={name: x.expand(rows, *x.shape[1:]) for name, x in call.gates.items()},
            cu_seqlens=None,
        )
    # Lengths are numbers, and shapes are those of full sequences.
    call = replace(call, lengths=None, source_index=None)
    if call.state is not None:
        # The position is a number, which decides no shape: the state has a fixed number of slots.
        call = replace(call, state=call.state.with_position(0))
    with autograd_inside_op(), fake_shapes_mode():
        y, state = memorise(call)
    outputs = [y if packed_y is None else packed_y]
    if state is not None:
        state = replace(state, cache={})
        _record_layout(form, state)
        outputs += state.tensors()
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in outputs]


@torch.library.custom_op("recollect::memorise_backward", mutates_args=())
def _memorise_backward(
    form: str, tensors: Sequence[Tensor], indices: Sequence[int], grads: Sequence[Tensor]
) -> list[Tensor]:
    with autograd_inside_op(), torch.enable_grad():
        inputs = [x.detach() for x in tensors]
        for i in indices:
            inputs[i].requires_grad_()
        y, state = memorise(_call(form, inputs))
        outputs = [y, *([] if state is None else replace(state, cache={}).tensors())]
        pairs = [(x, g) for x, g in zip(outputs, grads, strict=True) if x.requires_grad]
        targets = [inputs[i] for i in indices]
        if not pairs:
            return [torch.zeros_like(x) for x in targets]
        differentiable, grad_outputs = zip(*pairs, strict=True)
        slopes = torch.autograd.grad(differentiable, targets, grad_outputs, allow_unused=True)
    results = zip(targets, cast("tuple[Tensor | None, ...]", slopes), strict=True)
    dense = [torch.zeros_like(x) if g is None else g for x, g in results]
    return _without_aliases(dense, [*tensors, *grads])


@_memorise_backward.register_fake
def _(
    form: str, tensors: Sequence[Tensor], indices: Sequence[int], grads: Sequence[Tensor]
) -> list[Tensor]:
    del form, grads
    return [torch.empty_like(tensors[i], memory_format=torch.contiguous_format) for i in indices]


def _setup_context(
    ctx: Any, inputs: tuple[str, Sequence[Tensor]], output: Sequence[Tensor]
) -> None:
    ctx.form, tensors = inputs
    ctx.save_for_backward(*tensors)
    ctx.like = [(x.shape, x.dtype, x.device) for x in output]


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[None, list[Tensor | None]]:
    tensors = list(ctx.saved_tensors)
    needs = ctx.needs_input_grad[1]
    indices = [i for i, need in enumerate(needs) if need]
    dense = [
        torch.zeros(shape, dtype=dtype, device=device) if g is None else g
        for g, (shape, dtype, device) in zip(grads, ctx.like, strict=True)
    ]
    slopes = iter(_memorise_backward(ctx.form, tensors, indices, dense))
    return None, [next(slopes) if need else None for need in needs]


_memorise.register_autograd(_backward, setup_context=_setup_context)
