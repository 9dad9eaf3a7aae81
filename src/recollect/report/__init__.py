"""What an experiment leaves behind: figures, a page to read, and where it was measured."""

from recollect.report.environment import Environment, describe_environment
from recollect.report.figures import (
    FigureFiles,
    Series,
    bar_figure,
    line_figure,
)
from recollect.report.files import write_atomic
from recollect.report.html import Figure, Note, Report, Table
from recollect.report.panels import Panel, panel_figure

__all__ = [
    "Environment",
    "Figure",
    "FigureFiles",
    "Note",
    "Panel",
    "Report",
    "Series",
    "Table",
    "bar_figure",
    "describe_environment",
    "line_figure",
    "panel_figure",
    "write_atomic",
]
