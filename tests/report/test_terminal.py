"""Tables on terminals of every width: no number is cut, and what is left out is named."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("rich")

from rich.cells import cell_len
from rich.console import Console

from recollect.report.terminal import Column, TerminalTable, hung

NUMBERS = ("1.9132", "4,261,920", "299,040")
TABLE = TerminalTable(
    title="A title",
    columns=(
        Column(name="#", right=True, rank=3),
        Column(name="model"),
        Column(name="bits", right=True),
        Column(name="bytes", right=True, rank=1),
        Column(name="remarks", least=8, rank=2),
    ),
    rows=[
        ("1", "gated_delta_net", "1.9132", "299,040", "it decays before it is corrected"),
        ("2", "fox", "2.0622", "4,261,920", "grows [bold]with[/bold] the text :memo:"),
    ],
)


def shown(width: int, table: TerminalTable = TABLE, elsewhere: str = "") -> str:
    console = Console(file=io.StringIO(), width=width)
    table.print(console, elsewhere=elsewhere)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [*range(16, 100, 3), 200])
def test_no_line_is_too_wide_and_no_number_cut(width: int) -> None:
    page = shown(width)
    assert max(map(cell_len, page.splitlines())) <= width
    assert "…" not in page
    for number in ("1.9132", "2.0622"):
        assert number in page
    if "bytes" in page and "left out" not in page:
        assert "4,261,920" in page
    for line in page.split("left out")[0].splitlines():
        for word in line.split():
            if word[0].isdigit():
                assert word in ("1", "2", "1.9132", "2.0622", "299,040", "4,261,920")


def test_columns_go_in_their_order_and_are_named() -> None:
    left = []
    for width in (200, 58, 42, 30):
        page = shown(width)
        _, _, lost = " ".join(page.split()).partition("left out at")
        left.append(lost.partition("columns: ")[2])
    assert left == ["", "#", "#, remarks", "#, bytes, remarks"]
    assert "; --json has them" in " ".join(shown(42, elsewhere="--json").split())


def test_rows_become_lists_of_all_that_they_hold() -> None:
    page = shown(18)
    assert "left out" not in page
    words = " ".join(page.split())
    for said in ("gated_delta_net #: 1 bits: 1.9132", "bytes: 4,261,920", "remarks: it decays"):
        assert said in words


def test_brackets_and_colons_are_shown_as_they_are() -> None:
    for width in (22, 200):
        words = " ".join(shown(width).split())
        assert "[bold]with[/bold]" in words and ":memo:" in words


def test_a_page_that_nothing_bounds_has_every_column() -> None:
    console = Console(file=io.StringIO(), width=20)
    console.bounded = False  # type: ignore[attr-defined]
    TABLE.print(console)
    assert isinstance(console.file, io.StringIO)
    page = console.file.getvalue()
    assert "left out" not in page and "remarks" in page and "4,261,920" in page


def test_a_ragged_table_is_refused() -> None:
    with pytest.raises(ValueError, match="row 0 has 1 cells for 2 columns"):
        TerminalTable(columns=(Column(name="a"), Column(name="b")), rows=[["x"]])


def test_lines_that_are_too_long_hang_below_their_text() -> None:
    text = (
        "engine   linear (triangular solve)\nneeds    gate log_decay [B, T, H] ≤ 0, for each token"
    )
    assert hung(text, None) == text == hung(text, 200)
    lines = hung(text, 30).splitlines()
    assert lines[:2] == ["engine   linear (triangular", "           solve)"]
    assert max(map(len, lines)) <= 30
    assert " ".join(" ".join(lines).split()) == " ".join(text.split()), "nothing is lost"
    assert all(line.startswith("  ") for line in hung(text, 12).splitlines()[1:3])
    equations = "write    S = S − η g;   W = α W + S\n         W° = W"
    assert hung(equations, 34) == equations.replace(";   ", ";\n         ")
    assert hung("part\n\nstate", 20) == "part\n\nstate"
