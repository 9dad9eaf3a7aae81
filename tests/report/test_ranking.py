"""A ranking as a figure."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("matplotlib")

from recollect.report.ranking import ranking_figure


def test_rows_are_ordered_and_a_name_without_a_number_stands_last() -> None:
    values = {"worse": [3.0, 3.2], "none": [math.nan, 1.0], "better": [2.0]}
    figure = ranking_figure(values, x="bits", title="T", marked={"first": ["better"]})
    assert figure.png.startswith(b"\x89PNG")
    order = {"better": [2.0], "worse": [3.0, 3.2], "none": [math.nan, 1.0]}
    same = ranking_figure(order, x="bits", title="T", marked={"first": ["better"]})
    assert figure.svg == same.svg != ranking_figure(values, x="bits", title="T").svg


def test_kinds_and_baselines_change_the_figure() -> None:
    values = {"a": [2.0], "b": [3.0]}
    plain = ranking_figure(values, x="bits", title="T").svg
    marked = ranking_figure(values, x="bits", title="T", marked={"ours": ["a"]}).svg
    assert (
        len({plain, marked, ranking_figure(values, x="bits", title="T", baselines={"c": 2.5}).svg})
        == 3
    )


def test_only_what_diverged() -> None:
    assert ranking_figure({"none": [math.inf]}, x="bits", title="T").png


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no name, or one without a value"):
        ranking_figure({}, x="bits", title="T")
    with pytest.raises(ValueError, match="there is no name, or one without a value"):
        ranking_figure({"a": []}, x="bits", title="T")
