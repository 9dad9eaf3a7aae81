"""An operator's outputs, and gradients of its gradients by the library's own way.

The package's backward passes are kernels: what autograd would record of them under
``create_graph=True`` is not their derivative, and nothing says so. So a call is one node of the
graph. Its backward pass runs the package's, unless a graph of it is asked for: then it is the
engine's own, from the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from recollect.choices.autograd import CustomFunction, differentiable_backward

__all__ = ["Way", "by_operator"]

Way = Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]
"""From inputs by name to outputs."""


def by_operator(fast: Way, own: Way, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """What ``fast`` gives, differentiable any number of times.

    Args:
        fast: by the package.
        own: the same outputs by this library.
        inputs: of both, by name.
    """
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs.values())):
        with torch.no_grad():
            return fast(inputs)
    call = _Call(fast, own, tuple(inputs))
    return _Twice.apply(call, *inputs.values())  # type: ignore[no-any-return, no-untyped-call]


class _Call:
    """Both ways, from tensors in the order of the inputs' names."""

    def __init__(self, fast: Way, own: Way, names: tuple[str, ...]) -> None:
        self._fast, self._own, self._names = fast, own, names

    def fast(self, tensors: list[Any]) -> tuple[Tensor, ...]:
        return self._fast(dict(zip(self._names, tensors, strict=True)))

    def own(self, tensors: list[Any]) -> tuple[Tensor, ...]:
        return self._own(dict(zip(self._names, tensors, strict=True)))


class _Twice(CustomFunction):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        with torch.enable_grad():
            found = call.fast(leaves)
        ctx.call, ctx.leaves, ctx.found = call, leaves, found
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in found)

    @staticmethod
    def backward(ctx: Any, *above: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(ctx.found, above)]  # noqa: B905
            return None, *differentiable_backward(ctx.call.own, saved, needs, zeros)
        pairs = [
            (x, g)
            for x, g in zip(ctx.found, above, strict=True)
            if g is not None and x.requires_grad
        ]
        wanted = [x for x, need in zip(ctx.leaves, needs, strict=True) if need]
        if not pairs or not wanted:
            return None, *[None for _ in needs]
        outputs, pulls = zip(*pairs, strict=True)
        # Whoever keeps the outer graph may come again; it goes with what it holds.
        slopes = torch.autograd.grad(outputs, wanted, pulls, retain_graph=True, allow_unused=True)
        found = iter(slopes)
        return None, *[next(found) if need else None for need in needs]
