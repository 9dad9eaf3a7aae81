"""Explanation of a composition: how the recipes work together, and its state and cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recollect.blocks.cost import EARLIER_SEGMENTS_SUFFIX, SEGMENT_START_SUFFIX
from recollect.blocks.mixers import Mixer, RecipeMixer
from recollect.costs import Cost
from recollect.explanation.labelled_text import SIZE, LabelledText
from recollect.report.formatting import format_si

if TYPE_CHECKING:
    from recollect.explanation.explain import Explanation

__all__ = ["Composition"]


@dataclass(frozen=True, kw_only=True)
class Composition(LabelledText):
    """Explanation of a composition of recipes; ``str()`` prints its `blocks`.

    Attributes:
        title: name of the system, or kind of the composition.
        fidelity: closeness of a system of the zoo to its source; empty for other compositions.
        layers: mixers over the depth, by name; one mixer if all layers are equal.
        parts: explanations of the recipes, by the names that lead to them, joined with dots.
        costs: costs of each layer at K = V = 64, by name; ``None`` if an engine has none.

    Examples:
        >>> composition = rc.explain("titans_mac")
        >>> list(composition.parts)
        ['memory', 'attention']
        >>> composition.costs["titans_mac"].state_bytes_per_token
        0
    """

    title: str
    fidelity: str = ""
    layers: Mapping[str, Mixer]
    parts: Mapping[str, Explanation]
    costs: Mapping[str, Cost | None]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, and the equations of the layers, as data for JSON."""
        equations = {name: list(mixer.equations) for name, mixer in self.layers.items()}
        return {**super().to_dict(), "equations": equations}

    def _lines(self) -> Iterator[tuple[str, list[str]]]:
        prefixes = {name: f"{name}: " if len(self.layers) > 1 else "" for name in self.layers}
        if len(self.layers) > 1:
            yield "layers", [f"{', '.join(self.layers)}, in turns; an MLP follows each"]
        for name, mixer in self.layers.items():
            if not isinstance(mixer, RecipeMixer):
                yield "composes", [f"{prefixes[name]}{_mixer_text(mixer)}", *mixer.equations]
        yield "fidelity", [self.fidelity] if self.fidelity else []
        for name, part in self.parts.items():
            yield "", [""]
            yield "part", [name]
            yield from part.solution
        yield "", [""]
        for label, lines in (("state", self._state_lines), ("cost", self._cost_lines)):
            yield (
                label,
                [f"{prefix}{line}" for name, prefix in prefixes.items() for line in lines(name)],
            )

    def _state_lines(self, name: str) -> Iterator[str]:
        cost = self.costs[name]
        if cost is None:
            yield "of unknown size"
            return
        sizes: dict[str, int] = {}
        for part, size in cost.state.items():
            suffixes = (SEGMENT_START_SUFFIX, EARLIER_SEGMENTS_SUFFIX)
            suffix = next((one for one in suffixes if part.endswith(one)), "")
            leaf = part.split()[0] + suffix
            sizes[leaf] = sizes.get(leaf, 0) + size
        if sizes and not isinstance(self.layers[name], RecipeMixer):
            yield "; ".join(f"{leaf}: {format_si(size, 'B')}" for leaf, size in sizes.items())
        growth = "constant"
        if cost.state_bytes_per_token:
            growth = f"and {format_si(cost.state_bytes_per_token, 'B')} more per token"
        lengths = f"per sequence and head after {cost.sizes['T']} tokens at K = V = {SIZE}"
        yield f"{format_si(cost.state_bytes, 'B')} {lengths}, {growth}"

    def _cost_lines(self, name: str) -> Iterator[str]:
        cost = self.costs[name]
        if cost is not None:
            token = format_si(cost.total / cost.sizes["T"], "FLOP")
            decode = format_si(cost.decode, "FLOP")
            sizes = f"K = V = {SIZE}, T = {cost.sizes['T']}"
            yield f"{token} per token and head, {decode} to decode one, at {sizes}"
            yield from cost.pace


def _mixer_text(mixer: Mixer) -> str:
    """Return a composition with the names of its parts and its sizes."""
    arguments = [*mixer.children]
    for field in dataclasses.fields(mixer):  # type: ignore[arg-type]
        value = getattr(mixer, field.name)
        items: tuple[Any, ...] = value if isinstance(value, tuple) else ()
        if value not in (None, ()) and not any(isinstance(x, Mixer) for x in (value, *items)):
            arguments.append(f"{field.name}={value}")
    return f"{type(mixer).__name__}({', '.join(arguments)})"
