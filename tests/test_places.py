"""Every preset and member has an entry in each of the files that `CONTRIBUTING.md` lists."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.places import MEMBER, PRESET, ROOT, Place

import recollect as rc
from recollect.choices.member import Member
from recollect.recipe.recipe import CHOICES

MEMBERS = [
    (choice, name)
    for choice in CHOICES
    for name, value in vars(getattr(rc, choice)).items()
    if isinstance(value, type) and issubclass(value, Member)
]


def missing(places: tuple[Place, ...], title: str, *subject: object) -> str:
    """Return the list of files, with the missing ones marked; empty if none is missing."""
    marks = [place.has_entry(*subject) for place in places]
    if all(marks):
        return ""
    lines = [
        f"{'      ' if mark else 'MISSING'} {p}" for mark, p in zip(marks, places, strict=True)
    ]
    return "\n".join((f"{title} needs an entry in each of these places:", *lines))


@pytest.mark.parametrize("name", [*rc.zoo.names(), *rc.zoo.names(kind="hybrid")])
def test_a_preset_is_in_all_places(name: str) -> None:
    preset = rc.zoo.get(name)
    places = tuple(place for place in PRESET if place.applies(preset))
    report = missing(places, f"the preset {name}", preset)
    assert not report, report


@pytest.mark.parametrize(("choice", "name"), MEMBERS)
def test_a_member_is_in_all_places(choice: str, name: str) -> None:
    report = missing(MEMBER, f"{choice}.{name}", choice, name)
    assert not report, report


@pytest.mark.parametrize(
    ("heading", "places"), [("### Places of a member", MEMBER), ("### Places of a preset", PRESET)]
)
def test_the_page_lists_the_places(heading: str, places: tuple[Place, ...]) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = text.partition(f"{heading}\n")[2].partition("\n#")[0]
    listed = [" ".join(item.split()) for item in section.split("\n- ")[1:]]
    listed[-1] = listed[-1].split("\n\n")[0]
    assert listed == [str(place) for place in places]


def test_a_preset_without_entries_is_reported_with_the_list() -> None:
    """The report names every file, and marks those without an entry."""
    preset = replace(rc.zoo.get("gla"), name="unlisted_net", family="unlisted")
    report = missing(PRESET, "the preset unlisted_net", preset)
    assert all(str(place) in report for place in PRESET)
    assert report.count("MISSING") == len(PRESET) - 1  # the numbers are right
