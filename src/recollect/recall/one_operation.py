"""A call as one operation of `torch.compile`, whatever its engine does inside.

Engines write out backward passes, walk over inner batches and choose by sizes: a compiler that
follows them makes a dozen graphs of a layer. So a compiled layer hands its call over as one
operation that the compiler does not look into. What stands before and behind it (projections,
norms, gates, MLPs) is one graph, and the engine runs as it does without a compiler. The shapes of
what comes out are those of the same engine, run on tensors without numbers.

The operation keeps what it was given and nothing else: its backward pass solves once more. A list
of tensors says nothing of the state that they make up, so what a state is made of goes in as text
(`_layout`), and is found where shapes are for the state that comes out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from recollect.choices.devices import shapes_alone
from recollect.recall.bound import Bound, bound_of
from recollect.recall.call import Call
from recollect.recall.modes import with_autograd
from recollect.recall.recall import memorise
from recollect.recall.uncompiled import uncompiled
from recollect.state.buffer import Buffer
from recollect.state.kernel_rows import KernelRows
from recollect.state.state import State

__all__ = ["memorise_as_one", "suits"]

_left: dict[str, str] = {}
"""The layout of the state that a call leaves, by the call's form."""


def suits(call: Call) -> bool:
    """Whether a compiled call goes in as one operation: what the compiler can follow, it follows.

    Args:
        call: of a layer, which keeps what it has bound.
    """
    follows, recipe = call.bound.engine.follows, call.bound.sized.recipe
    apart = call.lengths is not None or call.cu_seqlens is not None
    grows = recipe.span is None or recipe.dual
    if call.bound.name is None or (apart and grows and call.output_state):
        return False  # how long the longest row is decides how long such a state is
    if call.bound.products is not None or call.bound.method == "fla":
        return True  # neither kernels nor products of a precision of their own are the compiler's
    return follows is None or not follows(call.bound.sized, call.k.shape[1])


def memorise_as_one(call: Call) -> tuple[Tensor, State | None]:
    """`recollect.recall.recall.memorise` of a compiled call.

    Args:
        call: that `suits`.

    Raises:
        RecipeError, ValueError: as `recollect.recall.recall.memorise`, when the graph runs.
    """
    state = call.state
    if state is not None and state.written_by not in (None, call.bound.sized.written):
        return uncompiled(memorise, call)  # which refuses it, or knows why not
    form, tensors = _taken_apart(call)
    y, *after = _solve(form, tensors)
    if not call.output_state:
        return y, None
    return y, _state(call.bound, _layout_after(form), iter(after))


@torch.compiler.assume_constant_result
def _layout_after(form: str) -> str:
    """What the state after a call of this form is made of; its shapes were found just before."""
    return _left[form]


# -- a call as text and tensors -------------------------------------------------------------------


def _taken_apart(call: Call) -> tuple[str, list[Tensor]]:
    """What a call says, ``|`` between its parts, and its tensors in the order of `_call`."""
    init, state = call.init, call.state
    starts = [] if init is None else [init] if isinstance(init, Tensor) else list(init)
    beside = {"cu_seqlens": call.cu_seqlens, "lengths": call.lengths, "places": call.places}
    given = {name: x for name, x in beside.items() if x is not None}
    if state is not None and state.cache:
        state = replace(state, cache={})
    flags = (call.causal, call.output_state, call.sure, call.documents, init is not None)
    form = "|".join(
        [
            str(call.bound.name),
            ",".join(call.gates),
            ",".join(call.params),
            str(len(starts)),
            ",".join(given),
            "".join(["1" if flag else "0" for flag in flags]),
            "" if call.chunk_size is None else str(call.chunk_size),
            "" if state is None else _layout(state),
        ]
    )
    tensors = [call.q, call.k, call.v, *call.gates.values(), *call.params.values(), *starts]
    return form, [*tensors, *given.values(), *([] if state is None else state.tensors())]


def _call(form: str, tensors: Sequence[Tensor]) -> Call:
    """The call that was taken apart."""
    name, gates, params, starts, beside, flags, chunk_size, layout = form.split("|")
    bound, rest = bound_of(name), iter(tensors)
    q, k, v = next(rest), next(rest), next(rest)
    causal, output_state, sure, documents, started = (flag == "1" for flag in flags)

    def named(names: str) -> dict[str, Tensor]:
        return {name: next(rest) for name in _words(names)}

    by_token, learned = named(gates), named(params)
    init = [next(rest) for _ in range(int(starts))]
    around = named(beside)
    return Call(
        bound=bound,
        q=q,
        k=k,
        v=v,
        gates=by_token,
        params=learned,
        init=init if started else None,
        cu_seqlens=around.get("cu_seqlens"),
        lengths=around.get("lengths"),
        places=around.get("places"),
        state=_state(bound, layout, rest) if layout else None,
        causal=causal,
        chunk_size=int(chunk_size) if chunk_size else None,
        output_state=output_state,
        sure=sure,
        documents=documents,
    )


def _words(text: str) -> list[str]:
    return text.split(",") if text else []


def _layout(state: State) -> str:
    """What a state without a cache is made of, ``;`` between its parts: see `_state`."""
    buffer, dual = state.buffer, state.dual
    slots = {name: state.slots[name] for name in sorted(state.slots)}
    rates = "" if buffer is None else ",".join(buffer.rates)
    return ";".join(
        [
            str(len(state.weights)),
            _sizes(slots),
            "" if buffer is None else "buffer",
            rates,
            "" if dual is None else str(len(dual.rows)),
            "" if dual is None else _sizes(dual.slots),
            "" if state.ones is None else "ones",
            "" if state.log_scale is None else "log_scale",
        ]
    )


def _sizes(slots: Mapping[str, Sequence[Tensor]]) -> str:
    return ",".join([f"{name}={len(slot)}" for name, slot in slots.items()])


def _state(bound: Bound, layout: str, tensors: Iterator[Tensor]) -> State:
    """The state of this layout, of the next tensors, in the order of `State.tensors`."""
    maps, slots, buffered, rates, rows, dual_slots, ones, log_scale = layout.split(";")

    def some(n: int) -> tuple[Tensor, ...]:
        return tuple([next(tensors) for _ in range(n)])

    def named(sizes: str) -> dict[str, tuple[Tensor, ...]]:
        pairs = [word.split("=") for word in _words(sizes)]
        return {name: some(int(n)) for name, n in pairs}

    weights, position = some(int(maps)), next(tensors)
    kept, buffer, dual = named(slots), None, None
    if buffered:
        k, v = some(2)
        by_name = {name: next(tensors) for name in _words(rates)}
        buffer = Buffer(k=k, v=v, rates=by_name, mask=next(tensors))
    if rows:
        k, u, mass, mask = next(tensors), some(int(rows)), next(tensors), next(tensors)
        dual = KernelRows(k=k, rows=u, mass=mass, mask=mask, slots=named(dual_slots))
    at = bound.sized
    return State(
        sizes=(at.H, at.K, at.V),
        weights=weights,
        position=position,
        slots=kept,
        buffer=buffer,
        dual=dual,
        ones=next(tensors) if ones else None,
        log_scale=next(tensors) if log_scale else None,
        written_by=at.written,
    )


# -- the operation --------------------------------------------------------------------------------


@torch.library.custom_op("recollect::memorise", mutates_args=())
def _solve(form: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    with with_autograd():
        y, after = memorise(_call(form, tensors))
    if after is None:
        return _own([y], tensors)
    after = replace(after, cache={})
    _left[form] = _layout(after)  # read where a graph had to break beside the operation
    return _own([y, *after.tensors()], tensors)


def _own(found: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """What an operation gives back: dense, nothing that it was given, and nothing twice."""
    taken = {x.untyped_storage().data_ptr() for x in given if x.numel()}
    own: list[Tensor] = []
    for x in found:
        x = x.contiguous()
        place = x.untyped_storage().data_ptr()
        own.append(x.clone() if x.numel() and place in taken else x)
        taken.add(place)
    return own


@_solve.register_fake
def _(form: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    call, y = _call(form, tensors), None
    if call.cu_seqlens is not None:
        # Where documents end is a matter of numbers; their states are those of as many rows.
        y = call.v.new_empty(*call.q.shape[:3], call.v.shape[-1])
        rows = call.cu_seqlens.shape[0] - 1
        call = replace(
            call,
            q=call.q.expand(rows, *call.q.shape[1:]),
            k=call.k.expand(rows, *call.k.shape[1:]),
            v=call.v.expand(rows, *call.v.shape[1:]),
            gates={name: x.expand(rows, *x.shape[1:]) for name, x in call.gates.items()},
            cu_seqlens=None,
        )
    # How many tokens of a row are real is a number: shapes are those of full rows.
    call = replace(call, lengths=None, places=None)
    if call.state is not None:
        # How many tokens were seen is a number too. It decides no shape: what is kept has slots.
        call = replace(call, state=call.state.stating(0))
    with with_autograd(), shapes_alone():
        read, after = memorise(call)
    found = [read if y is None else y]
    if after is not None:
        after = replace(after, cache={})
        _left[form] = _layout(after)
        found += after.tensors()
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in found]


@torch.library.custom_op("recollect::memorise_backward", mutates_args=())
def _pull(
    form: str, tensors: Sequence[Tensor], wanted: Sequence[int], grads: Sequence[Tensor]
) -> list[Tensor]:
    with with_autograd(), torch.enable_grad():
        inputs = [x.detach() for x in tensors]
        for i in wanted:
            inputs[i].requires_grad_()
        y, after = memorise(_call(form, inputs))
        found = [y, *([] if after is None else replace(after, cache={}).tensors())]
        pairs = [(x, g) for x, g in zip(found, grads, strict=True) if x.requires_grad]
        asked = [inputs[i] for i in wanted]
        if not pairs:
            return [torch.zeros_like(x) for x in asked]
        outputs, pulls = zip(*pairs, strict=True)
        slopes = torch.autograd.grad(outputs, asked, pulls, allow_unused=True)
    pulled = cast("tuple[Tensor | None, ...]", slopes)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(asked, pulled, strict=True)]
    return _own(zeros, [*tensors, *grads])


@_pull.register_fake
def _(
    form: str, tensors: Sequence[Tensor], wanted: Sequence[int], grads: Sequence[Tensor]
) -> list[Tensor]:
    del form, grads
    return [torch.empty_like(tensors[i], memory_format=torch.contiguous_format) for i in wanted]


def _keep(ctx: Any, inputs: tuple[str, Sequence[Tensor]], output: Sequence[Tensor]) -> None:
    ctx.form, tensors = inputs
    ctx.save_for_backward(*tensors)
    ctx.like = [(x.shape, x.dtype, x.device) for x in output]


def _back(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[None, list[Tensor | None]]:
    tensors = list(ctx.saved_tensors)
    needs = ctx.needs_input_grad[1]
    wanted = [i for i, need in enumerate(needs) if need]
    given = [
        torch.zeros(shape, dtype=dtype, device=device) if g is None else g
        for g, (shape, dtype, device) in zip(grads, ctx.like, strict=True)
    ]
    slopes = iter(_pull(ctx.form, tensors, wanted, given))
    return None, [next(slopes) if need else None for need in needs]


_solve.register_autograd(_back, setup_context=_keep)
