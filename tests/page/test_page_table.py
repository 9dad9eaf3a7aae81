"""The page's texts on a recipe equal those of the library."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.page.conftest import SYSTEMS
from tests.page.node import node

import recollect as rc
from recollect.choices.member import all_members
from recollect.page.knobs import Knobs, canonical_json
from recollect.page.table import make_table
from recollect.page.write import render
from recollect.recipe.recipe import CHOICES

Table = dict[str, Any]
Neighbour = tuple[str, str, dict[str, Any], int]


def neighbours(table: Table) -> Iterator[Neighbour]:
    """Yield system, changed choice, recipe as data, and result of every neighbour."""
    for preset in table["presets"]:
        changed = [
            choice["settings"][place]
            for choice, place in zip(table["choices"], preset["recipe"], strict=True)
        ]
        for i, choice in enumerate(table["choices"]):
            places = [member["first"] for member in choice["members"]]
            places += choice["near"][preset["recipe"][i]]
            assert len(places) == len(preset["around"][i])
            for place, result in zip(places, preset["around"][i], strict=True):
                members = [*changed]
                members[i] = choice["settings"][place]
                data = dict(zip(CHOICES, members, strict=True))
                yield preset["name"], choice["name"], data, result


def labelled_lines(table: Table, place: int) -> list[tuple[str, str]]:
    """Return lines of an explanation, each with the label of its block."""
    blocks = [table["blocks"][index] for index in table["explanations"][place]]
    return [
        (table["labels"][label], table["lines"][line]) for label, *lines in blocks for line in lines
    ]


def printed(recipe: rc.Recipe | rc.zoo.Preset) -> list[tuple[str, str]]:
    """Return lines of `rc.explain` without the fidelity, which the table has for each preset."""
    result, label = [], ""
    for line in str(rc.explain(recipe)).split("\n")[1:]:
        head, text = line[:9], line[9:]
        label = head.strip() or label
        if label != "fidelity":
            result.append((label, text))
    return result


def test_a_system_is_explained_as_rc_explain_prints_it(table: Table) -> None:
    assert [preset["name"] for preset in table["presets"]] == list(SYSTEMS)
    for preset in table["presets"]:
        system = rc.zoo.get(preset["name"])
        assert labelled_lines(table, preset["explanation"]) == printed(system)
        kind, *deviations = preset["fidelity"]
        assert kind.startswith(f"{system.fidelity.kind}, from ")
        assert deviations == [f"- {item}" for item in system.fidelity.deviations]


def test_neighbours_are_explained_or_refused_as_the_library_does(table: Table) -> None:
    pairs = list(neighbours(table))
    refused = 0
    for name, _, data, result in pairs[::7]:
        choices = {x: getattr(rc.zoo.get(name).recipe, x).to_dict() for x in CHOICES}
        assert sum(canonical_json(choices[x]) != canonical_json(data[x]) for x in CHOICES) <= 1
        if result < 0:
            refused += 1
            with pytest.raises(rc.RecipeError) as why:
                rc.explain(rc.Recipe.from_dict(data))
            assert table["errors"][-result - 1] == str(why.value)
        else:
            assert labelled_lines(table, result) == printed(rc.Recipe.from_dict(data))
    assert 10 < refused < len(pairs[::7]) - 10


def test_neighbours_are_all_that_one_knob_reaches(table: Table) -> None:
    turned: dict[str, list[dict[str, Any]]] = {choice: [] for choice in CHOICES}
    for name, choice, data, _ in neighbours(table):
        if name == "gated_delta_net":
            turned[choice].append(data[choice])
    for choice in CHOICES:
        members = {x["member"] for x in turned[choice]}
        classes = {cls.__name__ for cls in all_members() if choice in cls.choices()}
        assert members == classes - {"Module"}, choice  # a user's code
    decays = [x for x in turned["retention"] if x["member"] == "Decay"]
    assert {x["per"] for x in decays} == {"head", "key", "value", "key_value", "entry"}
    assert {x["when"] for x in decays} == {"after", "before"}
    assert {x["alpha"] for x in decays} >= {"input", "learned", "input_scaled"}


def test_labels_of_any_length_are_separate_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels may be longer than the printed column of 9."""
    blocks = (("a label of many words", ("one", "two")), ("b", ("  three",)))
    monkeypatch.setattr(
        "recollect.page.table.explain", lambda recipe: SimpleNamespace(blocks=blocks)
    )
    table = make_table(["delta_net"])
    assert labelled_lines(table, table["presets"][0]["explanation"]) == [
        ("a label of many words", "one"),
        ("a label of many words", "two"),
        ("b", "  three"),
    ]


def test_lines_are_unique(table: Table) -> None:
    for name in ("lines", "blocks", "explanations", "errors"):
        texts = [json.dumps(x) for x in table[name]]
        assert len(set(texts)) == len(texts), name
    for choice in table["choices"]:
        keys = [canonical_json(x) for x in choice["settings"]]
        assert len(set(keys)) == len(keys)


def check_written(table: Table, pairs: list[Neighbour], results: list[dict[str, Any]]) -> None:
    """Check that Python, TOML and links of the script give the original recipes."""
    without_toml = 0
    for (_, _, data, result), one in zip(pairs, results, strict=True):
        back = {x: one["back"]["recipe"][x] for x in CHOICES}
        assert canonical_json(back) == canonical_json(data)
        if result < 0:
            assert one["result"]["error"] == table["errors"][-result - 1]
            assert one["result"]["lines"] is None
            continue
        recipe = rc.Recipe.from_dict(data)
        space: dict[str, Any] = {}
        exec(one["python"], space)
        assert space["recipe"] == recipe
        if one["toml"] is None:
            without_toml += 1
            assert "None" in one["python"]
        else:
            assert rc.Recipe.from_dict(tomllib.loads(one["toml"])) == recipe
        named = [x["name"] for x in one["result"]["presets"]]
        lines = [(label, line) for label, block in one["result"]["lines"] for line in block]
        if named:
            assert one["link"] == named[0]
        else:
            assert lines == labelled_lines(table, result)
            assert one["result"]["near"]
    assert 0 < without_toml < len(pairs) / 4


def test_script_finds_writes_and_links_every_recipe(table: Table) -> None:
    pairs = list(neighbours(table))
    links = ['{"bias":{"member":"Nothing"}}', "nobody", "%E0%A4%A", "{", '{"bios":1}']
    links += ['{"bias":{"member":"Matrix"}}', '{"retention":{"member":"Decay","par":"key"}}']
    links += ['{"retention":{"member":"Lq","q":7}}', "gated_delta_net"]
    links += ['{"context":{"member":"KernelWeighted","restrictions":[{"member":"Window"}]}}']
    links += ['{"retention":5}', '{"bias":[]}', '{"memory":{"member":"Matrix","read":null}}']
    payload = {"table": table, "recipes": [data for _, _, data, _ in pairs], "links": links}
    result = node("look_up.js", payload, ["memory.js", "recipes.js"])
    check_written(table, pairs, result["recipes"])
    refused = [x.get("error", "") for x in result["links"]]
    assert refused[0].startswith("This page knows no member named Nothing; bias has DotProduct, L2")
    assert refused[1] == "This page knows no system named nobody: choose one below."
    assert refused[2].startswith("This link is not whole")
    assert refused[3].startswith("The recipe of this link is not JSON")
    assert refused[4].startswith("A recipe has no choice bios; it has memory")
    assert refused[5].startswith("This page knows no member named Matrix; bias has")
    assert refused[6] == "Decay has no field par."
    assert refused[10].startswith("retention of this link is no member")
    assert refused[11].startswith("bias of this link is no member")
    assert result["links"][12]["recipe"]["memory"]["read"] is None
    assert refused[9] == "Window needs size, which is missing."
    assert result["links"][7]["recipe"]["retention"]["q"] == 7
    assert result["links"][7]["recipe"]["retention"]["form"] == "mirror"
    assert result["links"][8]["preset"] == "gated_delta_net"


def test_custom_member_is_an_option() -> None:
    from recollect.choices import member

    @rc.member
    class Sharp(rc.bias.Bias):
        """A user's loss."""

        sharpness: float = rc.fields.number(2.0, above=0)

        def loss(self, prediction, value, gates):  # type: ignore[no-untyped-def]
            return (self.sharpness * (prediction - value)).cosh().sum(-1)

    try:
        built = make_table(["delta_net"])
        name = member.registered_name(Sharp)
        assert name in [x["name"] for x in built["choices"][2]["members"]]
        assert built["classes"][name] == {
            "room": None,
            "fields": ["sharpness"],
            "defaults": {"sharpness": 2.0},
        }
        results = {
            data["bias"]["member"]: result
            for _, choice, data, result in neighbours(built)
            if choice == "bias"
        }
        assert ("engine", "deep") in [
            (label, line.split()[0]) for label, line in labelled_lines(built, results[name])
        ]
    finally:
        member._REGISTRY.popitem()


def test_values_of_fields_come_from_declarations_and_from_the_zoo() -> None:
    knobs = Knobs([rc.zoo.get(name).recipe for name in rc.zoo.names()])
    assert knobs.values("Decay", "when") == ["after", "before"]
    assert knobs.values("GradientDescent", "batch_size") == [1, 16, 64]
    assert knobs.values("GradientDescent", "lr") == ["input", "learned", "log_input", 1.0]
    assert knobs.values("Polynomial", "degree") == [2, 4]
    assert None in knobs.values("Ball", "decay")
    assert knobs.default_member("context", "Window")["size"] == 128  # as in the zoo
    assert "Module" not in knobs.members("memory")
    with pytest.raises(rc.RecipeError, match="memory has no knob 'Module'"):
        knobs.default_member("memory", "Module")
    with pytest.raises(rc.RecipeError, match="no architecture named 'nobody'"):
        make_table(["nobody"])


def test_progress_is_reported() -> None:
    progress: list[tuple[int, int]] = []
    make_table(["delta_net", "gla"], progress=lambda done, of: progress.append((done, of)))
    assert progress == [(0, 2), (1, 2)]


@pytest.mark.slow
def test_full_page_is_small_and_its_code_gives_its_recipes() -> None:
    assert len(render().encode()) < 1_500_000
    full = make_table()
    assert [x["name"] for x in full["presets"]] == rc.zoo.names()
    pairs = list(neighbours(full))
    payload = {"table": full, "recipes": [data for _, _, data, _ in pairs], "links": []}
    result = node("look_up.js", payload, ["memory.js", "recipes.js"])
    check_written(full, pairs, result["recipes"])
