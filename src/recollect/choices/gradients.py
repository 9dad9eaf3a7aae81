"""Hand-written backward passes, and how gradients through them are differentiated again.

A backward pass is asked for a gradient of its gradient under ``create_graph=True``, or not at all.
It then does one of two things: it writes the same gradient in operations that autograd records
(`again`), or its gradient carries a sentence that is raised when somebody differentiates it
(`once`). Torch's own ``once_differentiable`` does not raise where the gradients from above are
constants, as those of a sum are; then the second derivative would be silently incomplete.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from recollect.choices.devices import autocasts
from recollect.choices.member import RecipeError
from recollect.choices.multiplying import innermost, multiplying

__all__ = ["HandWritten", "again", "leaves_of", "once", "once_through", "places"]

Backward = Callable[..., Any]


class HandWritten(torch.autograd.Function):
    """A function whose backward pass is written out, and runs as its forward pass did.

    That is without autocast: whoever calls ``loss.backward()`` inside of ``torch.autocast`` would
    have its products rounded, and in-place ones refused, where autograd's own formulas see to their
    types themselves. And it is with the products that the forward pass was asked for
    (`recollect.choices.multiplying`), wherever and whenever it runs.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = vars(cls)
        # Which of the two is given the context is torch's distinction.
        first = "setup_context" if "setup_context" in own else "forward"
        for name, wrap in ((first, _remembering), ("backward", _as_before)):
            if name in own:
                setattr(cls, name, staticmethod(wrap(getattr(cls, name))))


def _remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """What is given the context, and notes there which products are asked for."""

    @functools.wraps(function)
    def noting(ctx: Any, *given: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling() and innermost.mode is not None:
            ctx.precision = innermost.mode.precision
        return function(ctx, *given, **named)

    return noting


def _as_before(backward: Backward) -> Backward:
    """A backward pass without autocast, and with the products of its forward pass."""

    @functools.wraps(backward)
    def exact(ctx: Any, *grads: Tensor | None) -> Any:
        device = next((g.device.type for g in grads if g is not None), None)
        rounds = device is not None and autocasts(device)
        precision = getattr(ctx, "precision", None)
        if precision is None and not rounds:
            return backward(ctx, *grads)
        outside = torch.autocast(device, enabled=False) if rounds and device else nullcontext()
        with outside, multiplying(precision):
            return backward(ctx, *grads)

    return exact


def places(tensors: Sequence[Tensor | None]) -> list[Any]:
    """The same tensors, each at a place of its own in the graph.

    Tensors may depend on each other: keys on a memory, values on keys. A gradient with respect to
    one of them would then count the ways that lead through another; at places of their own, none
    does.
    """
    return [x.view_as(x) if x is not None and x.requires_grad else x for x in tensors]


def leaves_of(weights: Sequence[Tensor], *, outer: bool) -> list[Tensor]:
    """Weights to take an inner gradient at: part of the outer graph where that is asked for."""
    return [
        w.view_as(w) if outer and w.requires_grad else w.detach().requires_grad_() for w in weights
    ]


def again(
    function: Callable[[list[Any]], Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    above: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of ``function`` at ``inputs`` that can be differentiated any number of times.

    Args:
        function: from tensors like the inputs to the outputs, in operations autograd knows.
        needs: which inputs want a gradient; the others get ``None``.
        above: gradients of the outputs; ``None`` of those that nobody reads.
    """
    given = places(inputs)
    outputs = zip(function(given), above, strict=True)
    pairs = [(y, g) for y, g in outputs if y.requires_grad and g is not None]
    wanted = [x for x, need in zip(given, needs, strict=True) if need]
    if not pairs or not wanted:
        return [None] * len(given)
    found = iter(
        torch.autograd.grad(
            [y for y, _ in pairs],
            wanted,
            [g for _, g in pairs],
            create_graph=True,
            allow_unused=True,
        )
    )
    return [next(found) if need else None for need in needs]


class _Refusing(torch.autograd.Function):
    """Numbers as they are, whose derivative is a sentence."""

    @staticmethod
    def forward(ctx: Any, sentence: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.sentence = sentence
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[None, ...]:
        raise RecipeError(ctx.sentence)


def _refusing(sentence: str, found: Any, connected: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Gradients that raise the sentence when they are differentiated."""
    gradients = found if isinstance(found, tuple) else (found,)
    real = [g for g in gradients if isinstance(g, Tensor)]
    graph = [x for x in connected if isinstance(x, Tensor) and x.requires_grad]
    if not real or not graph:
        return gradients
    refusing = iter(_Refusing.apply(sentence, len(real), *real, *graph))  # type: ignore[no-untyped-call]
    return tuple(next(refusing) if isinstance(g, Tensor) else g for g in gradients)


_REFERENCE = "use method='reference', which can be differentiated any number of times"


def _sentence(what: str, instead: str) -> str:
    return f"{what} can be differentiated once, not its gradient again: {instead}"


def once(what: str, instead: str = _REFERENCE) -> Callable[[Backward], Backward]:
    """A backward pass whose gradient is a number and no function.

    It is written as ``backward(ctx, saved, *above)``: the tensors that forward saved are unpacked
    once, as a checkpoint around the call demands.

    Args:
        what: the subject of the sentence that is raised when it is differentiated.
        instead: what to do instead.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def wrapped(ctx: Any, *above: Tensor) -> Any:
            saved = ctx.saved_tensors
            with torch.no_grad():
                found = backward(ctx, saved, *above)
            if not torch.is_grad_enabled():
                return found
            return _refusing(_sentence(what, instead), found, (*above, *saved))

        return wrapped

    return decorate


class _Through(torch.autograd.Function):
    """Tensors as they are; their gradients refuse where torch could not differentiate them."""

    @staticmethod
    def forward(ctx: Any, what: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.what = what
        ctx.save_for_backward(*tensors)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if not torch.is_grad_enabled() or not _ends(above, saved):
            return (None, *above)
        return (None, *_refusing(_sentence(ctx.what, _REFERENCE), above, (*above, *saved)))


def _ends(gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Whether autograd's graph of some gradients has a node without a derivative before ``inputs``.

    Which kernel runs is torch's choice: fused ones have one derivative, the plain one has all.
    """
    pending = [g.grad_fn for g in gradients]
    seen: set[Any] = {x.grad_fn for x in inputs}
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if "NotImplemented" in node.name():
            return True
        seen.add(node)
        pending += [further for further, _ in node.next_functions]
    return False


def once_through(what: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The same tensors on their way into an operation of torch's that may have one derivative.

    Args:
        what: the subject of the sentence that is raised when its gradient is differentiated and
            torch cannot.
    """
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return tensors
    return _Through.apply(what, *tensors)  # type: ignore[no-any-return, no-untyped-call]
