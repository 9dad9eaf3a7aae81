"""Moved to `recollect.lm.training.weight_decay`."""

from recollect.moved import alias

alias(__name__, "recollect.lm.training.weight_decay")
