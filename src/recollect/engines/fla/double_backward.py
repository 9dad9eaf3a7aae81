"""Outputs of an operator whose gradients are differentiable again.

The backward passes of the package are kernels. Under ``create_graph=True`` autograd records wrong
derivatives of these kernels without a warning. Therefore a call is one node of the graph. Its
backward pass runs the kernels, or differentiates the engine's products if a graph is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from recollect.choices.autograd import CustomFunction, differentiable_backward

__all__ = ["TensorFn", "with_double_backward"]

TensorFn = Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]
"""Function from named inputs to outputs."""


def with_double_backward(
    operator: TensorFn, engine: TensorFn, inputs: Mapping[str, Tensor]
) -> tuple[Tensor, ...]:
    """Return the outputs of ``operator``, differentiable any number of times.

    ``engine`` computes equal outputs with this library.
    """
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs.values())):
        with torch.no_grad():
            return operator(inputs)
    names = tuple(inputs)

    def positional(function: TensorFn) -> Callable[[list[Any]], tuple[Tensor, ...]]:
        return lambda tensors: function(dict(zip(names, tensors, strict=True)))

    functions = positional(operator), positional(engine)
    return _DoubleBackward.apply(*functions, *inputs.values())  # type: ignore[no-any-return, no-untyped-call]


class _DoubleBackward(CustomFunction):
    @staticmethod
    def forward(ctx: Any, operator: Any, engine: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        with torch.enable_grad():
            outputs = operator(leaves)
        ctx.engine, ctx.leaves, ctx.outputs = engine, leaves, outputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            pairs = zip(ctx.outputs, grad_outputs)  # noqa: B905
            grads = [torch.zeros_like(x) if g is None else g for x, g in pairs]
            return None, None, *differentiable_backward(ctx.engine, saved, needs, grads)
        used = [
            (x, g)
            for x, g in zip(ctx.outputs, grad_outputs, strict=True)
            if g is not None and x.requires_grad
        ]
        inputs_with_grad = [x for x, need in zip(ctx.leaves, needs, strict=True) if need]
        if not used or not inputs_with_grad:
            return None, None, *[None for _ in needs]
        outputs, output_grads = zip(*used, strict=True)
        # With retain_graph, autograd may call this backward pass again.
        input_grads = iter(
            torch.autograd.grad(
                outputs, inputs_with_grad, output_grads, retain_graph=True, allow_unused=True
            )
        )
        return None, None, *[next(input_grads) if need else None for need in needs]
