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
    from recollect.experiments.comparison.report import save_comparison
    from recollect.experiments.comparison.results import ModelRun, Sizes, Watcher
    from recollect.experiments.comparison.stored import load_comparison
    from recollect.experiments.comparison.table import add_rows, write_rows_table
    from recollect.experiments.comparison.tasks import read_corpus
    from recollect.experiments.comparison.training import Schedule

__all__ = [
    "EXPERIMENTS",
    "Claim",
    "Comparison",
    "Experiment",
    "ModelRun",
    "NotMeasured",
    "Published",
    "Record",
    "Results",
    "Run",
    "Schedule",
    "Sizes",
    "Verdict",
    "Watcher",
    "add_rows",
    "compare",
    "load_comparison",
    "published",
    "published_names",
    "read_corpus",
    "reproduce",
    "rules",
    "save_comparison",
    "write_rows_table",
]

# Loaded on first use: they train language models.
_TRAINING = {
    "compare": "comparison.compare",
    "save_comparison": "comparison.report",
    "Comparison": "comparison.comparison",
    "ModelRun": "comparison.results",
    "Sizes": "comparison.results",
    "Watcher": "comparison.results",
    "load_comparison": "comparison.stored",
    "add_rows": "comparison.table",
    "write_rows_table": "comparison.table",
    "read_corpus": "comparison.tasks",
    "Schedule": "comparison.training",
}


def __getattr__(name: str) -> Any:
    if name not in _TRAINING:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=sys.modules[__name__])
    importlib.import_module("recollect.lm")  # says what to install where it cannot be loaded
    return getattr(importlib.import_module(f"recollect.experiments.{_TRAINING[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
