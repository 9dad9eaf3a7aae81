"""The interface of layers that `recollect.explain`, `diagnose` and `cost` look into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from recollect.layer.options import LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.recipe.stability import StabilityLimit

__all__ = ["InspectableLayer", "MemorySpec", "RecallInputs"]


@dataclass(frozen=True, kw_only=True, eq=False)
class MemorySpec:
    """A layer's recipe, sizes and engine.

    Attributes:
        recipe: the regression problem of each head.
        d_model: width of the tokens.
        num_kv_heads: H, number of memories.
        head_dim: K, size of queries and keys.
        value_dim: V, size of values.
        num_heads: number of query heads. Default: ``num_kv_heads``.
        engine, precision, chunk_size: as in `recollect.recall`.
        initial_memory: as in `recollect.recall`; ``None`` if memories start at zero.
        gate_ranges: the ends of the range of each gate whose saturation is measured. Decays in log
            space are measured by the number of tokens that they cover, for any ends.
        stability_limit: the limit that ``"lr"`` is a multiple of, or ``None``.
        options: options of a `recollect.MemoryLayer`, or ``None``.
        title: title in explanations of models. Default: the name of the layer's class.

    Examples:
        >>> layer = rc.zoo.get("titans").build(d_model=8, num_heads=2)
        >>> spec = layer.memory_spec
        >>> spec.num_kv_heads, spec.head_dim, spec.value_dim
        (2, 4, 4)
    """

    recipe: Recipe
    d_model: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    num_heads: int | None = None
    engine: str = "auto"
    precision: str | None = None
    chunk_size: int | None = None
    initial_memory: tuple[Tensor, ...] | None = None
    gate_ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    stability_limit: StabilityLimit | None = None
    options: LayerOptions | None = None
    title: str = ""


class RecallInputs(Protocol):
    """Queries, keys, values, gates and params of tokens, as `recollect.recall` takes them."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def gates(self) -> Mapping[str, Tensor]:
        """Gates by name."""
        ...

    @property
    def params(self) -> Mapping[str, Tensor]:
        """Params by name."""
        ...


@runtime_checkable
class InspectableLayer(Protocol):
    """A layer with a recipe, which can be explained and diagnosed.

    `recollect.MemoryLayer` and the layers of `recollect.lm.adopt` have this interface. A module of
    yours needs the property (or attribute) and the method below.

    Examples:
        >>> from recollect.layer import InspectableLayer
        >>> isinstance(rc.zoo.get("titans").build(d_model=8, num_heads=2), InspectableLayer)
        True
        >>> isinstance(torch.nn.Linear(8, 8), InspectableLayer)
        False
    """

    @property
    def memory_spec(self) -> MemorySpec:
        """Recipe, sizes and engine."""
        ...

    def memory_inputs(self, x: Tensor, /) -> RecallInputs:
        """Return the arguments of `recollect.recall` for tokens ``[B, T, d_model]``."""
        ...
