"""Reports of experiments: tables, figures, HTML pages, and the environment of a measurement."""

from recollect.report.environment import Environment, describe_environment
from recollect.report.figures import Panel, RenderedFigure, Series, line_figure, panel_figure
from recollect.report.files import write_atomic
from recollect.report.page import Figure, Note, Report
from recollect.report.tables import Column, Table

__all__ = [
    "Column",
    "Environment",
    "Figure",
    "Note",
    "Panel",
    "RenderedFigure",
    "Report",
    "Series",
    "Table",
    "describe_environment",
    "line_figure",
    "panel_figure",
    "write_atomic",
]
