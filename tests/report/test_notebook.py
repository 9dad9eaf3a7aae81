"""Notebook representations: well-formed and escaped tables with the content of ``print``."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch

import recollect as rc
from recollect.report.notebook import definition_table
from recollect.report.tables import Table

VOID = {"br"}


class Page(HTMLParser):
    """Its texts; asserts that every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.heads: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.heads if "th" in self.open else self.texts).append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


@pytest.mark.parametrize("name", ["gated_delta_net", "titans", "softmax_attention", "rls"])
def test_explanation_has_the_printed_text(name: str) -> None:
    result = rc.explain(name)
    page = Page(result._repr_html_())
    assert all(line in page.text for _, lines in result.equations for line in lines)
    lines = str(result).splitlines()[1:]
    text = " ".join(line[9:] for line in lines)
    assert set(text.split()) == set(page.text.removeprefix(name).split())
    assert page.heads == [line[:9].strip() for line in lines if line[0] != " "]


def test_a_recipe_shows_its_choices_and_equations() -> None:
    recipe = rc.Recipe(retention=rc.retention.Decay(when="before"))
    page = Page(recipe._repr_html_())
    assert page.heads[:6] == ["memory", "features", "bias", "context", "retention", "algorithm"]
    assert 'Decay(when="before")' in page.text
    assert rc.explain(recipe).write_equations[0] in page.text


def test_custom_recipe() -> None:
    @rc.member
    class TwiceTheKey(rc.features.Features):
        """Features of twice the key."""

        def size(self, K: int) -> int:
            return K

        def map(self, x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            return 2 * x

    assert "TwiceTheKey()" in Page(rc.Recipe(features=TwiceTheKey())._repr_html_()).text


@pytest.mark.parametrize("name", ["titans", "titans_mac", "samba"])
def test_a_preset_names_its_papers(name: str) -> None:
    preset = rc.zoo.get(name)
    page = Page(preset._repr_html_())
    assert preset.rule in page.text
    assert preset.references[0].paper in page.text
    assert preset.fidelity.kind in page.text


def test_a_composition() -> None:
    page = Page(rc.explain("titans_mac")._repr_html_())
    assert "MemoryAsContext" in page.text


def test_a_diagnosis_has_a_row_per_head() -> None:
    layer = rc.zoo.get("titans").build(d_model=8, num_heads=2)
    result = rc.diagnose(layer, torch.randn(1, 20, 8))
    page = Page(result._repr_html_())
    assert page.heads[0] == "head"
    assert page.heads[-2:] == ["0", "1"]
    words = " ".join(str(result).split())
    assert all(" ".join(cell.split()) in words for cell in page.texts)


def test_texts_are_escaped() -> None:
    for text in (
        definition_table("<b>", [("<i>", ["a < b"]), ("code", ["x  <y>"])], equations=["code"]),
        Table(title="<b>", columns=["<i>"], rows=[["<u>"]], caption="<s>").to_html(notebook=True),
    ):
        page = Page(text)
        assert "<b>" in page.text + "".join(page.heads)
        assert "<i>" in page.heads
    assert definition_table("", [("empty", [])]) == "<table><tbody></tbody></table>"


def test_a_comparison() -> None:
    pytest.importorskip("transformers")
    from recollect.experiments.comparison.comparison import Comparison

    schedule = rc.experiments.Schedule(steps=3, batch=4)
    small = rc.experiments.Sizes(width=16, depth=1, heads=1, length=48, schedule=schedule)
    result = rc.compare(["gla", "delta_net"], tasks=["mqar"], sizes=small)
    assert isinstance(result, Comparison)
    page = Page(result._repr_html_())
    assert {"gla", "delta_net"} <= set(page.heads)
    words = " ".join(str(result).split())
    assert all(" ".join(cell.split()) in words for cell in (*page.texts, *page.heads))
