"""Context: which associations count at time t, and how much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from recollect.choices.features import Exponential, Kernel
from recollect.choices.member import Gate, Member, Range, flag, integer, member, quantity, slot
from recollect.choices.terms import figure

if TYPE_CHECKING:
    from recollect.recipe import Recipe

__all__ = ["Context", "Online", "Prefix", "Similar", "Window"]


class Context(Member):
    """The associations in the objective at time t.

    Attributes:
        horizon: how many of the latest associations count; ``None`` is all of them.
        kernel: similarity of a key to the query, for memories that solve per query.
        within: further restrictions whose weights multiply.
    """

    choice = "context"

    kernel: Kernel | None = None
    within: tuple[Context, ...] = ()

    @property
    def horizon(self) -> int | None:
        """Number of latest associations that count, or ``None`` for all."""
        return 1

    @property
    def index(self) -> str:
        """The index of an association inside `total`."""
        return "t" if self.horizon == 1 else "i"

    def total(self, term: str) -> str:
        """The sum over the context of a term of one association with index `index`."""
        return term


@member
class Online(Context):
    """Only the current association: γ = 1 for i = t."""


@member
class Window(Context):
    """The last c associations: Σ_{i=t−c+1..t} γ_i^(t) ℓ_i, the Omega rule (ATLAS 8–10).

    Args:
        size: c ≥ 1. The window reaches across inner batches; documents start with an empty one.
        gated: γ comes from the gate ``"window" [B, T, H, c]`` of the *current* token (entry m
            weighs association t − m); otherwise γ = 1.
    """

    size: int = integer(at_least=1, size=True)
    gated: bool = flag(True)

    @property
    def horizon(self) -> int:
        return self.size

    def gates(self) -> tuple[Gate, ...]:
        if not self.gated:
            return ()
        return (
            Gate(
                name="window",
                owner=self.title,
                axes=("c",),
                range=Range(low=0.0),
                init=1.0 / self.size,
            ),
        )

    def total(self, term: str) -> str:
        if self.size == 1:
            return f"γ_t {term}" if self.gated else term
        weight = "γ_i^(t) " if self.gated else ""
        return f"Σ_(i>t−{self.size}) {weight}{term}"

    def notes(self) -> tuple[str, ...]:
        if not self.gated or self.size == 1:
            return ()
        return ("γ_i^(t): the current token's weight of association i",)


@member
class Prefix(Context):
    """All past associations, Σ_{i≤t} γ^(t−i) w_i ℓ_i, geometrically weighted (TTR 14).

    Args:
        decay: γ in (0, 1]: a constant, the gate ``"log_decay"``, or a param.
        weight: w_i ≥ 0: a constant or the gate ``"weight"``, which travels with the association.
    """

    decay: float | str = quantity(1.0, above=0, at_most=1, init=0.98, log=True, letter="γ")
    weight: float | str = quantity(
        1.0, at_least=0, init=1.0, travels=True, kinds=("token",), letter="w"
    )

    @property
    def horizon(self) -> None:
        return None

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        if not recipe.algorithm.full_batch:
            yield (
                f"context.Prefix is for algorithms that see all of the past at once, and "
                f"{recipe.algorithm.title} takes one association at a time: use "
                "retention.Decay() to forget, or algorithm.GradientDescent(steps=I)"
            )

    def total(self, term: str) -> str:
        rate, weight = self.symbol("decay", "i"), self.symbol("weight", "i")
        words: list[str] = []
        if rate != 1.0:
            words.append("γ_i^(t)" if rate == "γ_i" else f"{figure(rate)}^(t−i)")
        if weight != 1.0:
            words.append(figure(weight))
        return " ".join((f"Σ_(i≤t) {' '.join(words)}".rstrip(), term))

    def notes(self) -> tuple[str, ...]:
        if self.decay != "token":
            return ()
        return ("γ_i^(t): the product of the decays of the tokens after i",)


@member
class Similar(Context):
    """Associations weighed by their keys' likeness to the query, s(k_i, q) (TTR 48).

    Args:
        kernel: s, e.g. ``features.Exponential()``.
        within: contexts whose weights multiply, e.g. ``(Window(size=64, gated=False),)``.
    """

    kernel: Kernel | None = slot(Exponential(), "features")
    within: tuple[Context, ...] = slot((), "context", many=True)

    @property
    def horizon(self) -> int | None:
        spans = [part.horizon for part in self.within if part.horizon is not None]
        return min(spans) if spans else None

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        if not isinstance(self.kernel, Kernel):
            yield (
                "context.Similar needs a kernel such as features.Exponential(), and "
                f"{self.kernel!r} is a finite map"
            )
        if recipe.memory.degree is None:
            yield (
                f"context.Similar weighs associations by the query, and {recipe.memory.title} is "
                "written before the query is known: use memory.LocalConstant()"
            )
        for part in self.within:
            if not isinstance(part, Window) or part.gated:
                yield (
                    f"context.Similar(within=...) restricts by Window(size=c, gated=False), not by "
                    f"{part.title}"
                )

    def total(self, term: str) -> str:
        return f"{self.span} s(k_i, q_t) {term}"

    @property
    def span(self) -> str:
        """The sum over the associations that count."""
        return f"Σ_(t−{self.horizon}<i≤t)" if self.horizon else "Σ_(i≤t)"

    def notes(self) -> tuple[str, ...]:
        assert self.kernel is not None  # only None is refused by requires()
        return (f"s(k, q) = {self.kernel.similarity('k', 'q')}", *super().notes())
