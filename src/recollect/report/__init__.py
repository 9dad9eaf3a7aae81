"""Reports of experiments: figures, an HTML page, and the environment of the measurement."""

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
