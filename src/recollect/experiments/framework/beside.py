"""What the papers report of a task that was evaluated: the rows of their tables beside a number.

A number stands beside published ones only where task and measure are theirs. Local needles have
RULER's form and other words, which whoever shows them says; fixtures stand beside nothing.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recollect.experiments.framework.published import published

if TYPE_CHECKING:
    from recollect.lm.evaluation.results import Evaluation

__all__ = ["Beside", "beside"]

# Tables of language models, and lm-eval's tasks and measures by the tables' columns. Questions
# without a text (triviaqa, nq_open) are not those of ATLAS table 5, which gives one to read.
_MODELS = ("miras_table2", "atlas_table2", "atlas_table8")
_NEEDLES = ("miras_table3", "atlas_table3")
_RECALL = ("atlas_table5",)
_COLUMNS = {
    ("wikitext", "word_perplexity"): ("wikitext ppl", _MODELS),
    ("lambada_openai", "perplexity"): ("lambada ppl", _MODELS),
    ("lambada_openai", "acc"): ("lambada acc", _MODELS),
    ("piqa", "acc"): ("piqa acc", _MODELS),
    ("hellaswag", "acc_norm"): ("hellaswag acc_n", _MODELS),
    ("winogrande", "acc"): ("winogrande acc", _MODELS),
    ("arc_easy", "acc"): ("arc_e acc", _MODELS),
    ("arc_challenge", "acc_norm"): ("arc_c acc_n", _MODELS),
    ("social_iqa", "acc"): ("siqa acc", _MODELS),
    ("boolq", "acc"): ("boolq acc", _MODELS),
    ("swde", "contains"): ("swde", _RECALL),
    ("fda", "contains"): ("fda", _RECALL),
    ("squad_completion", "contains"): ("squad", _RECALL),
}
_NEEDLE = re.compile(r"(local_)?niah_single_([123])")
_KINDS = {"1": "PK", "2": "N", "3": "W"}


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A measured number, and a table's column of the same task.

    Attributes:
        task, metric: of the evaluation.
        measured: in the table's units, so per cent where it has shares.
        table: name of the table, as `published` takes it. column: of it.
        group: part of the table, ``""`` where it has none.
        rows: model and number, in the table's order.
        note: in what the tasks differ, or ``""``.
    """

    task: str
    metric: str
    measured: float
    table: str
    column: str
    group: str
    rows: tuple[tuple[str, float], ...]
    note: str

    def __str__(self) -> str:
        low, high = (one(self.rows, key=lambda row: row[1]) for one in (min, max))
        where = self.table.replace("_table", " table ")
        where = where.upper().replace("TABLE", "table") + (f", {self.group}" if self.group else "")
        said = f"{low[1]:g} ({low[0]}) to {high[1]:g} ({high[0]}): {where}"
        return f"{said}; {self.note}" if self.note else said


def beside(evaluation: Evaluation) -> tuple[Beside, ...]:
    """The papers' columns for every number that they report too.

    Args:
        evaluation: what was measured.
    """
    found: list[Beside] = []
    for one in evaluation.tasks:
        for metric, value in one.metrics.items():
            if not math.isfinite(value):
                continue
            column, tables, note = _column(one.task, metric, one.settings.get("context"))
            for name in tables:
                table = published(name)
                if column not in table.columns:
                    continue
                measured = value if column.endswith("ppl") else 100 * value
                for group in table.groups:
                    rows = tuple(
                        (row.model, row.values[column]) for row in table.rows if row.group == group
                    )
                    found.append(
                        Beside(
                            task=one.task,
                            metric=metric,
                            measured=measured,
                            table=name,
                            column=column,
                            group=group,
                            rows=rows,
                            note=note,
                        )
                    )
    return tuple(found)


def _column(task: str, metric: str, context: int | None) -> tuple[str, tuple[str, ...], str]:
    """Column, tables, and in what the tasks differ."""
    needle = _NEEDLE.fullmatch(task)
    if needle is None:
        return *_COLUMNS.get((task, metric), ("", ())), ""
    local = needle[1] is not None
    length = context if local else int(metric) if metric.isdecimal() else None
    if length is None or length % 1024 or (local and metric != "string_match"):
        return "", (), ""
    column = f"S-NIAH-{_KINDS[needle[2]]} {length // 1024}K"
    return column, _NEEDLES, "the same form, other words" if local else ""
