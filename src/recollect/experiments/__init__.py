"""Experiments: comparisons of recipes, and figures and tables of the papers.

::

    rc.compare(["gated_delta_net", "atlas"], ["mqar"])
    rc.experiments.reproduce("ttr-fig2", scale="small", out="runs")

What trains language models needs the extra ``lm`` and is loaded on first use, so that figures and
tables of the papers need torch alone.

Examples:
    >>> "ttr-fig2" in rc.experiments.EXPERIMENTS
    True
    >>> rc.experiments.published_names()[:1]
    ('atlas_table2',)
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from recollect.experiments.framework import rules
from recollect.experiments.framework.experiment import Claim, Experiment
from recollect.experiments.framework.published import Published, published, published_names
from recollect.experiments.framework.records import NotMeasured, Record, Results
from recollect.experiments.framework.rules import Verdict
from recollect.experiments.framework.run import Run
from recollect.experiments.registry import EXPERIMENTS
from recollect.experiments.reproduce import reproduce

if TYPE_CHECKING:
    from recollect.experiments.comparison.compare import compare
    from recollect.experiments.comparison.comparison import Comparison
    from recollect.experiments.comparison.ledger import (
        extend_table,
        load_comparison,
        write_rows_table,
    )
    from recollect.experiments.comparison.results import ModelRun, ProgressReporter, Schedule, Sizes
    from recollect.experiments.comparison.tasks import read_corpus
    from recollect.experiments.recipe_search.result import Search
    from recollect.experiments.recipe_search.search import load_search, search

__all__ = [
    "EXPERIMENTS",
    "Claim",
    "Comparison",
    "Experiment",
    "ModelRun",
    "NotMeasured",
    "ProgressReporter",
    "Published",
    "Record",
    "Results",
    "Run",
    "Schedule",
    "Search",
    "Sizes",
    "Verdict",
    "compare",
    "extend_table",
    "load_comparison",
    "load_search",
    "published",
    "published_names",
    "read_corpus",
    "reproduce",
    "rules",
    "search",
    "write_rows_table",
]

# Loaded on first use: they train language models.
_TRAINING = {
    "compare": "comparison.compare",
    "extend_table": "comparison.ledger",
    "load_comparison": "comparison.ledger",
    "write_rows_table": "comparison.ledger",
    "Comparison": "comparison.comparison",
    "ModelRun": "comparison.results",
    "ProgressReporter": "comparison.results",
    "Schedule": "comparison.results",
    "Sizes": "comparison.results",
    "read_corpus": "comparison.tasks",
    "Search": "recipe_search.result",
    "load_search": "recipe_search.search",
    "search": "recipe_search.search",
}


def __getattr__(name: str) -> Any:
    if name not in _TRAINING:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=sys.modules[__name__])
    importlib.import_module("recollect.lm")  # says what to install where it cannot be loaded
    return getattr(importlib.import_module(f"recollect.experiments.{_TRAINING[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
