"""Activation recomputation: groups of inner batches that the backward pass runs again.

Training saves the inputs and the memory at the boundary of every group of g inner batches,
O(T d + (T/b/g) |W|). The backward pass recomputes the intermediates of a group. Gradients of
gradients use these operations without recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recollect.choices.autograd import CustomFunction, differentiable_backward

__all__ = ["Part", "Plan", "run"]

Tensors = list[Tensor]
Call = Callable[[int, Tensors, Tensors, Tensors, bool, bool], tuple[Tensor, Tensors]]


@dataclass(frozen=True)
class Part:
    """Tensor with tokens in axis 1. A group takes the tokens of its batches and ``more``."""

    x: Tensor
    more: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Computation of the groups.

    Attributes:
        call: function of (group, memory, token tensors, other tensors, differentiable, needs the
            final memory) that returns outputs ``[B, t, ...]`` and the final memory.
        groups: first and last column of each group.
        more: number of columns after its last that a group takes of each tensor.
        sizes: number of memory tensors, of token tensors and of other tensors.
    """

    call: Call
    groups: Sequence[tuple[int, int]]
    more: Sequence[int]
    sizes: tuple[int, int, int]

    def split(self, flat: Sequence[Tensor]) -> tuple[Tensors, Tensors, Tensors]:
        a, b, _ = self.sizes
        return list(flat[:a]), list(flat[a : a + b]), list(flat[a + b :])

    def cut(self, group: int, tokens: Sequence[Tensor]) -> Tensors:
        """Return the columns of a group of the token tensors."""
        start, stop = self.groups[group]
        return [x[:, start : stop + more] for x, more in zip(tokens, self.more, strict=True)]


def run(
    call: Call,
    groups: Sequence[tuple[int, int]],
    memory: Tensors,
    tokens: Sequence[Part],
    others: Mapping[str, Tensor],
) -> tuple[Tensor, Tensors]:
    """Return the outputs of all columns and the final memory."""
    plan = Plan(
        call=call,
        groups=groups,
        more=[part.more for part in tokens],
        sizes=(len(memory), len(tokens), len(others)),
    )
    flat = [*memory, *(part.x for part in tokens), *others.values()]
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in flat)):
        with torch.no_grad():
            y, final, _ = _forward(plan, [x.detach() for x in flat], outer=False)
        return y, final
    y, *final = _Groups.apply(plan, *flat)
    return y, final


def _forward(
    plan: Plan, flat: Sequence[Tensor], *, outer: bool, keep: bool = False
) -> tuple[Tensor, Tensors, list[Tensors]]:
    memory, tokens, others = plan.split(flat)
    outputs: list[Tensor] = []
    starts: list[Tensors] = []
    for group in range(len(plan.groups)):
        if keep:
            starts.append(memory)
        y, memory = plan.call(group, memory, plan.cut(group, tokens), others, outer, True)
        outputs.append(y)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), memory, starts


class _Groups(CustomFunction):
    """Run of all groups, and backward pass over the groups in reverse."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *flat: Tensor) -> tuple[Tensor, ...]:
        y, memory, starts = _forward(plan, [x.detach() for x in flat], outer=False, keep=True)
        ctx.plan, ctx.starts = plan, starts
        ctx.save_for_backward(*flat)
        # An unused final memory is not differentiated.
        ctx.set_materialize_grads(False)
        # Outputs must be neither inputs nor saved tensors.
        return y, *(x.clone() for x in memory)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: Plan = ctx.plan
        flat = list(ctx.saved_tensors)
        needs = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():

            def outputs(inputs: Tensors) -> Tensors:
                y, final, _ = _forward(plan, inputs, outer=True)
                return [y, *final]

            return None, *differentiable_backward(outputs, flat, needs, grads)
        return None, *_backward(plan, flat, ctx.starts, needs, grads)


def _backward(
    plan: Plan,
    flat: Sequence[Tensor],
    starts: Sequence[Tensors],
    needs: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    _, tokens, others = plan.split(flat)
    of_memory, of_tokens, of_others = plan.split(needs)  # type: ignore[arg-type]
    dy, dmemory = grads[0], list(grads[1:])
    token_sums = _zeros(tokens, of_tokens)
    other_sums = _zeros(others, of_others)
    for group in reversed(range(len(plan.groups))):
        start, stop = plan.groups[group]
        with torch.enable_grad():
            memory = [x.detach().requires_grad_() for x in starts[group]]
            cut = [
                x.detach().requires_grad_(bool(need))
                for x, need in zip(plan.cut(group, tokens), of_tokens, strict=True)
            ]
            rest = [
                x.detach().requires_grad_(bool(need))
                for x, need in zip(others, of_others, strict=True)
            ]
            needs_memory = any(g is not None for g in dmemory)
            y, final = plan.call(group, memory, cut, rest, True, needs_memory)
        of_y = None if dy is None else dy[:, start:stop]
        inputs = [x for x in (*memory, *cut, *rest) if x.requires_grad]
        pairs = [
            (out, grad)
            for out, grad in zip((y, *final), (of_y, *dmemory), strict=True)
            if out.requires_grad and grad is not None
        ]
        gradients = iter(
            torch.autograd.grad(
                [out for out, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True
            )
            if pairs
            else [None] * len(inputs)
        )
        dmemory = [next(gradients) for _ in memory]
        for total, x, more in zip(token_sums, cut, plan.more, strict=True):
            if total is not None and x.requires_grad and (g := next(gradients)) is not None:
                total[:, start : stop + more] += g
        for total, x in zip(other_sums, rest, strict=True):
            if total is not None and x.requires_grad and (g := next(gradients)) is not None:
                total += g
    first = [g if need else None for g, need in zip(dmemory, of_memory, strict=True)]
    return [*first, *token_sums, *other_sums]


def _zeros(tensors: Sequence[Tensor], needs: Sequence[object]) -> list[Tensor | None]:
    return [torch.zeros_like(x) if need else None for x, need in zip(tensors, needs, strict=True)]
