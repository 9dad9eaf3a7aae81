"""A step of decoding as one compiled program.

A token of a memory runs about a hundred small operations, and torch's overhead dominates. The step
is traced to tensor operations, including inner gradients, with all decisions of the host fixed
(position, sizes). TorchInductor then fuses the operations between products. Tracing uses fake
tensors, so that a step that depends on a value raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from torch.fx import GraphModule

from recollect.choices.runtime import tracing_mode, without_autocast
from recollect.decoder.states import tensors_of, with_tensors

__all__ = ["DEVICE_OPTIONS", "Program", "Step", "program_of", "traced"]

DEVICE_OPTIONS: dict[str, Any] = {"combo_kernels": True}
"""Options of TorchInductor for GPUs: independent kernels are combined into one launch."""

Step = Callable[[Tensor, Any], tuple[Tensor, Any]]
"""Function from a token and a state to the output and the next state."""


@dataclass(frozen=True)
class Program:
    """A compiled step."""

    # function from a token and the tensors of a state to the output and the tensors of the next
    # state
    compiled: Callable[..., Sequence[Tensor]]
    state_template: Any  # a state with the structure of these tensors

    def __call__(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, tensors = self.run(x, tensors_of(state))
        return y, self.state(tensors)

    def run(self, x: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Run the step with the tensors of a state."""
        with without_autocast(x.device.type):  # its casts are in the trace
            y, *outputs = self.compiled(x, *tensors)
        return y, outputs

    def state(self, tensors: Sequence[Tensor]) -> Any:
        """Return the state after the step."""
        return with_tensors(self.state_template, tensors)


def program_of(step: Step, x: Tensor, state: Any) -> Program:
    """Trace and compile a step, for tokens and states of these sizes and this position.

    The step runs without gradients, and its weights are read at every run. The tensors of ``state``
    are contiguous. Raises RuntimeError if the step depends on a value of a tensor, or without a
    compiler.
    """
    from torch._inductor import compile as compiled  # loads the compiler, which takes seconds

    graph, state_template = traced(step, x, state)
    options = {} if x.device.type == "cpu" else DEVICE_OPTIONS
    with without_autocast(x.device.type):
        program = compiled(graph, [x, *tensors_of(state)], options)
    return Program(
        compiled=cast("Callable[..., Sequence[Tensor]]", program), state_template=state_template
    )


def traced(step: Step, x: Tensor, state: Any) -> tuple[GraphModule, Any]:
    """Return the operations of a step on tensors, and the state after it as a template."""
    from torch.fx.experimental.proxy_tensor import make_fx

    outputs: list[Any] = []

    def flat(x: Tensor, *tensors: Tensor) -> list[Tensor]:
        y, state_template = step(x, with_tensors(state, tensors))
        outputs[:] = [state_template]
        return [y, *(x.contiguous() for x in tensors_of(state_template))]

    with tracing_mode():
        trace = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)
        return trace(x, *tensors_of(state)), outputs[0]
