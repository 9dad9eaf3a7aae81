"""Published recurrent layers as data: a recipe, and the projections of their modules."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from recollect.lm.adoption.cache import LayerMemory, memory_of
from recollect.lm.adoption.context import CallContext, passed_cache
from recollect.recipe.recipe import Recipe
from recollect.state.state import State

__all__ = ["Family", "MemoryArguments", "families", "family_of", "register_family"]


@dataclass(kw_only=True)
class MemoryArguments:
    """Arguments of `recollect.recall` for the tokens of one call.

    Attributes:
        q, k: queries and keys ``[B, T, H, K]``.
        v: values ``[B, T, H, V]``.
        gates: gates of each token by name.
        params: params by name, ``[H, ...]``.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> arguments = rc.lm.MemoryArguments(q=q, k=k, v=v, gates={"lr": torch.ones(1, 4, 2)})
        >>> arguments.cut(3).k.shape
        torch.Size([1, 3, 2, 8])
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Mapping[str, Tensor]
    params: Mapping[str, Tensor] = field(default_factory=dict)

    def cut(self, n: int) -> MemoryArguments:
        """Return the arguments of the first n tokens."""
        gates = {name: gate[:, :n] for name, gate in self.gates.items()}
        return MemoryArguments(
            q=self.q[:, :n], k=self.k[:, :n], v=self.v[:, :n], gates=gates, params=self.params
        )


@contextlib.contextmanager
def loaded(module: nn.Module) -> Iterator[None]:
    """Load weights that accelerate offloads, for code that reads them without a call."""
    hook: Any = getattr(module, "_hf_hook", None)
    if hook is not None:
        hook.pre_forward(module)
    yield
    if hook is not None:
        hook.post_forward(module, ())


class Family(ABC):
    """Layers of published models that compute the same recipe.

    An adopted layer runs: projections → causal depthwise convolution → activation → arguments of
    the memory → `recollect.recall` → output. A subclass describes the four steps that differ. All
    methods get the layer's own module and read its parameters.

    Attributes:
        name: name in reports.
        recipe: the regression problem of each head.
        keys_first: whether the cache stores a memory as ``[B, H, K, V]``, rather than
            ``[B, H, V, K]``.
        needs_starts: whether `arguments` depends on which tokens are the first of a document.
        has_own_cache: whether the cache is of the model's own class, which `generate` of
            transformers does not make.

    Examples:
        >>> class Narrow(rc.lm.Family):  # a family of a user defines the abstract methods
        ...     name = "narrow"
        ...     recipe = rc.zoo.get("gla").recipe
        ...
        >>> sorted(Narrow.__abstractmethods__)
        ['arguments', 'matches', 'output', 'project']
    """

    name: ClassVar[str]
    recipe: ClassVar[Recipe]
    keys_first: ClassVar[bool] = False
    needs_starts: ClassVar[bool] = False
    has_own_cache: ClassVar[bool] = False

    @abstractmethod
    def matches(self, module: nn.Module) -> bool:
        """Whether a module is a layer of the family, by its structure."""

    @abstractmethod
    def project(self, module: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the inputs of the convolution, and all other projections by name.

        Args:
            module: the layer.
            x: hidden states ``[B, T, d]``.
        """

    def convolution(self, module: Any) -> nn.Conv1d | None:
        """Return the causal depthwise convolution of the module, or ``None``."""
        return module.conv1d  # type: ignore[no-any-return]

    def activate(self, module: Any, u: Tensor) -> Tensor:
        """Apply the activation after the convolution.

        Args:
            module: the layer.
            u: outputs of the convolution ``[B, T, C]``.
        """
        return ACT2FN[module.activation](u)  # type: ignore[no-any-return]

    @abstractmethod
    def arguments(
        self, module: Any, u: Tensor, projections: dict[str, Tensor], starts: Tensor | None
    ) -> MemoryArguments:
        """Return the arguments of the memory.

        Args:
            module: the layer.
            u: activated outputs of the convolution ``[B, T, C]``.
            projections: as returned by `project`.
            starts: ``[B, T]``, whether a token is the first of its document, if the family needs
                it; ``None`` if no token is.
        """

    @abstractmethod
    def output(
        self, module: Any, y: Tensor, arguments: MemoryArguments, projections: dict[str, Tensor]
    ) -> Tensor:
        """Return the output of the layer ``[B, T, d]``.

        Args:
            module: the layer.
            y: outputs of the memory ``[B, T, H, V]``, in the type of the hidden states.
            arguments: as returned by `arguments`.
            projections: as returned by `project`.
        """

    @torch.no_grad()
    def sample(self, module: nn.Module) -> MemoryArguments:
        """Return the arguments of one token of zeros, whose shapes are the sizes of the memory."""
        weight = next(x for x in module.parameters() if x.dim() == 2)
        x = weight.new_zeros(1, 1, self.width(module))
        u, projections = self.project(module, x)
        return self.arguments(module, u, projections, None)

    def width(self, module: Any) -> int:
        """Return the number of channels of hidden states."""
        return int(module.hidden_size)

    def returned(self, module: Any, y: Tensor, stored: tuple[Tensor, ...] | None) -> Any:
        """Return the result of the layer's forward method.

        Args:
            module: the layer.
            y: output ``[B, T, d]``.
            stored: tensors of the memory in the cache after the call, ``None`` without a cache.
        """
        return y

    def memory_of_call(
        self, arguments: Mapping[str, Any], context: CallContext, index: int
    ) -> LayerMemory | None:
        """Return the layer of the cache that a call reads and writes, ``None`` without a cache.

        Args:
            arguments: arguments of the layer's forward method.
            context: the call of the model.
            index: index of the layer in the cache.
        """
        cache = passed_cache(arguments)
        if cache is None:
            return None
        if context.is_active:
            context.cache = cache
        return self.cache_layer(cache, index)

    def cache_layer(self, cache: Any, index: int) -> LayerMemory:
        """Return the layer of a cache that stores the memory of a layer of the model.

        Args:
            cache: the model's cache.
            index: index of the layer in the cache.
        """
        return memory_of(cache, index)

    def new_cache(self, model: Any, batch_size: int) -> Any:
        """Return an empty cache for `generate`, if `has_own_cache`.

        Args:
            model: the model.
            batch_size: number of sequences.

        Raises:
            NotImplementedError: the family has no cache of its own.
        """
        raise NotImplementedError(f"family {self.name!r} makes no cache")

    def load_state(self, module: Any, stored: tuple[Tensor, ...]) -> dict[str, Any]:
        """Return the fields of a `recollect.State` of the tensors in the model's cache.

        Args:
            module: the layer.
            stored: tensors of the memory in the cache.
        """
        return {"weights": (stored[0].mT if self.keys_first else stored[0],)}

    def store_state(self, module: Any, state: State) -> tuple[Tensor, ...]:
        """Undo `load_state`.

        Args:
            module: the layer.
            state: state of the recipe.
        """
        return (state.weights[0].mT if self.keys_first else state.weights[0],)


_families: list[Family] = []


def register_family(family: Family) -> Family:
    """Add a family, which `adopt` tries before the families that are registered already.

    Args:
        family: an object of a subclass of `Family`.

    Raises:
        TypeError: not a family.
        ValueError: the name is taken.

    Examples:
        >>> rc.lm.register_family("mamba")
        Traceback (most recent call last):
        TypeError: expected an object of a subclass of rc.lm.Family, not 'mamba'
    """
    if not isinstance(family, Family):
        raise TypeError(f"expected an object of a subclass of rc.lm.Family, not {family!r}")
    if any(other.name == family.name for other in _families):
        raise ValueError(f"a family named {family.name!r} exists: give the new one another name")
    _families.insert(0, family)
    return family


def families() -> Iterator[Family]:
    """Iterate over all families, in the order in which `adopt` tries them.

    Examples:
        >>> "kimi delta attention" in [family.name for family in rc.lm.families()]
        True
    """
    return iter(tuple(_families))


def family_of(module: nn.Module) -> Family | None:
    """Return the first family that a module belongs to."""
    return next((family for family in families() if family.matches(module)), None)
