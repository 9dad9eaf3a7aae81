"""Moved to `recollect.experiments.framework.experiment`."""

from recollect.moved import alias

alias(__name__, "recollect.experiments.framework.experiment")
