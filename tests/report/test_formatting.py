"""Text for readers: counts with units, and long lines below their labels."""

from __future__ import annotations

import pytest

from recollect.report.formatting import format_si, hanging_indent


@pytest.mark.parametrize(
    ("count", "unit", "text"),
    [(999, "B", "999 B"), (1536, "B", "1.5 KiB"), (2.5e6, "FLOP", "2.5 MFLOP"), (0, "B", "0 B")],
)
def test_counts_have_three_digits_and_a_prefix(count: float, unit: str, text: str) -> None:
    assert format_si(count, unit) == text


def test_lines_that_are_too_long_hang_below_their_text() -> None:
    text = (
        "engine   linear (triangular solve)\nneeds    gate log_decay [B, T, H] ≤ 0, for each token"
    )
    assert hanging_indent(text, None) == text == hanging_indent(text, 200)
    lines = hanging_indent(text, 30).splitlines()
    assert lines[:2] == ["engine   linear (triangular", "           solve)"]
    assert max(map(len, lines)) <= 30
    assert " ".join(" ".join(lines).split()) == " ".join(text.split()), "nothing is lost"
    assert all(line.startswith("  ") for line in hanging_indent(text, 12).splitlines()[1:3])
    equations = "write    S = S − η g;   W = α W + S\n         W° = W"
    assert hanging_indent(equations, 34) == equations.replace(";   ", ";\n         ")
    assert hanging_indent("part\n\nstate", 20) == "part\n\nstate"
