"""What members ask of each other through the recipe that they stand in: one Protocol per choice.

A member knows the recipe by these questions alone, so that choices stand below recipes: what is not
declared here cannot be asked. The base class of each choice answers them, most of them from the
quantities that a member declares, and documents them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

from torch import Tensor

from recollect.choices.fields import Gate

__all__ = [
    "AlgorithmLike",
    "BiasLike",
    "ContextLike",
    "DecayLike",
    "FeaturesLike",
    "MemberLike",
    "MemoryLike",
    "ReadLike",
    "RecipeLike",
    "RetentionLike",
]


class MemberLike(Protocol):
    """What every member says of itself: see `recollect.choices.member.Member`."""

    @property
    def title(self) -> str: ...
    @property
    def brief(self) -> str: ...
    def gates(self) -> tuple[Gate, ...]: ...


class ReadLike(MemberLike, Protocol):
    """How a memory is read: see `memory.Read`."""

    @property
    def normalize(self) -> str: ...
    @property
    def when(self) -> str: ...
    @property
    def bonus(self) -> float | str: ...


class MemoryLike(MemberLike, Protocol):
    """What is asked of a memory: see `memory.Memory`."""

    @property
    def linear(self) -> bool: ...
    @property
    def channelled(self) -> bool: ...
    @property
    def diagonal(self) -> bool: ...
    @property
    def degree(self) -> int | None: ...
    @property
    def letter(self) -> str: ...
    @property
    def read(self) -> ReadLike: ...
    @property
    def bounded(self) -> bool: ...
    def reachable(self, value: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor: ...


class FeaturesLike(MemberLike, Protocol):
    """What is asked of features and kernels: see `features.Features`."""

    @property
    def finite(self) -> bool: ...
    @property
    def definite(self) -> bool: ...
    @property
    def positive(self) -> bool: ...
    def axes(self, K: int) -> dict[str, int]: ...
    def lift(self, x: str) -> str: ...


class BiasLike(MemberLike, Protocol):
    """What is asked of an attentional bias: see `bias.Bias`."""

    @property
    def affine(self) -> tuple[float, float] | None: ...
    @property
    def probe(self) -> MemberLike | None: ...
    @property
    def target(self) -> float | None: ...


class ContextLike(MemberLike, Protocol):
    """What is asked of a context: see `context.Context`."""

    @property
    def horizon(self) -> int | None: ...
    @property
    def keeps(self) -> int | None: ...
    @property
    def kernel(self) -> MemberLike | None: ...
    @cached_property
    def forgets(self) -> bool: ...
    @cached_property
    def weighs(self) -> bool: ...


class DecayLike(MemberLike, Protocol):
    """What is asked of a decay: see `retention.Decay`."""

    @property
    def per(self) -> str: ...


class RetentionLike(MemberLike, Protocol):
    """What is asked of a retention: see `retention.Retention`."""

    @property
    def decay(self) -> DecayLike | None: ...
    @property
    def linked(self) -> bool: ...
    @property
    def additive(self) -> bool: ...


class AlgorithmLike(MemberLike, Protocol):
    """What is asked of an algorithm: see `algorithm.Algorithm`."""

    @property
    def batch(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def slots(self) -> tuple[str, ...]: ...
    @property
    def reduce(self) -> str: ...
    @property
    def linear(self) -> bool: ...
    @property
    def keyed(self) -> bool: ...
    @property
    def normalizes(self) -> bool: ...
    @property
    def searches(self) -> bool: ...
    @property
    def limit(self) -> str: ...
    @property
    def eta(self) -> str | None: ...
    @property
    def per_value(self) -> bool: ...
    @property
    def momentum_of(self) -> str | None: ...
    @property
    def solves(self) -> bool: ...
    @property
    def full_batch(self) -> bool: ...


class RecipeLike(Protocol):
    """A recipe, as far as its members ask: see `recollect.recipe.Recipe`."""

    @property
    def memory(self) -> MemoryLike: ...
    @property
    def features(self) -> FeaturesLike: ...
    @property
    def bias(self) -> BiasLike: ...
    @property
    def context(self) -> ContextLike: ...
    @property
    def retention(self) -> RetentionLike: ...
    @property
    def algorithm(self) -> AlgorithmLike: ...
    @property
    def nonparametric(self) -> bool: ...
    @property
    def solves_from_gram(self) -> bool: ...
