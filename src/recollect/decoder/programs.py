"""A step of decoding as one compiled program.

A token of a memory is a hundred small operations, and most of its time is what torch spends around
each. The step is traced with everything that the host decides already decided (tokens seen, sizes),
as operations on tensors alone, inner gradients among them, and TorchInductor brings together what
stands between its products. It is traced on tensors without numbers: a step that asks for a number
cannot be traced, where one with numbers would be traced wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule

from recollect.choices.devices import autocasts, written_down
from recollect.decoder.states import put, tensors_of

__all__ = ["DEVICE_OPTIONS", "Program", "Step", "program_of", "traced"]

DEVICE_OPTIONS: dict[str, Any] = {"combo_kernels": True}
"""TorchInductor's where launches are the time: stretches that do not wait for each other are one.
A CPU has them in one function anyway."""

Step = Callable[[Tensor, Any], tuple[Tensor, Any]]
"""From a token and a state to the output and the state after it."""


@dataclass(frozen=True)
class Program:
    """A compiled step.

    Attributes:
        compiled: from the token and a state's tensors to the output and the tensors of the next.
        after: what these tensors make up.
    """

    compiled: Callable[..., Sequence[Tensor]]
    after: Any

    def __call__(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The step."""
        y, tensors = self.run(x, tensors_of(state))
        return y, self.state(tensors)

    def run(self, x: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The step, from tensors to tensors.

        Args:
            x: the token. tensors: of the state before it.
        """
        with _as_traced(x):
            y, *left = self.compiled(x, *tensors)
        return y, left

    def state(self, tensors: Sequence[Tensor]) -> Any:
        """The state after the step.

        Args:
            tensors: that the step left.
        """
        return put(self.after, tensors)


def program_of(step: Step, x: Tensor, state: Any) -> Program:
    """Trace a step and compile it, for tokens and states of these sizes and as many tokens seen.

    Args:
        step: without gradients. What it reads beside its arguments (weights) is read anew each
            time.
        x: a token.
        state: before it, of contiguous tensors, as those of the states after it are.

    Raises:
        RuntimeError: the step asks for a number; or there is no compiler.
    """
    from torch._inductor import compile as compiled  # loads the compiler, which takes seconds

    graph, after = traced(step, x, state)
    options = {} if x.device.type == "cpu" else DEVICE_OPTIONS
    with _as_traced(x):
        found = compiled(graph, [x, *tensors_of(state)], options)
    return Program(compiled=cast("Callable[..., Sequence[Tensor]]", found), after=after)


def _as_traced(x: Tensor) -> AbstractContextManager[object]:
    """Autocast's casts are in the trace, where it was on; nothing is cast again."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if autocasts(kind) else nullcontext()


def traced(step: Step, x: Tensor, state: Any) -> tuple[GraphModule, Any]:
    """The operations of a step, from the token and the state's tensors; and the state they leave.

    Args:
        step, x, state: as in `program_of`.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    left: list[Any] = []

    def flat(x: Tensor, *tensors: Tensor) -> list[Tensor]:
        y, after = step(x, put(state, tensors))
        left[:] = [after]
        return [y, *(one.contiguous() for one in tensors_of(after))]

    with written_down():
        trace = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)
        return trace(x, *tensors_of(state)), left[0]
