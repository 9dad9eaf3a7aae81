"""Lines of a system's page that follow from its recipes: its use, models that have it, its cost."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from recollect.choices import bias
from recollect.costs import Cost
from recollect.explanation.composition import Composition
from recollect.explanation.explain import Explanation
from recollect.report.formatting import format_si
from recollect.zoo.preset import Preset

__all__ = ["cost_line", "published_models", "use_line"]

_ADOPTED = Path(__file__).parents[1] / "adopt.md"
_FAMILY_ROW = re.compile(r"^\| ([a-z0-9 -]+) \| .* \| (.+) \|$", re.MULTILINE)


def use_line(system: Preset, explanation: Explanation | Composition) -> str:
    """Return the uses of a system that follow from the structure of its recipes."""
    if system.kind == "feed_forward":
        return "knowledge from training, in place of an MLP. Nothing is written while it reads."
    parts = explanation.parts.values() if isinstance(explanation, Composition) else [explanation]
    costs = _costs(explanation).values()
    is_growing = any(cost is not None and cost.state_bytes_per_token for cost in costs)
    uses = list(dict.fromkeys(use for part in parts for use in _uses(part, is_growing)))
    return f"{', '.join(uses[:-1])} and {uses[-1]}." if len(uses) > 1 else f"{uses[0]}."


def _uses(part: Explanation, is_growing: bool) -> Iterator[str]:
    recipe, cost = part.recipe, part.cost
    if is_growing and cost is not None and cost.state_bytes_per_token:
        yield "recall of every earlier token (growing state)"
    elif recipe.nonparametric:
        yield "recall of recent tokens"
    else:
        yield "long texts (constant state)"
    if recipe.nonparametric:
        return
    if not isinstance(recipe.bias, bias.DotProduct):
        yield "pairs whose values change"
    if part.properties["dynamic decay"]:
        yield "texts whose subject changes"
    if part.properties["deep memory"]:
        yield "nonlinear maps from keys to values"


def _costs(explanation: Explanation | Composition) -> Mapping[str, Cost | None]:
    """Return the costs of a system by layer."""
    return explanation.costs if isinstance(explanation, Composition) else {"": explanation.cost}


def cost_line(system: Preset, explanation: Explanation | Composition) -> str:
    """Return FLOPs, state and time at K = V = 64 and T = 4096, by layer if there are several."""
    if system.kind == "feed_forward":
        return "an MLP with a hidden unit for each stored association, and no state."
    known = {name: cost for name, cost in _costs(explanation).items() if cost is not None}
    if not known:
        return "unknown."
    prefixes = {name: f"`{name}` " if len(known) > 1 else "" for name in known}
    texts = [f"{prefixes[name]}{_cost_text(cost)}" for name, cost in known.items()]
    size = next(iter(known.values())).sizes["T"]
    return f"{'; '.join(texts)} (K = V = 64, T = {size:,}; the time is an estimate)."


def _cost_text(cost: Cost) -> str:
    growth = f" that grows by {format_si(cost.state_bytes_per_token, 'B')} per token"
    return (
        f"{format_si(cost.total / cost.sizes['T'], 'FLOP')} per token and head, "
        f"{format_si(cost.state_bytes, 'B')} of state{growth if cost.state_bytes_per_token else ''}"
        f", {format_si(cost.relative_time, '')}× the time of Gated DeltaNet on a CPU"
    )


@cache
def published_models() -> dict[str, str]:
    """Return the classes with published weights in `adopt.md`, by the name of their preset."""
    section = _ADOPTED.read_text("utf-8").partition("\n## Models\n")[2].partition("\n## ")[0]
    rows = _FAMILY_ROW.findall(section)
    return {re.sub(r"\W", "_", family): models for family, models in rows if family != "family"}
