from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from recollect.report import Figure, FigureFiles, Note, Report, Table

VOID = {"meta", "img"}
EVIL = "<script>alert(\"a & 'b'\")</script>"


class Reader(HTMLParser):
    """Collects tags and text, and fails on tags that do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def a_page(word: str = "word") -> str:
    figure = FigureFiles(png=b"", svg="<svg xmlns='http://www.w3.org/2000/svg'/>")
    return Report(
        title=word,
        command=word,
        summary=word,
        facts={word: word},
        sections=[
            Table(columns=[word, "n"], rows=[[word, 1]], title=word, caption=word),
            Figure(files=figure, alt=word, title=word, caption=word),
            Note(text=word, title=word),
            Note(text=word, code=True),
        ],
    ).render()


def test_the_page_is_well_formed_and_needs_nothing_else() -> None:
    page = Reader(a_page())
    assert page.links
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert not {"script", "link", "iframe"} & set(page.tags)
    style = a_page().split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    for use in ("prefers-color-scheme: dark", "@media print"):
        assert use in style
    assert 'name="viewport"' in a_page()


def test_every_text_is_escaped() -> None:
    page = a_page(EVIL)
    assert "<script" not in page
    shown = "".join(Reader(page).text)
    # title twice, command, summary, fact twice, table four times, figure's title and caption,
    # note's title and text, code
    assert shown.count(EVIL) == 15


def test_backticks_are_shown_as_code() -> None:
    said = "as `rc.recall(q, <k>)` does"
    page = a_page(said)
    assert page.count("as <code>rc.recall(q, &lt;k&gt;)</code> does") == 11
    assert "<title>as rc.recall(q, &lt;k&gt;) does</title>" in page
    for tag in ("pre", "td", "th", "figcaption", "h1", "h2", "dd"):
        assert f"<{tag}" in page
    assert f"<pre>{said.replace('<', '&lt;').replace('>', '&gt;')}</pre>" in page
    assert 'alt="as `rc' in page
    for plain in ("3` alone", "`a\nb`", "``"):
        assert "<code>" not in a_page(plain)


def test_backticks_in_the_gallery_are_shown_as_code(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from recollect.experiments.gallery import save_gallery

    record = {"seed": 0, "device": "cpu", "commit": "c"}
    claim = {"claim": "`exp` <wins>", "verdict": "holds", "because": "of `d = 4`"}
    data = {"experiment": "am-snr", "source": "`AM` 2", "scale": "small", "seconds": 1.0}
    (tmp_path / "am-snr").mkdir()
    (tmp_path / "am-snr" / "results.json").write_text(
        json.dumps({**data, "complete": True, "records": [record], "claims": [claim]})
    )
    path = save_gallery(tmp_path)
    assert path is not None
    page = path.read_text("utf-8")
    assert "<code>exp</code> &lt;wins&gt;" in page
    assert "<code>d = 4</code>" in page and "<code>AM</code> 2" in page


def test_a_table_scrolls_by_itself_and_breaks_only_sentences() -> None:
    style = a_page().split("<style>")[1].split("</style>")[0]
    assert re.search(r"\.wide \{[^}]*overflow-x: auto", style)
    assert re.search(r"th, td \{[^}]*white-space: nowrap", style)
    assert re.search(r"\.sentence \{[^}]*white-space: normal", style)
    sentence = "Every estimate is within five standard errors of the closed form."
    table = Table(columns=["a", "b"], rows=[["gated_delta_net", sentence]]).render()
    assert table.startswith('<div class="wide"><table>')
    assert f'<td>gated_delta_net</td><td class="sentence">{sentence}</td>' in table


def test_numbers_stand_to_the_right_under_their_heading() -> None:
    table = Table(
        columns=["model", "size", "loss", "note"],
        rows=[["a", 12345, 1.23456, 3], ["b", None, 2.0, "text"]],
    ).render()
    cells = re.findall(r"<t[hd]( [^>]*)?>([^<]*)<", table)
    text = [value for _, value in cells]
    assert text[:4] == ["model", "size", "loss", "note"]
    assert text[4:] == ["a", "12,345", "1.235", "3", "b", "–", "2", "text"]
    right = ["number" in attributes for attributes, _ in cells]
    assert right == [False, True, True, False] * 3


def test_an_empty_table_is_a_table() -> None:
    assert "<td" not in Table(columns=["a"], rows=[]).render()


def test_a_ragged_table_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1 has 1 cells for 2 columns"):
        Table(columns=["a", "b"], rows=[[1, 2], [3]], title="t")


def test_saving(tmp_path: Path) -> None:
    path = Report(title="Größe").save(tmp_path / "runs" / "report.html")
    assert path.read_text("utf-8") == Report(title="Größe").render()


def test_numbers_that_are_written_out_stand_to_the_right() -> None:
    cells = {
        "0.834": "0.834 ± 0.012",
        "12,345": "1,085,536",
        "14.1 KiB": "30.2 KiB, grows",
        "0.5 (0.4–0.6)": "0.97 (0.9 … 1), 1 diverged",
        "1e-05": "−3",
        "41 %": "7 s",
    }
    words = {"gla": "3 of 3 seeds", "1.2.3": "4", "diverged": "0.1", "seed 3": "2 more"}
    for right, every in ((True, cells), (False, words)):
        for pair in every.items():
            drawn = Table(columns=["x"], rows=[[cell] for cell in (*pair, None)]).render()
            assert (drawn.count(' class="number"') == 4) is right, pair
            assert (' class="number"' in drawn) is right, pair
