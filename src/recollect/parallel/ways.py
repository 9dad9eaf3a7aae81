"""Which way a recipe's memory goes from rank to rank: what its structure allows, and why.

* ``"affine"``: the weights after a segment are affine in those before it. Every rank works out its
  segment's transition and what it wrote, all at once; one gather, and each reads.
* ``"gather"``: the state is associations and nothing made of them. Every rank is given those that
  its tokens may look back at, all at once.
* ``"hand_over"``: rank r waits for the state of rank r − 1. Exact for every recipe; pieces of the
  batch and heads follow each other, so that ranks idle for (R − 1)/(R − 1 + m) of m pieces' time.
"""

from __future__ import annotations

from dataclasses import dataclass

from recollect.choices.member import RecipeError
from recollect.engines import linear
from recollect.engines.linear.engine import scans
from recollect.recipe.recipe import Recipe

__all__ = ["WAYS", "Way", "way_of"]

WAYS = ("affine", "gather", "hand_over")
"""How a memory goes from rank to rank.

``"affine"``: each rank's segment is one affine map of the weights, and the maps are scanned.
``"gather"``: keys and values are gathered, as for attention. ``"hand_over"``: the state is handed
from rank to rank.

Examples:
    >>> rc.parallel.way_of(rc.Recipe()).name in rc.parallel.WAYS
    True
"""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a recipe's memory goes from rank to rank.

    Attributes:
        name: one of `WAYS`.
        transition: of ``"affine"``, what the weights before a segment become after it:
            ``"decays"``, numbers per row and column; ``"entries"``, a number per entry; ``"keys"``,
            a matrix over key features, the same for every row of the memory.
        why: in a few words.

    Examples:
        >>> way = rc.parallel.way_of(rc.zoo.get("gla").recipe)
        >>> way.name, way.transition
        ('affine', 'decays')
    """

    name: str
    transition: str | None = None
    why: str

    def __str__(self) -> str:
        said = {
            "affine": "all at once",
            "gather": "all at once",
            "hand_over": "one after the other",
        }
        return f"{self.name}, {said[self.name]}: {self.why}"


def way_of(recipe: Recipe, way: str = "auto") -> Way:
    """The way that a recipe's structure allows, or the one that is asked for.

    Args:
        recipe: the regression problem.
        way: ``"auto"``, or one of `WAYS`.

    Raises:
        RecipeError: a way that this recipe does not allow.
        ValueError: an unknown way.

    Examples:
        >>> rc.parallel.way_of(rc.zoo.get("gated_delta_net").recipe).name
        'affine'
        >>> rc.parallel.way_of(rc.zoo.get("softmax_attention").recipe).name
        'gather'
        >>> rc.parallel.way_of(rc.zoo.get("titans").recipe).name
        'hand_over'
    """
    if way not in ("auto", *WAYS):
        raise ValueError(f"way must be auto, {', '.join(WAYS[:-1])} or {WAYS[-1]}, not {way!r}")
    reasons: dict[str, str] = {}
    for name, found in (("gather", _gathers(recipe)), ("affine", _affine(recipe))):
        if isinstance(found, Way):
            if way in ("auto", name):
                return found
        else:
            reasons[name] = found
    if way in reasons:
        raise RecipeError(
            f"way={way!r} cannot run this recipe: {reasons[way]}; use way='auto' or 'hand_over'"
        )
    return Way(name="hand_over", why=reasons.get("affine", "it was asked for"))


def _gathers(recipe: Recipe) -> Way | str:
    if not recipe.nonparametric or recipe.dual or recipe.solves_from_gram:
        return "its state is more than associations as they came"
    if recipe.algorithm.slots or recipe.algorithm.batch > 1 or recipe.associations > 1:
        return "its state is more than associations as they came"
    if recipe.context.first:
        return f"the first {recipe.context.first} associations stay for all of the sequence"
    span = recipe.span
    what = "all associations" if span is None else f"the last {span} associations"
    return Way(name="gather", why=f"its state is {what}")


def _affine(recipe: Recipe) -> Way | str:
    refused = linear.refuses(recipe)
    if refused:
        return refused[0]
    if recipe.memory.read.normalize == "floor":
        return "its normaliser keeps a running scale"
    if recipe.associations > 1 and recipe.context.horizon != 1:
        return "several associations per token in a window"
    affine, decay = recipe.bias.affine, recipe.retention.decay
    assert affine is not None  # linear.refuses
    alone = affine[0] == 0 and recipe.bias.probe is None and recipe.algorithm.momentum_of == "none"
    normalised = recipe.memory.read.normalize != "none"
    if recipe.memory.diagonal and (not alone or normalised or not scans(recipe)):
        return "each channel follows an equation of its own"
    per_value = decay is not None and decay.per in ("value", "key_value", "entry")
    if normalised and per_value:
        return "its normaliser decays otherwise than its values"
    if alone and decay is not None and decay.per == "entry":
        return Way(name="affine", transition="entries", why="each entry only decays")
    if alone:
        return Way(name="affine", transition="decays", why="the weights only decay")
    if per_value or recipe.algorithm.per_value:
        return "each value channel follows an equation of its own"
    return Way(name="affine", transition="keys", why="each row of the weights moves alike")
