"""Custom backward passes and their second derivatives.

Under ``create_graph=True`` a backward pass has two options. It computes its gradient in operations
that autograd records (`differentiable_backward`), or it returns a gradient that raises when it is
differentiated (`once_differentiable`). Torch's own ``once_differentiable`` does not raise if the
incoming gradients are constants, as those of a sum are. The second derivative would then be
incomplete without an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from recollect.choices.matmul_precision import active, matmul_precision
from recollect.choices.runtime import autocast_enabled
from recollect.messages import RecipeError

__all__ = [
    "CustomFunction",
    "as_separate_nodes",
    "differentiable_backward",
    "gram",
    "inner_leaves",
    "mark_once_differentiable",
    "once_differentiable",
]

Backward = Callable[..., Any]


class CustomFunction(torch.autograd.Function):
    """A function whose backward pass has the matmul precision of its forward pass and no autocast.

    Autocast would round the matmuls of the backward pass and refuse its in-place matmuls.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        methods = vars(cls)
        # torch passes the context to setup_context if it is defined, else to forward.
        first = "setup_context" if "setup_context" in methods else "forward"
        for name, wrap in ((first, _save_precision), ("backward", _restore_precision)):
            if name in methods:
                setattr(cls, name, staticmethod(wrap(getattr(cls, name))))


def _save_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Store the active matmul precision in the context."""

    @functools.wraps(function)
    def wrapper(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and active.precision is not None:
            ctx.precision = active.precision
        return function(ctx, *args, **kwargs)

    return wrapper


def _restore_precision(backward: Backward) -> Backward:
    """Run a backward pass without autocast and with the stored matmul precision."""

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor | None) -> Any:
        device = next((g.device.type for g in grads if g is not None), None)
        rounds = device is not None and autocast_enabled(device)
        precision = getattr(ctx, "precision", None)
        if device is None or (precision is None and not rounds):
            return backward(ctx, *grads)
        no_autocast = torch.autocast(device, enabled=False) if rounds else nullcontext()
        with no_autocast, matmul_precision(precision, device):
            return backward(ctx, *grads)

    return wrapper


def as_separate_nodes(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Return views that are separate nodes of the graph.

    Inputs may depend on each other, as values on keys. A gradient with respect to such a view does
    not include paths through the other inputs.
    """
    return [x.view_as(x) if x is not None and x.requires_grad else x for x in tensors]


def inner_leaves(weights: Sequence[Tensor], *, outer: bool) -> list[Tensor]:
    """Return weights for an inner gradient, attached to the outer graph if ``outer``."""
    return [
        w.view_as(w) if outer and w.requires_grad else w.detach().requires_grad_() for w in weights
    ]


def differentiable_backward(
    function: Callable[[list[Any]], Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    grad_outputs: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Return gradients of ``function`` that can be differentiated any number of times.

    ``function`` maps tensors like ``inputs`` to the outputs in operations of autograd. Unused
    outputs have the gradient ``None``, and so have the results of inputs that need none.
    """
    nodes = as_separate_nodes(inputs)
    outputs = zip(function(nodes), grad_outputs, strict=True)
    pairs = [(y, g) for y, g in outputs if y.requires_grad and g is not None]
    needed = [x for x, need in zip(nodes, needs, strict=True) if need]
    if not pairs or not needed:
        return [None] * len(nodes)
    ys, gs = zip(*pairs, strict=True)
    grads = iter(torch.autograd.grad(ys, needed, gs, create_graph=True, allow_unused=True))
    return [next(grads) if need else None for need in needs]


class _RaiseOnBackward(torch.autograd.Function):
    """Identity with a backward pass that raises."""

    @staticmethod
    def forward(ctx: Any, message: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        raise RecipeError(ctx.message)


def _raise_on_backward(message: str, grads: Any, sources: Sequence[Any]) -> tuple[Any, ...]:
    """Return gradients that depend on ``sources`` and raise when they are differentiated."""
    grads = grads if isinstance(grads, tuple) else (grads,)
    tensors = [g for g in grads if isinstance(g, Tensor)]
    sources = [x for x in sources if isinstance(x, Tensor) and x.requires_grad]
    if not tensors or not sources:
        return grads
    raising = iter(_RaiseOnBackward.apply(message, len(tensors), *tensors, *sources))  # type: ignore[no-untyped-call]
    return tuple(next(raising) if isinstance(g, Tensor) else g for g in grads)


_HINT = "use engine='reference', which can be differentiated any number of times"


def _message(subject: str, hint: str) -> str:
    return f"{subject} can be differentiated once, not its gradient again: {hint}"


def once_differentiable(subject: str, hint: str = _HINT) -> Callable[[Backward], Backward]:
    """Return a decorator for a backward pass that cannot be differentiated again.

    The decorated function is ``backward(ctx, saved, *grad_outputs)``. Saved tensors are unpacked
    only once, as activation checkpointing requires. The error names the subject and ends with the
    hint.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def wrapper(ctx: Any, *grad_outputs: Tensor) -> Any:
            saved = ctx.saved_tensors
            with torch.no_grad():
                grads = backward(ctx, saved, *grad_outputs)
            if not torch.is_grad_enabled():
                return grads
            return _raise_on_backward(_message(subject, hint), grads, (*grad_outputs, *saved))

        return wrapper

    return decorate


class _Passthrough(torch.autograd.Function):
    """Identity with gradients that raise if torch cannot differentiate them."""

    @staticmethod
    def forward(ctx: Any, subject: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.subject = subject
        ctx.save_for_backward(*tensors)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if not torch.is_grad_enabled() or not _has_missing_derivative(grad_outputs, saved):
            return (None, *grad_outputs)
        message, sources = _message(ctx.subject, _HINT), (*grad_outputs, *saved)
        return (None, *_raise_on_backward(message, grad_outputs, sources))


def _has_missing_derivative(grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Whether the graph from ``inputs`` to ``grads`` has a node without a derivative.

    Torch chooses the kernel: its fused attention has one derivative, the plain one has all.
    """
    pending = [g.grad_fn for g in grads]
    visited: set[Any] = {x.grad_fn for x in inputs}
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        if "NotImplemented" in node.name():
            return True
        visited.add(node)
        pending += [parent for parent, _ in node.next_functions]
    return False


def mark_once_differentiable(subject: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Prepare inputs of a torch operation that may have only a first derivative.

    If torch cannot differentiate its gradient, the error names the subject.
    """
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return tensors
    return _Passthrough.apply(subject, *tensors)  # type: ignore[no-any-return, no-untyped-call]


class _Gram(CustomFunction):
    """XXᵀ of ``X [..., s, l]``, with the gradient (Ḡ + Ḡᵀ) X: one product instead of two."""

    generate_vmap_rule = True

    @staticmethod
    def forward(X: Tensor) -> Tensor:
        return X @ X.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (X,), (g,) = ctx.saved_tensors, grads
        return (g + g.mT) @ X

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        (X,), (dX,) = ctx.saved_tensors, tangents
        half = dX @ X.mT
        return half + half.mT


def gram(X: Tensor) -> Tensor:
    """Return XXᵀ ``[..., s, s]``, without `_Gram` in compiled graphs, which do not support jvp."""
    return X @ X.mT if torch.compiler.is_compiling() else cast(Tensor, _Gram.apply(X))
