"""Files of the repository that a new preset or a new member touches.

`CONTRIBUTING.md` lists the files. `tests/test_places.py` checks that the list is this table, and
that every preset and member has an entry in each file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import recollect as rc

ROOT = Path(__file__).parents[1]
REFERENCE_PAGES = {
    "memory": "memories",
    "features": "features",
    "bias": "biases",
    "context": "contexts",
    "retention": "retentions",
    "algorithm": "algorithms",
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """One place.

    Attributes:
        path: file, with {family} or {choice} for the family of a preset or the choice of a member.
        entry: description of the entry.
        has_entry: whether the place has the entry of a preset, by its name, or of a member, by its
            choice and name.
        applies: whether a preset needs the entry.
    """

    path: str
    entry: str
    has_entry: Callable[..., bool]
    applies: Callable[[rc.zoo.Preset], bool] = lambda preset: True

    def __str__(self) -> str:
        return f"`{self.path}`: {self.entry}"


def words(path: str) -> set[str]:
    """Return the words of a file."""
    return set(re.findall(r"\w+", (ROOT / path).read_text("utf-8")))


def family_attribute(preset: rc.zoo.Preset, attribute: str) -> Any:
    """Return an attribute of the module of the family; empty without a module."""
    return getattr(getattr(rc.zoo, preset.family, None), attribute, None) or ""


def in_docstring(preset: rc.zoo.Preset) -> bool:
    return preset.name in re.findall(r"\w+", family_attribute(preset, "__doc__"))


def exported(preset: rc.zoo.Preset) -> bool:
    return preset.name in family_attribute(preset, "__all__")


def counted(preset: rc.zoo.Preset) -> bool:
    """Whether the numbers of systems, presets, hybrids and kinds of fidelity are right."""
    presets = [rc.zoo.get(name) for name in rc.zoo.names()]
    presets = [preset for preset in presets if preset.family in dir(rc.zoo)]
    hybrids = len(rc.zoo.names("hybrid_systems"))
    systems = sum(not preset.twin_of for preset in presets)
    kinds = Counter(preset.fidelity.kind for preset in presets)
    readme, index, page = (
        " ".join((ROOT / path).read_text("utf-8").split())
        for path in ("README.md", "docs/index.md", "docs/zoo.md")
    )
    fidelities = (
        f"{kinds['exact']} are exact",
        f"{kinds['reconstruction']} are reconstructions",
        f"{kinds['approximation']} are approximations",
    )
    return (
        f"the {systems} systems" in readme
        and f"in {len(presets)} presets, and {hybrids} hybrids" in readme
        and f"{len(presets)} presets and {hybrids} hybrids" in index
        and all(count in readme and count in page for count in fidelities)
    )


def tested(preset: rc.zoo.Preset) -> bool:
    folders = ("zoo", "blocks", "engines", "parity")
    paths = [path for folder in folders for path in sorted((ROOT / "tests" / folder).glob("*.py"))]
    name = re.compile(rf"\b{preset.name}\b")
    return any(name.search(path.read_text("utf-8")) for path in paths)


def has_variant(preset: rc.zoo.Preset) -> bool:
    return f"{preset.twin_of or preset.name}:published" in rc.zoo.variants()


PRESET = (
    Place(
        path="src/recollect/zoo/{family}.py",
        entry="a decorated function, named in `__all__`.",
        has_entry=exported,
    ),
    Place(
        path="src/recollect/zoo/{family}.py",
        entry="the name in the example of the module's docstring.",
        has_entry=in_docstring,
    ),
    Place(
        path="src/recollect/zoo/__init__.py",
        entry="a new family, at its place in the order of presets.",
        has_entry=lambda preset: preset.family in rc.zoo.__all__,
    ),
    Place(
        path="src/recollect/zoo/published_equations.py",
        entry="the printed equation, if a deep memory has normalised steps.",
        has_entry=has_variant,
        applies=lambda preset: (
            preset.kind == "deep" and getattr(preset.recipe.algorithm, "normalized_steps", False)
        ),
    ),
    Place(
        path="tests/zoo/",
        entry="a test against a formula of the paper, or against another preset.",
        has_entry=tested,
    ),
    Place(
        path="tests/gpu/budgets.json",
        entry="kernel launches, from `python -m tests.gpu.measure --write NAME` (without a GPU).",
        has_entry=lambda preset: preset.name in words("tests/gpu/budgets.json"),
        applies=lambda preset: preset.kind != "hybrid",
    ),
    Place(
        path="docs/zoo.md",
        entry="the name in the table of families, or of hybrids.",
        has_entry=lambda preset: preset.name in words("docs/zoo.md"),
    ),
    Place(
        path="docs/reference/zoo.md",
        entry="the name among the members of the family.",
        has_entry=lambda preset: preset.name in words("docs/reference/zoo.md"),
    ),
    Place(
        path="README.md, docs/index.md, docs/zoo.md",
        entry="the numbers of systems, presets, hybrids and kinds of fidelity.",
        has_entry=counted,
    ),
)


def exports(choice: str, name: str) -> bool:
    return name in getattr(rc, choice).__all__


def member_tested(choice: str, name: str) -> bool:
    pattern = re.compile(rf"\b{name}\b")
    paths = (ROOT / "tests").rglob("*.py")
    return any(pattern.search(path.read_text("utf-8")) for path in paths)


MEMBER = (
    Place(
        path="src/recollect/choices/{choice}/__init__.py",
        entry="the import, and the name in `__all__`.",
        has_entry=exports,
    ),
    Place(
        path="docs/reference/{choices}.md",
        entry="a section with the name, which shows the docstring.",
        has_entry=lambda choice, name: (
            f"rc.{choice}.{name}\n"
            in (ROOT / f"docs/reference/{REFERENCE_PAGES[choice]}.md").read_text("utf-8")
        ),
    ),
    Place(
        path="tests/",
        entry="a test of a limit, a closed form or a number of the paper.",
        has_entry=member_tested,
    ),
)
