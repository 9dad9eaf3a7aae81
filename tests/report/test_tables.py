"""One table in five formats: alignment and number formats agree, and no number is cut."""

from __future__ import annotations

import io
import re

import pytest
from tests.report.reader import Reader

from recollect.report.tables import Column, Table, format_cell

NUMBERS = Table(
    columns=["model", "size", "loss", "note"],
    rows=[["gla", 12345, 1.23456, 3], ["rls", None, 2.0, "a | b"]],
    title="Sizes of `rc.zoo`",
    caption="One seed.",
)
WIDE = Table(
    title="A title",
    columns=(
        Column(name="#", priority=3),
        Column(name="model"),
        Column(name="bits"),
        Column(name="bytes", priority=1),
        Column(name="remarks", min_width=8, priority=2),
    ),
    rows=[
        ("1", "gated_delta_net", "1.9132", "299,040", "it decays before it is corrected"),
        ("2", "fox", "2.0622", "4,261,920", "grows [bold]with[/bold] the text :memo:"),
    ],
)


def printed(width: int, table: Table = WIDE, also_in: str = "") -> str:
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=width)
    table.print(console, also_in=also_in)
    return console.file.getvalue()


def test_text_has_aligned_columns_between_title_and_caption() -> None:
    assert NUMBERS.to_text().splitlines() == [
        "Sizes of `rc.zoo`",
        "model    size   loss  note",
        "gla    12,345  1.235  3",
        "rls         –      2  a | b",
        "One seed.",
    ]


@pytest.mark.parametrize("width", [*range(19, 100, 3), 200])
def test_text_of_a_width_cuts_no_number(width: int) -> None:
    table = Table(columns=WIDE.columns, rows=[[*row[:4], "short"] for row in WIDE.rows])
    text = table.to_text(width)
    lines = text.partition("left out")[0].splitlines()
    assert max(map(len, lines)) <= width
    assert "1.9132" in text and "2.0622" in text
    if "bytes" in lines[0]:
        assert "4,261,920" in text
    assert ("left out at" in text) == (len(lines) == 3 and "#" not in lines[0])


def test_markdown_escapes_bars_and_aligns_numbers() -> None:
    assert NUMBERS.to_markdown().splitlines() == [
        "| model | size | loss | note |",
        "|---|---:|---:|---|",
        "| gla | 12,345 | 1.235 | 3 |",
        r"| rls | – | 2 | a \| b |",
    ]
    escaped = Table(columns=["a"], rows=[[r"\|x|"]])
    assert escaped.to_markdown().endswith(r"| \|x\| |")
    two_lines = Table(columns=["a"], rows=[["x\ny"]])
    assert two_lines.to_markdown().endswith("| x<br>y |")


def test_a_notebook_shows_the_title_as_caption() -> None:
    page, notebook = NUMBERS.to_html(), NUMBERS.to_html(notebook=True)
    for text in (page, notebook):
        assert Reader(text).tags.count("td") == 6
        assert "One seed." in text and "Sizes of <code>rc.zoo</code>" in text
        assert 'aria-label="Sizes of rc.zoo"' in text
    assert "<h2>" in page and "<caption>" not in page
    assert "<caption>" in notebook and "<h2>" not in notebook


def test_all_formats_agree_on_alignment_and_numbers() -> None:
    html = NUMBERS.to_html()
    for text in ("12,345", "1.235", "–"):
        assert all(text in x for x in (html, NUMBERS.to_text(), NUMBERS.to_markdown()))
        assert text in printed(200, NUMBERS)
    right = ["number" in cell for cell in re.findall("<th scope=.col.[^>]*>", html)]
    assert right == [False, True, True, False]
    forced = Table(columns=[Column(name="a", align="right"), "b"], rows=[["x", "1"]])
    assert forced.to_html().count('class="number"') == 4
    assert forced.to_markdown().splitlines()[1] == "|---:|---:|"


def test_format_cell() -> None:
    cells = [None, 12345, 1.23456, 2.0, "text", True, float("nan")]
    assert [*map(format_cell, cells)] == ["–", "12,345", "1.235", "2", "text", "True", "nan"]


def test_an_empty_table_is_a_table() -> None:
    empty = Table(columns=["a"], rows=[])
    assert "<td" not in empty.to_html() and empty.to_text() == "a"


def test_a_row_with_too_few_cells_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1 has 1 cells for 2 columns"):
        Table(columns=["a", "b"], rows=[[1, 2], [3]], title="t")


@pytest.mark.parametrize("width", [*range(16, 100, 3), 200])
def test_a_console_of_any_width_shows_whole_numbers(width: int) -> None:
    text = printed(width)
    from rich.cells import cell_len

    assert max(map(cell_len, text.splitlines())) <= width
    assert "…" not in text
    for number in ("1.9132", "2.0622"):
        assert number in text
    if "bytes" in text and "left out" not in text:
        assert "4,261,920" in text
    for line in text.split("left out")[0].splitlines():
        for word in line.split():
            if word[0].isdigit():
                assert word in ("1", "2", "1.9132", "2.0622", "299,040", "4,261,920")


def test_columns_are_left_out_by_priority_and_named() -> None:
    omitted = []
    for width in (200, 58, 42, 30):
        _, _, rest = " ".join(printed(width).split()).partition("left out at")
        omitted.append(rest.partition("columns: ")[2])
    assert omitted == ["", "#", "#, remarks", "#, bytes, remarks"]
    assert "; --json has them" in " ".join(printed(42, also_in="--json").split())


def test_the_width_is_that_of_the_console_that_shows_all_columns() -> None:
    assert "left out" not in printed(WIDE.width)
    assert "left out" in printed(WIDE.width - 1)


def test_rows_become_lists_on_a_narrow_console() -> None:
    text = printed(18)
    assert "left out" not in text
    words = " ".join(text.split())
    for part in ("gated_delta_net #: 1 bits: 1.9132", "bytes: 4,261,920", "remarks: it decays"):
        assert part in words


def test_brackets_and_colons_are_printed_unchanged() -> None:
    for width in (22, 200):
        words = " ".join(printed(width).split())
        assert "[bold]with[/bold]" in words and ":memo:" in words


def test_an_unbounded_console_shows_every_column() -> None:
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=20)
    console.bounded = False
    WIDE.print(console)
    text = console.file.getvalue()
    assert "left out" not in text and "remarks" in text and "4,261,920" in text
