from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.report.reader import Reader

from recollect.report import Figure, Note, RenderedFigure, Report, Table
from recollect.report.rendering import SCRIPTS, read_static

EVIL = "<script>alert(\"a & 'b'\")</script>"


def a_page(word: str = "word") -> str:
    figure = RenderedFigure(png=b"", svg="<svg xmlns='http://www.w3.org/2000/svg'/>")
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
    ).to_html()


def test_page_is_well_formed_and_self_contained() -> None:
    page = Reader(a_page())
    assert page.links
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert not {"link", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert page.scripts == [{}]  # its own, which is inside
    for asks in ("fetch(", "XMLHttpRequest", "import(", "WebSocket", "sendBeacon", "innerHTML"):
        assert asks not in "".join(map(read_static, SCRIPTS))
    style = a_page().split("<style>")[1].split("</style>")[0]
    assert style.strip() == read_static("report.css").strip()
    assert "url(" not in style
    assert "@import" not in style
    for use in ("prefers-color-scheme: dark", "@media print"):
        assert use in style
    assert 'name="viewport"' in a_page()


def test_every_text_is_escaped() -> None:
    page = a_page(EVIL)
    assert EVIL not in page and "<script>alert" not in page
    shown = "".join(Reader(page).text)
    # title twice, command, summary, fact twice, table four times, figure's title and caption,
    # note's title and text, code; the names of the table's group and of the image are attributes
    assert shown.count(EVIL) == 15


def test_backticks_are_shown_as_code() -> None:
    text = "as `rc.recall(q, <k>)` does"
    page = a_page(text)
    assert page.count("as <code>rc.recall(q, &lt;k&gt;)</code> does") == 11
    assert "<title>as rc.recall(q, &lt;k&gt;) does</title>" in page
    for tag in ("pre", "td", "th", "figcaption", "h1", "h2", "dd"):
        assert f"<{tag}" in page
    assert f"<pre>{text.replace('<', '&lt;').replace('>', '&gt;')}</pre>" in page
    assert 'alt="as `rc' in page
    for plain in ("3` alone", "`a\nb`", "``"):
        assert "<code>" not in a_page(plain)


def test_backticks_in_the_gallery_are_shown_as_code(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from recollect.experiments.gallery import save_gallery

    record = {"seed": 0, "device": "cpu", "commit": "c"}
    claim = {"claim": "`exp` <wins>", "verdict": "holds", "evidence": "of `d = 4`"}
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
    table = Table(columns=["a", "b"], rows=[["gated_delta_net", sentence]]).to_html()
    assert table.startswith('<div class="wide" role="group" tabindex="0" aria-label="a, b"><table>')
    assert f'<th scope="row">gated_delta_net</th><td class="sentence">{sentence}</td>' in table


def test_numbers_are_right_aligned() -> None:
    table = Table(
        columns=["model", "size", "loss", "note"],
        rows=[["a", 12345, 1.23456, 3], ["b", None, 2.0, "text"]],
    ).to_html()
    cells = re.findall(r"<t[hd]( [^>]*)?>([^<]*)<", table)
    text = [value for _, value in cells]
    assert text[:4] == ["model", "size", "loss", "note"]
    assert text[4:] == ["a", "12,345", "1.235", "3", "b", "–", "2", "text"]
    right = ["number" in attributes for attributes, _ in cells]
    assert right == [False, True, True, False] * 3


def test_saving(tmp_path: Path) -> None:
    path = Report(title="Größe").save(tmp_path / "runs" / "report.html")
    assert path.read_text("utf-8") == Report(title="Größe").to_html()


def test_formatted_numbers_are_right_aligned() -> None:
    cells = {
        "0.834": "0.834 ± 0.012",
        "12,345": "1,085,536",
        "14.1 KiB": "30.2 KiB, grows",
        "0.5 (0.4–0.6)": "0.97 (0.9 … 1), 1 diverged",
        "1e-05": "−3",
        "41 %": "7 s",
    }
    words = {"gla": "3 of 3 seeds", "1.2.3": "4", "diverged": "0.1", "seed 3": "2 more"}
    for right, expected in ((True, cells), (False, words)):
        for pair in expected.items():
            html = Table(columns=["x"], rows=[[cell] for cell in (*pair, None)]).to_html()
            assert (html.count(' class="number"') == 4) is right, pair
            assert (' class="number"' in html) is right, pair


def test_cells_have_a_sort_key() -> None:
    rows = [
        ["a", "14.1 KiB", "0.834 ± 0.012", 12_345, "of 3"],
        ["b", "1 MiB, grows", "−1", None, ""],
    ]
    html = Table(columns=["m", "state", "value", "n", "words"], rows=rows).to_html()
    result = [
        dict(re.findall(r'([\w-]+)="([^"]*)"', cell)) for cell in re.findall("<td[^>]*>", html)
    ]
    keys = [cell.get("data-sort") for cell in result]
    assert keys == ["14438.4", "0.834", "12345", None, "1048576", "-1", None, None]


def test_a_column_with_one_that_diverged_is_still_sorted_by_numbers() -> None:
    html = Table(
        columns=["m", "loss"], rows=[["a", "2.5"], ["b", "diverged"], ["c", "1e-3"]]
    ).to_html()
    assert html.count("data-sort") == 2 and ' class="number"' not in html
    words = Table(columns=["m"], rows=[["a"], ["b"], ["3"]]).to_html()
    assert "data-sort" not in words


def test_half_diverged_column_is_sorted_by_numbers() -> None:
    table = Table(columns=["gain"], rows=[["+0.50"], ["diverged"], ["−0.25"], ["diverged"]])
    assert table.to_html().count("data-sort") == 2
    names = Table(columns=["x"], rows=[["3"], ["a4"], ["b10"]])
    assert "data-sort" not in names.to_html()


def test_page_of_another_command_is_renamed(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    Report(title="first", kind="training").save(path)
    Report(title="second", kind="training").save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    Report(title="third", kind="benchmark").save(path)
    assert "third" in path.read_text("utf-8")
    assert "second" in (tmp_path / "report-1.html").read_text("utf-8")
    path.write_bytes(b"\xff of somebody else")
    Report(title="fourth", kind="benchmark").save(path)
    assert (tmp_path / "report-2.html").read_bytes() == b"\xff of somebody else"
