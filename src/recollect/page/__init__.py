"""Pages: six knobs of recipes next to a memory at work, and the memories of a model on a text."""

from recollect.page.look import look
from recollect.page.table import make_table
from recollect.page.write import PAGE, render, save

__all__ = ["PAGE", "look", "make_table", "render", "save"]
