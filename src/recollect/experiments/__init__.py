"""Experiments: comparisons of recipes, and (as they are added) figures and tables of the papers."""

from recollect.experiments.compare import Comparison, ModelRun, Sizes, compare
from recollect.experiments.compare_report import save_comparison
from recollect.experiments.published import Published, published, published_names
from recollect.experiments.rows import add_rows, write_rows_table
from recollect.experiments.training import Schedule

__all__ = [
    "Comparison",
    "ModelRun",
    "Published",
    "Schedule",
    "Sizes",
    "add_rows",
    "compare",
    "published",
    "published_names",
    "save_comparison",
    "write_rows_table",
]
