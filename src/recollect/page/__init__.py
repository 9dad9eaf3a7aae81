"""The page of six knobs: recipes to change and explain, next to a memory at work."""

from recollect.page.table import make_table
from recollect.page.write import PAGE, render, save

__all__ = ["PAGE", "make_table", "render", "save"]
