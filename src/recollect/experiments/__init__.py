"""Experiments: comparisons of recipes, and figures and tables of the papers.

::

    rc.compare(["gated_delta_net", "atlas"], ["mqar"])
    rc.experiments.reproduce("ttr-fig2", scale="small", out="runs")
"""

from recollect.experiments.compare import compare
from recollect.experiments.compare_report import save_comparison
from recollect.experiments.comparison import Comparison, ModelRun, Sizes, Watcher
from recollect.experiments.protocol import Claim, Experiment, Verdict
from recollect.experiments.published import Published, published, published_names
from recollect.experiments.records import Record, Results
from recollect.experiments.registry import EXPERIMENTS, PLANNED
from recollect.experiments.rows import add_rows, write_rows_table
from recollect.experiments.runner import Run, reproduce
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
