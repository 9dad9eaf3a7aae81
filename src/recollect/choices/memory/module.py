"""A memory that is a PyTorch module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from recollect.choices.member import member
from recollect.choices.memory.base import Forward, Memory
from recollect.fields import text
from recollect.messages import RecipeError

__all__ = ["Module", "module_factory"]


Factory = Callable[[int, int], nn.Module]


_FACTORIES: dict[str, Factory] = {}


def module_factory(name: str) -> Callable[[Factory], Factory]:
    """Register ``factory(F, V) -> torch.nn.Module`` under a name for `Module`; a decorator.

    The module maps ``[N, F]`` to ``[N, V]``, has no buffers, and samples no random numbers.

    Examples:
        >>> @rc.memory.module_factory("wide")
        ... def wide(F, V):
        ...     return torch.nn.Linear(F, V, bias=False)
        >>> rc.memory.Module(factory="wide").shapes(4, 3)
        ((3, 4),)
    """

    def register(factory: Factory) -> Factory:
        existing = _FACTORIES.get(name)
        if existing is not None and getattr(existing, "__qualname__", existing) != getattr(
            factory, "__qualname__", factory
        ):
            raise RecipeError(f"a module factory named {name!r} exists already: choose another")
        _FACTORIES[name] = factory
        return factory

    return register


@member
class Module(Memory):
    """Any stateless torch module as memory: its parameters are the weights.

    Args:
        factory: name under which ``factory(F, V)`` was registered with
            ``rc.memory.module_factory``. A recipe is data, so it contains the name instead of the
            callable.

    Examples:
        >>> @rc.memory.module_factory("shallow")
        ... def shallow(F, V):
        ...     return torch.nn.Sequential(torch.nn.Linear(F, V), torch.nn.Tanh())
        >>> memory = rc.memory.Module(factory="shallow")
        >>> memory.shapes(4, 4)
        ((4, 4), (4,))
        >>> recipe = rc.Recipe(memory=memory, algorithm=rc.algorithm.GradientDescent(lr=0.1))
        >>> q, k, v = torch.randn(3, 1, 6, 2, 4)
        >>> memory_0 = [torch.randn(2, 4, 4), torch.zeros(2, 4)]
        >>> y, state = rc.recall(recipe, q, k, v, initial_memory=memory_0)
        >>> y.shape, state.weights[0].shape
        (torch.Size([1, 6, 2, 4]), torch.Size([1, 2, 4, 4]))
    """

    factory: str = text()

    def validate(self) -> None:
        if self.factory not in _FACTORIES:
            raise RecipeError(
                f"memory.Module: no factory named {self.factory!r} is registered; decorate a "
                "function (F, V) -> torch.nn.Module with "
                f"@rc.memory.module_factory({self.factory!r})"
            )

    def template(self, F: int, V: int) -> nn.Module:
        """Return a new module on the meta device, without values.

        Args:
            F: input features.
            V: outputs.

        Raises:
            RecipeError: a module with buffers.
        """
        with torch.device("meta"):
            module = _FACTORIES[self.factory](F, V)
        if any(True for _ in module.buffers()):
            raise RecipeError(
                f"memory.Module({self.factory!r}) has buffers, which a recipe cannot contain: "
                "make them constants or parameters"
            )
        return module

    def shapes(self, F: int, V: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(p.shape) for p in self.template(F, V).parameters())

    def bind(self, F: int, V: int) -> Forward:
        module = self.template(F, V)
        names = [name for name, _ in module.named_parameters()]

        def call(weights: tuple[Tensor, ...], h: Tensor) -> Tensor:
            return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (h,))

        batched = torch.vmap(torch.vmap(call))

        def forward(
            weights: Sequence[Tensor], x: Tensor, raw: Tensor, params: Mapping[str, Tensor]
        ) -> Tensor:
            return batched(tuple(weights), x)

        return forward

    def prediction_text(self, x: str, *, raw: str = "", W: str = "") -> str:
        return f"{self.factory}({W or self.weight_symbol}; {x})"
