"""Base class of the engines, and the result of their selection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from recollect.engines.common.problem import Problem
from recollect.engines.common.sizes import FlopCount, Sizes, weight_read_flops
from recollect.state.state import State

if TYPE_CHECKING:
    from recollect.recipe.bound import BoundRecipe
    from recollect.recipe.recipe import Recipe

__all__ = ["Engine", "Selection"]


class Engine(ABC):
    """Implementation of all recipes whose structure it supports."""

    name: ClassVar[str]
    # Whether a NaN input always gives a NaN output. If so, only the outputs of a decoded token are
    # checked.
    propagates_nan: ClassVar[bool] = False
    # whether tensors of a state may have been rounded to half precision
    accepts_half_precision_state: ClassVar[bool] = False

    @abstractmethod
    def unsupported_reasons(self, recipe: Recipe) -> list[str]:
        """Return the reasons why the engine cannot run a recipe; empty if it can."""

    @abstractmethod
    def describe(self, recipe: Recipe) -> str:
        """Return a one-line description of the method for a supported recipe."""

    @abstractmethod
    def run(self, problem: Problem) -> tuple[Tensor, State]:
        """Return outputs ``[B, T, H, G, V]`` and the state after the last token."""

    def make_plan(self, bound: BoundRecipe) -> Any:
        """Return values that `run` reads as `BoundRecipe.plan`, computed once per bound recipe."""
        return None

    def has_token_path(self, bound: BoundRecipe) -> bool:
        """Whether `decode_token` supports a recipe, which has its plan."""
        return False

    def decode_token(
        self,
        bound: BoundRecipe,
        q: Tensor,  # [B, 1, H·G, K]
        k: Tensor,  # [B, 1, H, K]
        v: Tensor,  # [B, 1, H, V]
        gates: Mapping[str, Tensor],  # gates [B, 1, H, ...] and params [H, ...] by name
        state: State,
    ) -> tuple[Tensor, State] | None:
        """Return outputs ``[B, 1, H·G, V]`` and the next state, or ``None`` to let `run` run.

        A short path of one token without gradients, with validated inputs of a layer.
        """
        return None

    def read_state(self, problem: Problem, query_rates: Mapping[str, Tensor]) -> Tensor | None:
        """Return outputs of read-only queries, or ``None`` to let the reference engine read.

        ``problem`` has no tokens, and ``query_rates`` are the gates of its queries.
        """
        return None

    def is_traceable(self, bound: BoundRecipe, tokens: int) -> bool:
        """Whether torch.compile may trace a layer's call with this number of tokens.

        Other calls are one opaque operation (`recollect.functional.one_operation`).
        """
        return False

    def uses_inner_autograd(self, recipe: Recipe) -> bool:
        """Whether inner gradients may be computed by autograd.

        Inference mode forbids inner gradients, and torch.compile would drop them.
        """
        return True

    def float32_reason(self, recipe: Recipe) -> str | None:
        """Return the reason why products stay float32 for any requested precision, or ``None``."""
        return None

    def matmul_precision(self, recipe: Recipe, precision: str | None) -> str | None:
        """Return the precision of a recipe's products for a requested precision."""
        if precision is None or self.float32_reason(recipe) is None:
            return precision
        return "float32"

    def count_flops(self, recipe: Recipe, sizes: Sizes) -> FlopCount | None:
        """Return the operations of one call, or ``None`` if they are not counted."""
        return None

    def count_read_flops(self, recipe: Recipe, sizes: Sizes, queries: int) -> int:
        """Return FLOPs of ``queries`` read-only queries per batch element and query head."""
        return weight_read_flops(recipe, sizes, queries)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Engine that runs a recipe, and the reasons against the engines before it."""

    engine: Engine
    description: str  # method of the engine in one line
    rejected: dict[str, list[str]]  # reasons by name of an earlier engine

    def __str__(self) -> str:
        lines = [f"{self.engine.name} ({self.description})"]
        lines += [f"not {name}: {reasons[0]}" for name, reasons in self.rejected.items()]
        return "\n".join(lines)
