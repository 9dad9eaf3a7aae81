"""Inner gradients inside ``torch.inference_mode``.

A memory learns by a gradient also where nobody trains. Inference mode forbids autograd, even for
numbers made and forgotten inside one call, so an engine that takes its inner gradient by autograd
leaves the mode for the length of the call, without asking for an outer gradient that the caller
switched off, and is given copies of what was made in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from recollect.engines.common.joined_tokens import tensors
from recollect.engines.common.problem import Problem

__all__ = ["leaves_inference", "ordinary", "ordinary_mode", "ordinary_problem"]


def leaves_inference(problem: Problem, *more: Tensor, inner_gradients: bool) -> bool:
    """Whether autograd would refuse numbers that this call differentiates.

    Inside inference mode that matters to inner gradients alone; outside of it to any gradient, of a
    state that was made inside, say.
    """
    if torch.compiler.is_compiling():
        return False
    if torch.is_inference_mode_enabled():
        return inner_gradients
    return any(map(Tensor.is_inference, (*tensors(problem), *more)))


@contextmanager
def ordinary_mode() -> Generator[None]:
    """Leave inference mode; whether an outer gradient is asked for stays as it was."""
    outer = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(outer):
        yield


def ordinary(x: Tensor) -> Tensor:
    """The same numbers in a tensor that was not made in inference mode."""
    return x.clone() if x.is_inference() else x


def ordinary_problem(problem: Problem) -> Problem:
    """The same problem of such tensors."""
    return dataclasses.replace(
        problem,
        q=ordinary(problem.q),
        k=ordinary(problem.k),
        v=ordinary(problem.v),
        rates={name: ordinary(x) for name, x in problem.rates.items()},
        params={name: ordinary(x) for name, x in problem.params.items()},
        state=problem.state.map(ordinary),
        lengths=None if problem.lengths is None else ordinary(problem.lengths),
    )
