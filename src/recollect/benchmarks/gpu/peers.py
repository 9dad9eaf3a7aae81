"""Cases of other libraries on a GPU: flash-linear-attention's operators, called by themselves."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

from recollect.benchmarks.results import Case
from recollect.benchmarks.suites.calls import Shape, gates_of, stepper, tensors
from recollect.blocks.cost import cost
from recollect.engines.fla.operators import function, installed
from recollect.zoo.preset import get

__all__ = ["OPERATORS", "operator_case", "packages"]

OPERATORS: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    "linear_attention": ("fla.ops.simple_gla", "chunk_simple_gla", {}),
    "gla": ("fla.ops.gla", "chunk_gla", {"log_decay": "g"}),
    "delta_net": ("fla.ops.delta_rule", "chunk_delta_rule", {"lr": "beta"}),
    "gated_delta_net": (
        "fla.ops.gated_delta_rule",
        "chunk_gated_delta_rule",
        {"log_decay": "g", "lr": "beta"},
    ),
}
"""By preset: module and name of the operator of the same recurrence, and its names of the gates."""


def operator_case(name: str, label: str, shape: Shape, *, backward: bool) -> Case:
    """The operator on the inputs that the preset gets, without a line of ours around it.

    Args:
        name: of the preset. label: of the case. shape: of the call.
        backward: whether gradients of all inputs are taken.
    """
    recipe, (module, operator, names) = get(name).recipe, OPERATORS[name]

    def make() -> Callable[[], object]:
        q, k, v = tensors(shape, grad=backward)
        gates = gates_of(recipe, shape, grad=backward)
        call: Callable[..., Any] = function(module, operator)
        given = {names[gate]: x for gate, x in gates.items()}

        def forward() -> Any:
            return call(q, k, v, scale=1.0, **given)[0]

        return stepper(forward, [q, k, v, *gates.values()]) if backward else forward

    price = cost(recipe, B=shape.B, H=shape.H, T=shape.T, K=shape.K, V=shape.V)
    return Case(name=label, make=make, flops=float(price.training if backward else price.total))


def packages() -> dict[str, str | None]:
    """Versions of what is compared with, ``None`` where it is not installed."""
    found: dict[str, str | None] = {}
    for name in ("flash-linear-attention", "titans-pytorch", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if not installed():
        found["flash-linear-attention"] = None
    return found
