"""Moved to `recollect.lm.model.counts`."""

from recollect.moved import alias

alias(__name__, "recollect.lm.model.counts")
