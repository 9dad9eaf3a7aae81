"""Data of the page: every preset of one recipe, and the recipes that differ from it in one choice.

A neighbour has another member with its defaults, or the same member with one other field. Each is
explained, or refused with the message of its `RecipeError`. Equal texts are stored once, and
referred to by index.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import recollect
from recollect import zoo
from recollect.choices.member import all_members, registered_name
from recollect.explanation.explain import Explanation, explain
from recollect.messages import RecipeError
from recollect.page.knobs import Data, Knobs, canonical_json, summary
from recollect.recipe.recipe import CHOICES, Recipe

__all__ = ["QUESTIONS", "make_table"]

QUESTIONS = {
    "memory": "what kind of function holds the associations?",
    "features": "how does it see a key and a query?",
    "bias": "what counts as an error?",
    "context": "which past associations does a step look at?",
    "retention": "what keeps the memory near where it was?",
    "algorithm": "how is the problem solved, step by step?",
}
"""The question of each choice."""

T = TypeVar("T")


class _Interner(Generic[T]):
    """A list without equal items."""

    def __init__(self, key: Callable[[T], str] = str) -> None:
        self.items: list[T] = []
        self._indices: dict[str, int] = {}
        self._key = key

    def index(self, item: T) -> int:
        """Return the index of an item; a new item is appended."""
        index = self._indices.setdefault(self._key(item), len(self.items))
        if index == len(self.items):
            self.items.append(item)
        return index


class _Table:
    """Parts of the result of `make_table`."""

    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self.labels = _Interner[str]()
        self.lines = _Interner[str]()
        self.blocks = _Interner[list[int]]()
        self.explanations = _Interner[list[int]]()
        self.errors = _Interner[str]()
        self.settings = {choice: _Interner[Data](canonical_json) for choice in CHOICES}
        self._results: dict[str, int] = {}

    def add_explanation(self, explanation: Explanation) -> int:
        """Return the index of an explanation, which is stored without its fidelity."""
        blocks = [
            [self.labels.index(label), *map(self.lines.index, lines)]
            for label, lines in explanation.blocks
            if label != "fidelity"
        ]
        return self.explanations.index([self.blocks.index(block) for block in blocks])

    def explain_or_error(self, data: Data) -> int:
        """Return the index of a recipe's explanation, or −1 − the index of its error."""
        key = canonical_json(data)
        if key not in self._results:
            try:
                self._results[key] = self.add_explanation(explain(Recipe.from_dict(data)))
            except RecipeError as error:
                self._results[key] = -1 - self.errors.index(str(error))
        return self._results[key]

    def neighbour_results(self, preset: zoo.Preset, defaults: dict[str, list[int]]) -> Any:
        """Return the results of a preset's neighbours by choice: other members, other fields."""
        recipe, results = _data(preset.recipe), []
        for choice in CHOICES:
            settings = self.settings[choice]
            variants = self.knobs.one_field_variants(recipe[choice])
            indices = [*defaults[choice], *(settings.index(data) for _, data in variants)]
            results.append(
                [self.explain_or_error({**recipe, choice: settings.items[i]}) for i in indices]
            )
        return results


def make_table(
    names: Iterable[str] | None = None, *, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Return presets, members, fields, explanations and errors as data for the page's script.

    The dictionary has

    - ``choices``: for each choice ``members`` (name, index of the default setting, fields with
      values), ``settings`` (data of members) and ``near`` (indices of the settings that differ in
      one field, by the index of a preset's setting);
    - ``classes``: for each member its module under ``rc``, its fields and their defaults;
    - ``presets``: with ``recipe`` (indices of settings), ``explanation`` (an index) and ``around``
      (for each choice the results of the default settings, then of ``near``: the index of an
      explanation, or −1 − the index of an error);
    - ``explanations`` (indices of ``blocks``), ``blocks`` (the index of a label, then indices of
      ``lines``), ``labels``, ``lines`` and ``errors``.

    Args:
        names: Names of presets; all presets of the zoo if omitted.
        progress: Function that is called with the number of finished presets and of all.

    Raises:
        RecipeError: Unknown name.

    Examples:
        >>> from recollect.page import make_table
        >>> table = make_table(["delta_net"])
        >>> preset = table["presets"][0]
        >>> blocks = [table["blocks"][i] for i in table["explanations"][preset["explanation"]]]
        >>> label, line = blocks[0]
        >>> table["labels"][label], table["lines"][line]
        ('problem', 'min  ½‖W k_t − v_t‖²')
    """
    all_presets = [zoo.get(name) for name in zoo.names()]
    presets = all_presets if names is None else [zoo.get(name) for name in names]
    table = _Table(Knobs([preset.recipe for preset in all_presets]))
    defaults = {
        choice: [
            table.settings[choice].index(table.knobs.default_member(choice, name))
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
                "recipe": [table.settings[x].index(recipe[x]) for x in CHOICES],
                "explanation": table.add_explanation(explain(preset)),
                "around": table.neighbour_results(preset, defaults),
            }
        )
    choices = [
        _choice(table, choice, defaults[choice], sorted({row["recipe"][i] for row in rows}))
        for i, choice in enumerate(CHOICES)
    ]
    return {
        "version": recollect.__version__,
        "choices": choices,
        "classes": _classes(table.knobs),
        "presets": rows,
        "explanations": table.explanations.items,
        "blocks": table.blocks.items,
        "labels": table.labels.items,
        "lines": table.lines.items,
        "errors": table.errors.items,
    }


def _choice(table: _Table, choice: str, defaults: Sequence[int], bases: Sequence[int]) -> Data:
    """Return the members of a choice, and all settings of recipes with a result."""
    shared, knobs = table.settings[choice], table.knobs
    near = {
        base: [shared.index(data) for _, data in knobs.one_field_variants(shared.items[base])]
        for base in bases
    }
    names = [(shared.items[index]["member"], index) for index in defaults]
    return {
        "name": choice,
        "asks": QUESTIONS[choice],
        "default": shared.index(_data(Recipe())[choice]),
        "members": [
            {"name": name, "first": index, "says": summary(name), "fields": knobs.fields(name)}
            for name, index in names
        ],
        "near": near,
        "settings": shared.items,
    }


def _classes(knobs: Knobs) -> dict[str, Data]:
    """Return for each member its module under ``rc``, its fields, and their defaults."""
    classes: dict[str, Data] = {}
    for cls in all_members():
        name = registered_name(cls)
        modules = [x for x in CHOICES if getattr(getattr(recollect, x), cls.__name__, None) is cls]
        classes[name] = {
            "room": modules[0] if modules else None,
            "fields": [field.name for field in dataclasses.fields(cls)],  # type: ignore[arg-type]
            "defaults": knobs.defaults(name),
        }
    return classes


def _data(recipe: Recipe) -> Data:
    return {choice: getattr(recipe, choice).to_dict() for choice in CHOICES}
