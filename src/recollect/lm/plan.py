"""Moved to `recollect.lm.training.plan`."""

from recollect.moved import alias

alias(__name__, "recollect.lm.training.plan")
