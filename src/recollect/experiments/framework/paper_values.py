"""The papers' numbers for an evaluated task.

A number is compared with published ones only if task and measure are theirs. Local needles have
RULER's form and other words, which their note states. Fixtures are compared with nothing.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recollect.experiments.framework.published import published

if TYPE_CHECKING:
    from recollect.lm.evaluation.results import Evaluation

__all__ = ["PaperComparison", "match_paper_values"]

# Tables of language models, and their columns by lm-eval's tasks and measures. ATLAS table 5 has
# questions about a text, so triviaqa and nq_open, which have no text, are not in it.
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
_NEEDLE_PATTERN = re.compile(r"(local_)?niah_single_([123])")
_TASK_TYPES = {"1": "PK", "2": "N", "3": "W"}


@dataclass(frozen=True, kw_only=True)
class PaperComparison:
    """A measured number, and the column of a published table for its task."""

    task: str  # task of the evaluation
    metric: str  # metric of the evaluation
    value: float  # measured number in the table's units: per cent for fractions
    table: str  # name of the table, as `published` takes it
    column: str  # column of the table
    group: str  # part of the table, or ""
    rows: tuple[tuple[str, float], ...]  # models and their numbers, in the table's order
    note: str  # difference between the tasks, or ""

    def __str__(self) -> str:
        low, high = (pick(self.rows, key=lambda row: row[1]) for pick in (min, max))
        paper, _, number = self.table.partition("_table")
        source = f"{paper.upper()} table {number}" + (f", {self.group}" if self.group else "")
        text = f"{low[1]:g} ({low[0]}) to {high[1]:g} ({high[0]}): {source}"
        return f"{text}; {self.note}" if self.note else text


def match_paper_values(evaluation: Evaluation) -> tuple[PaperComparison, ...]:
    """Return the papers' columns for every number that they report too."""
    comparisons: list[PaperComparison] = []
    for result in evaluation.tasks:
        for metric, value in result.metrics.items():
            if not math.isfinite(value):
                continue
            column, tables, note = _column(result.task, metric, result.settings.get("context"))
            for table in map(published, tables):
                if column not in table.columns:
                    continue
                comparisons += [
                    PaperComparison(
                        task=result.task,
                        metric=metric,
                        value=value if column.endswith("ppl") else 100 * value,
                        table=table.name,
                        column=column,
                        group=group,
                        rows=tuple(
                            (row.model, row.values[column])
                            for row in table.rows
                            if row.group == group
                        ),
                        note=note,
                    )
                    for group in table.groups
                ]
    return tuple(comparisons)


def _column(task: str, metric: str, context: int | None) -> tuple[str, tuple[str, ...], str]:
    """Return column, tables, and the difference between the tasks."""
    needle = _NEEDLE_PATTERN.fullmatch(task)
    if needle is None:
        return *_COLUMNS.get((task, metric), ("", ())), ""
    is_local = needle[1] is not None
    length = context if is_local else int(metric) if metric.isdecimal() else None
    if length is None or length % 1024 or (is_local and metric != "string_match"):
        return "", (), ""
    column = f"S-NIAH-{_TASK_TYPES[needle[2]]} {length // 1024}K"
    return column, _NEEDLES, "the same form, other words" if is_local else ""
