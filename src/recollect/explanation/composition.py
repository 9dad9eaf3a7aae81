"""A composition of recipes in words: how they work together, what each solves, what is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from recollect.blocks.cost import SEGMENT_START_SUFFIX, cost
from recollect.blocks.mixers import Mixer, RecipeMixer
from recollect.costs import Cost
from recollect.messages import RecipeError
from recollect.recipe.recipe import Recipe
from recollect.report.formatting import format_si
from recollect.report.notebook import definition_table

__all__ = ["Composition", "compose"]

_SIZE = 64  # K and V of the numbers that an explanation quotes


class _Explained(Protocol):
    """Parts of `recollect.explanation.explain.Explanation` that a composition shows."""

    @property
    def recipe(self) -> Recipe: ...
    @property
    def problem(self) -> str: ...
    @property
    def write(self) -> tuple[str, ...]: ...
    @property
    def read(self) -> tuple[str, ...]: ...
    @property
    def where(self) -> tuple[str, ...]: ...
    @property
    def engine(self) -> str: ...
    @property
    def how(self) -> str: ...
    @property
    def products(self) -> str: ...
    @property
    def properties(self) -> Mapping[str, bool]: ...

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Composition:
    """What `explain` found of a composition; ``str()`` lays it out.

    Attributes:
        title: the system's name, or the composition's kind.
        layers: the mixers over the depth, by name; one where all layers are alike.
        parts: what is told of every recipe, by the names that lead to it joined with dots.
        costs: the price of every layer at K = V = 64, by name; ``None`` where an engine has none.
        fidelity: of a system of the zoo, how close it is to its source; else empty.

    Examples:
        >>> found = rc.explain("titans_mac")
        >>> list(found.parts)
        ['memory', 'attention']
        >>> found.costs["titans_mac"].state_bytes_per_token
        0
    """

    title: str
    layers: Mapping[str, Mixer]
    parts: Mapping[str, _Explained]
    costs: Mapping[str, Cost | None]
    fidelity: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "title": self.title,
            "fidelity": self.fidelity,
            "layers": {name: mixer.to_dict() for name, mixer in self.layers.items()},
            "equations": {name: list(mixer.equations) for name, mixer in self.layers.items()},
            "parts": {name: part.to_dict() for name, part in self.parts.items()},
            "costs": {
                name: None if price is None else price.to_dict()
                for name, price in self.costs.items()
            },
        }

    def __str__(self) -> str:
        lines = [self.title]
        for label, block in self._blocks():
            for index, line in enumerate(block):
                lines.append(f"{label if index == 0 else '':<9}{line}".rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return definition_table(
            f"`{self.title}`",
            self._blocks(),
            equations=("composes", "problem", "write", "read", "where"),
        )

    def _blocks(self) -> Iterator[tuple[str, list[str]]]:
        alone = len(self.layers) == 1
        if not alone:
            yield "layers", [f"{', '.join(self.layers)}, in turns; an MLP follows each"]
        for name, mixer in self.layers.items():
            if not isinstance(mixer, RecipeMixer):
                at = "" if alone else f"{name}: "
                yield "composes", [f"{at}{_typed(mixer)}", *mixer.equations]
        yield "fidelity", [self.fidelity] if self.fidelity else []
        for name, part in self.parts.items():
            yield "", [""]
            yield "part", [name]
            yield "problem", [f"min  {part.problem}"]
            yield "write", list(part.write)
            yield "read", list(part.read)
            yield "where", list(part.where)
            products = [f"products of {part.products}"] if part.products else []
            yield "engine", [f"{part.engine} ({part.how})", *products]
        yield "", [""]
        yield "state", [line for name in self.layers for line in self._state(name, alone=alone)]
        yield "cost", [line for name in self.layers for line in self._cost(name, alone=alone)]

    def _state(self, name: str, *, alone: bool) -> Iterator[str]:
        price, at = self.costs[name], "" if alone else f"{name}: "
        if price is None:
            yield f"{at}of unknown size"
            return
        sizes: dict[str, int] = {}
        for part, size in price.state.items():
            suffix = SEGMENT_START_SUFFIX if part.endswith(SEGMENT_START_SUFFIX) else ""
            leaf = part.split()[0] + suffix
            sizes[leaf] = sizes.get(leaf, 0) + size
        several = not isinstance(self.layers[name], RecipeMixer)
        kept = "; ".join(f"{x}: {format_si(n, 'B')}" for x, n in sizes.items() if several)
        more = (
            f"and {format_si(price.state_bytes_per_token, 'B')} more per token"
            if price.state_bytes_per_token
            else "constant"
        )
        where = f"per sequence and head after {price.sizes['T']} tokens at K = V = {_SIZE}"
        if kept:
            yield f"{at}{kept}"
        yield f"{at}{format_si(price.state_bytes, 'B')} {where}, {more}"

    def _cost(self, name: str, *, alone: bool) -> Iterator[str]:
        price, at = self.costs[name], "" if alone else f"{name}: "
        if price is not None:
            token = format_si(price.total / price.sizes["T"], "FLOP")
            decode = format_si(price.decode, "FLOP")
            yield (
                f"{at}{token} per token and head, {decode} to decode one, at K = V = {_SIZE}, "
                f"T = {price.sizes['T']}"
            )
            yield from (f"{at}{line}" for line in price.pace)


def _typed(mixer: Mixer) -> str:
    """A composition with its sizes, its parts by their names."""
    said = [*mixer.children]
    for field in dataclasses.fields(mixer):  # type: ignore[arg-type]
        value = getattr(mixer, field.name)
        several: tuple[Any, ...] = value if isinstance(value, tuple) else ()
        if any(isinstance(one, Mixer) for one in (value, *several)) or value in (None, ()):
            continue
        said.append(f"{field.name}={value}")
    return f"{type(mixer).__name__}({', '.join(said)})"


def compose(
    title: str,
    layers: Mapping[str, Mixer],
    parts: Mapping[str, _Explained],
    engine: str,
    *,
    fidelity: str = "",
) -> Composition:
    """Put together what is told of the recipes.

    Args:
        title: of the whole.
        layers: the mixers by name.
        parts: what is told of each recipe.
        engine: the engine that was asked for.
        fidelity: how close a system of the zoo is to its source.
    """
    costs: dict[str, Cost | None] = {}
    for name, mixer in layers.items():
        try:
            costs[name] = cost(mixer, K=_SIZE, V=_SIZE, engine=engine)
        except RecipeError:
            costs[name] = None
    return Composition(title=title, layers=layers, parts=parts, costs=costs, fidelity=fidelity)
