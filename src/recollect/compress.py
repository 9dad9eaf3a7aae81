"""Moved to `recollect.recall.compress`."""

from recollect.moved import alias

alias(__name__, "recollect.recall.compress")
