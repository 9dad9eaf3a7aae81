"""Experiments: comparisons of recipes, and figures and tables of the papers.

::

    rc.compare(["gated_delta_net", "atlas"], ["mqar"])
    rc.experiments.reproduce("ttr-fig2", scale="small", out="runs")

What trains language models needs the extra ``lm`` and is loaded on first use, so that figures and
tables of the papers need torch alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from recollect.experiments.protocol import Claim, Experiment, Verdict
from recollect.experiments.published import Published, published, published_names
from recollect.experiments.records import Record, Results
from recollect.experiments.registry import EXPERIMENTS, PLANNED
from recollect.experiments.runner import Run, reproduce

if TYPE_CHECKING:
    from recollect.experiments.compare_models import compare
    from recollect.experiments.compare_report import save_comparison
    from recollect.experiments.comparison import Comparison, ModelRun, Sizes, Watcher
    from recollect.experiments.rows import add_rows, write_rows_table
    from recollect.experiments.training import Schedule

__all__ = [
    "EXPERIMENTS",
    "PLANNED",
    "Claim",
    "Comparison",
    "Experiment",
    "ModelRun",
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
    "published",
    "published_names",
    "reproduce",
    "save_comparison",
    "write_rows_table",
]

# Loaded on first use: they train language models.
_TRAINING = {
    "compare": "compare_models",
    "save_comparison": "compare_report",
    "Comparison": "comparison",
    "ModelRun": "comparison",
    "Sizes": "comparison",
    "Watcher": "comparison",
    "add_rows": "rows",
    "write_rows_table": "rows",
    "Schedule": "training",
}


def __getattr__(name: str) -> Any:
    if name not in _TRAINING:
        raise AttributeError(f"module 'recollect.experiments' has no attribute {name!r}")
    importlib.import_module("recollect.lm")  # says what to install where it cannot be loaded
    return getattr(importlib.import_module(f"recollect.experiments.{_TRAINING[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
