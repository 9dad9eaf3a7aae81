"""Published tables: every file states its source, and numbers equal the papers'."""

from __future__ import annotations

import math

import pytest

from recollect import experiments
from recollect.experiments.framework.published import _parse, published, published_names

SMALL, MIDDLE, LARGE = "340M / 15B tokens", "760M / 30B tokens", "1.3B / 100B tokens"


def test_required_tables_exist() -> None:
    assert set(published_names()) >= {
        *(f"atlas_table{n}" for n in (2, 3, 4, 5, 6, 8)),
        *(f"miras_table{n}" for n in (2, 3, 4)),
        "delta_net_mad",
    }


@pytest.mark.parametrize("name", published_names())
def test_every_table_has_a_source_and_numbers(name: str) -> None:
    table = published(name)
    assert "arXiv" in table.source and table.table and table.units
    assert len(table.rows) >= 4
    assert len({(row.group, row.model) for row in table.rows}) == len(table.rows)
    assert bool(table.grouping) == (table.groups != ("",))
    for row in table.rows:
        assert tuple(row.values) == table.columns
        assert all(math.isfinite(x) and x > 0 for x in row.values.values())
        for column, x in row.values.items():
            if "acc" in column or "per cent" in table.units.split("and")[0]:
                assert x <= 100, (row.model, column)


SPOTS = [
    ("atlas_table2", "Atlas", "wikitext ppl", MIDDLE, 18.92),
    ("atlas_table2", "Atlas++", "average acc", LARGE, 58.03),
    ("atlas_table2", "Transformer++", "lambada ppl", LARGE, 18.32),
    ("atlas_table2", "Atlas (MAG)", "boolq acc", MIDDLE, 65.0),
    ("atlas_table3", "TTT", "S-NIAH-N 16K", None, 4.4),
    ("atlas_table3", "Dot", "S-NIAH-W 8K", None, 93.2),
    ("atlas_table4", "OmegaNet", "fuzzy recall", None, 54.2),
    ("atlas_table4", "Gated DeltaNet", "compression", None, 44.8),
    ("atlas_table5", "Transformers", "fda", None, 72.5),
    ("atlas_table6", "c = 1", "ppl", None, 21.98),
    ("atlas_table6", "w/o Muon", "acc", None, 52.56),
    ("atlas_table7", "1.3B", "peak lr", None, 7e-4),
    ("atlas_table8", "OmegaNet", "wikitext ppl", SMALL, 26.03),
    ("atlas_table8", "GLA", "average acc", SMALL, 44.09),
    ("miras_table2", "Memora-H", "wikitext ppl", MIDDLE, 18.24),
    ("miras_table2", "Yaad", "winogrande acc", LARGE, 59.02),
    ("miras_table2", "Mamba", "arc_c acc_n", SMALL, 24.56),
    ("miras_table3", "Mamba2", "S-NIAH-W 4K", None, 4.2),
    ("miras_table3", "Moneta", "S-NIAH-N 8K", None, 92.8),
    ("miras_table4", "without retention gate", "average", None, 50.63),
    ("delta_net_mad", "DeltaNet", "memorization", None, 52.8),
]


@pytest.mark.parametrize(("name", "model", "column", "group", "value"), SPOTS)
def test_numbers_are_the_papers(
    name: str, model: str, column: str, group: str | None, value: float
) -> None:
    assert published(name).value(model, column, group=group) == value


@pytest.mark.parametrize(("name", "count"), [("atlas_table2", 18 + 14), ("miras_table2", 34)])
def test_no_row_is_missing(name: str, count: int) -> None:
    assert len(published(name).rows) == count


@pytest.mark.parametrize("name", ["atlas_table2", "atlas_table8"])
def test_averages_are_means_with_the_noted_exceptions(name: str) -> None:
    table = published(name)
    for row in table.rows:
        *eight, average = [
            x for column, x in row.values.items() if column.split()[-1] in {"acc", "acc_n"}
        ]
        assert len(eight) == 8
        known = f"{row.model} ({row.group.split()[0]})" in table.note
        assert (abs(sum(eight) / 8 - average) > 0.06) == known, row.model


def test_ablations_agree_with_table_2() -> None:
    """The perplexity of table 6 is the mean of two of table 2, for the rows in both."""
    full, parts = published("atlas_table2"), published("atlas_table6")
    same = {"Atlas": "Atlas", "+Gated MLP Memory": "Atlas++", "+Attn (MAG)": "Atlas (MAG)"}
    for part, model in same.items():
        two = [full.value(model, f"{c} ppl", group=MIDDLE) for c in ("wikitext", "lambada")]
        assert parts.value(part, "ppl") == pytest.approx(sum(two) / 2, abs=0.0051)
        assert parts.value(part, "acc") == full.value(model, "average acc", group=MIDDLE)


def test_the_two_mad_tables_disagree() -> None:
    ours = published("atlas_table4").value("Transformers", "fuzzy recall")
    theirs = published("delta_net_mad").value("Transformer", "fuzzy recall")
    assert ours - theirs == pytest.approx(18.4)
    for name, value in (("atlas_table4", theirs), ("delta_net_mad", ours)):
        assert str(value) in published(name).note


def test_missing_entries_are_refused() -> None:
    with pytest.raises(KeyError, match="no published table 'atlas_table9'"):
        published("atlas_table9")
    table = published("atlas_table2")
    with pytest.raises(KeyError, match="no column 'ppl'"):
        table.value("Atlas", "ppl")
    with pytest.raises(KeyError, match="2 rows: give group="):
        table.value("Atlas", "wikitext ppl")
    with pytest.raises(KeyError, match="no row among"):
        table.value("Atlantis", "wikitext ppl")


def test_files_without_a_source_are_refused() -> None:
    with pytest.raises(ValueError, match="has no source"):
        _parse("mine", "# table: 1\n# units: %\nmodel,a\nx,1\n")
    with pytest.raises(ValueError, match="a row of 1 cells"):
        _parse("mine", "# source: s\n# table: 1\n# units: %\nmodel,a\nx\n")


def test_the_loader_is_public() -> None:
    assert experiments.published is published
