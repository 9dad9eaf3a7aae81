"""What the page knows: every system of one recipe, its neighbours by one knob, and what they are.

A neighbour differs in one choice: another member with its defaults, or the same member with one
field turned. Each is explained, or refused with the sentence of its `RecipeError`. Sentences stand
once, and whatever uses them gives their index.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, Generic, TypeVar

import recollect
from recollect import zoo
from recollect.choices import algorithm, bias, context, features, memory, retention
from recollect.choices.member import all_members, registered_name
from recollect.explanation.explain import Explanation, explain
from recollect.messages import RecipeError
from recollect.page.knobs import Data, Knobs, key_of, summary
from recollect.recipe.recipe import CHOICES, Recipe

__all__ = ["ASKS", "BLOCKS", "make_table"]

ASKS = {
    "memory": "what kind of function holds the associations?",
    "features": "how does it see a key and a query?",
    "bias": "what counts as an error?",
    "context": "which past associations does a step look at?",
    "retention": "what keeps the memory near where it was?",
    "algorithm": "how is the problem solved, step by step?",
}
"""The question of each choice."""

BLOCKS = (
    *("problem", "write", "read", "where", "engine", "named"),
    *("needs", "state", "cost", "ranks", "theory", "has", "lacks"),
)
"""Labels of an explanation's lines, in order."""

_ROOMS: dict[str, ModuleType] = {
    "memory": memory,
    "features": features,
    "bias": bias,
    "context": context,
    "retention": retention,
    "algorithm": algorithm,
}

_LABEL = 9  # columns before a line of `str(Explanation)`


T = TypeVar("T")


class _Shared(Generic[T]):
    """Things that are kept once and named by their place."""

    def __init__(self, key: Callable[[T], str] = str) -> None:
        self.items: list[T] = []
        self._places: dict[str, int] = {}
        self._key = key

    def place(self, item: T) -> int:
        """Where it stands; at the end, when it is new."""
        key = self._key(item)
        if key not in self._places:
            self._places[key] = len(self.items)
            self.items.append(item)
        return self._places[key]


class _Table:
    """The parts of `make_table`'s answer while they are gathered."""

    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self.lines = _Shared[str]()
        self.blocks = _Shared[list[int]]()
        self.explanations = _Shared[list[int]]()
        self.errors = _Shared[str]()
        self.settings = {choice: _Shared[Data](key_of) for choice in CHOICES}
        self._known: dict[str, int] = {}

    def explained(self, found: Explanation) -> int:
        """The place of an explanation, as indices of its blocks."""
        blocks: dict[str, list[int]] = {label: [] for label in BLOCKS}
        label = ""
        for line in str(found).split("\n")[1:]:
            label = line[:_LABEL].strip() or label
            if label != "fidelity":  # a preset's, with its deviations
                blocks[label].append(self.lines.place(line[_LABEL:]))
        return self.explanations.place([self.blocks.place(lines) for lines in blocks.values()])

    def result(self, data: Data) -> int:
        """Of a recipe as data: the place of its explanation, or of its error e as −e − 1."""
        key = key_of(data)
        if key not in self._known:
            try:
                self._known[key] = self.explained(explain(Recipe.from_dict(data)))
            except RecipeError as error:
                self._known[key] = -self.errors.place(str(error)) - 1
        return self._known[key]

    def around(self, preset: zoo.Preset, alternatives: dict[str, list[int]]) -> list[list[int]]:
        """Results of a preset's neighbours, per choice: other members first, then other fields."""
        recipe, found = _data(preset.recipe), []
        for choice in CHOICES:
            settings = self.settings[choice]
            places = [*alternatives[choice]]
            places += [settings.place(data) for _, data in self.knobs.near(recipe[choice])]
            found.append([self.result({**recipe, choice: settings.items[x]}) for x in places])
        return found


def make_table(
    names: Iterable[str] | None = None, *, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Presets, members, fields, explanations and errors as plain data, for the page's script.

    Args:
        names: of presets; all of the zoo's when omitted.
        progress: told after each preset how many are done, of how many.

    Returns:
        ``choices`` with ``members`` (name, place of its first setting, fields with values),
        ``settings`` (data of members) and ``near`` (by place of a preset's setting: places of those
        that differ in one field); ``classes`` (where a member is found, its fields and defaults);
        ``presets`` with ``recipe`` (places of settings), ``explanation`` and ``around`` (per
        choice, results of the first settings of all members, then of ``near``: an explanation's
        place, or −e − 1 of error e); ``explanations`` (places of ``blocks``), ``blocks`` (places of
        ``lines``), ``errors``.

    Raises:
        RecipeError: an unknown name.

    Examples:
        >>> from recollect.page import make_table
        >>> table = make_table(["delta_net"])
        >>> preset = table["presets"][0]
        >>> blocks = [table["blocks"][i] for i in table["explanations"][preset["explanation"]]]
        >>> table["lines"][blocks[0][0]]
        'min  ½‖W k_t − v_t‖²'
    """
    every = [zoo.get(name) for name in zoo.names()]
    presets = every if names is None else [zoo.get(name) for name in names]
    table = _Table(Knobs([preset.recipe for preset in every]))
    firsts = {
        choice: [
            table.settings[choice].place(table.knobs.first(choice, name))
            for name in table.knobs.members(choice)
        ]
        for choice in CHOICES
    }
    rows: list[dict[str, Any]] = []
    for done, preset in enumerate(presets):
        if progress is not None:
            progress(done, len(presets))
        recipe = _data(preset.recipe)
        rows.append(
            {
                "name": preset.name,
                "title": preset.title,
                "family": preset.family.replace("_", " "),
                "summary": preset.summary,
                "source": "; ".join(map(str, preset.references)),
                "fidelity": str(preset.fidelity).splitlines(),
                "recipe": [table.settings[x].place(recipe[x]) for x in CHOICES],
                "explanation": table.explained(explain(preset)),
                "around": table.around(preset, firsts),
            }
        )
    bases = [{row["recipe"][i] for row in rows} for i in range(len(CHOICES))]
    return {
        "version": recollect.__version__,
        "labels": BLOCKS,
        "choices": [
            _choice(table, choice, firsts[choice], sorted(base))
            for choice, base in zip(CHOICES, bases, strict=True)
        ],
        "classes": _classes(table.knobs),
        "presets": rows,
        "explanations": table.explanations.items,
        "blocks": table.blocks.items,
        "lines": table.lines.items,
        "errors": table.errors.items,
    }


def _choice(table: _Table, choice: str, firsts: Sequence[int], bases: Sequence[int]) -> Data:
    """One choice: its members, and all settings of recipes that have a result."""
    shared, knobs = table.settings[choice], table.knobs
    near = [[shared.place(x) for _, x in knobs.near(shared.items[place])] for place in bases]
    return {
        "name": choice,
        "asks": ASKS[choice],
        "default": shared.place(_data(Recipe())[choice]),
        "members": [
            {
                "name": shared.items[place]["member"],
                "first": place,
                "says": summary(shared.items[place]["member"]),
                "fields": knobs.fields(shared.items[place]["member"]),
            }
            for place in firsts
        ],
        "near": dict(zip(bases, near, strict=True)),
        "settings": shared.items,
    }


def _classes(knobs: Knobs) -> dict[str, Data]:
    """Where each member is found under ``rc``, its fields, and those that need not be said."""
    found: dict[str, Data] = {}
    for cls in all_members():
        name = registered_name(cls)
        rooms = [room for room in CHOICES if getattr(_ROOMS[room], cls.__name__, None) is cls]
        found[name] = {
            "room": rooms[0] if rooms else None,
            "fields": [field.name for field in dataclasses.fields(cls)],  # type: ignore[arg-type]
            "defaults": knobs.defaults(name),
        }
    return found


def _data(recipe: Recipe) -> Data:
    """Its six members as plain data."""
    return {choice: getattr(recipe, choice).to_dict() for choice in CHOICES}
