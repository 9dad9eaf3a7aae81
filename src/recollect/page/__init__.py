"""The page of six knobs: recipes to turn, explained, beside a memory at work; one static file."""

from recollect.page.table import make_table
from recollect.page.write import PAGE, render, save

__all__ = ["PAGE", "make_table", "render", "save"]
