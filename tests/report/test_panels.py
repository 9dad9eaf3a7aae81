"""Axes of figures: every one has ticks that a reader can go by."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from recollect.report import Panel, Series, panel_figure


def test_a_logarithmic_axis_of_many_odd_values_has_ticks() -> None:
    values = [0.26 * 1.7**n for n in range(12)]  # none of them a power of two
    line = Series(name="a", x=values, y=[0.5] * len(values))
    figure = panel_figure([Panel(y="y", series=[line], log_x=True)], x="KiB", title="t")
    for label in ("0.5", "2", "32"):
        assert f"<!-- {label} -->" in figure.svg
